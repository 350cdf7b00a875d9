// Sums of products whose reduced index the ranks of a group share, with the bits of one rank's.
#ifndef MOE_COMM_TREE_REDUCE_SCATTER_H_
#define MOE_COMM_TREE_REDUCE_SCATTER_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/tree_cut.h"
#include "kernels/base/workspace.h"

namespace moe {

// One rank's arguments of TreeReduceScatter; R ranks.
template <typename T>
struct TreeScatter {
  TreeCut cut;  // the whole index, of which rank r has leaves LeavesOf(r, R, cut.leaves)
  // [R + 1] the rows of the sum that each rank is to have, from 0 to N; host memory, the same on
  // all ranks. Ranks may have none.
  absl::Span<const int64_t> row_offsets;
  // [N, n H], dense: columns [j H, (j + 1) H) are node j of the n of NodesOf(cut, r, R).
  MatrixView<const float> nodes;
  MatrixView<T> out;  // [own rows, H]
};

// `out` becomes this rank's rows of the sum over all leaves: nodes are added in the order of the
// tree, in float32, and rounded to T once, so that the bits are those of one rank's product over
// all leaves, at any R that has leaves for each rank. T: float, BFloat16, Float16.
//
// Collective, enqueued. Rank r sends 4 H n_r bytes for each row of another rank: with R a power of
// two and no empty leaves n is 1, (R - 1) / R of 4 N H bytes; with 3 ranks of 8 leaves 5/3 of that.
// One AllToAllV: of few ranks and long rows the time is that of the bytes. Nodes, `out` and
// `workspace` are memory of stream.device(); received nodes are memory of `workspace`, which the
// caller releases once the stream has passed.
// Errors: kInvalidArgument if shapes disagree; those of AllToAllV and FoldNodes.
template <typename T>
absl::Status TreeReduceScatter(const TreeScatter<T>& call, Communicator& comm, Workspace& workspace,
                               Stream& stream, const Site& site = {});

}  // namespace moe

#endif  // MOE_COMM_TREE_REDUCE_SCATTER_H_
