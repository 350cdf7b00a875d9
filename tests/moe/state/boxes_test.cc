#include "moe/state/boxes.h"

#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moe {
namespace {

// Name, box, first element.
using Row = std::tuple<std::string, int64_t, int64_t, int64_t, int64_t, int64_t>;

std::vector<Row> RowsOf(const std::vector<BoxInMemory>& boxes) {
  std::vector<Row> rows;
  for (const BoxInMemory& held : boxes) {
    const TensorBox& box = held.box;
    rows.emplace_back(held.tensor->name, box.row_begin, box.row_end, box.col_begin, box.col_end,
                      held.first);
  }
  return rows;
}

TEST(BoxesTest, AreTheTensorsInMemoryByHand) {
  ParameterStore store(DType::kFloat32, 1);
  const Parameter* const qkv = store
                                   .Add({.name = "qkv",
                                         .rows = 7,
                                         .cols = 3,
                                         .parts = {{.name = "q", .rows = 4, .cols = 3},
                                                   {.name = "none", .rows = 0, .cols = 3},
                                                   {.name = "k", .rows = 2, .cols = 3},
                                                   {.name = "v", .rows = 1, .cols = 3}}})
                                   .value();
  EXPECT_THAT(RowsOf(BoxesOf(*qkv)),
              ::testing::ElementsAre(Row{"q", 0, 4, 0, 3, 0}, Row{"k", 0, 2, 0, 3, 12},
                                     Row{"v", 0, 1, 0, 3, 18}));
  EXPECT_THAT(RowsOf(BoxesOf(*qkv, {6, 15})),
              ::testing::ElementsAre(Row{"q", 2, 4, 0, 3, 6}, Row{"k", 0, 1, 0, 3, 12}));
  EXPECT_THAT(RowsOf(BoxesOf(*qkv, {15, 18})), ::testing::ElementsAre(Row{"k", 1, 2, 0, 3, 15}));
  EXPECT_THAT(BoxesOf(*qkv, {12, 12}), ::testing::IsEmpty());
}

}  // namespace
}  // namespace moe
