// kernels/topk_gate: weights of the selected experts, and how often each was selected.
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include "kernels/topk_gate/gate_row.h"
#include "kernels/topk_gate/gate_rows.h"
#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using ::testing::ElementsAre;
using testing::kNaN;
using testing::Matrix;
using testing::SameBits;
using testing::SimdTarget;

// Rows 1 and 2 are special: all 0, as scores that underflowed, and one NaN.
Matrix<float> Scores(int64_t rows, int64_t k) {
  Matrix<float> scores = Matrix<float>::Random(rows, k, /*seed=*/7);
  for (int64_t j = 0; j < k; ++j) scores.at(1, j) = 0.0f;
  scores.at(2, k - 1) = kNaN;
  return scores;
}

TEST(WeighRowsTest, HasTheBitsOfNormaliseOnEveryTargetAndLeavesOtherRowsAlone) {
  constexpr int64_t kRows = 6, kBegin = 1, kEnd = 5;
  for (const int64_t k : {1, 2, 3, 4, 5, 8, 9, 16}) {
    for (const GateWeights weights : {GateWeights::kScores, GateWeights::kNormalised}) {
      for (const auto& [scale, epsilon] : {std::pair(1.0f, 0.0f), std::pair(2.5f, 0.5f)}) {
        Matrix<float> expected = Scores(kRows, k);
        for (int64_t t = kBegin; t < kEnd; ++t) {
          const absl::Span<float> row(expected.view().row(t), static_cast<size_t>(k));
          if (weights == GateWeights::kNormalised) Normalise(row, epsilon);
          for (float& w : row) w *= scale;
        }
        for (const std::string& target : gemm::SimdTargets()) {
          SCOPED_TRACE(::testing::Message() << target << " k " << k << " scale " << scale);
          const SimdTarget use(target);
          Matrix<float> weight = Scores(kRows, k);
          WeighRowsCpu(weight.view(), {.weights = weights, .scale = scale, .epsilon = epsilon},
                       kBegin, kEnd);
          EXPECT_TRUE(SameBits(weight, expected));
          EXPECT_TRUE(weight.edges_intact());
        }
      }
    }
  }
}

TEST(CountSelectedTest, CountsEveryIdFromZero) {
  const std::vector<int32_t> ids = {3, 0, 3, 1, 0, 3};
  std::vector<int64_t> count(5, -9);
  CountSelected({ids.data(), 3, 2}, absl::MakeSpan(count));
  EXPECT_THAT(count, ElementsAre(2, 1, 0, 3, 0));
}

}  // namespace
}  // namespace moe
