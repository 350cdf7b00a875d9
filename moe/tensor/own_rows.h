// Rows of a micro-batch that the ranks of a tensor group divide among them, and the segments of
// rows whose gradients are partials.
#ifndef MOE_MOE_TENSOR_OWN_ROWS_H_
#define MOE_MOE_TENSOR_OWN_ROWS_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "comm/row_gather.h"
#include "gating/routing.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/tree_cut.h"
#include "kernels/base/workspace.h"
#include "moe/run/context.h"
#include "moe/tensor/tensor_share.h"

namespace moe {

// Rows of all ranks of a tensor group that `batch` describes, by the offsets that it has.
int64_t RowsOf(const Batch& batch);

// Ascending rows: at most one for each leaf of a tree, and the end.
class RowOffsets {
 public:
  void push_back(int64_t row) { rows_[size_++] = row; }
  size_t size() const { return size_; }
  const int64_t* data() const { return rows_.data(); }
  int64_t* begin() { return rows_.data(); }
  int64_t* end() { return rows_.data() + size_; }
  const int64_t* begin() const { return rows_.data(); }
  const int64_t* end() const { return rows_.data() + size_; }
  int64_t operator[](size_t i) const { return rows_[i]; }

 private:
  std::array<int64_t, kMaxTreeLeaves + 1> rows_ = {};
  size_t size_ = 0;
};

// Of N rows of a micro-batch those that are this rank's own. All rows have a segment for each leaf
// of the tree products (Context::tensor_leaves), of n segment s is [N s / n, N (s + 1) / n), and a
// rank has those of its leaves: the same segments at any number of ranks.
struct OwnRows {
  RowOffsets offsets;  // [R + 1] of all rows those of each rank: [offsets[r], offsets[r + 1])
  size_t rank = 0;     // this one
  // [S + 1] of this rank's rows, from 0, its segments: a parameter that all ranks hold whole has
  // one partial gradient from each. In fast numerics they are one.
  RowOffsets segments;

  bool shared() const { return offsets.size() > 2; }
  int64_t all() const { return offsets[offsets.size() - 1]; }
  int64_t begin() const { return offsets[rank]; }
  int64_t end() const { return offsets[rank + 1]; }
  int64_t count() const { return end() - begin(); }
  template <typename T>
  MatrixView<T> Of(MatrixView<T> rows) const {
    return RowRange(rows, begin(), end());
  }
};
OwnRows OwnRowsOf(const Context& context, int64_t rows);
// Those among n of N rows, `picked` in ascending order, with the segments of the N.
OwnRows OwnRowsAmong(const Context& context, int64_t rows, absl::Span<const int32_t> picked);

// [B S + 1] of this rank's rows of B micro-batches, from 0, the segments of each, in host memory of
// `workspace`. Ranks that share rows have one micro-batch.
absl::StatusOr<absl::Span<const int64_t>> SegmentsOf(absl::Span<const int64_t> micro_batch_offsets,
                                                     const Context& context, Workspace& workspace);
// The same of the rows `picked` of the micro-batches, in ascending order: the segments of all rows.
absl::StatusOr<absl::Span<const int64_t>> SegmentsAmong(
    absl::Span<const int64_t> micro_batch_offsets, const Context& context,
    absl::Span<const int32_t> picked, Workspace& workspace);

// All rows [N, H], of which each rank has its own, dense: `own` itself where one rank has all,
// otherwise memory of the context's workspace, which the caller releases. Collective over the
// tensor group, enqueued on the compute stream: a rank sends its rows to each other.
template <typename T>
absl::StatusOr<MatrixView<const T>> AllRows(const Context& context, const OwnRows& rows,
                                            MatrixView<const T> own, const Site& site) {
  if (!rows.shared() || rows.all() == 0) return own;
  MOE_ASSIGN_OR_RETURN(const auto all, context.workspace->Matrix<T>(rows.all(), own.cols()));
  MOE_RETURN_IF_ERROR(
      TensorExchange(context, site.Named("tensor rows"), [&](Communicator& group, const Site& at) {
        return AllGatherRows<T>(own, all, rows.offsets, group, *context.compute, at);
      }));
  return all;
}

}  // namespace moe

#endif  // MOE_MOE_TENSOR_OWN_ROWS_H_
