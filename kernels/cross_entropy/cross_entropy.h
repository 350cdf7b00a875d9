// Softmax cross-entropy of next-token prediction.
#ifndef MOE_KERNELS_CROSS_ENTROPY_CROSS_ENTROPY_H_
#define MOE_KERNELS_CROSS_ENTROPY_CROSS_ENTROPY_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace moe {

// loss[t] = logsumexp(logits[t, :]) - logits[t, target[t]]  in nats, float32
// d_logits[t, v] = scale * (softmax(logits[t, :])[v] - [v == target[t]])
//
//   logits   [T, V] float32
//   target   [T] in [0, V)
//   loss     [T]
//   d_logits [T, V] of T (may be `logits` itself when T is float); empty view = loss only
//   scale    1 / T for the gradient of the mean loss (times a loss scale, a power of two)
//
// All memory is the stream's device's. Each row is computed alone, in a fixed order; exponentials
// and logarithms are the device's own, so that devices differ by roundings of float32.
// Errors: kInvalidArgument for shapes and, on the CPU, for a target out of range. On CUDA the host
// cannot read targets: the caller must have checked them. One out of range makes its loss and its
// row of d_logits NaN without an access out of bounds.
template <typename T>
absl::Status CrossEntropy(MatrixView<const float> logits, absl::Span<const int32_t> target,
                          float scale, absl::Span<float> loss, MatrixView<T> d_logits,
                          Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_CROSS_ENTROPY_CROSS_ENTROPY_H_
