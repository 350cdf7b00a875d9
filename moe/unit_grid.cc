#include "moe/unit_grid.h"

#include <algorithm>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

// First row (column) of a leaf.
int64_t LeafBegin(int64_t extent, int64_t item, int leaf) {
  const int64_t items = (extent + item - 1) / item;
  return std::min(extent, items * leaf / UnitGrid::kLeaves * item);
}

}  // namespace

UnitGrid::UnitGrid(const CanonicalTensor& tensor) {
  int64_t units = 0;
  for (int s = 0; s < kLeaves; ++s) {
    TensorBox& leaf = leaf_[s] = {0, tensor.rows, 0, tensor.cols};
    switch (tensor.axis) {
      case TensorAxis::kNone:
        if (s > 0) leaf = {};
        break;
      case TensorAxis::kRows:
        leaf.row_begin = LeafBegin(tensor.rows, tensor.item, s);
        leaf.row_end = LeafBegin(tensor.rows, tensor.item, s + 1);
        break;
      case TensorAxis::kColumns:
        leaf.col_begin = LeafBegin(tensor.cols, tensor.item, s);
        leaf.col_end = LeafBegin(tensor.cols, tensor.item, s + 1);
        break;
    }
    first_[s] = units;
    group_rows_[s] = std::max<int64_t>(1, kElements / std::max<int64_t>(1, leaf.cols()));
    if (leaf.cols() > 0) units += (leaf.rows() + group_rows_[s] - 1) / group_rows_[s];
  }
  first_[kLeaves] = units;
}

TensorBox UnitGrid::box(int64_t unit) const {
  MOE_CHECK(unit >= 0 && unit < size());
  const auto after = std::upper_bound(first_.begin(), first_.end(), unit);
  const int64_t s = after - first_.begin() - 1;
  TensorBox box = leaf_[s];
  box.row_begin += (unit - first_[s]) * group_rows_[s];
  box.row_end = std::min(box.row_end, box.row_begin + group_rows_[s]);
  return box;
}

uint64_t HashUnits(const CanonicalTensor& tensor, absl::Span<const float> values) {
  MOE_CHECK(static_cast<int64_t>(values.size()) == tensor.size());
  const uint64_t name = XXH3_64bits(tensor.name.data(), tensor.name.size());
  const UnitGrid grid(tensor);
  std::vector<float> rows;  // of a unit that is narrower than its tensor
  uint64_t sum = 0;
  for (int64_t unit = 0; unit < grid.size(); ++unit) {
    const TensorBox box = grid.box(unit);
    const int64_t count = box.rows() * box.cols();
    const float* data = values.data() + box.row_begin * tensor.cols + box.col_begin;
    if (box.cols() != tensor.cols) {
      rows.clear();
      for (int64_t r = 0; r < box.rows(); ++r) {
        rows.insert(rows.end(), data + r * tensor.cols, data + r * tensor.cols + box.cols());
      }
      data = rows.data();
    }
    sum += XXH3_64bits_withSeed(data, count * sizeof(float), name + static_cast<uint64_t>(unit));
  }
  return sum;
}

}  // namespace moe
