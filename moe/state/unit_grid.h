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

  // Calls visit(unit, its box) for the units of `box`, which HasWholeUnits. Units count up leaf by
  // leaf, in a leaf row by row, from 0 at the tensor's first. A leaf may be empty.
  template <typename Visit>
  void ForEachUnit(const TensorBox& box, Visit visit) const {
    MOE_CHECK(HasWholeUnits(box));
    for (int s = 0; s < kLeaves; ++s) {
      const TensorBox here = Common(leaf_[s], box);
      if (here.cols() <= 0) continue;
      for (int64_t row = here.row_begin; row < here.row_end; row += group_rows_) {
        visit(first_[s] + (row - leaf_[s].row_begin) / group_rows_,
              TensorBox{row, std::min(row + group_rows_, here.row_end), here.col_begin,
                        here.col_end});
      }
    }
  }
  // Whether no unit is partly in `box`: it has whole row groups and the columns of whole leaves.
  bool HasWholeUnits(const TensorBox& box) const;
  // The first row of the row group that `row` is in; rows() for row >= rows().
  int64_t FirstRowOfGroup(int64_t row) const;
  // A row to read up to from `row` on, the first of a row group or rows(): so few elements that a
  // near cache has them while they are hashed, and at least a row group.
  int64_t EndOfBand(int64_t row) const;
  // The cut nearest to `element`, where elements of `box` are counted row by row: the first of a
  // row group, or their end. The first of two that are as near.
  int64_t CutNear(const TensorBox& box, int64_t element) const;

 private:
  const int64_t cols_;  // the tensor's
  std::array<TensorBox, kLeaves> leaf_;
  int64_t group_rows_ = 1;
  std::array<int64_t, kLeaves> first_;  // unit of each leaf
};

// Sum over units, modulo 2^64, of XXH3(the unit's float32 bytes, row by row; seed: XXH3 of the
// name, plus the unit). A sum of sums is the whole's hash: whoever holds a unit adds it, in any
// order. rows: those of `box`, which has whole units.
uint64_t HashUnits(const CanonicalTensor& tensor, const TensorBox& box,
                   MatrixView<const float> rows);

}  // namespace moe

#endif  // MOE_MOE_STATE_UNIT_GRID_H_
