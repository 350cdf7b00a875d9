#include "kernels/grouped_gemm/grouped_gemm.h"

#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moe {
namespace {

using ::testing::ElementsAre;

TEST(GroupedGemm, MultipliesEachGroupByItsOwnWeight) {
  const std::vector<float> x = {1, 2, 3, 4, 5, 6};  // [3, 2]
  const std::vector<float> w0 = {1, 0, 0, 1};       // [2, 2]
  const std::vector<float> w1 = {0, 10, 100, 1000};
  const MatrixView<const float> weight[] = {{w0.data(), 2, 2}, {w1.data(), 2, 2}};
  std::vector<float> y(6, -1), dx(6, -1);
  Workspace workspace;
  const auto stream = MakeInlineStream();
  ASSERT_TRUE(
      GroupedGemm<float>({x.data(), 3, 2}, {0, 1, 3}, weight, {y.data(), 3, 2}, workspace, *stream)
          .ok());
  EXPECT_THAT(y, ElementsAre(1, 2, 40, 4300, 60, 6500));
  ASSERT_TRUE(GroupedGemmInputGradient<float>({x.data(), 3, 2}, {0, 1, 3}, weight,
                                              {dx.data(), 3, 2}, workspace, *stream)
                  .ok());
  EXPECT_THAT(dx, ElementsAre(1, 2, 400, 4030, 600, 6050));
}

TEST(GemmWeightGradient, SumsOverRowsAndAddsWhenAsked) {
  const std::vector<float> dy = {1, 2};                   // [2, 1]
  const std::vector<float> x = {1, 10, 100, 2, 20, 200};  // [2, 3]
  std::vector<float> dw = {7, 7, 7};                      // [1, 3]
  Workspace workspace;
  const auto stream = MakeInlineStream();
  ASSERT_TRUE(GemmWeightGradient<float>({dy.data(), 2, 1}, {x.data(), 2, 3}, {dw.data(), 1, 3},
                                        Write::kAdd, workspace, *stream)
                  .ok());
  EXPECT_THAT(dw, ElementsAre(12, 57, 507));
  ASSERT_TRUE(GemmWeightGradient<float>({dy.data(), 2, 1}, {x.data(), 2, 3}, {dw.data(), 1, 3},
                                        Write::kOverwrite, workspace, *stream)
                  .ok());
  EXPECT_THAT(dw, ElementsAre(5, 50, 500));
}

}  // namespace
}  // namespace moe
