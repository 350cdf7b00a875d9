#include "moe/tensor/tensor_share.h"

#include <utility>

#include <absl/strings/str_cat.h>

namespace moe {
namespace {

// Values of the index that is cut.
int64_t Extent(const CanonicalTensor& part) {
  return part.axis == TensorAxis::kRows ? part.rows : part.cols;
}

TensorBox BoxOf(const CanonicalTensor& part, const TensorShare& share) {
  TensorBox box = part.box();
  const TreeCut cut = {share.leaves, Extent(part), part.item};
  const TreeNode held = LeavesOf(share.index, share.ranks, share.leaves);
  const int64_t begin = cut.Begin(held.first), end = cut.Begin(held.last);
  if (part.axis == TensorAxis::kRows) {
    box.row_begin = begin;
    box.row_end = end;
  } else if (part.axis == TensorAxis::kColumns) {
    box.col_begin = begin;
    box.col_end = end;
  }
  return box;
}

}  // namespace

TreeNode TensorShare::ItemsOf(int items) const {
  const TreeCut cut = {leaves, items, 1};
  const TreeNode held = LeavesOf(index, ranks, leaves);
  return {static_cast<int>(cut.Begin(held.first)), static_cast<int>(cut.Begin(held.last))};
}

RankCounts TensorShare::RowsOf(int64_t rows) const {
  RankCounts offsets = {0};
  for (int r = 0; r < ranks; ++r) {
    offsets.push_back(rows * LeavesOf(r, ranks, leaves).last / leaves);
  }
  return offsets;
}

int MostRanks(const TreeCut& cut, int ranks) {
  const auto each_has_some = [&](int count) {
    for (int r = 0; r < count; ++r) {
      const TreeNode held = LeavesOf(r, count, cut.leaves);
      if (cut.Begin(held.first) == cut.Begin(held.last)) return false;
    }
    return true;
  };
  while (ranks > 1 && !each_has_some(ranks)) --ranks;
  return ranks;
}

TensorShare ShareOf(const Context& context, MeshGroup group) {
  return {.index = context.mesh->index(group),
          .ranks = context.mesh->size(group),
          .leaves = context.tensor_leaves,
          .group = group,
          .device = context.compute->device().kind};
}

absl::Status CheckHalfParts(const ParameterSpec& spec, const TensorShare& share) {
  if (!share.cut() || share.device != DeviceKind::kCuda) return absl::OkStatus();
  for (const CanonicalTensor& part : spec.parts) {
    constexpr int64_t kEach = 8;
    if (part.axis == TensorAxis::kNone) continue;
    if (Extent(part) % kEach == 0 && part.item % kEach == 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        share.group == MeshGroup::kTensor ? "--tp " : "--etp ", "is ", share.ranks,
        " in 16 bits on CUDA devices: ", part.name, " has ", Extent(part),
        part.axis == TensorAxis::kRows ? " rows" : " columns", " in items of ", part.item,
        ", expected multiples of ", kEach, " both, for rows that begin at whole vectors"));
  }
  return absl::OkStatus();
}

absl::StatusOr<ParameterSpec> HeldPart(ParameterSpec spec, const TensorShare& share) {
  if (!share.cut() || spec.parts.empty() || spec.parts.front().axis == TensorAxis::kNone) {
    return spec;
  }
  spec.rows = 0;
  for (const CanonicalTensor& part : spec.parts) {
    const int fits = MostRanks({share.leaves, Extent(part), part.item}, share.ranks);
    if (fits < share.ranks) {
      const int64_t items = (Extent(part) + part.item - 1) / part.item;
      const char* const flag = share.group == MeshGroup::kTensor ? "--tp " : "--etp ";
      return absl::InvalidArgumentError(
          absl::StrCat(flag, "is ", share.ranks, ": ", part.name, " has ", items, " items of ",
                       part.item, " ", part.axis == TensorAxis::kRows ? "rows" : "columns", " in ",
                       share.leaves, " leaves, expected some for each rank: ", flag, fits));
    }
    spec.boxes.push_back(BoxOf(part, share));
    spec.rows += spec.boxes.back().rows();
    spec.cols = spec.boxes.back().cols();
  }
  // Of one row, as biases are: parts side by side.
  if (spec.parts.size() > 1 && spec.parts.front().axis == TensorAxis::kColumns) {
    spec.rows = 1;
    spec.cols = 0;
    for (const TensorBox& box : spec.boxes) spec.cols += box.size();
  }
  return spec;
}

}  // namespace moe
