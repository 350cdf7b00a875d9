#include "moe/state/unit_grid.h"

#include <cstdint>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace moe {
namespace {

struct Case {
  CanonicalTensor tensor;
  int64_t units;
};

const Case kCases[] = {
    {{"norm", 1, 5000}, 1},                               // a row is never cut
    {{"router", 100, 100}, 3},                            // groups of 40 rows
    {{"gate", 64, 128, TensorAxis::kRows, 16}, 4},        // 4 items: every other leaf is empty
    {{"head", 256, 128, TensorAxis::kRows, 16}, 8},       // a group of 32 rows a leaf
    {{"down", 100, 256, TensorAxis::kColumns, 16}, 8},    // 128 rows of 32 columns fit a unit
    {{"o", 300, 128, TensorAxis::kColumns, 16}, 16},      // 256 rows of 16 columns, and the rest
    {{"uneven", 20, 7, TensorAxis::kRows, 16}, 2},        // the last item is shorter
    {{"heads", 100, 576, TensorAxis::kColumns, 64}, 32},  // the leaf of two heads fits 32 rows
    {{"bias", 1, 128, TensorAxis::kColumns, 16}, 8},      //
    {{"empty", 0, 128, TensorAxis::kRows, 16}, 0},        //
    {{"none", 3, 0, TensorAxis::kNone, 1}, 0},            //
};

TEST(UnitGridTest, UnitsTileATensorOnce) {
  for (const auto& [tensor, units] : kCases) {
    SCOPED_TRACE(tensor.name);
    std::vector<int> covered(static_cast<size_t>(tensor.size()), 0);
    int64_t visited = 0;
    UnitGrid(tensor).ForEachUnit(tensor.box(), [&](int64_t unit, const TensorBox& box) {
      EXPECT_EQ(unit, visited++);
      EXPECT_TRUE(box.rows() == 1 || box.rows() * box.cols() <= UnitGrid::kElements);
      for (int64_t r = box.row_begin; r < box.row_end; ++r) {
        for (int64_t c = box.col_begin; c < box.col_end; ++c) ++covered[r * tensor.cols + c];
      }
    });
    EXPECT_EQ(visited, units);
    EXPECT_EQ(covered, std::vector<int>(covered.size(), 1));
  }
}

uint64_t HashOf(const CanonicalTensor& tensor, const std::vector<float>& values) {
  return HashUnits(tensor, tensor.box(), {values.data(), tensor.rows, tensor.cols});
}

uint64_t Xxh3(const void* data, size_t bytes, uint64_t seed) {
  return XXH3_64bits_withSeed(data, bytes, seed);
}

TEST(HashUnitsTest, IsTheSumOverUnitsByHand) {
  // Two leaves of 16 columns; the units of a leaf have 256 rows and 1.
  const CanonicalTensor tensor = {"o", 257, 32, TensorAxis::kColumns, 16};
  std::vector<float> values(static_cast<size_t>(tensor.size()));
  std::iota(values.begin(), values.end(), 1.0f);
  const uint64_t name = Xxh3("o", 1, 0);
  uint64_t expected = 0, unit = 0;
  for (const int leaf : {0, 1}) {
    for (const auto& [first, last] : {std::pair{0, 256}, {256, 257}}) {
      std::vector<float> box;
      for (int r = first; r < last; ++r) {
        for (int c = 16 * leaf; c < 16 * (leaf + 1); ++c) box.push_back(values[r * 32 + c]);
      }
      expected += Xxh3(box.data(), box.size() * sizeof(float), name + unit++);
    }
  }
  EXPECT_EQ(HashOf(tensor, values), expected);
}

TEST(HashUnitsTest, WhoeverHasRowGroupsAddsThem) {
  for (const auto& [tensor, units] : kCases) {
    SCOPED_TRACE(tensor.name);
    std::vector<float> values(static_cast<size_t>(tensor.size()));
    std::iota(values.begin(), values.end(), 1.0f);
    const UnitGrid grid(tensor);
    EXPECT_EQ(grid.FirstRowOfGroup(0), 0);
    EXPECT_EQ(grid.FirstRowOfGroup(tensor.rows), tensor.rows);
    for (const int ranks : {2, 3, 7}) {
      uint64_t sum = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const int64_t first = grid.FirstRowOfGroup(tensor.rows * rank / ranks),
                      last = grid.FirstRowOfGroup(tensor.rows * (rank + 1) / ranks);
        sum += HashUnits(tensor, {first, last, 0, tensor.cols},
                         {values.data() + first * tensor.cols, last - first, tensor.cols});
      }
      EXPECT_EQ(sum, HashOf(tensor, values)) << ranks;
    }
  }
}

// Two ranks with 16 columns each, a leaf; and with the rows of one of its two row groups alone.
TEST(HashUnitsTest, WhoeverHasLeavesAddsThem) {
  const CanonicalTensor tensor = {"o", 257, 32, TensorAxis::kColumns, 16};
  std::vector<float> values(static_cast<size_t>(tensor.size()));
  std::iota(values.begin(), values.end(), 1.0f);
  uint64_t sum = 0;
  for (const TensorBox& box :
       {TensorBox{0, 257, 0, 16}, TensorBox{0, 256, 16, 32}, TensorBox{256, 257, 16, 32}}) {
    std::vector<float> mine;
    for (int64_t r = box.row_begin; r < box.row_end; ++r) {
      for (int64_t c = box.col_begin; c < box.col_end; ++c) mine.push_back(values[r * 32 + c]);
    }
    sum += HashUnits(tensor, box, {mine.data(), box.rows(), box.cols()});
  }
  EXPECT_EQ(sum, HashOf(tensor, values));
  const UnitGrid grid(tensor);
  EXPECT_TRUE(grid.HasWholeUnits({256, 257, 16, 32}));
  EXPECT_FALSE(grid.HasWholeUnits({0, 257, 0, 24}));
  EXPECT_FALSE(grid.HasWholeUnits({1, 257, 0, 32}));
  EXPECT_FALSE(grid.HasWholeUnits({0, 255, 0, 32}));
  // Between ranks of such a box: 16 elements a row, so its second row group begins at 4096.
  EXPECT_EQ(grid.CutNear({0, 257, 16, 32}, 2049), 4096);
  EXPECT_EQ(grid.CutNear({0, 257, 16, 32}, 2048), 0);
  EXPECT_EQ(grid.CutNear({0, 257, 16, 32}, 4105), 4112);
}

TEST(HashUnitsTest, SeesEveryValueItsPlaceAndItsName) {
  for (const auto& [tensor, units] : kCases) {
    SCOPED_TRACE(tensor.name);
    std::vector<float> values(static_cast<size_t>(tensor.size()));
    std::iota(values.begin(), values.end(), 1.0f);
    const uint64_t hash = HashOf(tensor, values);
    if (units == 0) {
      EXPECT_EQ(hash, 0u);
      continue;
    }
    CanonicalTensor renamed = tensor;
    renamed.name += "2";
    EXPECT_NE(HashOf(renamed, values), hash);
    for (size_t i = 0; i < values.size(); i += 1009) {
      const float value = values[i];
      values[i] = -value;
      EXPECT_NE(HashOf(tensor, values), hash) << i;
      values[i] = value;
    }
    std::swap(values.front(), values.back());
    EXPECT_NE(HashOf(tensor, values), hash);
  }
}

}  // namespace
}  // namespace moe
