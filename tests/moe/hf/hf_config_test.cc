#include "moe/hf/hf_config.h"

#include <algorithm>
#include <string>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/moe/status_is.h"

namespace moe::hf {
namespace {

using ::testing::HasSubstr;
using enum absl::StatusCode;
using testing::StatusIs;

HfConfig Parse(const std::string& document) {
  auto config = ParseHfConfig("config.json", document);
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : HfConfig{};
}

// The configuration of a model with no key but what it cannot do without.
HfConfig Defaults(absl::string_view model_type, const std::string& more = "") {
  return Parse(absl::StrCat(R"({"model_type": ")", model_type, "\"", more, "}"));
}

void ExpectRefused(const std::string& document, absl::StatusCode code, const std::string& part) {
  const auto config = ParseHfConfig("config.json", document);
  ASSERT_FALSE(config.ok()) << document;
  EXPECT_THAT(config, StatusIs(code, "config.json: "));
  EXPECT_THAT(std::string(config.status().message()), HasSubstr(part)) << document;
}
void ExpectDataLoss(const std::string& document, const std::string& part) {
  ExpectRefused(document, kDataLoss, part);
}
void ExpectUnsupported(const std::string& document, const std::string& part) {
  ExpectRefused(document, kUnimplemented, part);
}

int64_t CountSparse(const HfConfig& config) {
  return std::count(config.has_experts.begin(), config.has_experts.end(), true);
}

// Defaults of every model are compared with transformers' own in golden_test.
TEST(HfConfig, MixtralDefaults) {
  const HfConfig config = Defaults("mixtral");
  const MoeLayerConfig& moe = config.moe;
  EXPECT_EQ(config.model_type(), "mixtral");
  EXPECT_EQ(moe.router.gate, "mixtral");
  EXPECT_EQ(moe.activation, Activation::kSwiGlu);
  EXPECT_EQ(moe.router.load_balancing, LoadBalancing::kNone);
  EXPECT_EQ(CountSparse(config), 32);
}

// Messages have the spelling that is there.
TEST(HfConfig, KeysHaveTheSpellingsThatTransformersAccepts) {
  EXPECT_EQ(Defaults("qwen3_moe", R"(, "num_experts": 9)").moe.router.num_experts, 9);
  EXPECT_EQ(Defaults("qwen3_moe", R"(, "num_local_experts": 9)").moe.router.num_experts, 9);
  EXPECT_EQ(Defaults("deepseek_v3", R"(, "num_local_experts": 16)").moe.router.num_experts, 16);
  const HfConfig kimi = Defaults("kimi_linear", R"(, "num_experts_per_tok": 3,
      "norm_topk_prob": false, "n_group": 4, "topk_group": 2, "n_shared_experts": 2)");
  EXPECT_EQ(kimi.moe.router.top_k, 3);
  EXPECT_EQ(kimi.moe.router.norm_topk_prob, false);
  EXPECT_EQ(kimi.moe.router.num_groups, 4);
  EXPECT_EQ(kimi.moe.shared_expert_ffn_hidden_size, 2048);
  ExpectDataLoss(R"({"model_type": "qwen3_moe", "num_experts": 0})", "num_experts is 0");
  ExpectDataLoss(R"({"model_type": "kimi_linear", "num_expert_group": 7})",
                 "num_expert_group is 7, expected");
  ExpectDataLoss(R"({"model_type": "afmoe", "route_scale": 0})", "route_scale is 0, expected");
}

int64_t ExpertsOf(const HfConfig& config) {
  return config.moe.router.num_experts;
}
int64_t TopKOf(const HfConfig& config) {
  return config.moe.router.top_k;
}
int64_t GroupsOf(const HfConfig& config) {
  return config.moe.router.num_groups;
}
int64_t SharedOf(const HfConfig& config) {
  return config.moe.shared_expert_ffn_hidden_size / config.moe.ffn_hidden_size;
}
int64_t WidthOf(const HfConfig& config) {
  return config.moe.ffn_hidden_size;
}

// Every key with two spellings, and which of them transformers 5.24 takes where both are there:
// AutoConfig of files with either order of the two.
TEST(HfConfig, OfTwoSpellingsTransformersChoiceCounts) {
  const struct {
    const char *model_types, *taken, *other;
    int64_t (*read)(const HfConfig&);
    int64_t one, two;
    const char* more;
  } keys[] = {
      {"mixtral minimax minimax_m2 gpt_oss", "num_experts", "num_local_experts", ExpertsOf, 16, 24,
       ""},
      {"hunyuan_v1_moe qwen3_moe olmoe flex_olmo jamba", "num_local_experts", "num_experts",
       ExpertsOf, 16, 24, ""},
      {"deepseek_v3 deepseek_v32 glm4_moe glm4_moe_lite glm_moe_dsa dots1 solar_open longcat_flash",
       "num_local_experts", "n_routed_experts", ExpertsOf, 16, 24,
       R"("num_experts_per_tok": 2, "n_shared_experts": 1)"},
      {"deepseek_v2", "num_experts", "n_routed_experts", ExpertsOf, 16, 24,
       R"("num_experts_per_tok": 2)"},
      {"ernie4_5_moe", "num_experts", "moe_num_experts", ExpertsOf, 16, 24, ""},
      {"kimi_linear bailing_hybrid", "num_experts", "num_local_experts", ExpertsOf, 16, 24, ""},
      {"hunyuan_v1_moe longcat_flash", "num_experts_per_tok", "moe_topk", TopKOf, 1, 3,
       R"("num_experts": 8)"},
      {"ernie4_5_moe", "num_experts_per_tok", "moe_k", TopKOf, 1, 3, ""},
      {"kimi_linear", "num_experts_per_token", "num_experts_per_tok", TopKOf, 1, 3, ""},
      {"bailing_hybrid", "num_experts_per_token", "num_experts_per_tok", TopKOf, 4, 6, ""},
      {"kimi_linear bailing_hybrid", "num_shared_experts", "n_shared_experts", SharedOf, 3, 5, ""},
      {"kimi_linear bailing_hybrid", "num_expert_group", "n_group", GroupsOf, 4, 8,
       R"("topk_group": 4)"},
      {"longcat_flash", "moe_intermediate_size", "expert_ffn_hidden_size", WidthOf, 32, 48, ""}};
  const auto set = [](const char* key, int64_t value) {
    return absl::StrCat(", \"", key, "\": ", value);
  };
  for (const auto& key : keys) {
    for (const absl::string_view model_type : absl::StrSplit(key.model_types, ' ')) {
      SCOPED_TRACE(absl::StrCat(model_type, ": ", key.taken, ", ", key.other));
      const auto number = [&](const std::string& values) {
        return key.read(
            Defaults(model_type, absl::StrCat(values, *key.more ? ", " : "", key.more)));
      };
      EXPECT_EQ(number(set(key.taken, key.one)), key.one);
      EXPECT_EQ(number(set(key.other, key.one)), key.one);
      EXPECT_EQ(number(set(key.taken, key.one) + set(key.other, key.two)), key.one);
      EXPECT_EQ(number(set(key.other, key.one) + set(key.taken, key.two)), key.two);
    }
  }
  for (const char* const model_type : {"kimi_linear", "bailing_hybrid"}) {
    EXPECT_EQ(Defaults(model_type, R"(, "moe_renormalize": true, "norm_topk_prob": false)")
                  .moe.router.norm_topk_prob,
              true);
  }
}

// As Hunyuan-A13B publishes it; one layer's configuration stands for all.
TEST(HfConfig, TopKMayBeAListOfOneNumber) {
  EXPECT_EQ(TopKOf(Defaults("hunyuan_v1_moe", R"(, "num_experts": 8, "moe_topk": [3, 3, 3])")), 3);
  ExpectUnsupported(
      R"({"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": [3, 2]})",
      "moe_topk is a list of different numbers, which is not supported, expected one");
  ExpectDataLoss(R"({"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": []})",
                 "moe_topk is a list of 0, expected a whole number");
  ExpectDataLoss(R"({"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": ["3"]})",
                 "moe_topk is");
  ExpectDataLoss(R"({"model_type": "longcat_flash", "moe_topk": [3, 3]})",
                 "moe_topk is a list of 2, expected a whole number");
}

TEST(HfConfig, WhatIsAddedToTheSumOfTheWeights) {
  EXPECT_FALSE(Defaults("deepseek_v3").moe.router.norm_epsilon.has_value());  // the gate's 1e-20
  EXPECT_EQ(Defaults("minimax_m2").moe.router.norm_epsilon, 0.0f);
  EXPECT_EQ(Defaults("lfm2_moe").moe.router.norm_epsilon, 1e-6f);
}

TEST(HfConfig, DeepSeekV2IgnoresNormalisationAndGroupsOfTheGreedyMethod) {
  const HfConfig config =
      Defaults("deepseek_v2", R"(, "num_experts_per_tok": 6, "norm_topk_prob": true)");
  const MoeLayerConfig& moe = config.moe;
  EXPECT_EQ(moe.router.gate, "deepseek-v2");
  EXPECT_EQ(moe.router.num_groups, 0);
  EXPECT_FALSE(moe.router.norm_topk_prob.has_value());
  EXPECT_FALSE(moe.gated_shared_expert);
  // Groups count with the limited method alone.
  EXPECT_EQ(Defaults("deepseek_v2", R"(, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3)")
                .moe.router.num_groups,
            0);
  const HfConfig limited =
      Defaults("deepseek_v2", R"(, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3,
                                   "topk_method": "group_limited_greedy")");
  EXPECT_EQ(limited.moe.router.num_groups, 8);
  EXPECT_EQ(limited.moe.router.group_top_k, 3);
}

TEST(HfConfig, PhiMoeHasTwoChoicesAndReadsItsRouterJitter) {
  EXPECT_EQ(Defaults("phimoe").moe.router.gate, "sparsemixer");
  EXPECT_EQ(Defaults("phimoe").moe.router.router_jitter, 0.01f);
  EXPECT_EQ(Defaults("phimoe", R"(, "router_jitter_noise": 0)").moe.router.router_jitter, 0.0f);
  EXPECT_EQ(Defaults("mixtral", R"(, "router_jitter_noise": 0.2)").moe.router.router_jitter,
            RouterConfig().router_jitter);  // noise on inputs there, in training
  ExpectDataLoss(R"({"model_type": "phimoe", "num_experts_per_tok": 3})",
                 "num_experts_per_tok is 3, expected 2, the only one of gate 'sparsemixer'");
  ExpectDataLoss(R"({"model_type": "phimoe", "router_jitter_noise": -0.01})",
                 "router_jitter_noise is -0.01, expected a finite number, 0 or more");
  ExpectDataLoss(R"({"model_type": "phimoe", "num_local_experts": 1})",
                 "num_experts_per_tok is 2, expected at most 1");
}

TEST(HfConfig, GptOssHasTheConstantsOfItsSwiGluAndIgnoresTheActivation) {
  const HfConfig plain = Defaults("gpt_oss", R"(, "hidden_act": "relu")");
  EXPECT_EQ(plain.moe.activation, Activation::kClampedSwiGlu);
  EXPECT_EQ(plain.moe.activation.alpha, 1.702f);
  EXPECT_EQ(plain.moe.activation.limit, 7.0f);
  EXPECT_TRUE(plain.moe.projection_biases);
  const HfConfig config = Defaults("gpt_oss", R"(, "swiglu_limit": 3.0, "swiglu_alpha": 1.5)");
  EXPECT_EQ(config.moe.activation.alpha, 1.5f);
  EXPECT_EQ(config.moe.activation.limit, 3.0f);
  ExpectUnsupported(R"({"model_type": "gpt_oss", "swiglu_limit": 0})", "swiglu_limit is 0");
  ExpectDataLoss(R"({"model_type": "gpt_oss", "swiglu_limit": null})", "swiglu_limit is null");
}

TEST(HfConfig, Llama4HasItsKeysInATextConfig) {
  const HfConfig nested = Parse(R"({"model_type": "llama4", "num_local_experts": 3,
      "text_config": {"num_local_experts": 5, "interleave_moe_layer_step": 2}})");
  EXPECT_EQ(nested.model_type(), "llama4_text");
  EXPECT_EQ(nested.moe.router.num_experts, 5);
  EXPECT_EQ(CountSparse(nested), 24);
  EXPECT_TRUE(nested.has_experts[1]);
}

TEST(HfConfig, WhichLayersHaveExperts) {
  const HfConfig qwen = Defaults("qwen2_moe", R"(, "num_hidden_layers": 6,
      "decoder_sparse_step": 2, "mlp_only_layers": [3, 99])");
  EXPECT_THAT(qwen.has_experts, ::testing::ElementsAre(false, true, false, false, false, true));
  EXPECT_EQ(CountSparse(Defaults("qwen3_moe", R"(, "mlp_only_layers": null)")), 24);
  const HfConfig llama = Defaults("llama4_text", R"(, "num_hidden_layers": 4,
      "moe_layers": [0, 3], "interleave_moe_layer_step": 2)");
  EXPECT_THAT(llama.has_experts, ::testing::ElementsAre(true, false, false, true));
  const HfConfig deepseek = Defaults("deepseek_v3", R"(, "num_hidden_layers": 2)");
  EXPECT_EQ(CountSparse(deepseek), 0);
  const HfConfig listed = Defaults("deepseek_v32", R"(, "num_hidden_layers": 3,
      "first_k_dense_replace": 0, "mlp_layer_types": ["sparse", "dense", "sparse"])");
  EXPECT_THAT(listed.has_experts, ::testing::ElementsAre(true, false, true));
  ExpectDataLoss(R"({"model_type": "deepseek_v32", "mlp_layer_types": ["sparse", 1]})",
                 "a list of dense and sparse");
  const HfConfig jamba = Defaults("jamba", R"(, "num_hidden_layers": 6,
      "expert_layer_period": 3, "expert_layer_offset": 2)");
  EXPECT_THAT(jamba.has_experts, ::testing::ElementsAre(false, false, true, false, false, true));
  EXPECT_EQ(CountSparse(Defaults("jamba", R"(, "num_experts": 1, "num_experts_per_tok": 1)")), 0);
  const HfConfig ernie = Defaults("ernie4_5_moe", R"(, "num_hidden_layers": 6,
      "moe_layer_interval": 2, "moe_layer_start_index": 2, "moe_layer_end_index": 4)");
  EXPECT_THAT(ernie.has_experts, ::testing::ElementsAre(false, false, false, true, false, false));
}

TEST(HfConfig, GeluIsExactUnlessItsNameSaysTanh) {
  EXPECT_EQ(Defaults("mixtral", R"(, "hidden_act": "gelu")").moe.activation, Activation::kGeGlu);
  for (const char* name : {"gelu_pytorch_tanh", "gelu_new"}) {
    const std::string key = absl::StrCat(R"(, "hidden_act": ")", name, "\"");
    EXPECT_EQ(Defaults("mixtral", key).moe.activation, Activation::kGeGluTanh) << name;
  }
  EXPECT_EQ(Defaults("mixtral", R"(, "hidden_act": "swish")").moe.activation, Activation::kSwiGlu);
}

TEST(HfConfig, RefusesWhatIsNoConfiguration) {
  ExpectDataLoss("", "line 1");
  ExpectDataLoss("[]", "no object");
  ExpectDataLoss("{}", "model_type");
  ExpectDataLoss(R"({"model_type": 3})", "model_type");
  ExpectDataLoss(R"({"model_type": "mixtral", "model_type": "olmoe"})", "twice");
  ExpectDataLoss(R"({"model_type": "llama4"})", "text_config");
  ExpectDataLoss(R"({"model_type": "llama4", "text_config": []})", "text_config");
  ExpectDataLoss(std::string(100, '['), "deep");
}

TEST(HfConfig, RefusesValuesOutOfRangeAndOfTheWrongKind) {
  const auto with = [](const std::string& value) {
    return R"({"model_type": "mixtral", )" + value + "}";
  };
  for (const char* bad : {"0", "-1", "1e2", "4096.0", "1048577", "9223372036854775808",
                          "18446744073709551616", "1e400", "\"8\"", "true", "null", "[8]", "{}"}) {
    ExpectDataLoss(with(absl::StrCat(R"("hidden_size": )", bad)),
                   std::string(bad) == "1e400" ? "" : "hidden_size is ");
  }
  ExpectDataLoss(with(R"("num_local_experts": 4097)"), "num_local_experts is 4097");
  ExpectDataLoss(with(R"("num_hidden_layers": 1000000000)"), "num_hidden_layers");
  ExpectDataLoss(with(R"("num_experts_per_tok": 9)"), "num_experts_per_tok is 9, expected");
  ExpectDataLoss(with(R"("hidden_act": 1)"), "hidden_act is 1");
  ExpectDataLoss(with(R"("num_local_experts": 4096, "num_experts_per_tok": 1,
                         "intermediate_size": 1048576, "hidden_size": 1048576)"),
                 "2^40");
  ExpectDataLoss(R"({"model_type": "olmoe", "norm_topk_prob": 1})", "true or false");
  ExpectDataLoss(R"({"model_type": "qwen2_moe", "mlp_only_layers": 3})", "mlp_only_layers is 3");
  ExpectDataLoss(R"({"model_type": "qwen2_moe", "mlp_only_layers": [1, -1]})", "not -1 in it");
  ExpectDataLoss(R"({"model_type": "deepseek_v2"})", "num_experts_per_tok is missing");
  ExpectDataLoss(R"({"model_type": "deepseek_v2", "num_experts_per_tok": 2,
                     "topk_method": "group_limited_greedy"})",
                 "n_group is missing");
  ExpectDataLoss(R"({"model_type": "deepseek_v3", "n_group": 7})", "n_group is 7, expected");
  ExpectDataLoss(R"({"model_type": "deepseek_v3", "n_group": 4, "topk_group": 5})",
                 "topk_group is 5, expected");
  ExpectDataLoss(R"({"model_type": "deepseek_v3", "routed_scaling_factor": "2"})",
                 "routed_scaling_factor");
}

TEST(HfConfig, NamesWhatIsNotSupportedAndWhatIs) {
  ExpectUnsupported(R"({"model_type": "dbrx"})", "expected one of mixtral, minimax");
  ExpectUnsupported(R"({"model_type": "mixtral", "hidden_act": "quick_gelu"})",
                    "hidden_act is 'quick_gelu'");
  ExpectUnsupported(
      R"({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}})",
      "quantization_config is an object");
  ExpectUnsupported(R"({"model_type": "llama4", "text_config": {"quantization_config": {}}})",
                    "text_config.quantization_config");
  ExpectUnsupported(R"({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "mlp_bias": true})",
                    "mlp_bias is true");
  ExpectUnsupported(
      R"({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "topk_method": "noaux_tc"})",
      "greedy or group_limited_greedy");
  EXPECT_TRUE(ParseHfConfig("c", R"({"model_type": "mixtral", "quantization_config": null})").ok());
}

// Python's json module writes them bare.
TEST(HfConfig, NumbersThatAreNotFiniteMayStandInKeysThatAreNotRead) {
  EXPECT_EQ(Defaults("mixtral", R"(, "time_step_limit": [0.0, Infinity], "x": NaN)").num_layers(),
            32);
  ExpectDataLoss(R"({"model_type": "deepseek_v3", "routed_scaling_factor": -Infinity})",
                 R"(routed_scaling_factor is "-Infinity", expected a finite number)");
  ExpectDataLoss(R"({"model_type": "mixtral", "hidden_size": NaN})",
                 R"(hidden_size is "NaN", expected a whole number from)");
}

TEST(HfConfig, ReadsFiles) {
  EXPECT_TRUE(absl::IsNotFound(ReadHfConfig("/no/such/config.json").status()));
}

}  // namespace
}  // namespace moe::hf
