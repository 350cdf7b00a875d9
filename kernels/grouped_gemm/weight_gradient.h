// Weight gradients, added to the gradient sums of a step.
#ifndef MOE_KERNELS_GROUPED_GEMM_WEIGHT_GRADIENT_H_
#define MOE_KERNELS_GROUPED_GEMM_WEIGHT_GRADIENT_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/group_offsets.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"
#include "kernels/exact_sum/grad_accumulator.h"
#include "kernels/grouped_gemm/gemm_options.h"

namespace moe {

// For every weight g of G: grads[g] += dy^T x over its rows. Exact sums add one partial of the
// numerics contract (grad_accumulator.h) for each of its S segments that has rows; float32 sums one
// for all of them. A partial adds its terms in the order of grouped_gemm.h, starting from 0 or from
// the old value.
//
//   dy        [N, O], x [N, K], T: float, BFloat16 or Float16
//   segments  [G S + 1] ascending: rows [segments[g S + s], segments[g S + s + 1]) are segment s of
//             weight g
//   grads     [G], each of O * K elements, row behind row; all exact or none, no two of one sum
//
// Exact sums on the CPU are updated by a tile of a product while it is in cache: 16 bytes of memory
// traffic an element and segment. On CUDA all weights are one launch, which keeps their sums in
// registers: 8 or 16 bytes an element; an empty sum of a weight without rows becomes zeros. If
// `options` select cuBLAS, each weight is one group, and its products run one after the other,
// exact sums via float32.
// Memory is the stream's device's and stays valid until the stream has passed, except for `grads`
// and host offsets, which are read before the call returns. Scratch on the CPU as in
// grouped_gemm.h; on CUDA later work in the stream may use it once the call returns. Errors:
// kInvalidArgument if shapes disagree, for cuBLAS without a handle, and for cuBLAS with offsets
// that only the device knows; those of the workspace.
template <typename T>
absl::Status AddWeightGradients(MatrixView<const T> dy, MatrixView<const T> x,
                                const GroupOffsets& segments,
                                absl::Span<const GradAccumulator> grads, Workspace& workspace,
                                Stream& stream, GemmOptions options = {});

// One weight, one segment.
template <typename T>
absl::Status AddWeightGradient(MatrixView<const T> dy, MatrixView<const T> x,
                               const GradAccumulator& grad, Workspace& workspace, Stream& stream,
                               GemmOptions options = {}) {
  const int64_t segments[] = {0, dy.rows()};
  return AddWeightGradients<T>(dy, x, segments, {&grad, 1}, workspace, stream, options);
}

}  // namespace moe

#endif  // MOE_KERNELS_GROUPED_GEMM_WEIGHT_GRADIENT_H_
