// kernels/topk_gate: selection of the k largest values of each row.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "kernels/topk_gate/gate_rows.h"
#include "kernels/topk_gate/topk_gate.h"
#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using ::testing::ElementsAre;
using testing::kInfinity;
using testing::kNaN;
using testing::Matrix;
using testing::SameBits;
using testing::SimdTarget;
using testing::TestStream;

std::vector<int32_t> Ids(const Matrix<int32_t>& expert, int64_t t) {
  const int32_t* const row = expert.view().row(t);
  return {row, row + expert.cols()};
}

std::vector<int32_t> Select(const std::vector<float>& row, int64_t k) {
  TestStream stream;
  Matrix<int32_t> expert(1, k, -1.0f);
  const MatrixView<const float> value(row.data(), 1, static_cast<int64_t>(row.size()));
  EXPECT_TRUE(TopKSelect(value, expert.view(), *stream).ok());
  EXPECT_TRUE(expert.edges_intact());
  return Ids(expert, 0);
}

// Few distinct values, so that most rows have ties; every special value among them.
Matrix<float> WithTies(int64_t rows, int64_t experts, uint64_t seed) {
  const float values[] = {0.0f,      -0.0f,      1.0f, 1.0f,  -1.0f,
                          kInfinity, -kInfinity, kNaN, -kNaN, 1e-45f};
  Matrix<float> m(rows, experts);
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t e = 0; e < experts; ++e) {
      const auto item = static_cast<uint64_t>(t * experts + e);
      m.at(t, e) = values[Random4({.seed = seed, .item = item})[0] % std::size(values)];
    }
  }
  return m;
}

TEST(TopKSelectTest, HandMadeRowsComeBestFirstAndTiesByLowestId) {
  EXPECT_THAT(Select({1, 4, 2, 4, 3}, 3), ElementsAre(1, 3, 4));
  EXPECT_THAT(Select({1, 4, 2, 4, 3}, 5), ElementsAre(1, 3, 4, 2, 0));
  EXPECT_THAT(Select({-2, -1, -3}, 2), ElementsAre(1, 0));
  EXPECT_THAT(Select({5, 5, 5, 5}, 3), ElementsAre(0, 1, 2));
  EXPECT_THAT(Select({-0.0f, 0.0f, -0.0f}, 3), ElementsAre(0, 1, 2));
  EXPECT_THAT(Select({7}, 1), ElementsAre(0));
  EXPECT_THAT(Select({kNaN}, 1), ElementsAre(0));
}

TEST(TopKSelectTest, NaNRanksBelowMinusInfinityAndIsSelectedLast) {
  EXPECT_THAT(Select({kNaN, -kInfinity, -kNaN, 1}, 4), ElementsAre(3, 1, 0, 2));
  EXPECT_THAT(Select({kNaN, -kNaN, kNaN}, 2), ElementsAre(0, 1));
  EXPECT_THAT(Select({-kInfinity, -kInfinity, -kInfinity}, 3), ElementsAre(0, 1, 2));
  EXPECT_THAT(Select({kInfinity, 1e38f, kInfinity, kNaN}, 3), ElementsAre(0, 2, 1));
  // A whole vector of them before the one number.
  std::vector<float> row(40, kNaN);
  row[33] = -kInfinity;
  EXPECT_THAT(Select(row, 3), ElementsAre(33, 0, 1));
}

TEST(TopKSelectTest, IsTheReferenceForAnyNumberOfExpertsAndChoicesOnEveryTarget) {
  for (const int64_t experts : {1, 2, 5, 15, 16, 17, 40, 64, 65, 1000}) {
    const int64_t rows = experts < 1000 ? 50 : 5;
    for (const int64_t k :
         {int64_t{1}, int64_t{5}, int64_t{8}, int64_t{9}, (experts + 1) / 2, experts}) {
      if (k > std::min<int64_t>(65, experts))
        continue;  // the reference searches the ids that it took; AStableSort goes further
      for (const auto& value :
           {WithTies(rows, experts, 2), Matrix<float>::Random(rows, experts, 3)}) {
        Matrix<int32_t> reference(rows, k, -1.0f);
        TopKSelectReference(value.view(), reference.view(), 0, rows);
        for (const std::string& target : gemm::SimdTargets()) {
          SCOPED_TRACE(::testing::Message() << target << " E " << experts << " k " << k);
          const SimdTarget use(target);
          TestStream stream;
          Matrix<int32_t> expert(rows, k, -1.0f);
          ASSERT_TRUE(TopKSelect(value.view(), expert.view(), *stream).ok());
          EXPECT_TRUE(SameBits(expert, reference));
          EXPECT_TRUE(expert.edges_intact());
        }
      }
    }
  }
}

// A property that does not come from the reference.
TEST(TopKSelectTest, AllOfThemAreAStableSort) {
  const int64_t experts = 1000;
  for (const auto& value : {WithTies(1, experts, 4), Matrix<float>::Random(1, experts, 5)}) {
    std::vector<int32_t> sorted(experts);
    std::iota(sorted.begin(), sorted.end(), 0);
    std::stable_sort(sorted.begin(), sorted.end(), [&](int32_t a, int32_t b) {
      if (std::isnan(value(0, a))) return false;
      if (std::isnan(value(0, b))) return true;
      return value(0, a) > value(0, b);
    });
    for (const int64_t k : {int64_t{100}, experts}) {
      TestStream stream;
      Matrix<int32_t> expert(1, k);
      ASSERT_TRUE(TopKSelect(value.view(), expert.view(), *stream).ok());
      EXPECT_EQ(Ids(expert, 0), std::vector<int32_t>(sorted.begin(), sorted.begin() + k));
    }
  }
}

TEST(TopKSelectTest, AgreesWithTopKGate) {
  const int64_t tokens = 20, experts = 37, k = 6;
  const auto value = WithTies(tokens, experts, 5);
  Matrix<float> probs(tokens, experts), gate_value(tokens, k);
  Matrix<int32_t> expert(tokens, k), gate_expert(tokens, k);
  std::vector<int64_t> count(experts);
  TestStream stream;
  ASSERT_TRUE(TopKGate(value.view(),
                       {.probs = probs.view(),
                        .expert = gate_expert.view(),
                        .value = gate_value.view(),
                        .log_sum_exp = {},
                        .count = absl::MakeSpan(count)},
                       *stream)
                  .ok());
  ASSERT_TRUE(TopKSelect(value.view(), expert.view(), *stream).ok());
  EXPECT_TRUE(SameBits(expert, gate_expert));
}

TEST(TopKSelectTest, ARowIsSelectedTheSameAloneAndOnAnyNumberOfThreads) {
  const int64_t tokens = 700, experts = 19, k = 4;  // more rows than one task takes
  const auto value = WithTies(tokens, experts, 6);
  TestStream one, three(3);
  Matrix<int32_t> expert(tokens, k), threaded(tokens, k);
  ASSERT_TRUE(TopKSelect(value.view(), expert.view(), *one).ok());
  ASSERT_TRUE(TopKSelect(value.view(), threaded.view(), *three).ok());
  EXPECT_TRUE(SameBits(expert, threaded));
  for (const int64_t t : {int64_t{0}, int64_t{255}, int64_t{256}, tokens - 1}) {
    Matrix<int32_t> alone(1, k);
    ASSERT_TRUE(TopKSelect(value.view(t, t + 1), alone.view(), *one).ok());
    EXPECT_TRUE(SameBits(alone, expert, t));
  }
  Matrix<float> none(0, experts);
  EXPECT_TRUE(TopKSelect(none.view(), MatrixView<int32_t>(nullptr, 0, k), *one).ok());
}

TEST(TopKSelectTest, RefusesShapesThatDisagree) {
  TestStream stream;
  const Matrix<float> value(2, 3);
  const auto message = [&](MatrixView<const float> in, MatrixView<int32_t> out) {
    const absl::Status status = TopKSelect(in, out, *stream);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return testing::Message(status);
  };
  std::vector<int32_t> ids(8);
  EXPECT_EQ(message(value.view(), {ids.data(), 2, 0}),
            "TopKSelect: k is 0, expected 1 .. 3 (the experts)");
  EXPECT_EQ(message(value.view(), {ids.data(), 2, 4}),
            "TopKSelect: k is 4, expected 1 .. 3 (the experts)");
  EXPECT_EQ(message({nullptr, 2, 0}, {ids.data(), 2, 1}),
            "TopKSelect: k is 1, expected 1 .. 0 (the experts)");
  EXPECT_EQ(message(value.view(), {ids.data(), 1, 2}),
            "TopKSelect: expert is [1, 2] with stride 2, expected [2, 2]");
  EXPECT_EQ(message({value.view().data(), 2, 3, 2}, {ids.data(), 2, 2}),
            "TopKSelect: value is [2, 3] with stride 2, expected [2, 3]");
}

}  // namespace
}  // namespace moe
