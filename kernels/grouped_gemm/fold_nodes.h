// The root of a product's tree, from nodes that several ranks have computed.
#ifndef MOE_KERNELS_GROUPED_GEMM_FOLD_NODES_H_
#define MOE_KERNELS_GROUPED_GEMM_FOLD_NODES_H_

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/tree_cut.h"

namespace moe {

// out = the root over all `leaves`, [N, H], rounded to T once: the bits of one product over all
// leaves (grouped_gemm.h). T: the storage type of the product's operands, float, BFloat16 or
// Float16.
//   at     the leaves of each node; the leaves of none are empty. Read before the call returns
//   nodes  their sums [N, H], one for each of `at`, any strides. The span is read before the call
//          returns; the sums and `out` are memory of stream.device() and stay until it passes
// Without nodes `out` becomes zeros. Enqueues: reads 4 bytes of each node and writes one T for each
// element. Errors: kInvalidArgument if shapes or numbers disagree.
template <typename T>
absl::Status FoldNodes(int leaves, absl::Span<const TreeNode> at,
                       absl::Span<const MatrixView<const float>> nodes, MatrixView<T> out,
                       Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_GROUPED_GEMM_FOLD_NODES_H_
