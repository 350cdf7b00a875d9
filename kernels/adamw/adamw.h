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
  // += the elements whose new w, m or v is not finite; in memory of the stream's device. nullptr:
  // nobody asks.
  int64_t* non_finite = nullptr;
};

// g = gradient_scale * gradient
// m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
// w = w - lr * (m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + epsilon) + weight_decay * w)
//
// for the elements of every slice: float32 once the gradients' sum is scaled, in place. Bits do not
// depend on threads or position. Slices come in ascending order of what they have of the gradients,
// without an element in common, in memory of the host that is read before the call returns, or by a
// stream of the CPU. On CUDA one launch, for which `workspace`, memory of the device, lends the
// table of slices until the stream has passed.
// Errors: kInvalidArgument if a slice begins before the one before ends, or ends after the
// gradients, or if step < 1; of the gradients' grid and the workspace.
absl::Status AdamW(const AdamWOptions& options, const ScaledSum& gradients,
                   absl::Span<const AdamWSlice> slices, Workspace& workspace, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_ADAMW_ADAMW_H_
