// Units of a tensor: the smallest parts that ranks can hold, add or hash separately.
#ifndef MOE_MOE_STATE_UNIT_GRID_H_
#define MOE_MOE_STATE_UNIT_GRID_H_

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/base/status_macros.h"
#include "kernels/base/tensor_view.h"
#include "moe/state/canonical_tensor.h"

namespace moe {

// A tensor is cut along its axis into kLeaves leaves (without an axis, into one), leaf s of n items
// being items [n s / kLeaves, n (s + 1) / kLeaves); a leaf is cut, from its first row on, into
// groups of max(1, 4096 / columns of the widest leaf) rows. A unit is a row group of a leaf. Units
// depend on the tensor's shape alone, never on ranks, so results computed unit by unit have the
// same bits at any layout. Row groups of leaves side by side are the same rows, between which ranks
// may cut.
class UnitGrid {
 public:
  static constexpr int kLeaves = 8;
  static constexpr int64_t kElements = 4096;  // most elements of a unit, unless one row is longer

  explicit UnitGrid(const CanonicalTensor& tensor);

  // Calls visit(unit, its box) for the units of `box`, which must satisfy HasWholeUnits. Units are
  // numbered leaf by leaf, within a leaf row by row, from 0 at the tensor's first. A leaf may be
  // empty.
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
  // Whether no unit is partly in `box`: it consists of whole row groups and the columns of whole
  // leaves.
  bool HasWholeUnits(const TensorBox& box) const;
  // First row of the row group that contains `row`; rows() for row >= rows().
  int64_t FirstRowOfGroup(int64_t row) const;
  // End of the band of rows to read from `row` on, the first row of a row group or rows(): few
  // enough elements that a near cache holds them while they are hashed, but at least one row group.
  int64_t EndOfBand(int64_t row) const;
  // The cut nearest to `element`, an element of `box` counted row by row: the first element of a
  // row group, or the end. Of two equally near cuts the first.
  int64_t CutNear(const TensorBox& box, int64_t element) const;

 private:
  const int64_t cols_;  // columns of the tensor
  std::array<TensorBox, kLeaves> leaf_;
  int64_t group_rows_ = 1;
  std::array<int64_t, kLeaves> first_;  // number of the first unit of each leaf
};

// Sum over units, modulo 2^64, of XXH3(the unit's float32 bytes, row by row; seed: XXH3 of the
// name, plus the unit). Sums over parts add up to the hash of the whole: each owner of a unit adds
// it, in any order. rows: rows of `box`, which has whole units.
uint64_t HashUnits(const CanonicalTensor& tensor, const TensorBox& box,
                   MatrixView<const float> rows);

}  // namespace moe

#endif  // MOE_MOE_STATE_UNIT_GRID_H_
