#include <limits>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gating/gate.h"
#include "gating/router.h"

namespace moe {
namespace {

using ::testing::HasSubstr;

RouterConfig Valid() {
  return {.num_experts = 8, .top_k = 2, .hidden_size = 16};
}

// The message of the error that a changed configuration gives, from both places that check.
template <typename Change>
std::string MessageAfter(Change change) {
  RouterConfig config = Valid();
  change(config);
  const absl::Status status = ValidateRouterConfig(config);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_EQ(Router<float>::Create(config).status(), status);
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
  EXPECT_EQ(MessageAfter([](RouterConfig& c) { c.gate = "mixtrel"; }),
            "RouterConfig.gate is 'mixtrel', expected one of switch, gshard, topk, mixtral, qwen2, "
            "qwen3, "
            "olmoe, deepseek-v2, deepseek-v3, gpt-oss, llama4, longcat, expert-choice, noisy-topk, "
            "sinkhorn, sparsemixer; did you mean 'mixtral'?");
  EXPECT_EQ(NearestGateName("qwen"), "qwen2");
  EXPECT_EQ(NearestGateName("deepseek_v3"), "deepseek-v3");
  EXPECT_EQ(NearestGateName("Olmo"), "olmoe");
  EXPECT_EQ(NearestGateName("shard"), "gshard");
  EXPECT_EQ(NearestGateName("swich"), "switch");
}

TEST(RouterConfig, TopKMustSuitExpertsAndGate) {
  EXPECT_THAT(MessageAfter([](RouterConfig& c) { c.top_k = 9; }),
              HasSubstr("top_k is 9, expected at most 8 (num_experts)"));
  EXPECT_THAT(MessageAfter([](RouterConfig& c) { c.top_k = 0; }),
              HasSubstr("top_k is 0, expected at least 1"));
  EXPECT_THAT(MessageAfter([](RouterConfig& c) { c.gate = "switch"; }),
              HasSubstr("top_k is 2, expected 1, the only one of gate 'switch'"));
  EXPECT_THAT(MessageAfter([](RouterConfig& c) {
                c.gate = "gshard";
                c.top_k = 3;
              }),
              HasSubstr("top_k is 3, expected 2, the only one of gate 'gshard'"));
  EXPECT_THAT(MessageAfter([](RouterConfig& c) {
                c.gate = "sparsemixer";
                c.top_k = 1;
              }),
              HasSubstr("top_k is 1, expected 2, the only one of gate 'sparsemixer'"));
  EXPECT_THAT(MessageAfter([](RouterConfig& c) {
                c.gate = "gshard";
                c.num_experts = 1;
              }),
              HasSubstr("top_k is 2, expected at most 1"));
}

TEST(RouterConfig, RouterJitterIsOfSparseMixerAndNotNegative) {
  EXPECT_EQ(MessageAfter([](RouterConfig& c) { c.router_jitter = 0; }),
            "RouterConfig.router_jitter is set, expected its default: gate 'mixtral' does not read "
            "it");
  for (const float jitter :
       {-0.1f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_THAT(MessageAfter([&](RouterConfig& c) {
                  c.gate = "sparsemixer";
                  c.router_jitter = jitter;
                }),
                HasSubstr("expected a finite number, 0 or more"));
  }
}

TEST(RouterConfig, SizesMustBePositive) {
  EXPECT_THAT(MessageAfter([](RouterConfig& c) { c.num_experts = 0; }),
              HasSubstr("num_experts is 0, expected at least 1"));
  EXPECT_THAT(MessageAfter([](RouterConfig& c) { c.hidden_size = -1; }),
              HasSubstr("hidden_size is -1, expected at least 1"));
}

TEST(RouterConfig, CapacityFactorMustBeFiniteAndPositive) {
  for (const double factor : {0.0, -1.0, std::numeric_limits<double>::infinity(),
                              std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THAT(
        MessageAfter([&](RouterConfig& c) { c.capacity_factor = factor; }),
        ::testing::AllOf(HasSubstr("RouterConfig.capacity_factor is "),
                         HasSubstr("expected a finite number above 0, or none (dropless)")));
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
  EXPECT_THAT(MessageAfter([](RouterConfig& c) { c.pad_to_capacity = true; }),
              HasSubstr("pad_to_capacity is true, expected a capacity_factor with it"));
  EXPECT_THAT(MessageAfter([&](RouterConfig& c) {
                padded(c);
                c.micro_batch_tokens = 0;
              }),
              HasSubstr("micro_batch_tokens is 0, expected the tokens of a micro-batch"));
  EXPECT_THAT(MessageAfter([&](RouterConfig& c) {
                padded(c);
                c.token_group.tokens = -1;
              }),
              HasSubstr("token_group is the sequence, expected the micro-batch or N tokens"));
}

TEST(RouterConfig, TokenGroupMustDivideTheMicroBatch) {
  EXPECT_THAT(MessageAfter([](RouterConfig& c) { c.token_group.tokens = -2; }),
              HasSubstr("token_group is -2, expected -1 (sequence), 0 (micro-batch) or N > 0"));
  EXPECT_THAT(MessageAfter([](RouterConfig& c) {
                c.token_group.tokens = 24;
                c.micro_batch_tokens = 64;
              }),
              HasSubstr("token_group is 24, expected a divisor of 64 (micro_batch_tokens), 16"));
  EXPECT_THAT(MessageAfter([](RouterConfig& c) { c.micro_batch_tokens = -1; }),
              HasSubstr("micro_batch_tokens is -1, expected 0 (unknown) or more"));
}

TEST(RouterConfig, CoefficientsMustBeFiniteAndNotNegative) {
  EXPECT_THAT(MessageAfter([](RouterConfig& c) { c.aux_loss_coeff = -0.5f; }),
              HasSubstr("aux_loss_coeff is -0.5, expected a finite number, 0 (off) or more"));
  EXPECT_THAT(MessageAfter(
                  [](RouterConfig& c) { c.z_loss_coeff = std::numeric_limits<float>::infinity(); }),
              HasSubstr("z_loss_coeff is inf, expected a finite number"));
}

}  // namespace
}  // namespace moe
