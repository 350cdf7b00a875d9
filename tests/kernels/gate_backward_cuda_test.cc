// kernels/topk_gate's backward on the simulated GPU: the bits of the CPU's loops.
#include "kernels/topk_gate/gate_backward_cuda.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/rng.h"
#include "kernels/topk_gate/gate_backward.h"
#include "tests/cusim/schedules.h"

namespace moe {
namespace {

using cusim::DeviceMatrix;
using cusim::kLayouts;
using cusim::Layout;

// Tokens with 0 to K slots; every third slot is dropped, and its d_weight no number.
struct Slots {
  Slots(int64_t tokens, int64_t experts, int32_t k) : top_k(k) {
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t slots = t == 0 ? k : t * 5 % (k + 1);
      for (int64_t j = 0; j < slots; ++j) {
        expert.push_back(static_cast<int32_t>((7 * t + 3 * j) % experts));
      }
      offset.push_back(static_cast<int64_t>(expert.size()));
    }
    d_weight = cusim::RandomFloats(static_cast<int64_t>(expert.size()), 2);
    for (size_t s = 0; s < expert.size(); ++s) {
      dropped.push_back(s % 3 == 2 ? 1 : 0);
      if (dropped[s] != 0) d_weight[s] = std::numeric_limits<float>::quiet_NaN();
    }
  }

  int32_t top_k;
  std::vector<int64_t> offset = {0};
  std::vector<int32_t> expert;
  std::vector<uint8_t> dropped;
  std::vector<float> d_weight;
};

// Positive, as scores are; token 1's underflowed.
DeviceMatrix<float> Scores(int64_t tokens, int64_t experts, Layout layout) {
  auto score = DeviceMatrix<float>::Random(tokens, experts, layout, 1);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t e = 0; e < experts; ++e) {
      const float x = score.view()(t, e);
      score.view()(t, e) = t == 1 ? 0.0f : x * x / 8;
    }
  }
  return score;
}

cudaError_t RunOnGpu(const GateRule& rule, const DeviceMatrix<float>& score, const Slots& slots,
                     DeviceMatrix<float>& d_logits) {
  return topk_gate::Run({.rule = rule,
                         .score = score.view(),
                         .slot_offset = slots.offset.data(),
                         .expert = slots.expert.data(),
                         .dropped = slots.dropped.data(),
                         .d_weight = slots.d_weight.data(),
                         .d_logits = d_logits.view()},
                        nullptr);
}

TEST(GateBackwardCudaTest, HandMadeGradients) {
  DeviceMatrix<float> score(1, 3, kLayouts[0]), d_logits(1, 3, kLayouts[0]);
  const float p[] = {0.5f, 0.25f, 0.25f};
  std::copy_n(p, 3, score.view().row(0));
  Slots slots(0, 3, 2);
  slots.offset = {0, 2};
  slots.expert = {0, 2};
  slots.dropped = {0, 0};
  slots.d_weight = {1, 0};
  const auto run = [&](const GateRule& rule) {
    EXPECT_EQ(RunOnGpu(rule, score, slots, d_logits), cudaSuccess);
    const float* const row = d_logits.view().row(0);
    return std::vector<float>(row, row + 3);
  };
  // d_p = (2, 0, 0), its mean 1.
  EXPECT_EQ(run({.scale = 2}), (std::vector<float>{0.5f, -0.25f, -0.25f}));
  EXPECT_EQ(run({.score = ScoreFunction::kSigmoid, .scale = 2}), (std::vector<float>{0.5f, 0, 0}));
  // S = 3/4, w = (2/3, 1/3): d_p = (4/9, 0, -8/9), its mean 0.
  const auto normalised = run({.weights = GateWeights::kNormalised});
  EXPECT_FLOAT_EQ(normalised[0], 2.0f / 9);
  EXPECT_NEAR(normalised[1], 0, 0x1p-53);  // what the roundings of d_p left
  EXPECT_FLOAT_EQ(normalised[2], -2.0f / 9);
}

TEST(GateBackwardCudaTest, HasTheBitsOfTheCpuForAnyWidthLayoutAndSchedule) {
  const auto stream = MakeInlineStream();
  const auto check = [&](int64_t experts, int32_t k, Layout in, Layout out) {
    const int64_t tokens = 11;  // more than a block's warps
    const Slots slots(tokens, experts, k);
    const auto score = Scores(tokens, experts, in);
    for (const ScoreFunction function : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
      for (const GateWeights weights : {GateWeights::kScores, GateWeights::kNormalised}) {
        const GateRule rule = {.score = function, .weights = weights, .scale = 2.5f};
        DeviceMatrix<float> got(tokens, experts, out), want = got;
        ASSERT_EQ(RunOnGpu(rule, score, slots, got), cudaSuccess);
        ASSERT_TRUE(GateBackward(rule,
                                 {.score = score.view(),
                                  .slot_offset = slots.offset,
                                  .expert = slots.expert,
                                  .dropped = slots.dropped,
                                  .d_weight = slots.d_weight,
                                  .top_k = k},
                                 want.view(), *stream)
                        .ok());
        EXPECT_TRUE(got == want) << "E=" << experts << " K=" << k << " sigmoid "
                                 << (function == ScoreFunction::kSigmoid) << " normalised "
                                 << (weights == GateWeights::kNormalised);
      }
    }
  };
  cusim::ForSeeds([&] {
    for (const int64_t experts : {1, 7, 32, 130, 1030}) {
      check(experts, static_cast<int32_t>(std::min<int64_t>(experts, 8)), kLayouts[0], kLayouts[1]);
    }
    for (const auto& [in, out] : cusim::kLayoutPairs) check(40, 3, in, out);
    check(64, 32, kLayouts[0], kLayouts[0]);
  });
}

TEST(GateBackwardCudaTest, NoTokensAreNothing) {
  DeviceMatrix<float> score(0, 5, kLayouts[0]), d_logits(0, 5, kLayouts[0]);
  EXPECT_EQ(RunOnGpu({}, score, Slots(0, 5, 2), d_logits), cudaSuccess);
}

}  // namespace
}  // namespace moe
