#include "kernels/topk_gate/topk_gate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/rng.h"
#include "kernels/topk_gate/gate_rows.h"

namespace moe {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Dense outputs with `pad` sentinel columns after each row.
struct Result {
  int64_t tokens, experts, k, pad;
  std::vector<float> probs, value, lse;
  std::vector<int32_t> expert;
  std::vector<int64_t> count;

  Result(int64_t t, int64_t e, int64_t top_k, int64_t columns_after = 0)
      : tokens(t),
        experts(e),
        k(top_k),
        pad(columns_after),
        probs(static_cast<size_t>(t * (e + pad)), -7.0f),
        value(static_cast<size_t>(t * (k + pad)), -7.0f),
        lse(static_cast<size_t>(t), -7.0f),
        expert(static_cast<size_t>(t * (k + pad)), -7),
        count(static_cast<size_t>(e), -7) {}

  TopKGateOutput views() {
    return {.probs = {probs.data(), tokens, experts, experts + pad},
            .expert = {expert.data(), tokens, k, k + pad},
            .value = {value.data(), tokens, k, k + pad},
            .log_sum_exp = absl::MakeSpan(lse),
            .count = absl::MakeSpan(count)};
  }
  std::vector<int32_t> Ids(int64_t t) const {
    const auto* const first = expert.data() + t * (k + pad);
    return {first, first + k};
  }
};

MatrixView<const float> View(const std::vector<float>& logits, int64_t experts) {
  return {logits.data(), static_cast<int64_t>(logits.size()) / experts, experts};
}

Result Gate(const std::vector<float>& logits, int64_t experts, int64_t k, int threads = 1) {
  ThreadPool pool(threads);
  const auto stream = MakeInlineStream(&pool);
  Result result(static_cast<int64_t>(logits.size()) / experts, experts, k);
  const absl::Status status = TopKGate(View(logits, experts), result.views(), *stream);
  EXPECT_TRUE(status.ok()) << status;
  return result;
}

std::vector<float> RandomLogits(int64_t count, uint64_t seed) {
  std::vector<float> logits(static_cast<size_t>(count));
  for (size_t i = 0; i < logits.size(); ++i) {
    logits[i] = static_cast<float>(2 * Normal({.seed = seed, .item = i}));
  }
  return logits;
}

// Few distinct values, so that most rows have ties; every special value among them.
std::vector<float> LogitsWithTies(int64_t count, uint64_t seed) {
  const float values[] = {0.0f, -0.0f, 1.0f, 1.0f, -1.0f, kInf, -kInf, kNan, -kNan, 1e-45f};
  std::vector<float> logits(static_cast<size_t>(count));
  for (size_t i = 0; i < logits.size(); ++i) {
    logits[i] = values[Random4({.seed = seed, .item = i})[0] % std::size(values)];
  }
  return logits;
}

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

TEST(TopKGate, HandMadeRowHasSoftmaxTopKAndCounts) {
  // exp: 1, 2, 2, 4 (sum 9); second row is uniform.
  const float ln2 = std::log(2.0f);
  const Result r = Gate({0, ln2, ln2, 2 * ln2, 5, 5, 5, 5}, 4, 2);
  EXPECT_THAT(r.Ids(0), ElementsAre(3, 1));  // 1 and 2 tie: the lowest id
  EXPECT_THAT(r.Ids(1), ElementsAre(0, 1));
  EXPECT_THAT(r.count, ElementsAre(1, 2, 0, 1));
  EXPECT_FLOAT_EQ(r.value[0], 4.0f / 9);
  EXPECT_FLOAT_EQ(r.value[1], 2.0f / 9);
  EXPECT_FLOAT_EQ(r.probs[0], 1.0f / 9);
  EXPECT_FLOAT_EQ(r.probs[4], 0.25f);
  EXPECT_FLOAT_EQ(r.lse[0], std::log(9.0f));
  EXPECT_FLOAT_EQ(r.lse[1], 5 + std::log(4.0f));
}

TEST(TopKGate, ProbabilitiesAndLogSumExpAreWithinTheirErrorOfFloat64) {
  // With u = 2^-24: x - m errs by |x - m| u, exp by 1 ulp = 2u, each of the at most E/16 + 4
  // additions by u, the division by u; the sum inherits the worst term's error.
  constexpr double kU = 0x1p-24;
  for (const int64_t experts : {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 257, 1100}) {
    SCOPED_TRACE(experts);
    const int64_t k = std::min<int64_t>(experts, 9);
    const std::vector<float> logits = RandomLogits(13 * experts, 1);
    const Result r = Gate(logits, experts, k);
    for (int64_t t = 0; t < r.tokens; ++t) {
      const float* const row = logits.data() + t * experts;
      const double max = *std::max_element(row, row + experts);
      const double min = *std::min_element(row, row + experts);
      double sum = 0;
      for (int64_t e = 0; e < experts; ++e) sum += std::exp(double{row[e]} - max);
      const double error = (2 * (max - min) + 4 + static_cast<double>(experts) / 16 + 5) * kU;
      for (int64_t e = 0; e < experts; ++e) {
        const double p = std::exp(double{row[e]} - max) / sum;
        ASSERT_NEAR(r.probs[static_cast<size_t>(t * experts + e)], p, p * error) << t << " " << e;
      }
      const double lse = max + std::log(sum);
      ASSERT_NEAR(r.lse[static_cast<size_t>(t)], lse, error + std::abs(lse) * kU);
      for (int64_t j = 0; j < k; ++j) {
        const int32_t id = r.Ids(t)[static_cast<size_t>(j)];
        ASSERT_EQ(r.value[static_cast<size_t>(t * k + j)],
                  r.probs[static_cast<size_t>(t * experts + id)]);
      }
    }
  }
}

TEST(TopKGate, SelectionIsThatOfTheReferenceWithTiesInfinitiesAndNans) {
  for (const int64_t experts : {1, 2, 5, 16, 17, 40, 64, 65}) {
    for (const int64_t k : {int64_t{1}, std::min<int64_t>(2, experts),
                            std::min<int64_t>(8, experts), (experts + 1) / 2, experts}) {
      SCOPED_TRACE(testing::Message() << "E " << experts << " k " << k);
      for (const auto& logits : {LogitsWithTies(50 * experts, 2), RandomLogits(50 * experts, 3)}) {
        const Result r = Gate(logits, experts, k);
        Result reference(r.tokens, experts, k);
        TopKGateReference(View(logits, experts), reference.views(), 0, r.tokens);
        EXPECT_EQ(r.expert, reference.expert);
        for (size_t i = 0; i < r.probs.size(); ++i) {
          ASSERT_EQ(std::isnan(r.probs[i]), std::isnan(reference.probs[i])) << i;
        }
      }
    }
  }
}

TEST(TopKGate, NanRanksLowestAndMakesItsRowNan) {
  const Result r = Gate({kNan, -kInf, kNan, 1.0f,  //
                         kNan, kNan, kNan, kNan,   //
                         2.0f, 1.0f, 0.0f, -1.0f},
                        4, 4);
  EXPECT_THAT(r.Ids(0), ElementsAre(3, 1, 0, 2));
  EXPECT_THAT(r.Ids(1), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(r.Ids(2), ElementsAre(0, 1, 2, 3));
  for (size_t i = 0; i < 8; ++i) EXPECT_TRUE(std::isnan(r.probs[i])) << i;
  for (size_t i = 8; i < 12; ++i) EXPECT_GT(r.probs[i], 0.0f) << i;  // its neighbour is not touched
}

TEST(TopKGate, SelectsByLogitsWhereProbabilitiesUnderflow) {
  const Result r = Gate({-300, 0, -200, 1e30f, -1e30f}, 5, 4);
  EXPECT_THAT(r.Ids(0), ElementsAre(3, 1, 2, 0));
  EXPECT_THAT(r.probs, ElementsAre(0, 0, 0, 1, 0));
  EXPECT_EQ(r.lse[0], 1e30f);
}

TEST(TopKGate, MinusInfinityHasProbabilityZero) {
  const Result r = Gate({-kInf, 3, -kInf, 3}, 4, 3);
  EXPECT_THAT(r.Ids(0), ElementsAre(1, 3, 0));
  EXPECT_THAT(r.probs, ElementsAre(0, 0.5f, 0, 0.5f));
}

TEST(TopKGate, SameBitsForAnyNumberOfRowsAndThreads) {
  constexpr int64_t kExperts = 37, kTopK = 5, kTokens = 1500;  // more rows than one task takes
  const std::vector<float> logits = RandomLogits(kTokens * kExperts, 4);
  const Result all = Gate(logits, kExperts, kTopK);
  const Result threaded = Gate(logits, kExperts, kTopK, /*threads=*/3);
  EXPECT_TRUE(SameBits(all.probs, threaded.probs));
  EXPECT_TRUE(SameBits(all.lse, threaded.lse));
  EXPECT_EQ(all.expert, threaded.expert);
  EXPECT_EQ(all.count, threaded.count);
  EXPECT_EQ(std::accumulate(all.count.begin(), all.count.end(), int64_t{0}), kTokens * kTopK);
  for (const int64_t t : {int64_t{0}, int64_t{255}, int64_t{256}, kTokens - 1}) {
    const auto first = logits.begin() + t * kExperts;
    const Result one = Gate({first, first + kExperts}, kExperts, kTopK);
    const auto row = all.probs.begin() + t * kExperts;
    EXPECT_TRUE(SameBits(one.probs, std::vector<float>(row, row + kExperts))) << t;
    EXPECT_EQ(one.Ids(0), all.Ids(t));
  }
}

TEST(TopKGate, StridedOutputsKeepTheirPadding) {
  const std::vector<float> logits = RandomLogits(3 * 5, 5);
  const Result dense = Gate(logits, 5, 2);
  Result strided(3, 5, 2, /*columns_after=*/3);
  ASSERT_TRUE(TopKGate(View(logits, 5), strided.views(), *MakeInlineStream()).ok());
  for (int64_t t = 0; t < 3; ++t) {
    EXPECT_EQ(strided.Ids(t), dense.Ids(t));
    for (int64_t e = 0; e < 8; ++e) {
      EXPECT_EQ(strided.probs[static_cast<size_t>(t * 8 + e)],
                e < 5 ? dense.probs[static_cast<size_t>(t * 5 + e)] : -7.0f);
    }
    for (int64_t j = 2; j < 5; ++j) {
      EXPECT_EQ(strided.expert[static_cast<size_t>(t * 5 + j)], -7);
      EXPECT_EQ(strided.value[static_cast<size_t>(t * 5 + j)], -7.0f);
    }
  }
}

TEST(TopKGate, NoTokensGiveZeroCounts) {
  EXPECT_THAT(Gate({}, 3, 2).count, ElementsAre(0, 0, 0));
}

TEST(TopKGate, LogSumExpIsOptional) {
  Result r(1, 2, 1);
  TopKGateOutput views = r.views();
  views.log_sum_exp = {};
  const std::vector<float> logits = {1, 2};
  ASSERT_TRUE(TopKGate(View(logits, 2), views, *MakeInlineStream()).ok());
  EXPECT_EQ(r.lse[0], -7.0f);
  EXPECT_THAT(r.Ids(0), ElementsAre(1));
}

TEST(TopKGate, RefusesShapesThatDisagree) {
  const std::vector<float> logits(6, 0.0f);  // [2, 3]
  const auto message = [&](auto change) {
    Result r(2, 3, 2);
    TopKGateOutput views = r.views();
    MatrixView<const float> in = View(logits, 3);
    change(in, views);
    const absl::Status status = TopKGate(in, views, *MakeInlineStream());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  using In = MatrixView<const float>;
  EXPECT_THAT(message([](In& in, TopKGateOutput&) { in = In(in.data(), 2, 0); }),
              HasSubstr("at least one expert"));
  EXPECT_THAT(message([](In&, TopKGateOutput& o) {
                o.expert = {o.expert.data(), 2, 0};
              }),
              HasSubstr("k is 0, expected 1 .. 3"));
  EXPECT_THAT(message([](In& in, TopKGateOutput&) { in = In(in.data(), 2, 1); }),
              HasSubstr("k is 2, expected 1 .. 1"));
  EXPECT_THAT(message([](In&, TopKGateOutput& o) {
                o.probs = {o.probs.data(), 1, 3};
              }),
              HasSubstr("probs [1, 3]"));
  EXPECT_THAT(message([](In&, TopKGateOutput& o) {
                o.value = {o.value.data(), 2, 1};
              }),
              HasSubstr("value [2, 1]"));
  EXPECT_THAT(message([](In&, TopKGateOutput& o) { o.log_sum_exp = o.log_sum_exp.first(1); }),
              HasSubstr("log_sum_exp holds 1"));
  EXPECT_THAT(message([](In&, TopKGateOutput& o) { o.count = o.count.first(2); }),
              HasSubstr("count holds 2, expected 3"));
}

}  // namespace
}  // namespace moe
