// Rows that the ranks of a group hold apart, for networks that these ranks share.
#ifndef MOE_MOE_TENSOR_GATHERED_ROWS_H_
#define MOE_MOE_TENSOR_GATHERED_ROWS_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "kernels/base/group_offsets.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/tree_cut.h"
#include "kernels/base/workspace.h"
#include "moe/run/context.h"
#include "moe/run/pass.h"
#include "moe/tensor/tensor_share.h"

namespace moe {

// Experts whose matrices the R ranks of an expert-tensor group share: each rank has received rows
// of its own for the same L networks, and all of them compute on the rows of all. Ranks of a block
// of experts (MeshGroup::kExpertBlock) are sources of rows; rank q of the block sends to the ranks
// of its own expert-tensor index, q mod R. So gathered rows are in the order
//   (network, source q, micro-batch of q, token, choice)
// of a plan of one rank for the whole block, whatever R is.
//
// Immutable; views of what the pass given to Create keeps.
class GatheredRows {
 public:
  // A rank's arguments; host memory, borrowed until Create returns.
  struct Inputs {
    // [L S + 1] this rank's rows by network and segment: `sources` neighbours of equal size, one of
    // each source with its expert-tensor index.
    absl::Span<const int64_t> segments;
    int sources = 1;
    // Segments of so many neighbouring sources are one: those of a tensor group, which has its
    // micro-batches in common.
    int together = 1;
    // [d + 1] the networks that are gathered at once: [first[c], first[c + 1]).
    absl::Span<const int32_t> first_network;
    TensorShare share;
  };
  // Collective over share.group: an AllGather of L S int32. Blocks the host.
  static absl::StatusOr<GatheredRows> Create(const Inputs& inputs, const Pass& pass);

  int64_t rows() const { return network_.back(); }  // of all ranks
  // [L + 1]; [L S R / together + 1]
  GroupOffsets offsets() const { return network_; }
  GroupOffsets segments() const { return segments_; }

  // Rows of networks [first, last) of the two orders; networks that are gathered at once.
  template <typename T>
  MatrixView<T> Own(MatrixView<T> rows, int first, int last) const {
    const absl::Span<const int64_t> mine = OffsetsOf(share_.index);
    return RowRange(rows, mine[static_cast<size_t>(first)], mine[static_cast<size_t>(last)]);
  }
  // [last - first + 1] this rank's rows of these networks, from 0, in host memory of `workspace`.
  absl::StatusOr<GroupOffsets> OwnOffsets(int first, int last, Workspace& workspace) const;
  template <typename T>
  MatrixView<T> All(MatrixView<T> rows, int first, int last) const {
    return RowRange(rows, network_[static_cast<size_t>(first)],
                    network_[static_cast<size_t>(last)]);
  }

  // The rows of `all` [rows(), H] of these networks, from those that each rank has in `own`, dense.
  // Collective over share.group, enqueued on the compute stream; a rank sends its rows to each
  // other. Scratch is memory of the context's workspace, which the caller releases, as below.
  template <typename T>
  absl::Status Gather(const Context& context, int first, int last, MatrixView<const T> own,
                      MatrixView<T> all, const Site& site) const;

  // This rank's rows of sums whose index the ranks share: nodes [N, n H] of all rows of these
  // networks, as TreeReduceScatter takes them, and own [own N, H]. Collective, enqueued: a rank
  // sends 4 n H bytes for each row of another.
  template <typename T>
  absl::Status Sum(const Context& context, int first, int last, const TreeCut& cut,
                   MatrixView<const float> nodes, MatrixView<T> own, const Site& site) const;

 private:
  GatheredRows() = default;
  // [L + 1] rows of rank r before each network.
  absl::Span<const int64_t> OffsetsOf(int r) const {
    const size_t size = network_.size();
    return by_rank_.subspan(static_cast<size_t>(r) * size, size);
  }
  // [R + 1] rows of the ranks one behind the other.
  RankCounts RowsByRank(int first, int last) const;
  absl::Status CountRows(const Inputs& inputs, absl::Span<const int32_t> counts,
                         Workspace& workspace);
  absl::Status OrderRows(const Inputs& inputs, absl::Span<const int32_t> counts,
                         Workspace& workspace);

  TensorShare share_;
  absl::Span<const int64_t> network_, segments_;
  absl::Span<const int64_t> by_rank_;  // [R, L + 1]
  // [rows()] of the networks gathered at once: for each row its place in the order (rank, network,
  // ...), and the inverse; memory of the compute stream's device.
  absl::Span<const int32_t> place_, row_at_;
};

}  // namespace moe

#endif  // MOE_MOE_TENSOR_GATHERED_ROWS_H_
