// kernels/topk_gate on the simulated GPU. The simulator's exponential is the host's: scores,
// weights and sums have the bits of the plain loops.
#include "kernels/topk_gate/topk_gate_cuda.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/topk_gate/gate_rows.h"
#include "tests/cusim/schedules.h"
#include "tests/sanitizers.h"

namespace moe {
namespace {

using cusim::DeviceMatrix;
using cusim::kLayouts;
using cusim::Layout;
using topk_gate::CudaGate;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Everything that a gate writes, before that sentinels.
struct Outputs {
  Outputs(int64_t tokens, int64_t experts, int64_t k, Layout layout)
      : score(tokens, experts, layout),
        expert(tokens, k, layout),
        weight(tokens, k, layout),
        log_sum_exp(tokens, -77),
        count(experts, -77),
        slot_offset(tokens + 1, -77) {}
  bool operator==(const Outputs&) const = default;

  DeviceMatrix<float> score;
  DeviceMatrix<int32_t> expert;
  DeviceMatrix<float> weight;
  std::vector<float> log_sum_exp;
  std::vector<int64_t> count;
  std::vector<int64_t> slot_offset;
};

template <typename T>
CudaGate<T> GateOf(const DeviceMatrix<T>& logits, Outputs& out) {
  return {.logits = logits.view(),
          .score = out.score.view(),
          .expert = out.expert.view(),
          .weight = out.weight.view(),
          .log_sum_exp = out.log_sum_exp.data(),
          .count = out.count.data(),
          .slot_offset = out.slot_offset.data()};
}

template <typename T>
DeviceMatrix<float> Widened(const DeviceMatrix<T>& from) {
  DeviceMatrix<float> to(from.view().rows(), from.view().cols(), kLayouts[0]);
  for (int64_t t = 0; t < to.view().rows(); ++t) {
    for (int64_t e = 0; e < to.view().cols(); ++e) {
      to.view()(t, e) = static_cast<float>(from.view()(t, e));
    }
  }
  return to;
}

// Few distinct values, so that most rows have ties; every special value among them.
template <typename T>
DeviceMatrix<T> LogitsWithTies(int64_t tokens, int64_t experts, uint64_t seed) {
  const float values[] = {0.0f, -0.0f, 1.0f, 1.0f, -1.0f, 2.0f, kInfinity, -kInfinity, kNan, -kNan};
  DeviceMatrix<T> logits(tokens, experts, kLayouts[0]);
  for (int64_t i = 0; i < tokens * experts; ++i) {
    const auto random = Random4({.seed = seed, .item = static_cast<uint64_t>(i)});
    logits.view()(i / experts, i % experts) = T(values[random[0] % std::size(values)]);
  }
  return logits;
}

std::vector<int64_t> Count(const DeviceMatrix<int32_t>& expert, int64_t experts) {
  std::vector<int64_t> count(experts, 0);
  for (int64_t t = 0; t < expert.view().rows(); ++t) {
    for (int64_t j = 0; j < expert.view().cols(); ++j) ++count[expert.view()(t, j)];
  }
  return count;
}

std::vector<int64_t> SlotOffsets(int64_t tokens, int64_t k) {
  std::vector<int64_t> offset(tokens + 1);
  for (int64_t t = 0; t <= tokens; ++t) offset[t] = t * k;
  return offset;
}

void TopKGateInPlainLoops(MatrixView<const float> logits, Outputs& out) {
  TopKGateReference(logits,
                    {.probs = out.score.view(),
                     .expert = out.expert.view(),
                     .value = out.weight.view(),
                     .log_sum_exp = absl::MakeSpan(out.log_sum_exp),
                     .count = {}},
                    0, logits.rows());
  out.count = Count(out.expert, logits.cols());
  out.slot_offset = SlotOffsets(logits.rows(), out.expert.view().cols());
}

// v where the group of the expert is kept, -infinity elsewhere.
std::vector<float> MaskedByGroups(std::vector<float> v, int32_t groups, int32_t top, int32_t sum) {
  const auto size = static_cast<int64_t>(v.size()) / groups;
  std::vector<float> worth(groups, 0.0f);
  for (int32_t g = 0; g < groups; ++g) {
    std::vector<float> members(v.begin() + g * size, v.begin() + (g + 1) * size);
    for (float& m : members) m = std::isnan(m) ? -kInfinity : m;
    std::sort(members.begin(), members.end(), std::greater<>());
    for (int64_t i = 0; i < std::min<int64_t>(sum, size); ++i) worth[g] += members[i];
  }
  for (int32_t g = 0; g < groups; ++g) {
    int32_t before = 0;
    for (int32_t o = 0; o < groups; ++o) {
      if (worth[o] > worth[g] || (worth[o] == worth[g] && o < g)) ++before;
    }
    if (before >= top) std::fill_n(v.begin() + g * size, size, -kInfinity);
  }
  return v;
}

// What a gate selects and weighs, given the scores that it wrote.
template <typename T>
void SelectInPlainLoops(const CudaGate<T>& g, Outputs& out) {
  const int64_t tokens = g.logits.rows(), experts = g.logits.cols(), k = g.expert.cols();
  DeviceMatrix<float> value(tokens, experts, kLayouts[0]);
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<float> v(experts);
    for (int64_t e = 0; e < experts; ++e) {
      v[e] = out.score.view()(t, e) + (g.expert_bias == nullptr ? 0.0f : g.expert_bias[e]);
    }
    if (g.rule.num_groups > 0)
      v = MaskedByGroups(v, g.rule.num_groups, g.rule.group_top_k, g.rule.group_sum);
    std::copy(v.begin(), v.end(), value.view().row(t));
  }
  TopKSelectReference(value.view(), out.expert.view(), 0, tokens);
  for (int64_t t = 0; t < tokens; ++t) {
    float* const weight = out.weight.view().row(t);
    float sum = 0;
    for (int64_t j = 0; j < k; ++j) {
      weight[j] = out.score.view()(t, out.expert.view()(t, j));
      sum += weight[j];
    }
    for (int64_t j = 0; j < k; ++j) {
      if (g.rule.weights == GateWeights::kNormalised && sum != 0) weight[j] /= sum;
      weight[j] *= g.rule.scale;
    }
  }
  out.count = Count(out.expert, experts);
  out.slot_offset = SlotOffsets(tokens, k);
}

template <typename T>
class TopKGateCudaTest : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(TopKGateCudaTest, Types);

TYPED_TEST(TopKGateCudaTest, HandMadeRowsHaveSoftmaxTopKAndCounts) {
  using T = TypeParam;
  DeviceMatrix<T> logits(2, 4, kLayouts[0]);
  const float rows[2][4] = {{0, 1, 1, 2}, {5, 5, 5, 5}};
  for (int t = 0; t < 2; ++t)
    std::transform(rows[t], rows[t] + 4, logits.view().row(t), [](float x) { return T(x); });
  Outputs out(2, 4, 2, kLayouts[0]);
  ASSERT_EQ(topk_gate::Run(GateOf(logits, out), nullptr), cudaSuccess);
  const auto expert = out.expert.view();
  EXPECT_EQ(std::vector<int32_t>(expert.row(0), expert.row(0) + 4),
            (std::vector<int32_t>{3, 1, 0, 1}));  // ties: the lowest id
  EXPECT_EQ(out.count, (std::vector<int64_t>{1, 2, 0, 1}));
  const double sum = 1 + 2 * std::exp(1.0) + std::exp(2.0);
  EXPECT_FLOAT_EQ(out.weight.view()(0, 0), static_cast<float>(std::exp(2.0) / sum));
  EXPECT_FLOAT_EQ(out.weight.view()(0, 1), static_cast<float>(std::exp(1.0) / sum));
  EXPECT_FLOAT_EQ(out.score.view()(0, 0), static_cast<float>(1 / sum));
  EXPECT_EQ(out.score.view()(1, 3), 0.25f);
  EXPECT_FLOAT_EQ(out.log_sum_exp[0], static_cast<float>(std::log(sum)));
  EXPECT_FLOAT_EQ(out.log_sum_exp[1], 5 + std::log(4.0f));
}

TYPED_TEST(TopKGateCudaTest, HasTheBitsOfThePlainLoopsForAnyWidthLayoutAndSchedule) {
  using T = TypeParam;
  const auto check = [&](int64_t experts, int64_t k, Layout in, Layout out_layout) {
    const int64_t tokens = 11;  // more than a block's warps
    const auto logits = DeviceMatrix<T>::Random(tokens, experts, in, 1, 3);
    Outputs got(tokens, experts, k, out_layout), want = got;
    TopKGateInPlainLoops(Widened(logits).view(), want);
    ASSERT_EQ(topk_gate::Run(GateOf(logits, got), nullptr), cudaSuccess);
    EXPECT_TRUE(got == want) << "E=" << experts << " K=" << k;
  };
  cusim::ForSeeds([&] {
    for (const int64_t experts : {1, 7, 16, 33, 128, 129, 257, 600}) {
      check(experts, std::min<int64_t>(experts, 8), kLayouts[0], kLayouts[1]);
    }
    for (const auto& [in, out] : cusim::kLayoutPairs) check(40, 3, in, out);
    check(1024, 16, kLayouts[3], kLayouts[4]);
    check(16, 16, kLayouts[0], kLayouts[0]);
  });
}

TYPED_TEST(TopKGateCudaTest, SelectsAsTheReferenceWithTiesInfinitiesAndNans) {
  using T = TypeParam;
  cusim::ForSeeds([&] {
    for (const int64_t experts : {1, 2, 16, 40, 130}) {
      const auto logits = LogitsWithTies<T>(10, experts, 2);
      const int64_t k = std::min<int64_t>(experts, 16);
      Outputs got(10, experts, k, kLayouts[0]), want = got, scored = got;
      TopKGateInPlainLoops(Widened(logits).view(), want);
      ASSERT_EQ(topk_gate::Run(CudaGate<T>{.logits = logits.view(), .expert = got.expert.view()},
                               nullptr),
                cudaSuccess);
      EXPECT_TRUE(got.expert == want.expert) << experts;
      ASSERT_EQ(topk_gate::Run(GateOf(logits, scored), nullptr), cudaSuccess);
      EXPECT_TRUE(scored.expert == want.expert) << experts;
      for (int64_t t = 0; t < 10; ++t) {
        for (int64_t e = 0; e < experts; ++e) {
          const float p = scored.score.view()(t, e), reference = want.score.view()(t, e);
          EXPECT_TRUE(p == reference || (std::isnan(p) && std::isnan(reference))) << t << " " << e;
        }
      }
    }
  });
}

// 2 ulp of the exact value, as topk_gate.h promises: one of them is the exponential's.
TYPED_TEST(TopKGateCudaTest, SigmoidScoresAreWithinTwoUlpAndTheirSumsHaveTheBitsOfSoftmax) {
  using T = TypeParam;
  cusim::ForSeeds([&] {
    for (const int64_t experts : {1, 30, 257}) {
      auto logits = DeviceMatrix<T>::Random(9, experts, kLayouts[3], 3, 30);
      logits.view()(0, 0) = T(kInfinity);
      logits.view()(1, 0) = T(-kInfinity);
      logits.view()(2, 0) = T(-100.0f);  // a denormal score
      Outputs got(9, experts, 0, kLayouts[4]), want = got;
      SigmoidScoresReference(Widened(logits).view(), want.score.view(),
                             absl::MakeSpan(want.log_sum_exp), 0, 9);
      CudaGate<T> gate = GateOf(logits, got);
      gate.rule.score = ScoreFunction::kSigmoid;
      ASSERT_EQ(topk_gate::Run(gate, nullptr), cudaSuccess);
      for (int64_t t = 0; t < 9; ++t) {
        for (int64_t e = 0; e < experts; ++e) {
          const double x = static_cast<float>(logits.view()(t, e));
          const double exact = 1 / (1 + std::exp(-x));
          const double ulp =
              std::ldexp(1.0, std::max(std::ilogb(std::max(exact, 0x1p-126)) - 23, -149));
          EXPECT_NEAR(got.score.view()(t, e), exact, 2 * ulp) << x;
        }
        const float lse = got.log_sum_exp[t], reference = want.log_sum_exp[t];
        EXPECT_TRUE(lse == reference || (std::isnan(lse) && std::isnan(reference))) << t;
      }
      EXPECT_EQ(got.count, std::vector<int64_t>(experts, 0));
    }
  });
}

TYPED_TEST(TopKGateCudaTest, SelectsByBiasedScoresWithinGroupsAndNormalises) {
  using T = TypeParam;
  struct Case {
    int64_t experts, k;
    int32_t groups, group_top_k, group_sum;
  };
  const Case cases[] = {{24, 4, 0, 0, 1},  {24, 4, 4, 2, 2},    {24, 6, 8, 1, 1},
                        {32, 5, 32, 7, 9}, {130, 16, 10, 3, 2}, {1024, 8, 16, 4, 2}};
  const auto check = [&](const Case& c, const DeviceMatrix<T>& logits, bool biased) {
    const int64_t tokens = logits.view().rows();
    auto bias = cusim::RandomFloats(c.experts, 4);
    bias[c.experts / 2] = bias[0];
    for (const ScoreFunction function : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
      Outputs got(tokens, c.experts, c.k, kLayouts[0]);
      CudaGate<T> gate = GateOf(logits, got);
      gate.rule.score = function;
      gate.expert_bias = biased ? bias.data() : nullptr;
      gate.rule.num_groups = c.groups;
      gate.rule.group_top_k = c.group_top_k;
      gate.rule.group_sum = c.group_sum;
      gate.rule.weights = biased ? GateWeights::kNormalised : GateWeights::kScores;
      gate.rule.scale = 2.5f;
      ASSERT_EQ(topk_gate::Run(gate, nullptr), cudaSuccess);
      Outputs want = got;
      SelectInPlainLoops(gate, want);
      EXPECT_TRUE(got.expert == want.expert) << c.experts << " " << c.groups;
      EXPECT_EQ(got.count, want.count);
      EXPECT_EQ(got.slot_offset, want.slot_offset);
      for (int64_t i = 0; i < tokens * c.k; ++i) {
        const float w = got.weight.view()(i / c.k, i % c.k),
                    w2 = want.weight.view()(i / c.k, i % c.k);
        EXPECT_TRUE(w == w2 || (std::isnan(w) && std::isnan(w2))) << w << " " << w2;
      }
    }
  };
  cusim::ForSeeds([&] {
    for (const Case& c : cases) {
      if (c.groups == 0 && c.experts == 24) check(c, LogitsWithTies<T>(9, c.experts, 5), true);
      if (c.groups == 0) continue;
      check(c, DeviceMatrix<T>::Random(3, c.experts, kLayouts[3], 6), true);
      check(c, LogitsWithTies<T>(3, c.experts, 7), false);
    }
  });
}

TYPED_TEST(TopKGateCudaTest, ScoresThatUnderflowGiveZeroWeights) {
  using T = TypeParam;
  const DeviceMatrix<T> logits = [] {
    DeviceMatrix<T> m(1, 3, kLayouts[0]);
    std::fill_n(m.view().row(0), 3, T(-200.0f));
    return m;
  }();
  Outputs out(1, 3, 2, kLayouts[0]);
  CudaGate<T> gate = GateOf(logits, out);
  gate.rule.score = ScoreFunction::kSigmoid;
  gate.rule.weights = GateWeights::kNormalised;
  ASSERT_EQ(topk_gate::Run(gate, nullptr), cudaSuccess);
  EXPECT_EQ(out.weight.view()(0, 0), 0.0f);
  EXPECT_EQ(out.weight.view()(0, 1), 0.0f);
}

// More rows than one round of all blocks: five warps take a second one. All to the same expert.
TEST(TopKGateCudaCountTest, CountsEverySlotOfManyRows) {
  if (moe::testing::kSanitized) GTEST_SKIP() << "a matter of size";
  const int64_t tokens = 2048 * 8 + 5;
  const std::vector<BFloat16> logits(tokens * 2, BFloat16(1.0f));
  std::vector<int32_t> expert(tokens, -1);
  std::vector<int64_t> count(2, -1);
  ASSERT_EQ(topk_gate::Run(CudaGate<BFloat16>{.logits = {logits.data(), tokens, 2},
                                              .expert = {expert.data(), tokens, 1},
                                              .count = count.data()},
                           nullptr),
            cudaSuccess);
  EXPECT_EQ(count, (std::vector<int64_t>{tokens, 0}));
  EXPECT_EQ(expert, std::vector<int32_t>(tokens, 0));
  // Nobody asks for the ids.
  count.assign(2, -1);
  ASSERT_EQ(topk_gate::Run(CudaGate<BFloat16>{.logits = {logits.data(), 3, 2},
                                              .expert = {nullptr, 3, 1},
                                              .count = count.data()},
                           nullptr),
            cudaSuccess);
  EXPECT_EQ(count, (std::vector<int64_t>{3, 0}));
}

TYPED_TEST(TopKGateCudaTest, NoTokensGiveZeroCounts) {
  using T = TypeParam;
  const DeviceMatrix<T> logits(0, 5, kLayouts[0]);
  Outputs out(0, 5, 2, kLayouts[0]);
  ASSERT_EQ(topk_gate::Run(GateOf(logits, out), nullptr), cudaSuccess);
  EXPECT_EQ(out.count, std::vector<int64_t>(5, 0));
  EXPECT_EQ(out.slot_offset, std::vector<int64_t>{0});
}

TYPED_TEST(TopKGateCudaTest, RefusesWhatItIsNotCompiledForAndWritesNothing) {
  using T = TypeParam;
  const auto run = [](int64_t experts, int64_t k, auto change) {
    const DeviceMatrix<T> logits(1, experts, kLayouts[0]);
    Outputs out(1, experts, k, kLayouts[0]);
    const Outputs before = out;
    CudaGate<T> gate = GateOf(logits, out);
    change(gate);
    const cudaError_t error = topk_gate::Run(gate, nullptr);
    EXPECT_EQ(error == cudaSuccess, !(out == before));
    return error;
  };
  const auto with_groups = [](int32_t groups, int32_t top, int32_t sum) {
    return [=](CudaGate<T>& gate) {
      gate.rule.num_groups = groups;
      gate.rule.group_top_k = top;
      gate.rule.group_sum = sum;
    };
  };
  const auto plain = [](CudaGate<T>&) {
  };
  EXPECT_EQ(run(1024, 16, plain), cudaSuccess);
  EXPECT_EQ(run(1025, 16, plain), cudaErrorInvalidValue);
  EXPECT_EQ(run(1024, 17, plain), cudaErrorInvalidValue);
  EXPECT_EQ(run(3, 4, plain), cudaErrorInvalidValue);
  EXPECT_EQ(run(0, 0, plain), cudaErrorInvalidValue);
  EXPECT_EQ(run(64, 2, with_groups(32, 1, 1)), cudaSuccess);
  EXPECT_EQ(run(66, 2, with_groups(33, 1, 1)), cudaErrorInvalidValue);
  EXPECT_EQ(run(64, 2, with_groups(5, 1, 1)), cudaErrorInvalidValue);
  EXPECT_EQ(run(64, 2, with_groups(-1, 1, 1)), cudaErrorInvalidValue);
  EXPECT_EQ(run(64, 2, with_groups(4, 0, 1)), cudaErrorInvalidValue);
  EXPECT_EQ(run(64, 2, with_groups(4, 1, 0)), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace moe
