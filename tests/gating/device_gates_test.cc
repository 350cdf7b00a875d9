// Gates and their losses on every device of this build: a gate that runs on CUDA devices reads and
// writes their memory alone, and decides there what it decides on a CPU.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gating/gate.h"
#include "gating/router_losses.h"
#include "tests/kernels/device_memory.h"
#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using testing::kFloatRounding;
using testing::TestDevice;
using testing::TestDevices;

constexpr int64_t kTokens = 40, kExperts = 24;
constexpr int32_t kChoices = 3;
constexpr float kAux = 0.5f, kZ = 0.25f, kScale = 2.5f;
// Two devices' scores: their exponentials are within 2 ulps, and E / 16 + 5 roundings follow.
constexpr double kScoreBound = (16 + 2 * (kExperts / 16.0 + 5)) * kFloatRounding;

RouterConfig Config(const std::string& gate) {
  RouterConfig config = {
      .gate = gate, .num_experts = kExperts, .top_k = kChoices, .hidden_size = 8};
  if (gate == "switch") config.top_k = 1;
  if (gate == "deepseek-v2" || gate == "deepseek-v3" || gate == "topk") {
    config.num_groups = 4;
    config.group_top_k = 2;
    config.scaling_factor = kScale;
  }
  config.aux_loss_coeff = kAux;
  config.z_loss_coeff = kZ;
  config.token_group.tokens = 10;
  return config;
}

struct Results {
  std::vector<int64_t> slot_offset, count;
  std::vector<int32_t> expert;
  std::vector<float> weight, score, log_sum_exp, d_losses, d_logits;
  std::vector<double> aux_and_z;
};

// A copy of what a gate left in the device's memory.
template <typename T>
auto Read(const TestDevice& device, const T* data, size_t size) {
  std::vector<T> host(size);
  const absl::Status copied = device.stream().CopyBytes(data, host.data(), size * sizeof(T));
  EXPECT_TRUE(copied.ok() && device.stream().Synchronize().ok()) << copied;
  return host;
}

Results RunGate(const Gate& gate, const RouterConfig& config, const TestDevice& device) {
  const auto logits = device.Copy(testing::RandomFloats(kTokens * kExperts, 1, 2));
  const auto bias = device.Copy(testing::RandomFloats(kExperts, 2, 0.1));
  const int64_t slots = kTokens * config.top_k;
  const auto d_weight = device.Copy(testing::RandomFloats(slots, 3));
  const auto dropped = device.Copy(std::vector<uint8_t>(slots, 0));
  const auto d_logits = device.Copy(std::vector<float>(kTokens * kExperts, -77));
  Workspace host, workspace(device.memory());
  const std::vector<int64_t> micro_batches = {0, 10, 40};
  const Batch batch = *CopyBatch({.micro_batch_offsets = micro_batches}, kTokens, host);
  const TokenGroups groups = *MakeTokenGroups(config.token_group, batch, host);
  const GateInput input = {
      .logits = logits.view(kTokens, kExperts, kExperts),
      .batch = batch,
      .groups = groups,
      .expert_bias = gate.traits().expert_bias ? bias.span() : absl::Span<float>()};
  Stream& stream = device.stream();
  const auto selection = gate.Select(input, workspace, stream);
  EXPECT_TRUE(selection.ok()) << selection.status();
  if (!selection.ok()) return {};
  const auto losses = EnqueueLosses(config, gate, input, *selection, {}, Gradient::kWanted, host,
                                    workspace, stream);
  EXPECT_TRUE(losses.ok()) << losses.status();
  if (!losses.ok()) return {};
  EXPECT_TRUE(gate.Backward({.logits = input.logits,
                             .batch = batch,
                             .selection = *selection,
                             .dropped = dropped.span(),
                             .d_weight = d_weight.span()},
                            d_logits.view(kTokens, kExperts, kExperts), stream)
                  .ok());
  const auto read = [&](auto span) {
    return Read(device, span.data(), span.size());
  };
  return {.slot_offset = Read(device, selection->slot_offset.data(), kTokens + 1),
          .count = Read(device, selection->count.data(), kExperts),
          .expert = Read(device, selection->expert.data(), slots),
          .weight = read(absl::MakeConstSpan(selection->weight)),
          .score = Read(device, selection->score.data(), kTokens * kExperts),
          .log_sum_exp = Read(device, selection->log_sum_exp.data(), kTokens),
          .d_losses = Read(device, losses->d_logits.data(), kTokens * kExperts),
          .d_logits = device.Read(d_logits),
          .aux_and_z = Read(device, losses->aux_and_z.data(), 2)};
}

void ExpectNear(const std::vector<float>& got, const std::vector<float>& expected, double bound,
                const char* what) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], bound) << what << i;
}

double Largest(const std::vector<float>& values) {
  double largest = 0;
  for (const float x : values) largest = std::max(largest, std::abs(double{x}));
  return largest;
}

// With b the bound of a score, W the largest |d_weight| and S the least sum of a token's selected
// scores: combine weights are within 2 b of themselves, so the gradients by scores, up to 2 W / S,
// within 4 b W / S, their mean within 6 b W / S, and those by logits within 14 b W / S, all times
// the scale. Shares s / sum s of the losses are within 2 b, G up to coeff E / T_g; likewise.
void ExpectSameDecisions(const Results& got, const Results& expected) {
  EXPECT_EQ(got.slot_offset, expected.slot_offset);
  EXPECT_EQ(got.count, expected.count);
  ASSERT_EQ(got.expert, expected.expert);
  const double b = kScoreBound;
  const size_t k = got.expert.size() / kTokens;
  double least_sum = 1;
  for (size_t t = 0; t < kTokens; ++t) {
    double sum = 0;
    for (size_t j = 0; j < k; ++j) sum += expected.score[t * kExperts + expected.expert[t * k + j]];
    least_sum = std::min(least_sum, sum);
  }
  ExpectNear(got.score, expected.score, b, "score ");
  ExpectNear(got.weight, expected.weight, 2 * b * Largest(expected.weight), "weight ");
  ExpectNear(got.d_logits, expected.d_logits,
             14 * b * kScale * Largest(testing::RandomFloats(kTokens * kChoices, 3)) / least_sum,
             "d_logits ");
  const double lse = Largest(expected.log_sum_exp);
  ExpectNear(got.log_sum_exp, expected.log_sum_exp, b * (1 + lse), "log_sum_exp ");
  ExpectNear(got.d_losses, expected.d_losses,
             14 * 2 * b * kAux * kExperts / 10 + 2 * kZ * 3 * b * (1 + lse) / 10, "d_losses ");
  EXPECT_NEAR(got.aux_and_z[0], expected.aux_and_z[0], 2 * b * expected.aux_and_z[0]);
  EXPECT_NEAR(got.aux_and_z[1], expected.aux_and_z[1], 2 * kZ * 2 * b * lse * (1 + lse));
}

TEST(DeviceGatesTest, GatesOfScaledScoresDecideAndLoseTheSameOnEveryDevice) {
  for (const char* name : {"switch", "topk", "mixtral", "qwen2", "qwen3", "olmoe", "deepseek-v2",
                           "deepseek-v3", "gpt-oss", "llama4", "longcat"}) {
    const RouterConfig config = Config(name);
    ASSERT_TRUE(ValidateRouterConfig(config).ok()) << name << ValidateRouterConfig(config);
    const auto gate = FindGate(name)->make(config);
    EXPECT_TRUE(gate->RunsOn(DeviceKind::kCuda)) << name;
    Results expected;
    for (const auto& device : TestDevices()) {
      SCOPED_TRACE(::testing::Message() << name << " on " << device->name());
      const Results got = RunGate(*gate, config, *device);
      ASSERT_FALSE(got.expert.empty());
      if (expected.expert.empty()) expected = got;
      ExpectSameDecisions(got, expected);
    }
    EXPECT_GT(expected.aux_and_z[0], 0) << name;
    EXPECT_GT(expected.aux_and_z[1], 0) << name;
  }
}

TEST(DeviceGatesTest, OtherGatesAskForHostMemory) {
  for (const char* name : {"gshard", "expert-choice", "noisy-topk", "sinkhorn", "sparsemixer"}) {
    RouterConfig config = {.gate = name, .num_experts = kExperts, .top_k = 2, .hidden_size = 8};
    const auto gate = FindGate(name)->make(config);
    EXPECT_TRUE(gate->RunsOn(DeviceKind::kCpu)) << name;
    EXPECT_FALSE(gate->RunsOn(DeviceKind::kCuda)) << name;
  }
}

}  // namespace
}  // namespace moe
