// Gates and devices: which run where, and input jitter with the same factors and tokens on each.
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "gating/gate.h"
#include "gating/router.h"
#include "tests/kernels/device_memory.h"

namespace moe {
namespace {

using testing::TestDevice;

constexpr int64_t kTokens = 300, kHidden = 5;  // more tokens than are uploaded at once
constexpr float kJitter = 0.25f;

TEST(DeviceJitterTest, FactorsAndTokensHaveTheSameBits) {
  const auto router = Router<float>::Create({.gate = "switch",
                                             .num_experts = 3,
                                             .top_k = 1,
                                             .hidden_size = kHidden,
                                             .input_jitter = kJitter,
                                             .seed = 7,
                                             .layer = 2});
  ASSERT_TRUE(router.ok()) << router.status();
  testing::ExpectSameBitsOnEveryDevice([&](const TestDevice& device) {
    const auto tokens = device.Random(kTokens * kHidden, 1);
    const auto weight = device.Random(3 * kHidden, 2);
    Workspace workspace(device.memory()), host;
    RouterSaved<float> saved;
    const auto routing = (*router)->Forward(tokens.view(kTokens, kHidden, kHidden),
                                            {.weight = weight.view(3, kHidden, kHidden)},
                                            {.first_global_token = 1000, .step = 3}, workspace,
                                            device.stream(), &saved, nullptr, &host);
    EXPECT_TRUE(routing.ok()) << routing.status();
    const auto read = [&](MatrixView<const float> from) {
      const auto copy = device.Copy(std::vector<float>(kTokens * kHidden));
      EXPECT_TRUE(device.stream()
                      .CopyBytes(from.data(), copy.span().data(),
                                 kTokens * kHidden * int64_t{sizeof(float)})
                      .ok());
      return device.Read(copy);
    };
    const auto factors = read(saved.jitter);
    for (const float factor : factors) {
      EXPECT_GE(factor, 1 - kJitter);
      EXPECT_LE(factor, 1 + kJitter);
    }
    return std::tuple(factors, read(saved.tokens));
  });
}

TEST(DeviceGatesTest, ThoseOfScaledScoresRunOnDevicesAndOthersAskForHostMemory) {
  for (const std::string& name : GateNames()) {
    const auto gate = FindGate(name)->make({.gate = name, .num_experts = 8, .top_k = 2});
    const bool host = name == "gshard" || name == "expert-choice" || name == "noisy-topk" ||
                      name == "sinkhorn" || name == "sparsemixer";
    EXPECT_TRUE(gate->RunsOn(DeviceKind::kCpu)) << name;
    EXPECT_EQ(gate->RunsOn(DeviceKind::kCuda), !host) << name;
  }
}

}  // namespace
}  // namespace moe
