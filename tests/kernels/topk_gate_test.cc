// kernels/topk_gate: softmax, selection and counts, on every device.
#include "kernels/topk_gate/topk_gate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "kernels/topk_gate/gate_rows.h"
#include "tests/kernels/device_memory.h"

namespace moe {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using testing::ForEachDevice;
using ::testing::HasSubstr;
using testing::kFloatRounding;
using testing::kInfinity;
using testing::kNaN;
using testing::Matrix;
using testing::MatrixLayout;
using testing::SameBits;
using testing::SameNumbers;
using testing::Simd;
using testing::TestDevice;

// What a gate writes.
struct Result {
  Result() = default;
  Result(int64_t tokens, int64_t experts, int64_t k, MatrixLayout layout)
      : probs(tokens, experts, layout, -7),
        value(tokens, k, layout, -7),
        expert(tokens, k, layout, -7),
        log_sum_exp(size_t(tokens), -7.0f),
        count(size_t(experts), -7) {}

  std::vector<int32_t> Ids(int64_t t) const {
    const int32_t* const row = expert.view().row(t);
    return {row, row + expert.cols()};
  }

  Matrix<float> probs, value;
  Matrix<int32_t> expert;
  std::vector<float> log_sum_exp;
  std::vector<int64_t> count;
};

Result Gate(const TestDevice& device, const Matrix<float>& logits, int64_t k,
            MatrixLayout layout = {}) {
  const Result before(logits.rows(), logits.cols(), k, layout);
  const auto in = device.Copy(logits), probs = device.Copy(before.probs),
             value = device.Copy(before.value);
  const auto expert = device.Copy(before.expert);
  const auto log_sum_exp = device.Copy(before.log_sum_exp);
  const auto count = device.Copy(before.count);
  const absl::Status status = TopKGate(in.view(),
                                       {.probs = probs.view(),
                                        .expert = expert.view(),
                                        .value = value.view(),
                                        .log_sum_exp = log_sum_exp.span(),
                                        .count = count.span()},
                                       device.stream());
  EXPECT_TRUE(status.ok()) << status;
  Result result;
  result.probs = device.Read(probs);
  result.value = device.Read(value);
  result.expert = device.Read(expert);
  result.log_sum_exp = device.Read(log_sum_exp);
  result.count = device.Read(count);
  return result;
}

Matrix<int32_t> Select(const TestDevice& device, const Matrix<float>& value, int64_t k) {
  const auto in = device.Copy(value);
  const auto expert = device.Copy(Matrix<int32_t>(value.rows(), k, -1.0f));
  EXPECT_TRUE(TopKSelect(in.view(), expert.view(), device.stream()).ok());
  return device.Read(expert);
}

// The ids of one row, which TopKSelect and TopKGate agree on.
std::vector<int32_t> IdsOf(const TestDevice& device, const std::vector<float>& row, int64_t k) {
  const auto value = Matrix<float>::Of(1, static_cast<int64_t>(row.size()), row);
  const Result gate = Gate(device, value, k);
  EXPECT_TRUE(SameBits(Select(device, value, k), gate.expert));
  return gate.Ids(0);
}

Result InPlainLoops(const Matrix<float>& logits, int64_t k, MatrixLayout layout = {}) {
  Result result(logits.rows(), logits.cols(), k, layout);
  TopKGateReference(logits.view(),
                    {.probs = result.probs.view(),
                     .expert = result.expert.view(),
                     .value = result.value.view(),
                     .log_sum_exp = absl::MakeSpan(result.log_sum_exp),
                     .count = {}},
                    0, logits.rows());
  return result;
}

TEST(TopKGate, HandMadeRowHasSoftmaxTopKAndCounts) {
  // exp: 1, 2, 2, 4 (sum 9); second row is uniform.
  const float ln2 = std::log(2.0f);
  const auto logits = Matrix<float>::Of(2, 4, {0, ln2, ln2, 2 * ln2, 5, 5, 5, 5});
  ForEachDevice([&](const TestDevice& device) {
    const Result r = Gate(device, logits, 2);
    EXPECT_THAT(r.Ids(0), ElementsAre(3, 1));  // 1 and 2 tie: the lowest id
    EXPECT_THAT(r.Ids(1), ElementsAre(0, 1));
    EXPECT_THAT(r.count, ElementsAre(1, 2, 0, 1));
    EXPECT_FLOAT_EQ(r.value.at(0, 0), 4.0f / 9);
    EXPECT_FLOAT_EQ(r.value.at(0, 1), 2.0f / 9);
    EXPECT_FLOAT_EQ(r.probs.at(0, 0), 1.0f / 9);
    EXPECT_FLOAT_EQ(r.probs.at(1, 3), 0.25f);
    EXPECT_FLOAT_EQ(r.log_sum_exp[0], std::log(9.0f));
    EXPECT_FLOAT_EQ(r.log_sum_exp[1], 5 + std::log(4.0f));
  });
}

TEST(TopKSelect, HandMadeRowsComeBestFirstAndTiesByLowestId) {
  ForEachDevice(
      [](const TestDevice& device) {
        EXPECT_THAT(IdsOf(device, {1, 4, 2, 4, 3}, 3), ElementsAre(1, 3, 4));
        EXPECT_THAT(IdsOf(device, {1, 4, 2, 4, 3}, 5), ElementsAre(1, 3, 4, 2, 0));
        EXPECT_THAT(IdsOf(device, {-2, -1, -3}, 2), ElementsAre(1, 0));
        EXPECT_THAT(IdsOf(device, {5, 5, 5, 5}, 3), ElementsAre(0, 1, 2));
        EXPECT_THAT(IdsOf(device, {-0.0f, 0.0f, -0.0f}, 3), ElementsAre(0, 1, 2));
        EXPECT_THAT(IdsOf(device, {7}, 1), ElementsAre(0));
      },
      Simd::kAll);
}

TEST(TopKSelect, NaNRanksBelowMinusInfinityAndIsSelectedLast) {
  ForEachDevice(
      [](const TestDevice& device) {
        EXPECT_THAT(IdsOf(device, {kNaN}, 1), ElementsAre(0));
        EXPECT_THAT(IdsOf(device, {kNaN, -kInfinity, -kNaN, 1}, 4), ElementsAre(3, 1, 0, 2));
        EXPECT_THAT(IdsOf(device, {kNaN, -kNaN, kNaN, kNaN}, 4), ElementsAre(0, 1, 2, 3));
        EXPECT_THAT(IdsOf(device, {-kInfinity, -kInfinity, -kInfinity}, 3), ElementsAre(0, 1, 2));
        EXPECT_THAT(IdsOf(device, {kInfinity, 1e38f, kInfinity, kNaN}, 3), ElementsAre(0, 2, 1));
        // A whole vector of them before the one number.
        std::vector<float> row(40, kNaN);
        row[33] = -kInfinity;
        EXPECT_THAT(IdsOf(device, row, 3), ElementsAre(33, 0, 1));
      },
      Simd::kAll);
}

TEST(TopKGate, ANaNMakesItsRowNaNAndMinusInfinityHasProbabilityZero) {
  const auto logits = Matrix<float>::Of(
      3, 4, {kNaN, -kInfinity, kNaN, 1, 2, 1, 0, -1, -kInfinity, 3, -kInfinity, 3});
  ForEachDevice([&](const TestDevice& device) {
    const Result r = Gate(device, logits, 3);
    for (int64_t e = 0; e < 4; ++e) EXPECT_TRUE(std::isnan(r.probs(0, e))) << e;
    for (int64_t e = 0; e < 4; ++e) EXPECT_GT(r.probs(1, e), 0) << e;  // not touched by it
    EXPECT_THAT(r.Ids(2), ElementsAre(1, 3, 0));
    for (int64_t e = 0; e < 4; ++e) EXPECT_EQ(r.probs(2, e), e % 2 == 0 ? 0 : 0.5) << e;
  });
}

TEST(TopKGate, SelectsByLogitsWhereProbabilitiesUnderflow) {
  const auto logits = Matrix<float>::Of(1, 5, {-300, 0, -200, 1e30f, -1e30f});
  ForEachDevice([&](const TestDevice& device) {
    const Result r = Gate(device, logits, 4);
    EXPECT_THAT(r.Ids(0), ElementsAre(3, 1, 2, 0));
    EXPECT_THAT(r.probs.values(), ElementsAre(0, 0, 0, 1, 0));
    EXPECT_EQ(r.log_sum_exp[0], 1e30f);
  });
}

// With u = 2^-24: x - m errs by |x - m| u, exp by 1 ulp = 2u, on a GPU by 2, each of the at most
// E/16 + 4 additions by u, the division by u; the sum inherits the worst term's error.
TEST(TopKGate, ProbabilitiesAndLogSumExpAreWithinTheirErrorOfFloat64) {
  ForEachDevice([](const TestDevice& device) {
    for (const int64_t experts : {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 257, 1100}) {
      if (!device.is_cpu() && experts > 1024) continue;
      SCOPED_TRACE(experts);
      const int64_t k = std::min<int64_t>(experts, 9);
      const auto logits = Matrix<float>::Random(13, experts, 1, 2);
      const Result r = Gate(device, logits, k);
      for (int64_t t = 0; t < 13; ++t) {
        double max = logits(t, 0), min = max, sum = 0;
        for (int64_t e = 0; e < experts; ++e) {
          max = std::max(max, logits(t, e));
          min = std::min(min, logits(t, e));
        }
        for (int64_t e = 0; e < experts; ++e) sum += std::exp(logits(t, e) - max);
        const double exponentials = device.has_host_math() ? 4 : 8;
        const double error =
            (2 * (max - min) + exponentials + static_cast<double>(experts) / 16 + 5) *
            kFloatRounding;
        for (int64_t e = 0; e < experts; ++e) {
          const double p = std::exp(logits(t, e) - max) / sum;
          ASSERT_NEAR(r.probs(t, e), p, p * error) << t << " " << e;
        }
        const double lse = max + std::log(sum);
        ASSERT_NEAR(r.log_sum_exp[t], lse, error + std::abs(lse) * kFloatRounding);
        for (int64_t j = 0; j < k; ++j) {
          ASSERT_EQ(r.value(t, j), r.probs(t, r.expert.at(t, j)));
        }
      }
    }
  });
}

// A simulated device has the host's exponential: all that it writes has the bits of the loops.
TEST(TopKGate, SelectionIsThatOfThePlainLoopsForAnyWidthAndLayout) {
  struct Case {
    Matrix<float> logits;
    int64_t k;
    MatrixLayout layout;
    Result want;
  };
  std::vector<Case> cases;
  const auto add = [&](int64_t experts, int64_t k, MatrixLayout in, MatrixLayout out) {
    const int64_t rows = experts < 300 ? 11 : 5;  // more than a block's warps
    for (const auto& logits : {testing::WithTies(rows, experts, in, 2),
                               Matrix<float>::Random(rows, experts, in, 3, 3)}) {
      cases.push_back({logits, k, out, InPlainLoops(logits, k, out)});
    }
  };
  for (const int64_t experts : {1, 2, 5, 7, 15, 16, 17, 33, 40, 64, 65, 128, 129, 257, 1000}) {
    for (const int64_t k :
         {int64_t{1}, int64_t{5}, int64_t{8}, int64_t{9}, (experts + 1) / 2, experts}) {
      if (k <= std::min<int64_t>(65, experts)) add(experts, k, {}, {});
    }
  }
  for (const auto& [in, out] : testing::kLayoutPairs) add(40, 3, in, out);
  add(1024, 16, testing::kLayouts[3], testing::kLayouts[4]);
  ForEachDevice(
      [&](const TestDevice& device) {
        for (const Case& c : cases) {
          if (!device.is_cpu() && c.k > 16) continue;
          SCOPED_TRACE(::testing::Message() << "E " << c.logits.cols() << " k " << c.k);
          const Result got = Gate(device, c.logits, c.k, c.layout);
          EXPECT_TRUE(SameBits(got.expert, c.want.expert));
          EXPECT_TRUE(SameBits(Select(device, c.logits, c.k), c.want.expert));
          EXPECT_TRUE(got.probs.edges_intact() && got.value.edges_intact());
          if (!device.is_cpu() && device.has_host_math()) {
            EXPECT_TRUE(SameNumbers(got.probs, c.want.probs));
            EXPECT_TRUE(SameNumbers(got.value, c.want.value));
            EXPECT_TRUE(SameNumbers(got.log_sum_exp, c.want.log_sum_exp));
          }
        }
      },
      Simd::kAll);
}

// A property that does not come from the reference.
TEST(TopKSelect, AllOfThemAreAStableSort) {
  const int64_t experts = 1000;
  for (const auto& value :
       {testing::WithTies(1, experts, {}, 4), Matrix<float>::Random(1, experts, 5)}) {
    const std::vector<float> row(value.view().row(0), value.view().row(0) + experts);
    std::vector<int32_t> sorted(experts);
    std::iota(sorted.begin(), sorted.end(), 0);
    std::stable_sort(sorted.begin(), sorted.end(), [&](int32_t a, int32_t b) {
      if (std::isnan(value(0, a))) return false;
      if (std::isnan(value(0, b))) return true;
      return value(0, a) > value(0, b);
    });
    ForEachDevice([&](const TestDevice& device) {
      for (const int64_t k : {int64_t{16}, int64_t{100}, experts}) {
        if (!device.is_cpu() && k > 16) continue;
        EXPECT_EQ(IdsOf(device, row, k), std::vector<int32_t>(sorted.begin(), sorted.begin() + k));
      }
    });
  }
}

TEST(TopKGate, ARowHasTheSameBitsAloneAndOnAnyNumberOfThreads) {
  const int64_t tokens = 1500, experts = 37, k = 5;  // more rows than one task takes
  const auto logits = Matrix<float>::Random(tokens, experts, 4, 2);
  ForEachDevice([&](const TestDevice& device) {
    const Result all = Gate(device, logits, k);
    EXPECT_EQ(std::accumulate(all.count.begin(), all.count.end(), int64_t{0}), tokens * k);
    if (device.is_cpu()) {
      const Result serial = Gate(TestDevice(Device()), logits, k);
      EXPECT_TRUE(SameBits(all.probs, serial.probs));
      EXPECT_TRUE(SameBits(all.log_sum_exp, serial.log_sum_exp));
      EXPECT_TRUE(SameBits(all.expert, serial.expert));
      EXPECT_EQ(all.count, serial.count);
    }
    for (const int64_t t : {int64_t{0}, int64_t{255}, int64_t{256}, tokens - 1}) {
      Matrix<float> row(1, experts);
      std::copy_n(logits.view().row(t), experts, row.view().row(0));
      const Result alone = Gate(device, row, k);
      EXPECT_TRUE(SameBits(alone.probs, all.probs, t));
      EXPECT_TRUE(SameBits(alone.expert, all.expert, t));
      EXPECT_TRUE(SameBits(Select(device, row, k), all.expert, t));
    }
  });
}

TEST(TopKGate, NoTokensGiveZeroCounts) {
  ForEachDevice([](const TestDevice& device) {
    EXPECT_THAT(Gate(device, Matrix<float>(0, 3), 2).count, Each(0));
    Select(device, Matrix<float>(0, 3), 2);
  });
}

TEST(TopKGate, LogSumExpIsOptional) {
  ForEachDevice([](const TestDevice& device) {
    const auto logits = device.Copy(Matrix<float>::Of(1, 2, {1, 2}));
    const auto probs = device.Copy(Matrix<float>(1, 2)), value = device.Copy(Matrix<float>(1, 1));
    const auto expert = device.Copy(Matrix<int32_t>(1, 1));
    const auto count = device.Copy(std::vector<int64_t>(2));
    ASSERT_TRUE(TopKGate(logits.view(),
                         {.probs = probs.view(),
                          .expert = expert.view(),
                          .value = value.view(),
                          .log_sum_exp = {},
                          .count = count.span()},
                         device.stream())
                    .ok());
    EXPECT_EQ(device.Read(expert).at(0, 0), 1);
  });
}

TEST(TopKGate, RefusesShapesThatDisagree) {
  testing::TestStream stream;
  const Matrix<float> logits(2, 3);
  const auto message = [&](auto change) {
    Result r(2, 3, 2, {0, 0, 0});
    TopKGateOutput views = {.probs = r.probs.view(),
                            .expert = r.expert.view(),
                            .value = r.value.view(),
                            .log_sum_exp = absl::MakeSpan(r.log_sum_exp),
                            .count = absl::MakeSpan(r.count)};
    MatrixView<const float> in = logits.view();
    change(in, views);
    const absl::Status status = TopKGate(in, views, *stream);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return testing::Message(status);
  };
  using In = MatrixView<const float>;
  using Out = TopKGateOutput;
  EXPECT_THAT(message([](In& in, Out&) { in = In(in.data(), 2, 0); }),
              HasSubstr("at least one expert"));
  EXPECT_THAT(message([](In&, Out& o) {
                o.expert = {o.expert.data(), 2, 0};
              }),
              HasSubstr("k is 0, expected 1 .. 3"));
  EXPECT_THAT(message([](In& in, Out&) { in = In(in.data(), 2, 1); }),
              HasSubstr("k is 2, expected 1 .. 1"));
  EXPECT_THAT(message([](In&, Out& o) {
                o.probs = {o.probs.data(), 1, 3};
              }),
              HasSubstr("probs [1, 3]"));
  EXPECT_THAT(message([](In&, Out& o) {
                o.value = {o.value.data(), 2, 1};
              }),
              HasSubstr("value [2, 1]"));
  EXPECT_THAT(message([](In&, Out& o) { o.log_sum_exp = o.log_sum_exp.first(1); }),
              HasSubstr("log_sum_exp holds 1"));
  EXPECT_THAT(message([](In&, Out& o) { o.count = o.count.first(2); }),
              HasSubstr("count holds 2, expected 3"));
}

TEST(TopKSelect, RefusesShapesThatDisagree) {
  testing::TestStream stream;
  const Matrix<float> value(2, 3);
  std::vector<int32_t> ids(8);
  const auto message = [&](MatrixView<const float> in, MatrixView<int32_t> out) {
    const absl::Status status = TopKSelect(in, out, *stream);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return testing::Message(status);
  };
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

// A CPU takes any size; the CUDA kernel keeps a row in the registers of a warp.
TEST(TopKGate, SizesThatTheKernelIsNotCompiledForAreRefusedByName) {
  ForEachDevice([](const TestDevice& device) {
    const auto messages = [&](int64_t experts, int64_t k) {
      const auto logits = device.Copy(std::vector<float>(experts, 1.0f));
      const auto score = device.Copy(std::vector<float>(experts));
      const auto weight = device.Copy(std::vector<float>(k));
      const auto ids = device.Copy(std::vector<int32_t>(k));
      const auto count = device.Copy(std::vector<int64_t>(experts));
      const MatrixView<const float> row = logits.view(1, experts, experts);
      const std::vector<std::string> all = {
          testing::Message(TopKGate(row,
                                    {.probs = score.view(1, experts, experts),
                                     .expert = ids.view(1, k, k),
                                     .value = weight.view(1, k, k),
                                     .log_sum_exp = {},
                                     .count = count.span()},
                                    device.stream())),
          testing::Message(TopKSelect(row, ids.view(1, k, k), device.stream())),
          testing::Message(
              SigmoidScores(row, score.view(1, experts, experts), {}, device.stream()))};
      EXPECT_TRUE(device.stream().Synchronize().ok());  // before its memory goes
      return all;
    };
    const std::vector<std::string> none(3);
    EXPECT_EQ(messages(1024, 16), none);
    if (device.is_cpu()) {
      EXPECT_EQ(messages(1025, 17), none);
      return;
    }
    const std::string k = ": k is 17, expected at most 16 on CUDA";
    EXPECT_EQ(messages(1024, 17), (std::vector<std::string>{"TopKGate" + k, "TopKSelect" + k, ""}));
    const std::string e = ": E (experts) is 1025, expected at most 1024 on CUDA";
    EXPECT_EQ(messages(1025, 17),
              (std::vector<std::string>{"TopKGate" + e, "TopKSelect" + e, "SigmoidScores" + e}));
  });
}

}  // namespace
}  // namespace moe
