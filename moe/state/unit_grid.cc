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

int64_t UnitGrid::CutNear(int64_t element) const {
  if (cols_ == 0) return 0;
  const int64_t row = element / cols_, first = FirstRowOfGroup(row);
  const auto leaf = std::find_if(leaf_.begin(), leaf_.end(),
                                 [row](const TensorBox& box) { return row < box.row_end; });
  if (leaf == leaf_.end()) return first;
  const int64_t next = std::min(first + group_rows_, leaf->row_end);
  return element - first * cols_ <= next * cols_ - element ? first : next;
}

uint64_t HashUnits(const CanonicalTensor& tensor, int64_t first_row, MatrixView<const float> rows) {
  const uint64_t name = Xxh3(tensor.name.data(), tensor.name.size());
  const UnitGrid grid(tensor);
  std::vector<float> elements;  // of a unit that is narrower than its tensor
  uint64_t sum = 0;
  grid.ForEachUnit(first_row, first_row + rows.rows(), [&](int64_t unit, const TensorBox& box) {
    const float* data = rows.row(box.row_begin - first_row) + box.col_begin;
    if (box.cols() != rows.stride()) {
      elements.clear();
      for (int64_t r = 0; r < box.rows(); ++r) {
        const float* const row = data + r * rows.stride();
        elements.insert(elements.end(), row, row + box.cols());
      }
      data = elements.data();
    }
    sum += Xxh3(data, box.rows() * box.cols() * sizeof(float), name + static_cast<uint64_t>(unit));
  });
  return sum;
}

}  // namespace moe
