// AdamW: Adam with decoupled weight decay. Loshchilov and Hutter (2019), arXiv:1711.05101.
#ifndef MOE_KERNELS_ADAMW_ADAMW_H_
#define MOE_KERNELS_ADAMW_ADAMW_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/adamw/adamw_slice.h"
#include "kernels/base/stream.h"
#include "kernels/base/workspace.h"
#include "kernels/exact_sum/scaled_sum.h"

namespace moe {

struct AdamWOptions {
  float learning_rate = 1e-3f;
  float beta1 = 0.9f;
  float beta2 = 0.95f;
  float epsilon = 1e-8f;
  float gradient_scale = 1.0f;  // multiplies every gradient first (clipping)
  int64_t step = 1;             // counts from 1, for bias correction
  // The number of elements whose new w, m or v is not finite is added here; memory of the stream's
  // device. nullptr: not counted.
  int64_t* non_finite = nullptr;
};

// g = gradient_scale * gradient
// m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
// w = w - lr * (m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + epsilon) + weight_decay * w)
//
// The equations hold for the elements of every slice, in float32 once the gradients' sum is scaled,
// in place. Bits do not depend on threads or position. Slices are ordered by the gradients that
// they cover and have no element in common. They are host memory, which is read before the call
// returns, or by a CPU stream when the task runs. On CUDA one launch, for which `workspace`, device
// memory, lends the table of slices until the stream has passed.
// Errors: kInvalidArgument if a slice begins before the end of the previous one, or ends after the
// gradients, or if step < 1; those of the gradients' grid and of the workspace.
absl::Status AdamW(const AdamWOptions& options, const ScaledSum& gradients,
                   absl::Span<const AdamWSlice> slices, Workspace& workspace, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_ADAMW_ADAMW_H_
