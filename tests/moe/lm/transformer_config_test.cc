#include "moe/lm/transformer_config.h"

#include <cmath>
#include <functional>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/moe/lm/transformer_harness.h"
#include "tests/moe/status_is.h"

namespace moe::lm {
namespace {

using ::moe::testing::OneRank;
using ::moe::testing::SmallConfig;
using ::testing::ElementsAre;
using enum absl::StatusCode;
using ::moe::testing::StatusIs;

const Parameter* Find(const ParameterStore& store, const std::string& name) {
  const Parameter* const found = store.Find(name);
  EXPECT_NE(found, nullptr) << name;
  return found;
}

TEST(Transformer, ParametersHaveCanonicalNamesInForwardOrder) {
  TransformerConfig config = SmallConfig();
  config.moe.router.num_experts = 2;
  const OneRank<float> rank(config);
  std::vector<std::string> got;
  for (const auto& p : rank.store.parameters()) {
    got.push_back(absl::StrCat(p->spec().name, " ", p->spec().rows, "x", p->spec().cols));
  }
  EXPECT_THAT(got, ElementsAre("model.embed_tokens.weight 11x12",
                               "model.layers.0.input_layernorm.weight 1x12",
                               "model.layers.0.self_attn.qkv_proj.weight 36x12",
                               "model.layers.0.self_attn.o_proj.weight 12x12",
                               "model.layers.0.post_attention_layernorm.weight 1x12",
                               "model.layers.0.mlp.gate_up_proj.weight 18x12",
                               "model.layers.0.mlp.down_proj.weight 12x9",
                               "model.layers.1.input_layernorm.weight 1x12",
                               "model.layers.1.self_attn.qkv_proj.weight 36x12",
                               "model.layers.1.self_attn.o_proj.weight 12x12",
                               "model.layers.1.post_attention_layernorm.weight 1x12",
                               "model.layers.1.mlp.gate.weight 2x12",
                               "model.layers.1.mlp.experts.0.gate_up_proj.weight 14x12",
                               "model.layers.1.mlp.experts.1.gate_up_proj.weight 14x12",
                               "model.layers.1.mlp.experts.0.down_proj.weight 12x7",
                               "model.layers.1.mlp.experts.1.down_proj.weight 12x7",
                               "model.layers.1.mlp.shared_expert.gate_up_proj.weight 10x12",
                               "model.layers.1.mlp.shared_expert.down_proj.weight 12x5",
                               "model.norm.weight 1x12", "lm_head.weight 11x12"));
  EXPECT_EQ(rank.model->moe_layers(), 1);
  EXPECT_FALSE(Find(rank.store, "model.norm.weight")->spec().weight_decay);
}

TEST(Transformer, AttentionHasTheCanonicalTensorsOfItsHeads) {
  TransformerConfig config = ::moe::testing::GroupedConfig(QkNorm::kHead);
  config.num_layers = 1;
  config.moe_layer_freq = 1;
  const auto names = [](const TransformerConfig& of) {
    const OneRank<float> rank(of);
    std::vector<std::string> got;
    for (const auto& p : rank.store.parameters()) {
      for (const CanonicalTensor& part : p->parts()) {
        if (absl::StrContains(part.name, ".mlp.")) continue;
        got.push_back(absl::StrCat(absl::StripPrefix(part.name, "model.layers.0."), " ", part.rows,
                                   "x", part.cols, " by ", part.item));
      }
    }
    return got;
  };
  EXPECT_THAT(
      names(config),
      ElementsAre("model.embed_tokens.weight 11x12 by 1", "input_layernorm.weight 1x12 by 1",
                  "self_attn.q_proj.weight 16x12 by 8", "self_attn.k_proj.weight 8x12 by 4",
                  "self_attn.v_proj.weight 8x12 by 4", "self_attn.q_proj.bias 1x16 by 8",
                  "self_attn.k_proj.bias 1x8 by 4", "self_attn.v_proj.bias 1x8 by 4",
                  "self_attn.o_proj.weight 12x16 by 8", "self_attn.q_norm.weight 1x4 by 1",
                  "self_attn.k_norm.weight 1x4 by 1", "post_attention_layernorm.weight 1x12 by 1",
                  "model.norm.weight 1x12 by 1"));
  config.qk_norm = QkNorm::kHeads;
  EXPECT_THAT(names(config), ::testing::IsSupersetOf({"self_attn.q_norm.weight 1x16 by 1",
                                                      "self_attn.k_norm.weight 1x8 by 1"}));
}

TEST(Transformer, OutputProjectionsStartSmallerByTheSquareRootOfTwiceTheLayers) {
  const OneRank<float> rank(SmallConfig());
  const auto std_of = [&](const char* name) {
    return Find(rank.store, name)->spec().init_std;
  };
  const double small = 0.4 / std::sqrt(4.0);
  EXPECT_DOUBLE_EQ(std_of("model.layers.0.self_attn.o_proj.weight"), small);
  EXPECT_DOUBLE_EQ(std_of("model.layers.0.mlp.down_proj.weight"), small);
  EXPECT_DOUBLE_EQ(std_of("model.layers.1.mlp.experts.4.down_proj.weight"), small);
  EXPECT_DOUBLE_EQ(std_of("model.layers.1.mlp.shared_expert.down_proj.weight"), small);
  EXPECT_DOUBLE_EQ(std_of("model.layers.1.mlp.gate.weight"), 0.4);
  EXPECT_DOUBLE_EQ(std_of("model.layers.1.mlp.experts.0.gate_up_proj.weight"), 0.4);
  EXPECT_DOUBLE_EQ(std_of("model.layers.1.self_attn.qkv_proj.weight"), 0.4);
  EXPECT_DOUBLE_EQ(std_of("model.embed_tokens.weight"), 0.4);
  EXPECT_DOUBLE_EQ(std_of("lm_head.weight"), 0.4);
}

TEST(Transformer, DenseWidthDefaultsToThatOfTheChosenExperts) {
  TransformerConfig config = SmallConfig();
  config.dense_ffn_hidden_size = 0;
  const OneRank<float> rank(config);
  EXPECT_EQ(Find(rank.store, "model.layers.0.mlp.down_proj.weight")->spec().cols, 2 * 7);
}

TEST(Transformer, BadConfigurationsAreRefusedWithTheNearestValidChoice) {
  const auto refused = [](const char* with, const std::function<void(TransformerConfig&)>& spoil) {
    TransformerConfig config = SmallConfig();
    spoil(config);
    EXPECT_THAT(ValidateTransformerConfig(config), StatusIs(kInvalidArgument, with));
  };
  EXPECT_TRUE(ValidateTransformerConfig(SmallConfig()).ok());
  refused("hidden_size is 14, expected an even multiple of the 2 attention heads, nearest 16",
          [](auto& c) { c.hidden_size = 14; });
  refused("hidden_size is 13, expected an even multiple of the 2 attention heads, nearest 12",
          [](auto& c) { c.hidden_size = 13; });
  refused("num_layers is 0, expected at least 1", [](auto& c) { c.num_layers = 0; });
  refused("num_attention_heads is 0", [](auto& c) { c.num_attention_heads = 0; });
  refused("num_query_groups is 4, expected a divisor of the 6 attention heads, nearest 3",
          [](auto& c) {
            c.num_attention_heads = 6;
            c.num_query_groups = 4;
          });
  refused("num_query_groups is 3, expected a divisor of the 2 attention heads, nearest 2",
          [](auto& c) { c.num_query_groups = 3; });
  refused("num_query_groups is -1, expected at least 0", [](auto& c) { c.num_query_groups = -1; });
  refused("kv_channels is 3, expected an even number, nearest 4",
          [](auto& c) { c.kv_channels = 3; });
  refused("vocab_size is 0", [](auto& c) { c.vocab_size = 0; });
  refused("vocab_size is 2147483648, expected at most 2147483647",
          [](auto& c) { c.vocab_size = int64_t{1} << 31; });
  refused("moe_layer_freq is 3, expected at most num_layers 2",
          [](auto& c) { c.moe_layer_freq = 3; });
  refused("rotary_base is 0", [](auto& c) { c.rotary_base = 0; });
  refused("norm_epsilon is nan", [](auto& c) { c.norm_epsilon = NAN; });
  refused("init_std is -1", [](auto& c) { c.init_std = -1; });
  refused("ffn_hidden_size is 0", [](auto& c) { c.moe.ffn_hidden_size = 0; });
  refused("dense_ffn_hidden_size is -2", [](auto& c) { c.dense_ffn_hidden_size = -2; });
  refused("top_k", [](auto& c) { c.moe.router.top_k = 6; });
}

TEST(Transformer, StoreOfTheOtherTypeIsRefused) {
  const OneRank<float> rank(SmallConfig());
  ParameterStore store(DType::kBFloat16, 1);
  const auto created = Stage<float>::Create(SmallConfig(), store, rank.session->context());
  EXPECT_EQ(created.status().code(), kInvalidArgument);
}

}  // namespace
}  // namespace moe::lm
