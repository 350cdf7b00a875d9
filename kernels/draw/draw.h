// Arrays of random numbers (kernels/base/rng.h), drawn on the device that has them: data of
// benchmarks.
#ifndef MOE_KERNELS_DRAW_DRAW_H_
#define MOE_KERNELS_DRAW_DRAW_H_

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/rng.h"
#include "kernels/base/stream.h"

namespace moe {

// values[i] = T(r / 2^31 - 1) in [-1, 1), r = number i % 4 of Random4 of item key.item + i - i % 4.
// The same bits on every device. Enqueued; T = float, BFloat16 or Float16.
template <typename T>
absl::Status DrawUniform(const RandomKey& key, absl::Span<T> values, Stream& stream);

// values[i] = T(float(Normal of item key.item + i)). A GPU's logarithm and cosine in float64 may
// differ from the host's by their last bit, which the rounding to float32 almost always hides.
template <typename T>
absl::Status DrawNormal(const RandomKey& key, absl::Span<T> values, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_DRAW_DRAW_H_
