#include "moe/state/unit_grid.h"

#include <algorithm>
#include <vector>

#include "kernels/base/tree_cut.h"
#include "kernels/base/xxh3.h"

namespace moe {

UnitGrid::UnitGrid(const CanonicalTensor& tensor) : cols_(tensor.cols) {
  const TreeCut rows = {kLeaves, tensor.rows, tensor.item},
                cols = {kLeaves, tensor.cols, tensor.item};
  int64_t widest = 1;
  for (int s = 0; s < kLeaves; ++s) {
    TensorBox& leaf = leaf_[s] = {0, tensor.rows, 0, tensor.cols};
    switch (tensor.axis) {
      case TensorAxis::kNone:
        if (s > 0) leaf = {tensor.rows, tensor.rows, 0, tensor.cols};
        break;
      case TensorAxis::kRows:
        leaf.row_begin = rows.Begin(s);
        leaf.row_end = rows.Begin(s + 1);
        break;
      case TensorAxis::kColumns:
        leaf.col_begin = cols.Begin(s);
        leaf.col_end = cols.Begin(s + 1);
        break;
    }
    widest = std::max(widest, leaf.cols());
  }
  group_rows_ = std::max<int64_t>(1, kElements / widest);
  int64_t units = 0;
  for (int s = 0; s < kLeaves; ++s) {
    first_[s] = units;
    if (leaf_[s].cols() > 0) units += (leaf_[s].rows() + group_rows_ - 1) / group_rows_;
  }
}

int64_t UnitGrid::FirstRowOfGroup(int64_t row) const {
  for (const TensorBox& leaf : leaf_) {
    if (row >= leaf.row_end) continue;
    return row - (row - leaf.row_begin) % group_rows_;
  }
  return leaf_[kLeaves - 1].row_end;
}

int64_t UnitGrid::EndOfBand(int64_t row) const {
  constexpr int64_t kBand = int64_t{1} << 16;  // elements, twice those of eight units side by side
  return FirstRowOfGroup(row + std::max<int64_t>(1, kBand / cols_));
}

bool UnitGrid::HasWholeUnits(const TensorBox& box) const {
  if (FirstRowOfGroup(box.row_begin) != box.row_begin) return false;
  if (FirstRowOfGroup(box.row_end) != box.row_end) return false;
  return std::all_of(leaf_.begin(), leaf_.end(), [&](const TensorBox& leaf) {
    const TensorBox here = Common(leaf, box);
    return here.rows() <= 0 || here.cols() <= 0 || here.cols() == leaf.cols();
  });
}

int64_t UnitGrid::CutNear(const TensorBox& box, int64_t element) const {
  const int64_t cols = box.cols();
  if (cols == 0) return 0;
  const int64_t row = box.row_begin + element / cols, first = FirstRowOfGroup(row);
  const auto leaf = std::find_if(leaf_.begin(), leaf_.end(),
                                 [row](const TensorBox& each) { return row < each.row_end; });
  const int64_t next = leaf == leaf_.end() ? first : std::min(first + group_rows_, leaf->row_end);
  const int64_t before = (first - box.row_begin) * cols, after = (next - box.row_begin) * cols;
  return element - before <= after - element ? before : after;
}

uint64_t HashUnits(const CanonicalTensor& tensor, const TensorBox& box,
                   MatrixView<const float> rows) {
  const uint64_t name = Xxh3(tensor.name.data(), tensor.name.size());
  std::vector<float> elements;  // copy of a unit that is narrower than the rows
  uint64_t sum = 0;
  UnitGrid(tensor).ForEachUnit(box, [&](int64_t number, const TensorBox& unit) {
    const float* data = rows.row(unit.row_begin - box.row_begin) + unit.col_begin - box.col_begin;
    if (unit.cols() != rows.stride()) {
      elements.clear();
      for (int64_t r = 0; r < unit.rows(); ++r) {
        const float* const row = data + r * rows.stride();
        elements.insert(elements.end(), row, row + unit.cols());
      }
      data = elements.data();
    }
    sum += Xxh3(data, unit.size() * sizeof(float), name + static_cast<uint64_t>(number));
  });
  return sum;
}

}  // namespace moe
