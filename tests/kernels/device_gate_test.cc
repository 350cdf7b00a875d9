// Operations of gates on every device of this build. Selections are equal; scores differ by the
// devices' exponentials, each within 2 ulps.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/topk_gate/select_experts.h"
#include "kernels/topk_gate/topk_gate.h"
#include "tests/kernels/device_memory.h"
#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using testing::kFloatRounding;
using testing::TestDevice;
using testing::TestDevices;

constexpr int64_t kTokens = 9, kExperts = 36, kChoices = 6, kStride = 40;

// Multiples of 1/4, so that rows have ties.
std::vector<float> LogitsWithTies() {
  std::vector<float> logits = testing::RandomFloats(kTokens * kStride, 1);
  for (float& x : logits) x = std::round(8 * x) / 4;
  return logits;
}

// What a gate computes, read back.
struct Results {
  std::vector<float> score, weight, log_sum_exp;
  std::vector<int32_t> expert;
  std::vector<int64_t> count, slot_offset;
};

// Two devices' probabilities: terms differ by 2 * 2 ulps, their sum by as much and by the roundings
// of the additions on the way of a term, E / 16 + 4 on either device, the quotient by one on
// either.
const double kSumBound = (8 + 2 * (kExperts / 16.0 + 4)) * kFloatRounding;
const double kProbBound = 8 * kFloatRounding + kSumBound + 2 * kFloatRounding;

void ExpectNear(const std::vector<float>& got, const std::vector<float>& expected, double relative,
                double absolute = 0) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i], expected[i], relative * std::abs(expected[i]) + absolute) << i;
  }
}

void ExpectSameSelection(const Results& got, const Results& expected) {
  EXPECT_EQ(got.expert, expected.expert);
  EXPECT_EQ(got.count, expected.count);
  EXPECT_EQ(got.slot_offset, expected.slot_offset);
  ExpectNear(got.log_sum_exp, expected.log_sum_exp, 2 * kFloatRounding, kSumBound);
}

// Arrays that an operation writes, before that -77.
struct Outputs {
  explicit Outputs(const TestDevice& device)
      : score(device.Copy(std::vector<float>(kTokens * kStride, -77))),
        weight(device.Copy(std::vector<float>(kTokens * kChoices, -77))),
        log_sum_exp(device.Copy(std::vector<float>(kTokens, -77))),
        expert(device.Copy(std::vector<int32_t>(kTokens * kChoices, -77))),
        count(device.Copy(std::vector<int64_t>(kExperts, -77))),
        slot_offset(device.Copy(std::vector<int64_t>(kTokens + 1, -77))) {}

  MatrixView<float> scores() const { return score.view(kTokens, kExperts, kStride); }
  MatrixView<int32_t> experts() const { return expert.view(kTokens, kChoices, kChoices); }
  MatrixView<float> weights() const { return weight.view(kTokens, kChoices, kChoices); }
  Results Read(const TestDevice& device) const {
    return {device.Read(score),  device.Read(weight), device.Read(log_sum_exp),
            device.Read(expert), device.Read(count),  device.Read(slot_offset)};
  }

  testing::DeviceArray<float> score, weight, log_sum_exp;
  testing::DeviceArray<int32_t> expert;
  testing::DeviceArray<int64_t> count, slot_offset;
};

TEST(DeviceGateTest, TopKGate) {
  Results expected;
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const auto logits = device->Copy(LogitsWithTies());
    const Outputs out(*device);
    ASSERT_TRUE(TopKGate(logits.view(kTokens, kExperts, kStride),
                         {.probs = out.scores(),
                          .expert = out.experts(),
                          .value = out.weights(),
                          .log_sum_exp = out.log_sum_exp.span(),
                          .count = out.count.span()},
                         device->stream())
                    .ok());
    const Results got = out.Read(*device);
    if (expected.expert.empty()) expected = got;
    ExpectSameSelection(got, expected);
    ExpectNear(got.score, expected.score, kProbBound);
    ExpectNear(got.weight, expected.weight, kProbBound);
  }
}

TEST(DeviceGateTest, TopKSelect) {
  std::vector<int32_t> expected;
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const auto value = device->Copy(LogitsWithTies());
    const Outputs out(*device);
    ASSERT_TRUE(
        TopKSelect(value.view(kTokens, kExperts, kStride), out.experts(), device->stream()).ok());
    const std::vector<int32_t> got = device->Read(out.expert);
    if (expected.empty()) expected = got;
    EXPECT_EQ(got, expected);
  }
}

// Each device within 2 ulps of the exact score; sums as of a softmax.
TEST(DeviceGateTest, SigmoidScores) {
  Results expected;
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const auto logits = device->Copy(LogitsWithTies());
    const Outputs out(*device);
    ASSERT_TRUE(SigmoidScores(logits.view(kTokens, kExperts, kStride), out.scores(),
                              out.log_sum_exp.span(), device->stream())
                    .ok());
    const Results got = out.Read(*device);
    if (expected.expert.empty()) expected = got;
    ExpectSameSelection(got, expected);
    ExpectNear(got.score, expected.score, 8 * kFloatRounding);
  }
}

// s = 1/2, 3/4, 1/4, 1/2; v = 1/2, -1/4, 1/4, 3/5. The second pair is worth more.
TEST(DeviceGateTest, SelectsByHandWithinTheBestGroupByBiasedScores) {
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const auto logits = device->Copy<float>({0, std::log(3.0f), -std::log(3.0f), 0});
    const auto bias = device->Copy<float>({0, -1, 0, 0.1f});
    const auto score = device->Copy(std::vector<float>(4)), weight = device->Copy<float>({0, 0});
    const auto expert = device->Copy<int32_t>({-1, -1});
    const auto count = device->Copy<int64_t>({-1, -1, -1, -1}),
               offset = device->Copy<int64_t>({9, 9});
    ASSERT_TRUE(
        SelectExperts({.score = ScoreFunction::kSigmoid,
                       .num_groups = 2,
                       .group_top_k = 1,
                       .group_sum = 2,
                       .weights = GateWeights::kNormalised,
                       .scale = 2},
                      {.logits = logits.view(1, 4, 4), .expert_bias = bias.span(), .value = {}},
                      {.score = score.view(1, 4, 4),
                       .expert = expert.view(1, 2, 2),
                       .weight = weight.view(1, 2, 2),
                       .log_sum_exp = {},
                       .count = count.span(),
                       .slot_offset = offset.span()},
                      device->stream())
            .ok());
    EXPECT_EQ(device->Read(expert), (std::vector<int32_t>{3, 2}));
    EXPECT_EQ(device->Read(count), (std::vector<int64_t>{0, 0, 1, 1}));
    EXPECT_EQ(device->Read(offset), (std::vector<int64_t>{0, 2}));
    const auto w = device->Read(weight);
    ASSERT_EQ(w.size(), 2u);
    EXPECT_FLOAT_EQ(w[0], 4.0f / 3);
    EXPECT_FLOAT_EQ(w[1], 2.0f / 3);
  }
}

// Weights: two scores' bound, the roundings of a sum of K terms, of a quotient and of a product.
TEST(DeviceGateTest, SelectExperts) {
  const double bound = 2 * kProbBound + 2 * (kChoices + 2) * kFloatRounding;
  const GateRule plain = {.weights = GateWeights::kNormalised};
  const GateRule grouped = {.score = ScoreFunction::kSigmoid,
                            .num_groups = 6,
                            .group_top_k = 3,
                            .group_sum = 2,
                            .scale = 2.5f};
  for (const GateRule& rule : {plain, grouped}) {
    Results expected;
    for (const auto& device : TestDevices()) {
      SCOPED_TRACE(device->name());
      const auto logits = device->Copy(LogitsWithTies());
      const auto bias = device->Copy(testing::RandomFloats(kExperts, 2, 0.1));
      const Outputs out(*device);
      ASSERT_TRUE(
          SelectExperts(rule,
                        {.logits = logits.view(kTokens, kExperts, kStride),
                         .expert_bias = rule.num_groups > 0 ? bias.span() : absl::Span<float>(),
                         .value = {}},
                        {.score = out.scores(),
                         .expert = out.experts(),
                         .weight = out.weights(),
                         .log_sum_exp = out.log_sum_exp.span(),
                         .count = out.count.span(),
                         .slot_offset = out.slot_offset.span()},
                        device->stream())
              .ok());
      const Results got = out.Read(*device);
      if (expected.expert.empty()) expected = got;
      ExpectSameSelection(got, expected);
      ExpectNear(got.score, expected.score, kProbBound);
      ExpectNear(got.weight, expected.weight, bound);
    }
  }
}

// A CPU takes any size; the CUDA kernel keeps a row in the registers of a warp.
TEST(DeviceGateTest, SizesThatTheKernelIsNotCompiledForAreRefusedByName) {
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const auto messages = [&](int64_t experts, int64_t k) {
      const auto logits = device->Copy(std::vector<float>(experts, 1.0f));
      const auto score = device->Copy(std::vector<float>(experts));
      const auto weight = device->Copy(std::vector<float>(k));
      const auto ids = device->Copy(std::vector<int32_t>(k));
      const auto count = device->Copy(std::vector<int64_t>(experts));
      const MatrixView<const float> row = logits.view(1, experts, experts);
      return std::vector<std::string>{
          testing::Message(TopKGate(row,
                                    {.probs = score.view(1, experts, experts),
                                     .expert = ids.view(1, k, k),
                                     .value = weight.view(1, k, k),
                                     .log_sum_exp = {},
                                     .count = count.span()},
                                    device->stream())),
          testing::Message(TopKSelect(row, ids.view(1, k, k), device->stream())),
          testing::Message(
              SigmoidScores(row, score.view(1, experts, experts), {}, device->stream()))};
    };
    const std::vector<std::string> none(3);
    EXPECT_EQ(messages(1024, 16), none);
    if (device->stream().device().kind == DeviceKind::kCpu) {
      EXPECT_EQ(messages(1025, 17), none);
      continue;
    }
    const std::string k = ": k is 17, expected at most 16 on CUDA";
    EXPECT_EQ(messages(1024, 17), (std::vector<std::string>{"TopKGate" + k, "TopKSelect" + k, ""}));
    const std::string e = ": E (experts) is 1025, expected at most 1024 on CUDA";
    EXPECT_EQ(messages(1025, 17),
              (std::vector<std::string>{"TopKGate" + e, "TopKSelect" + e, "SigmoidScores" + e}));
  }
}

}  // namespace
}  // namespace moe
