#include "comm/tree_reduce_scatter.h"

#include <absl/strings/str_cat.h>

#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/grouped_gemm/fold_nodes.h"

namespace moe {

template <typename T>
absl::Status TreeReduceScatter(const TreeScatter<T>& call, Communicator& comm, Workspace& workspace,
                               Stream& stream, const Site& site) {
  const int ranks = comm.size(), rank = comm.rank();
  const int64_t cols = call.out.cols();
  const auto& offsets = call.row_offsets;
  MOE_RETURN_IF_ERROR(CheckGroups("TreeReduceScatter", "ranks", offsets, ranks, call.nodes.rows()));
  const auto width = [&](int r) {
    return static_cast<int64_t>(NodesOf(call.cut, r, ranks).size()) * cols;
  };
  MOE_RETURN_IF_ERROR(
      CheckShape("TreeReduceScatter", "nodes", call.nodes, offsets.back(), width(rank)));
  const int64_t mine = offsets[rank + 1] - offsets[rank];
  MOE_RETURN_IF_ERROR(CheckShape("TreeReduceScatter", "out", call.out, mine, cols));
  if (call.nodes.stride() != call.nodes.cols()) {
    return absl::InvalidArgumentError(
        absl::StrCat("TreeReduceScatter: nodes of ", call.nodes.cols(), " columns with stride ",
                     call.nodes.stride(), ", expected a dense matrix"));
  }
  // Rows of a destination are neighbours, with all their nodes.
  RankCounts send, receive;
  int64_t received = 0;
  for (int r = 0; r < ranks; ++r) {
    send.push_back((offsets[r + 1] - offsets[r]) * width(rank));
    receive.push_back(mine * width(r));
    received += receive.back();
  }
  MOE_ASSIGN_OR_RETURN(const auto there, workspace.Array<float>(received));
  MOE_RETURN_IF_ERROR(comm.AllToAllV<float>(
      {call.nodes.data(), static_cast<size_t>(call.nodes.rows() * call.nodes.cols())}, send, there,
      receive, stream, site));
  absl::InlinedVector<TreeNode, kMaxTreeLeaves> at;
  absl::InlinedVector<MatrixView<const float>, kMaxTreeLeaves> nodes;
  const float* from = there.data();
  for (int r = 0; r < ranks; ++r) {
    const auto theirs = NodesOf(call.cut, r, ranks);
    const int64_t stride = width(r);
    for (size_t j = 0; j < theirs.size(); ++j) {
      nodes.emplace_back(from + static_cast<int64_t>(j) * cols, mine, cols, stride);
      at.push_back(theirs[j]);
    }
    from += mine * stride;
  }
  return FoldNodes<T>(call.cut.leaves, at, nodes, call.out, stream);
}

#define MOE_INSTANTIATE(T)                                                                  \
  template absl::Status TreeReduceScatter(const TreeScatter<T>&, Communicator&, Workspace&, \
                                          Stream&, const Site&);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
