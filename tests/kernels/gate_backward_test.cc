// kernels/topk_gate: gradients of logits by those of weights, on every device.
#include "kernels/topk_gate/gate_backward.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tests/kernels/device_memory.h"

namespace moe {
namespace {

using testing::ForEachDevice;
using testing::kLayouts;
using testing::Matrix;
using testing::MatrixLayout;
using testing::TestDevice;

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
    d_weight = testing::RandomFloats(static_cast<int64_t>(expert.size()), 2);
    for (size_t s = 0; s < expert.size(); ++s) {
      dropped.push_back(s % 3 == 2 ? 1 : 0);
      if (dropped[s] != 0) d_weight[s] = testing::kNaN;
    }
  }

  int32_t top_k;
  std::vector<int64_t> offset = {0};
  std::vector<int32_t> expert;
  std::vector<uint8_t> dropped;
  std::vector<float> d_weight;
};

Matrix<float> Gradient(const TestDevice& device, const GateRule& rule, const Matrix<float>& score,
                       const Slots& slots, MatrixLayout out = {}) {
  const auto scores = device.Copy(score);
  const auto d_logits = device.Copy(Matrix<float>(score.rows(), score.cols(), out));
  const auto offset = device.Copy(slots.offset);
  const auto expert = device.Copy(slots.expert);
  const auto dropped = device.Copy(slots.dropped);
  const auto d_weight = device.Copy(slots.d_weight);
  EXPECT_TRUE(GateBackward(rule,
                           {.score = scores.view(),
                            .slot_offset = offset.span(),
                            .expert = expert.span(),
                            .dropped = dropped.span(),
                            .d_weight = d_weight.span(),
                            .top_k = slots.top_k},
                           d_logits.view(), device.stream())
                  .ok());
  return device.Read(d_logits);
}

TEST(GateBackwardTest, HandMadeGradients) {
  const auto score = Matrix<float>::Of(1, 3, {0.5f, 0.25f, 0.25f});
  Slots slots(0, 3, 2);
  slots.offset = {0, 2};
  slots.expert = {0, 2};
  slots.dropped = {0, 0};
  slots.d_weight = {1, 0};
  ForEachDevice([&](const TestDevice& device) {
    // d_p = (2, 0, 0), its mean 1.
    EXPECT_EQ(Gradient(device, {.scale = 2}, score, slots).values(),
              (std::vector<double>{0.5, -0.25, -0.25}));
    const GateRule sigmoid = {.score = ScoreFunction::kSigmoid, .scale = 2};
    EXPECT_EQ(Gradient(device, sigmoid, score, slots).values(), (std::vector<double>{0.5, 0, 0}));
    // S = 3/4, w = (2/3, 1/3): d_p = (4/9, 0, -8/9), its mean 0.
    const auto normalised = Gradient(device, {.weights = GateWeights::kNormalised}, score, slots);
    EXPECT_FLOAT_EQ(normalised.at(0, 0), 2.0f / 9);
    EXPECT_NEAR(normalised(0, 1), 0, 0x1p-53);  // what the roundings of d_p left
    EXPECT_FLOAT_EQ(normalised.at(0, 2), -2.0f / 9);
  });
}

// Scores are positive; token 1's underflowed.
TEST(GateBackwardTest, HasTheBitsOfOneThreadForAnyWidthAndLayout) {
  const TestDevice one{Device()};
  const auto check = [&](const TestDevice& device, int64_t tokens, int64_t experts, int32_t k,
                         MatrixLayout in, MatrixLayout out) {
    const Slots slots(tokens, experts, k);
    auto score = Matrix<float>::Random(tokens, experts, in, 1);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t e = 0; e < experts; ++e) {
        score.at(t, e) = t == 1 ? 0.0f : score.at(t, e) * score.at(t, e) / 8;
      }
    }
    for (const ScoreFunction function : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
      for (const GateWeights weights : {GateWeights::kScores, GateWeights::kNormalised}) {
        const GateRule rule = {
            .score = function, .weights = weights, .scale = 2.5f, .epsilon = 0.25f};
        EXPECT_TRUE(testing::SameBits(Gradient(device, rule, score, slots, out),
                                      Gradient(one, rule, score, slots)))
            << "E=" << experts << " K=" << k << " sigmoid " << (function == ScoreFunction::kSigmoid)
            << " normalised " << (weights == GateWeights::kNormalised);
      }
    }
  };
  ForEachDevice([&](const TestDevice& device) {
    for (const int64_t experts : {1, 7, 32, 130, 1030}) {
      // More tokens than a block's warps.
      check(device, 11, experts, static_cast<int32_t>(std::min<int64_t>(experts, 8)), kLayouts[0],
            kLayouts[1]);
    }
    for (const auto& [in, out] : testing::kLayoutPairs) check(device, 11, 40, 3, in, out);
    check(device, 11, 64, 32, kLayouts[0], kLayouts[0]);
    check(device, 300, 16, 2, {}, {});
    check(device, 0, 5, 2, {}, {});
  });
}

}  // namespace
}  // namespace moe
