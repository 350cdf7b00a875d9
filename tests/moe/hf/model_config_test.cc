// config.json of whole public models: what is refused, kept and assumed.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "moe/hf/model_rule.h"
#include "tests/moe/hf/golden_model.h"
#include "tests/moe/status_is.h"

namespace moe::hf {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;
using enum absl::StatusCode;
using testing::StatusIs;

TEST(ModelConfig, WhatIsNotComputedIsRefusedByKey) {
  constexpr auto kUnknown = kUnimplemented, kWrong = kDataLoss;
  const struct {
    const char* family;
    const char* changes;
    absl::StatusCode code;
    const char* message;
  } cases[] = {
      {"mixtral", R"({"sliding_window": 16})", kUnknown, "sliding_window is 16"},
      {"qwen3_moe", R"({"use_sliding_window": true})", kUnknown, "use_sliding_window is true"},
      {"olmoe", R"({"clip_qkv": 8.0})", kUnknown, "clip_qkv is 8.0"},
      {"qwen3_moe", R"({"attention_bias": true})", kUnknown, "attention_bias is true"},
      {"olmoe", R"({"rope_scaling": {"type": "linear", "factor": 2.0}})", kUnknown,
       "rope_scaling is of the type linear"},
      {"mixtral", R"({"rope_parameters": {"rope_type": "yarn"}})", kUnknown,
       "rope_parameters is of the type yarn"},
      {"mixtral", R"({"rope_parameters": {"partial_rotary_factor": 0.5}})", kUnknown,
       "rope_parameters is of a part of each head"},
      {"mixtral", R"({"hidden_act": "relu"})", kUnknown, "hidden_act"},
      {"mixtral", R"({"quantization_config": {"bits": 4}})", kUnknown, "quantization_config"},
      {"mixtral", R"({"model_type": "granitemoe"})", kUnknown,
       "model_type is granitemoe, which is not supported, expected mixtral, olmoe, qwen2_moe, "
       "qwen3_moe"},
      {"qwen3_moe", R"({"mlp_only_layers": [0, 1]})", kUnknown, "mlp_only_layers"},
      {"qwen3_moe", R"({"num_hidden_layers": 3, "mlp_only_layers": [2]})", kUnknown,
       "mlp_only_layers"},
      {"qwen2_moe", R"({"decoder_sparse_step": 3})", kUnknown, "decoder_sparse_step"},
      {"mixtral", R"({"num_hidden_layers": 60000, "num_local_experts": 4000})", kWrong,
       "expected at most 10^6 tensors in all"},
      {"mixtral", R"({"num_key_value_heads": 3})", kWrong,
       "num_key_value_heads is 3, expected a divisor of the 4 attention heads, nearest 2"},
      {"mixtral", R"({"head_dim": 5})", kWrong, "head_dim is 5, expected an even number"},
      {"olmoe", R"({"hidden_size": 18})", kWrong, "hidden_size is 18"},
      {"mixtral", R"({"rms_norm_eps": 0})", kWrong, "rms_norm_eps is 0"},
      {"mixtral", R"({"rope_parameters": 3})", kWrong, "rope_parameters is 3, expected an object"},
      {"mixtral", R"({"vocab_size": null})", kWrong, "vocab_size is missing"},
      {"mixtral", R"({"num_key_value_heads": null})", kWrong, "num_key_value_heads is missing"},
      {"mixtral", R"({"num_attention_heads": null})", kWrong, "num_attention_heads is missing"}};
  for (const auto& [family, changes, code, message] : cases) {
    SCOPED_TRACE(changes);
    const auto config = ParseModelConfig("config.json", Changed(family, changes));
    EXPECT_THAT(config, StatusIs(code, "config.json: "));
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(message));
  }
}

// What no pass reads: it is written again as it was read.
TEST(ModelConfig, WhatNoPassReadsIsKept) {
  for (const std::string& family : ModelTypes()) {
    SCOPED_TRACE(family);
    for (const char* const eos : {"null", "7", "[7, 9]"}) {
      const std::string document = Changed(
          family, R"({"max_position_embeddings": 4096, "bos_token_id": 3, "eos_token_id": 0})");
      Json json = Json::parse(document);
      json["eos_token_id"] = Json::parse(eos);
      const auto config = ParseModelConfig("config.json", json.dump()).value();
      const Json written = Json::parse(ModelConfigJson(*config.rule, config.model, 64, "float32"));
      const Json generation = Json::parse(GenerationConfigJson(config.model));
      EXPECT_EQ(written["max_position_embeddings"], 4096);
      for (const Json& tokens : {written, generation}) {
        EXPECT_EQ(tokens["bos_token_id"], 3);
        EXPECT_EQ(tokens["eos_token_id"], json["eos_token_id"]);
      }
    }
    // Sequences of training may be longer.
    const auto config = ParseModelConfig("config.json", Changed(family, "{}"));
    EXPECT_EQ(Json::parse(ModelConfigJson(*config->rule, config->model, 100,
                                          "float32"))["max_position_embeddings"],
              100);
  }
}

// The class defaults of transformers 5.24.
TEST(ModelConfig, WhatNoPassReadsHasTheDefaultsOfTransformers) {
  const struct {
    const char* family;
    int64_t positions;
    std::optional<int64_t> bos;
    std::vector<int32_t> eos;
  } defaults[] = {{"mixtral", 131072, 1, {2}},
                  {"olmoe", 4096, {}, {50279}},
                  {"qwen2_moe", 32768, {}, {}},
                  {"qwen3_moe", 32768, {}, {}}};
  for (const auto& [family, positions, bos, eos] : defaults) {
    const auto config =
        ParseModelConfig("config.json",
                         Changed(family, R"({"max_position_embeddings": null, "bos_token_id": null,
                                           "eos_token_id": null})"))
            .value();
    EXPECT_EQ(config.model.max_position_embeddings, positions);
    EXPECT_EQ(config.model.bos_token_id, bos);
    EXPECT_EQ(config.model.eos_token_ids, eos);
  }
}

TEST(ModelConfig, KeysThatAreAbsentHaveTheDefaultsOfTransformers) {
  const auto parsed = [](const std::string& family, const std::string& changes) {
    const auto config = ParseModelConfig("config.json", Changed(family, changes));
    EXPECT_TRUE(config.ok()) << config.status();
    return config->model;
  };
  const char kNone[] = R"({"rope_parameters": null, "head_dim": null, "rms_norm_eps": null,
      "tie_word_embeddings": null, "qkv_bias": null})";
  const lm::TransformerConfig mixtral = parsed("mixtral", kNone);
  EXPECT_EQ(mixtral.rotary_base, 1e6f);
  EXPECT_EQ(mixtral.norm_epsilon, 1e-5f);
  EXPECT_EQ(mixtral.head_dim(), 4);
  const lm::TransformerConfig qwen2 = parsed("qwen2_moe", kNone);
  EXPECT_EQ(qwen2.rotary_base, 1e4f);
  EXPECT_EQ(qwen2.norm_epsilon, 1e-6f);
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(parsed("qwen2_moe", R"({"qkv_bias": false})").qkv_bias);
  EXPECT_FALSE(parsed("qwen3_moe", kNone).tied_embeddings);
  EXPECT_EQ(parsed("olmoe", R"({"num_key_value_heads": null})").key_value_heads(), 4);
  // As transformers 4 writes it.
  EXPECT_EQ(parsed("olmoe", R"({"rope_parameters": null, "rope_theta": 5e5})").rotary_base, 5e5f);
  // Where both objects are present, the older one counts, unless it is empty.
  const char kBoth[] = R"({"rope_scaling": {"type": "default"}, "rope_theta": 5e5,
      "rope_parameters": {"rope_theta": 7e5}})";
  EXPECT_EQ(parsed("olmoe", kBoth).rotary_base, 5e5f);
  EXPECT_EQ(parsed("olmoe", R"({"rope_scaling": {}, "rope_parameters": {"rope_theta": 7e5}})")
                .rotary_base,
            7e5f);
}

}  // namespace
}  // namespace moe::hf
