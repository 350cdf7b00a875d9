// Conversion between storage types.
#ifndef MOE_KERNELS_CAST_CAST_H_
#define MOE_KERNELS_CAST_CAST_H_

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"

namespace moe {

// out[i] = in[i], rounded to nearest even. Lengths must agree (kInvalidArgument).
// Instantiated for float -> 16-bit types, those -> float, float -> float.
template <typename From, typename To>
absl::Status Cast(absl::Span<const From> in, absl::Span<To> out, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_CAST_CAST_H_
