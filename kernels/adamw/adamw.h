// AdamW: Adam with decoupled weight decay. Loshchilov and Hutter (2019), arXiv:1711.05101.
#ifndef MOE_KERNELS_ADAMW_ADAMW_H_
#define MOE_KERNELS_ADAMW_ADAMW_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/stream.h"
#include "kernels/base/workspace.h"
#include "kernels/exact_sum/scaled_sum.h"

namespace moe {

struct AdamWOptions {
  float learning_rate = 1e-3f;
  float beta1 = 0.9f;
  float beta2 = 0.95f;
  float epsilon = 1e-8f;
  float weight_decay = 0.1f;
  float gradient_scale = 1.0f;  // multiplies every gradient first (clipping)
  int64_t step = 1;             // counts from 1, for bias correction
};

// g = gradient_scale * gradient
// m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
// w = w - lr * (m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + epsilon) + weight_decay * w)
//
// All float32 [n] once the gradient's sum is scaled, elementwise, in place; bits do not depend on
// threads or position. `workspace`, memory of the stream's device, lends CUDA 4 n bytes until the
// stream has passed.
// Errors: kInvalidArgument if lengths differ or step < 1; of the gradient's grid and the workspace.
absl::Status AdamW(const AdamWOptions& options, const ScaledSum& gradient, absl::Span<float> weight,
                   absl::Span<float> m, absl::Span<float> v, Workspace& workspace, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_ADAMW_ADAMW_H_
