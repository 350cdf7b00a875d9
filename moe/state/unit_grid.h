// The units of a tensor: the least that ranks can hold, add or hash apart.
#ifndef MOE_MOE_STATE_UNIT_GRID_H_
#define MOE_MOE_STATE_UNIT_GRID_H_

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/base/status_macros.h"
#include "kernels/base/tensor_view.h"
#include "moe/state/canonical_tensor.h"

namespace moe {

// A tensor is cut along its axis into kLeaves leaves (one without an axis), leaf s of n items being
// items [n s / kLeaves, n (s + 1) / kLeaves); a leaf is cut, from its first row on, into groups of
// max(1, 4096 / columns of the widest leaf) rows. A unit is a row group of a leaf. Units depend on
// the tensor's shape alone, never on ranks, so what is made of them unit by unit has the same bits
// at any layout. Row groups of leaves side by side are the same rows, between which ranks may cut.
class UnitGrid {
 public:
  static constexpr int kLeaves = 8;
  static constexpr int64_t kElements = 4096;  // of a unit, at most, unless its row is longer

  explicit UnitGrid(const CanonicalTensor& tensor);

  // Calls visit(unit, its box) for the units of rows [begin, end), which are whole row groups.
  // Units count up leaf by leaf, in a leaf row by row; of all rows from 0. A leaf may be empty.
  template <typename Visit>
  void ForEachUnit(int64_t begin, int64_t end, Visit visit) const {
    for (int s = 0; s < kLeaves; ++s) {
      TensorBox box = leaf_[s];
      const int64_t leaf_begin = box.row_begin, leaf_end = std::min(end, box.row_end);
      if (box.cols() == 0) continue;
      for (int64_t row = std::max(begin, leaf_begin); row < leaf_end; row = box.row_end) {
        box.row_begin = row;
        box.row_end = std::min(row + group_rows_, leaf_[s].row_end);
        MOE_CHECK((row - leaf_begin) % group_rows_ == 0 && box.row_end <= end);
        visit(first_[s] + (row - leaf_begin) / group_rows_, box);
      }
    }
  }
  // The first row of the row group that `row` is in; rows() for row >= rows().
  int64_t FirstRowOfGroup(int64_t row) const;
  // A row to read up to from `row` on, the first of a row group or rows(): so few elements that a
  // near cache has them while they are hashed, and at least a row group.
  int64_t EndOfBand(int64_t row) const;
  // The first row of the row group, or rows(), whose first element, row by row, is nearest to
  // `element`; of two as near, the first.
  int64_t CutNear(int64_t element) const;

 private:
  const int64_t cols_;  // of the tensor
  std::array<TensorBox, kLeaves> leaf_;
  int64_t group_rows_ = 1;
  std::array<int64_t, kLeaves> first_;  // unit of each leaf
};

// Sum over units, modulo 2^64, of XXH3(the unit's float32 bytes, row by row; seed: XXH3 of the
// name, plus the unit). A sum of sums is the whole's hash: whoever holds a unit adds it, in any
// order. rows: the tensor's from first_row on, whole row groups.
uint64_t HashUnits(const CanonicalTensor& tensor, int64_t first_row, MatrixView<const float> rows);

}  // namespace moe

#endif  // MOE_MOE_STATE_UNIT_GRID_H_
