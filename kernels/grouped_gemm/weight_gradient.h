// Gradients of weights, added where gradients of a step add up.
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

// For every weight g of G: grads[g] += dy^T x over its rows, one partial of the numerics contract
// (grad_accumulator.h) for each of its S segments that has rows; in float32 one for all of them.
// A partial adds its terms in the order of grouped_gemm.h, from 0 or from what is there on.
//
//   dy        [N, O], x [N, K], T: float, BFloat16 or Float16
//   segments  [G S + 1] ascending: rows [segments[g S + s], segments[g S + s + 1]) are segment s of
//             weight g
//   grads     [G], each of O * K elements, row behind row; all exact or none, no two of one sum
//
// Exact sums on the CPU take a tile of a product while it is in cache: 16 bytes of memory an
// element and segment. On CUDA all weights are one launch, which keeps their sums in registers: 8
// or 16 bytes an element; an empty sum of a weight without rows becomes zeros. Where `options` say
// cuBLAS, each weight one group, it is a product after the other, exact sums by way of float32.
// Memory of the stream's device, valid until the stream has passed, but for `grads` and offsets of
// the host, read before the call returns. Scratch on the CPU as in grouped_gemm.h; on CUDA free for
// later work in the stream when the call returns. Errors: kInvalidArgument if shapes disagree, for
// cuBLAS without one, and for cuBLAS with offsets that the device knows alone; of the workspace.
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
