#include <limits>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gating/gate.h"
#include "gating/router.h"

namespace moe {
namespace {

using C = RouterConfig;

RouterConfig Valid() {
  return {.num_experts = 8, .top_k = 2, .hidden_size = 16};
}

// A changed configuration is refused with `part` in the message, which is returned, by both places
// that check.
template <typename Change>
std::string Refused(const std::string& part, Change change) {
  RouterConfig config = Valid();
  change(config);
  const absl::Status status = ValidateRouterConfig(config);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_EQ(Router<float>::Create(config).status(), status);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(part));
  return std::string(status.message());
}

TEST(RouterConfig, EveryGateHasAValidConfiguration) {
  EXPECT_THAT(GateNames(), ::testing::ElementsAre("switch", "gshard", "topk", "mixtral", "qwen2",
                                                  "qwen3", "olmoe", "deepseek-v2", "deepseek-v3",
                                                  "gpt-oss", "llama4", "longcat", "expert-choice",
                                                  "noisy-topk", "sinkhorn", "sparsemixer"));
  for (const std::string& gate : GateNames()) {
    RouterConfig config = Valid();
    config.gate = gate;
    if (gate == "switch") config.top_k = 1;
    EXPECT_TRUE(ValidateRouterConfig(config).ok()) << ValidateRouterConfig(config);
    EXPECT_TRUE(Router<BFloat16>::Create(config).ok());
  }
}

TEST(RouterConfig, UnknownGateNamesTheNearest) {
  EXPECT_EQ(Refused("", [](C& c) { c.gate = "mixtrel"; }),
            "RouterConfig.gate is 'mixtrel', expected one of switch, gshard, topk, mixtral, qwen2, "
            "qwen3, olmoe, deepseek-v2, deepseek-v3, gpt-oss, llama4, longcat, expert-choice, "
            "noisy-topk, sinkhorn, sparsemixer; did you mean 'mixtral'?");
  EXPECT_EQ(NearestGateName("qwen"), "qwen2");
  EXPECT_EQ(NearestGateName("deepseek_v3"), "deepseek-v3");
  EXPECT_EQ(NearestGateName("Olmo"), "olmoe");
  EXPECT_EQ(NearestGateName("shard"), "gshard");
  EXPECT_EQ(NearestGateName("swich"), "switch");
}

TEST(RouterConfig, TopKMustSuitExpertsAndGate) {
  Refused("top_k is 9, expected at most 8 (num_experts)", [](C& c) { c.top_k = 9; });
  Refused("top_k is 0, expected at least 1", [](C& c) { c.top_k = 0; });
  Refused("top_k is 2, expected 1, the only one of gate 'switch'", [](C& c) { c.gate = "switch"; });
  Refused("top_k is 3, expected 2, the only one of gate 'gshard'", [](C& c) {
    c.gate = "gshard";
    c.top_k = 3;
  });
  Refused("top_k is 1, expected 2, the only one of gate 'sparsemixer'", [](C& c) {
    c.gate = "sparsemixer";
    c.top_k = 1;
  });
  Refused("top_k is 2, expected at most 1", [](C& c) {
    c.gate = "gshard";
    c.num_experts = 1;
  });
}

TEST(RouterConfig, RouterJitterIsOfSparseMixerAndNotNegative) {
  EXPECT_EQ(
      Refused("", [](C& c) { c.router_jitter = 0; }),
      "RouterConfig.router_jitter is set, expected its default: gate 'mixtral' does not read it");
  for (const float jitter :
       {-0.1f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Refused("expected a finite number, 0 or more", [&](C& c) {
      c.gate = "sparsemixer";
      c.router_jitter = jitter;
    });
  }
}

TEST(RouterConfig, SizesMustBePositive) {
  Refused("num_experts is 0, expected at least 1", [](C& c) { c.num_experts = 0; });
  Refused("hidden_size is -1, expected at least 1", [](C& c) { c.hidden_size = -1; });
}

TEST(RouterConfig, CapacityFactorMustBeFiniteAndPositive) {
  for (const double factor : {0.0, -1.0, std::numeric_limits<double>::infinity(),
                              std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THAT(Refused("expected a finite number above 0, or none (dropless)",
                        [&](C& c) { c.capacity_factor = factor; }),
                ::testing::HasSubstr("RouterConfig.capacity_factor is "));
  }
}

TEST(RouterConfig, PaddingNeedsACapacityAndFixedLengths) {
  const auto padded = [](RouterConfig& c) {
    c.pad_to_capacity = true;
    c.capacity_factor = 1.25;
    c.micro_batch_tokens = 64;
  };
  RouterConfig valid = Valid();
  padded(valid);
  EXPECT_TRUE(ValidateRouterConfig(valid).ok());
  Refused("pad_to_capacity is true, expected a capacity_factor with it",
          [](C& c) { c.pad_to_capacity = true; });
  Refused("micro_batch_tokens is 0, expected the tokens of a micro-batch", [&](C& c) {
    padded(c);
    c.micro_batch_tokens = 0;
  });
  Refused("token_group is the sequence, expected the micro-batch or N tokens", [&](C& c) {
    padded(c);
    c.token_group.tokens = -1;
  });
}

TEST(RouterConfig, TokenGroupMustDivideTheMicroBatch) {
  Refused("token_group is -2, expected -1 (sequence), 0 (micro-batch) or N > 0",
          [](C& c) { c.token_group.tokens = -2; });
  Refused("token_group is 24, expected a divisor of 64 (micro_batch_tokens), 16", [](C& c) {
    c.token_group.tokens = 24;
    c.micro_batch_tokens = 64;
  });
  Refused("micro_batch_tokens is -1, expected 0 (unknown) or more",
          [](C& c) { c.micro_batch_tokens = -1; });
}

TEST(RouterConfig, CoefficientsMustBeFiniteAndNotNegative) {
  Refused("aux_loss_coeff is -0.5, expected a finite number, 0 (off) or more",
          [](C& c) { c.aux_loss_coeff = -0.5f; });
  Refused("z_loss_coeff is inf, expected a finite number",
          [](C& c) { c.z_loss_coeff = std::numeric_limits<float>::infinity(); });
}

}  // namespace
}  // namespace moe
