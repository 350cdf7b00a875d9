#include "moe/tensor/own_rows.h"

#include <algorithm>

namespace moe {
namespace {

// The segments of this rank's rows, [first, last) of `of` that all rows have.
struct SegmentCut {
  int first = 0, last = 1, of = 1;

  int64_t Begin(int segment, int64_t rows) const { return rows * segment / of; }
};

SegmentCut CutOf(const Context& context) {
  const TensorShare share = ShareOf(context);
  const TreeNode held = LeavesOf(share.index, share.ranks, share.leaves);
  return {held.first, held.last, share.leaves};
}

// Calls visit(row) at the begin of each segment of this rank and at the end of the last.
template <typename Visit>
void ForEachCut(const Context& context, int64_t rows, Visit visit) {
  const SegmentCut cut = CutOf(context);
  const bool one = context.numerics == Numerics::kFast;
  for (int s = cut.first; s <= cut.last; s += one ? cut.last - cut.first : 1) {
    visit(cut.Begin(s, rows));
  }
}

// Of ascending rows `picked`, how many are before `row`.
int64_t Before(int64_t row, absl::Span<const int32_t> picked) {
  return std::lower_bound(picked.begin(), picked.end(), row) - picked.begin();
}

}  // namespace

int64_t RowsOf(const Batch& batch) {
  const auto& offsets =
      batch.sequence_offsets.empty() ? batch.micro_batch_offsets : batch.sequence_offsets;
  return offsets.empty() ? 0 : offsets.back();
}

OwnRows OwnRowsOf(const Context& context, int64_t rows) {
  const TensorShare share = ShareOf(context);
  OwnRows own = {.rank = static_cast<size_t>(share.index)};
  for (const int64_t row : share.RowsOf(rows)) own.offsets.push_back(row);
  ForEachCut(context, rows, [&](int64_t row) { own.segments.push_back(row - own.begin()); });
  return own;
}

OwnRows OwnRowsAmong(const Context& context, int64_t rows, absl::Span<const int32_t> picked) {
  OwnRows own = OwnRowsOf(context, rows);
  const int64_t first = own.begin();
  for (int64_t& offset : own.offsets) offset = Before(offset, picked);
  for (int64_t& cut : own.segments) cut = Before(first + cut, picked) - own.begin();
  return own;
}

absl::StatusOr<absl::Span<const int64_t>> SegmentsOf(absl::Span<const int64_t> micro_batch_offsets,
                                                     const Context& context, Workspace& workspace) {
  const auto batches = std::ssize(micro_batch_offsets) - 1;
  int64_t first = 0, size = 0;
  ForEachCut(context, 0, [&](int64_t) { ++size; });
  MOE_ASSIGN_OR_RETURN(const auto segments, workspace.Array<int64_t>(batches * (size - 1) + 1));
  segments[0] = 0;
  size_t at = 0;
  for (int64_t b = 0; b < batches; ++b) {
    const int64_t begin = micro_batch_offsets[b];
    // The last cut of a micro-batch is the first one of the next.
    ForEachCut(context, micro_batch_offsets[b + 1] - begin, [&](int64_t row) {
      if (at == 0) first = begin + row;
      segments[at++] = begin + row - first;
    });
    if (b + 1 < batches) --at;
  }
  return segments;
}

absl::StatusOr<absl::Span<const int64_t>> SegmentsAmong(
    absl::Span<const int64_t> micro_batch_offsets, const Context& context,
    absl::Span<const int32_t> picked, Workspace& workspace) {
  MOE_ASSIGN_OR_RETURN(const auto of_all, SegmentsOf(micro_batch_offsets, context, workspace));
  MOE_ASSIGN_OR_RETURN(const auto segments, workspace.Array<int64_t>(std::ssize(of_all)));
  const int64_t first = OwnRowsOf(context, micro_batch_offsets.back()).begin();
  std::transform(of_all.begin(), of_all.end(), segments.begin(),
                 [&](int64_t row) { return Before(first + row, picked) - Before(first, picked); });
  return segments;
}

}  // namespace moe
