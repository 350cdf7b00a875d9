// kernels/topk_gate: selection and weights by every rule, on every device; and the limits of its
// CUDA kernel.
#include "kernels/topk_gate/select_experts.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "kernels/topk_gate/topk_gate_cuda.h"
#include "tests/kernels/gate_run.h"

namespace moe::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// v where the group of the expert is kept, -infinity elsewhere.
std::vector<float> MaskedByGroups(std::vector<float> v, const GateRule& rule) {
  const int32_t groups = rule.num_groups;
  const auto size = static_cast<int64_t>(v.size()) / groups;
  std::vector<float> worth(groups, 0.0f);
  for (int32_t g = 0; g < groups; ++g) {
    std::vector<float> members(v.begin() + g * size, v.begin() + (g + 1) * size);
    for (float& m : members) m = std::isnan(m) ? -kInfinity : m;
    std::sort(members.begin(), members.end(), std::greater<>());
    for (int64_t i = 0; i < std::min<int64_t>(rule.group_sum, size); ++i) worth[g] += members[i];
  }
  for (int32_t g = 0; g < groups; ++g) {
    int32_t before = 0;
    for (int32_t o = 0; o < groups; ++o) {
      if (worth[o] > worth[g] || (worth[o] == worth[g] && o < g)) ++before;
    }
    if (before >= rule.group_top_k) std::fill_n(v.begin() + g * size, size, -kInfinity);
  }
  return v;
}

// The selection and weights of a gate, given the scores that it wrote.
GateResult InPlainLoops(const GateRule& rule, const Matrix<float>& logits,
                        const std::vector<float>& bias, GateResult out) {
  const int64_t tokens = logits.rows(), experts = logits.cols(), k = out.expert.cols();
  const bool by_score = rule.num_groups > 0 || !bias.empty();
  Matrix<float> value = logits;
  for (int64_t t = 0; t < tokens && by_score; ++t) {
    std::vector<float> v(out.score.view().row(t), out.score.view().row(t) + experts);
    for (size_t e = 0; e < bias.size(); ++e) v[e] += bias[e];
    if (rule.num_groups > 0) v = MaskedByGroups(v, rule);
    std::copy(v.begin(), v.end(), value.view().row(t));
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const std::vector<int32_t> best = BestOf(value.view().row(t), experts, k);
    std::copy(best.begin(), best.end(), out.expert.view().row(t));
  }
  std::fill(out.count.begin(), out.count.end(), 0);
  for (int64_t t = 0; t < tokens; ++t) {
    const absl::Span<float> weight(out.weight.view().row(t), size_t(k));
    for (int64_t j = 0; j < k; ++j) {
      const int32_t id = out.expert.at(t, j);
      weight[j] = out.score.at(t, id);
      ++out.count[id];
    }
    if (rule.weights == GateWeights::kNormalised) Normalise(weight, rule.epsilon);
    for (float& w : weight) w *= rule.scale;
  }
  for (int64_t t = 0; t <= tokens; ++t) out.slot_offset[t] = t * k;
  return out;
}

void ExpectSame(const GateResult& got, const GateResult& want) {
  EXPECT_TRUE(SameBits(got.expert, want.expert));
  EXPECT_TRUE(SameNumbers(got.weight, want.weight));
  EXPECT_TRUE(got.score.edges_intact());
  EXPECT_EQ(got.count, want.count);
  EXPECT_EQ(got.slot_offset, want.slot_offset);
}

// s = 1/2, 3/4, 1/4, 1/2; v = 1/2, -1/4, 1/4, 3/5. The second pair has the larger sum.
TEST(SelectExpertsTest, SelectsByHandWithinTheBestGroupByBiasedScores) {
  const auto logits = Matrix<float>::Of(1, 4, {0, std::log(3.0f), -std::log(3.0f), 0});
  const GateRule rule = {.score = ScoreFunction::kSigmoid,
                         .num_groups = 2,
                         .group_top_k = 1,
                         .group_sum = 2,
                         .weights = GateWeights::kNormalised,
                         .scale = 2};
  ForEachDevice([&](const TestDevice& device) {
    const GateResult got = RunGate(device, rule, logits, 2, {0, -1, 0, 0.1f});
    EXPECT_EQ(got.expert.at(0, 0), 3);
    EXPECT_EQ(got.expert.at(0, 1), 2);
    EXPECT_EQ(got.count, (std::vector<int64_t>{0, 0, 1, 1}));
    EXPECT_EQ(got.slot_offset, (std::vector<int64_t>{0, 2}));
    EXPECT_FLOAT_EQ(got.weight.at(0, 0), 4.0f / 3);
    EXPECT_FLOAT_EQ(got.weight.at(0, 1), 2.0f / 3);
  });
}

// The ids of one row by its logits.
std::vector<int32_t> IdsOf(const TestDevice& device, const std::vector<float>& row, int64_t k) {
  const auto logits = Matrix<float>::Of(1, static_cast<int64_t>(row.size()), row);
  return RunGate(device, {}, logits, k).Ids(0);
}

TEST(SelectExpertsTest, HandMadeRowsComeBestFirstAndTiesByLowestId) {
  ForEachDevice(Simd::kAll, [](const TestDevice& device) {
    EXPECT_THAT(IdsOf(device, {1, 4, 2, 4, 3}, 3), ElementsAre(1, 3, 4));
    EXPECT_THAT(IdsOf(device, {1, 4, 2, 4, 3}, 5), ElementsAre(1, 3, 4, 2, 0));
    EXPECT_THAT(IdsOf(device, {-2, -1, -3}, 2), ElementsAre(1, 0));
    EXPECT_THAT(IdsOf(device, {5, 5, 5, 5}, 3), ElementsAre(0, 1, 2));
    EXPECT_THAT(IdsOf(device, {-0.0f, 0.0f, -0.0f}, 3), ElementsAre(0, 1, 2));
    EXPECT_THAT(IdsOf(device, {7}, 1), ElementsAre(0));
  });
}

// In neighbouring lanes of a CUDA device, and in one lane, which has experts 3 and 35.
TEST(SelectExpertsTest, TheLastBitOfAValueDecides) {
  ForEachDevice(Simd::kAll, [](const TestDevice& device) {
    for (const float sign : {1.0f, -1.0f}) {
      for (const int32_t larger : {4, 35}) {
        std::vector<float> row(40, -2.0f);
        row[3] = sign;
        row[larger] = std::nextafter(sign, kInfinity);
        EXPECT_THAT(IdsOf(device, row, 1), ElementsAre(larger));
        EXPECT_THAT(IdsOf(device, row, 3), ElementsAre(larger, 3, 0));
      }
    }
  });
}

TEST(SelectExpertsTest, NaNRanksBelowMinusInfinityAndIsSelectedLast) {
  ForEachDevice(Simd::kAll, [](const TestDevice& device) {
    EXPECT_THAT(IdsOf(device, {kNaN}, 1), ElementsAre(0));
    EXPECT_THAT(IdsOf(device, {kNaN, -kInfinity, -kNaN, 1}, 4), ElementsAre(3, 1, 0, 2));
    EXPECT_THAT(IdsOf(device, {kNaN, -kNaN, kNaN, kNaN}, 4), ElementsAre(0, 1, 2, 3));
    EXPECT_THAT(IdsOf(device, {-kInfinity, -kInfinity, -kInfinity}, 3), ElementsAre(0, 1, 2));
    EXPECT_THAT(IdsOf(device, {kInfinity, 1e38f, kInfinity, kNaN}, 3), ElementsAre(0, 2, 1));
    // A whole vector of them before the one number.
    std::vector<float> row(40, kNaN);
    row[33] = -kInfinity;
    EXPECT_THAT(IdsOf(device, row, 3), ElementsAre(33, 0, 1));
  });
}

// By the logits of a softmax, which have the order of its scores, of a sigmoid and, on the CPU, by
// given values.
TEST(SelectExpertsTest, SelectionIsThatOfThePlainLoopsForAnyWidthAndLayout) {
  struct Shape {
    int64_t experts, k;
    MatrixLayout in, out;
  };
  std::vector<Shape> shapes = {{1024, 16, kLayouts[3], kLayouts[4]}};
  for (const int64_t experts : {1, 2, 5, 7, 15, 16, 17, 33, 40, 64, 65, 128, 129, 257, 1000}) {
    if (kSanitized && experts != 1 && experts != 17 && experts != 129) continue;
    for (const int64_t k :
         {int64_t{1}, int64_t{5}, int64_t{8}, int64_t{9}, (experts + 1) / 2, experts}) {
      if (k <= std::min<int64_t>(65, experts)) shapes.push_back({experts, k, {}, {}});
    }
  }
  for (const auto& [in, out] : kLayoutPairs) shapes.push_back({40, 3, in, out});
  ForEachDevice(Simd::kAll, [&](const TestDevice& device) {
    for (const auto& [experts, k, in, out] : shapes) {
      if (!device.is_cpu() && k > 16) continue;
      SCOPED_TRACE(::testing::Message() << "E " << experts << " k " << k);
      const int64_t rows = experts < 300 ? 11 : 5;  // more than a block's warps
      for (const auto& logits :
           {WithTies(rows, experts, in, 2), Matrix<float>::Random(rows, experts, in, 3, 3)}) {
        const GateResult softmax = RunGate(device, {}, logits, k, {}, out);
        const GateResult sigmoid =
            RunGate(device, {.score = ScoreFunction::kSigmoid}, logits, k, {}, out);
        EXPECT_TRUE(softmax.expert.edges_intact() && softmax.weight.edges_intact());
        EXPECT_TRUE(SameBits(sigmoid.expert, softmax.expert));
        for (int64_t t = 0; t < rows; ++t) {
          ASSERT_EQ(softmax.Ids(t), BestOf(logits.view().row(t), experts, k)) << t;
        }
      }
    }
  });
}

// A property that does not depend on the reference.
TEST(SelectExpertsTest, AllOfThemAreAStableSort) {
  const int64_t experts = 1000;
  for (const auto& value : {WithTies(1, experts, {}, 4), Matrix<float>::Random(1, experts, 5)}) {
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

// On the CPU: scores and weights are those of the logits.
TEST(SelectExpertsTest, GivenValuesSelectInsteadOfTheLogits) {
  const auto logits = Matrix<float>::Random(9, 33, 7), value = WithTies(9, 33, {}, 8);
  ForEachDevice([&](const TestDevice& device) {
    const auto in = device.Copy(logits), by = device.Copy(value);
    const GateOutputs out(device, 9, 33, 4, {});
    const absl::Status status =
        SelectExperts({}, {.logits = in.view(), .value = by.view()}, out.Views(), device.stream());
    EXPECT_EQ(status.code(),
              device.is_cpu() ? absl::StatusCode::kOk : absl::StatusCode::kUnimplemented);
    if (!status.ok()) return;
    const GateResult got = out.Read(), of_logits = RunGate(device, {}, logits, 4);
    EXPECT_TRUE(SameBits(got.score, of_logits.score));
    for (int64_t t = 0; t < 9; ++t) {
      EXPECT_EQ(got.Ids(t), BestOf(value.view().row(t), 33, 4));
      for (int64_t j = 0; j < 4; ++j) {
        EXPECT_EQ(got.weight(t, j), got.score(t, got.expert.at(t, j)));
      }
    }
  });
}

struct Case {
  int64_t experts, k;
  int32_t groups, group_top_k, group_sum;
  bool biased;
};

// Weights have the bits of Normalise, also for NaN and scores that underflowed.
TEST(SelectExpertsTest, IsTheRuleInPlainLoopsGivenTheScores) {
  const Case cases[] = {{24, 4, 0, 0, 1, true},    {24, 4, 4, 2, 2, true},
                        {24, 6, 8, 1, 1, false},   {32, 5, 32, 7, 9, true},
                        {130, 16, 10, 3, 2, true}, {1024, 8, 16, 4, 2, false},
                        {7, 1, 0, 0, 1, false},    {16, 2, 0, 0, 1, false},
                        {36, 3, 6, 3, 2, true},    {36, 9, 0, 0, 1, false}};
  ForEachDevice(Simd::kAll, [&](const TestDevice& device) {
    for (const Case& c : cases) {
      auto bias = RandomFloats(c.biased ? c.experts : 0, 4);
      if (c.biased) bias[c.experts / 2] = bias[0];
      auto random = Matrix<float>::Random(5, c.experts, kLayouts[3], 6, 3);
      for (int64_t e = 0; e < c.experts; ++e) random.at(1, e) = -200;  // sigmoids underflow
      for (const auto& logits : {random, WithTies(9, c.experts, {}, 5)}) {
        for (int i = 0; i < 4; ++i) {
          const bool normalised = i % 2 == 1;
          const GateRule rule = {
              .score = i / 2 == 0 ? ScoreFunction::kSoftmax : ScoreFunction::kSigmoid,
              .num_groups = c.groups,
              .group_top_k = c.group_top_k,
              .group_sum = c.group_sum,
              .weights = normalised ? GateWeights::kNormalised : GateWeights::kScores,
              .scale = i == 1 ? 1.0f : 2.5f,
              .epsilon = i == 3 ? 0.5f : 0.0f};
          SCOPED_TRACE(::testing::Message() << c.experts << " " << c.groups << " " << i);
          const GateResult got = RunGate(device, rule, logits, c.k, bias, kLayouts[i]);
          ExpectSame(got, InPlainLoops(rule, logits, bias, got));
        }
      }
    }
  });
}

TEST(SelectExpertsTest, ScoresThatUnderflowGiveZeroWeights) {
  const auto logits = Matrix<float>::Of(1, 3, {-200, -200, -200});
  ForEachDevice([&](const TestDevice& device) {
    const GateResult got = RunGate(
        device, {.score = ScoreFunction::kSigmoid, .weights = GateWeights::kNormalised}, logits, 2);
    EXPECT_EQ(got.weight.values(), (std::vector<double>{0, 0}));
  });
}

TEST(SelectExpertsTest, NoTokensGiveZeroCounts) {
  ForEachDevice([](const TestDevice& device) {
    const GateResult got = RunGate(device, {}, Matrix<float>(0, 5), 2);
    EXPECT_EQ(got.count, std::vector<int64_t>(5, 0));
    EXPECT_EQ(got.slot_offset, std::vector<int64_t>{0});
  });
}

TEST(SelectExpertsTest, SumsAndOffsetsAreOptional) {
  ForEachDevice([](const TestDevice& device) {
    const auto logits = device.Copy(Matrix<float>::Of(1, 2, {1, 2}));
    const GateOutputs out(device, 1, 2, 1, {});
    SelectExpertsOutput views = out.Views();
    views.log_sum_exp = {};
    views.slot_offset = {};
    ASSERT_OK(SelectExperts({}, {.logits = logits.view()}, views, device.stream()));
    EXPECT_EQ(out.Read().expert.at(0, 0), 1);
    EXPECT_EQ(out.Read().log_sum_exp[0], -77);
  });
}

TEST(SelectExpertsTest, RefusesShapesThatDisagree) {
  const TestDevice device{Device()};
  const Matrix<float> logits(2, 3, kLayouts[0]);
  const GateOutputs memory(device, 2, 3, 2, kLayouts[0]);
  using In = SelectExpertsInput;
  using Out = SelectExpertsOutput;
  const auto message = [&](auto change, const GateRule& rule = {}) {
    In in = {.logits = logits.view()};
    Out out = memory.Views();
    change(in, out);
    const absl::Status status = SelectExperts(rule, in, out, device.stream());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return Message(status);
  };
  const auto reshaped = [](auto& view, int64_t rows, int64_t cols, int64_t stride) {
    view = {view.data(), rows, cols, stride};
  };
  EXPECT_EQ(message([&](In&, Out& o) { reshaped(o.expert, 2, 0, 0); }),
            "SelectExperts: k is 0, expected 1 .. 3 (the experts)");
  EXPECT_EQ(message([&](In& in, Out&) { reshaped(in.logits, 2, 1, 1); }),
            "SelectExperts: k is 2, expected 1 .. 1 (the experts)");
  EXPECT_EQ(message([&](In& in, Out&) { reshaped(in.logits, 2, 3, 2); }),
            "SelectExperts: logits is [2, 3] with stride 2, expected [2, 3]");
  EXPECT_THAT(message([&](In& in, Out&) { reshaped(in.logits, 0, (1 << 20) + 1, 1 << 21); }),
              HasSubstr("1048577 experts, expected at most 1048576"));
  EXPECT_THAT(message([&](In&, Out& o) { reshaped(o.score, 1, 3, 3); }),
              HasSubstr("score is [1, 3]"));
  EXPECT_THAT(message([&](In&, Out& o) { reshaped(o.expert, 1, 2, 2); }),
              HasSubstr("expert is [1, 2]"));
  EXPECT_THAT(message([&](In&, Out& o) { reshaped(o.weight, 2, 1, 1); }),
              HasSubstr("weight is [2, 1]"));
  EXPECT_THAT(message([&](In& in, Out&) {
                in.value = {in.logits.data(), 1, 3};
              }),
              HasSubstr("value is [1, 3]"));
  EXPECT_THAT(message([&](In& in, Out&) {
                in.expert_bias = {in.logits.data(), 2};
              }),
              HasSubstr("expert_bias is [2], expected [3]"));
  EXPECT_THAT(message([](In&, Out& o) { o.log_sum_exp = o.log_sum_exp.first(1); }),
              HasSubstr("log_sum_exp is [1], expected [2]"));
  EXPECT_THAT(message([](In&, Out& o) { o.count = {}; }), HasSubstr("count is [0], expected [3]"));
  EXPECT_THAT(message([](In&, Out& o) { o.slot_offset = o.slot_offset.first(2); }),
              HasSubstr("slot_offset is [2], expected [3]"));
  EXPECT_THAT(message([](In&, Out&) {}, {.num_groups = 2, .group_top_k = 1}),
              HasSubstr("2 groups of 3 experts"));
}

// A CPU accepts any size; the CUDA kernel keeps a row in the registers of a warp.
TEST(SelectExpertsTest, SizesThatTheKernelIsNotCompiledForAreRefusedByName) {
  ForEachDevice([](const TestDevice& device) {
    const auto message = [&](int64_t experts, int64_t k, int32_t groups = 0) {
      const auto logits = device.Copy(Matrix<float>(1, experts));
      const GateOutputs out(device, 1, experts, k, {});
      const absl::Status status =
          SelectExperts({.num_groups = groups, .group_top_k = 1}, {.logits = logits.view()},
                        out.Views(), device.stream());
      EXPECT_OK(device.stream().Synchronize());  // before its memory is destroyed
      return Message(status);
    };
    const auto on_cuda = [&](const char* text) {
      return device.is_cpu() ? "" : std::string("SelectExperts: ") + text + " on CUDA";
    };
    EXPECT_EQ(message(1024, 16), "");
    EXPECT_EQ(message(1024, 17), on_cuda("k is 17, expected at most 16"));
    EXPECT_EQ(message(1025, 17), on_cuda("E (experts) is 1025, expected at most 1024"));
    EXPECT_EQ(message(66, 2, 33), on_cuda("num_groups is 33, expected at most 32"));
  });
}

// Calls of the launcher, on a simulated device, that the operations never make.
#if defined(MOE_TEST_SCHEDULES)
using topk_gate::CudaGate;

// More rows than one round of all blocks: five warps take a second one. All to the same expert.
TEST(TopKGateLauncherTest, CountsEverySlotOfManyRows) {
  if (kSanitized) GTEST_SKIP() << "a matter of size";
  const int64_t tokens = 2048 * 8 + 5;
  const std::vector<float> logits(tokens * 2, 1.0f);
  std::vector<int32_t> expert(tokens, -1);
  std::vector<int64_t> count(2, -1);
  const auto run = [&](int64_t rows, int32_t* ids) {
    return topk_gate::Run(
        CudaGate<float>{
            .logits = {logits.data(), rows, 2}, .expert = {ids, rows, 1}, .count = count.data()},
        nullptr);
  };
  ASSERT_EQ(run(tokens, expert.data()), cudaSuccess);
  EXPECT_EQ(count, (std::vector<int64_t>{tokens, 0}));
  EXPECT_EQ(expert, std::vector<int32_t>(tokens, 0));
  count.assign(2, -1);
  ASSERT_EQ(run(3, nullptr), cudaSuccess);  // without ids
  EXPECT_EQ(count, (std::vector<int64_t>{3, 0}));
}

struct LauncherResult {
  std::vector<int32_t> expert;
  std::vector<float> weight, log_sum_exp, score;
  std::vector<int64_t> count;
};

template <typename T>
LauncherResult Launched(const std::vector<T>& logits, int64_t tokens, int64_t experts, int64_t k) {
  LauncherResult out = {.expert = std::vector<int32_t>(tokens * k, -1),
                        .weight = std::vector<float>(tokens * k, -1.0f),
                        .log_sum_exp = std::vector<float>(tokens, -1.0f),
                        .score = std::vector<float>(tokens * experts, -1.0f),
                        .count = std::vector<int64_t>(experts, -1)};
  const cudaError_t error =
      topk_gate::Run(CudaGate<T>{.logits = {logits.data(), tokens, experts},
                                 .rule = {.weights = GateWeights::kNormalised},
                                 .score = {out.score.data(), tokens, experts},
                                 .expert = {out.expert.data(), tokens, k},
                                 .weight = {out.weight.data(), tokens, k},
                                 .log_sum_exp = out.log_sum_exp.data(),
                                 .count = out.count.data()},
                     nullptr);
  EXPECT_EQ(error, cudaSuccess);
  return out;
}

// In half a warp and in a whole one: rows with ties, with all choices in one lane, with NaNs of
// both signs, with zeros of both signs, with infinities.
template <typename T>
void CompareWithFloat32() {
  constexpr int64_t kTokens = 7;
  for (const int64_t experts : {1, 17, 128, 256, 300, 512}) {
    if (kSanitized && experts != 17 && experts != 256) continue;
    for (const int64_t k : {0, 1, 8, 16}) {
      if (k > experts) continue;
      SCOPED_TRACE(std::to_string(experts) + " experts, k " + std::to_string(k));
      std::vector<float> wide = RandomFloats(kTokens * experts, 10 * experts + k);
      for (int64_t i = 0; i < kTokens * experts; ++i) {
        const int64_t t = i / experts, e = i % experts;
        float& x = wide[i];
        if (t == 1) x = std::round(x * 2);                                    // ties
        if (t == 2) x = e % 16 == 3 ? 9.0f - static_cast<float>(e) / 64 : x;  // in one lane
        if (t == 3) x = e % 3 == 0 ? kNaN : e % 3 == 1 ? -kNaN : -kInfinity;
        if (t == 4) x = e % 2 == 0 ? -0.0f : 0.0f;
        if (t == 5) x = e % 5 == 0 ? -kNaN : x;
        if (t == 6 && e % 4 == 1) x = kInfinity;
        x = static_cast<float>(static_cast<T>(x));
      }
      const std::vector<T> narrow(wide.begin(), wide.end());
      const LauncherResult got = Launched(narrow, kTokens, experts, k);
      const LauncherResult expected = Launched(wide, kTokens, experts, k);
      EXPECT_EQ(got.expert, expected.expert);
      EXPECT_EQ(got.count, expected.count);
      EXPECT_TRUE(SameNumbers(got.weight, expected.weight));
      EXPECT_TRUE(SameNumbers(got.log_sum_exp, expected.log_sum_exp));
      EXPECT_TRUE(SameNumbers(got.score, expected.score));
    }
  }
}

TEST(TopKGateLauncherTest, SixteenBitsSelectAndWeighAsTheFloat32ThatTheyWidenTo) {
  CompareWithFloat32<BFloat16>();
  CompareWithFloat32<Float16>();
}

#endif

}  // namespace
}  // namespace moe::testing
