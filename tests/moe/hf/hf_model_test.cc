// Whole public models: tests/golden/models against the logits that transformers computed.
#include "moe/hf/hf_model.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/session.h"
#include "tests/moe/io/io_test.h"
#include "tests/moe/lm/transformer_harness.h"
#include "tests/moe/status_is.h"

namespace moe::hf {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using ::testing::HasSubstr;
using enum absl::StatusCode;
using testing::StatusIs;

std::string GoldenFolder(const std::string& family) {
  return absl::StrCat(MOE_GOLDEN_MODELS, "/", family);
}

HfModel OpenGolden(const std::string& family) {
  auto model = HfModel::Open(GoldenFolder(family));
  EXPECT_TRUE(model.ok()) << model.status();
  return *std::move(model);
}

struct GoldenRun {
  std::vector<int32_t> tokens;
  std::vector<float> logits;  // [T, V]
};

GoldenRun ReadRun(const std::string& family) {
  const auto file = SafetensorsFile::Open(GoldenFolder(family) + "/io.safetensors");
  EXPECT_TRUE(file.ok()) << file.status();
  GoldenRun run;
  const SafetensorsTensor& tokens = *file->Find("tokens");
  std::vector<int64_t> ids(tokens.num_elements);
  std::memcpy(ids.data(), file->Data(tokens).data(), tokens.size_bytes);
  run.tokens.assign(ids.begin(), ids.end());
  run.logits.resize(file->Find("logits")->num_elements);
  EXPECT_TRUE(file->ReadFloat32(*file->Find("logits"), absl::MakeSpan(run.logits)).ok());
  return run;
}

// The losses of all tokens, should `target` follow each of them.
template <typename T>
std::vector<float> Losses(lm::Transformer<T>& model, const std::vector<int32_t>& tokens,
                          int32_t target) {
  const std::vector<int32_t> targets(tokens.size(), target);
  const int64_t offsets[] = {0, static_cast<int64_t>(tokens.size())};
  std::vector<float> losses(tokens.size());
  const absl::Status status =
      model.Evaluate(tokens, targets, {.sequence_offsets = offsets, .mode = Mode::kEvaluation},
                     absl::MakeSpan(losses), nullptr);
  EXPECT_TRUE(status.ok()) << status;
  return losses;
}

class HfModelGolden : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Families, HfModelGolden, ::testing::ValuesIn(ModelTypes()),
                         [](const auto& of) { return of.param; });

// Minus a loss is a logit less the logarithm of the sum of all exponentials.
TEST_P(HfModelGolden, HasTheLogitsOfTransformers) {
  const HfModel hf = OpenGolden(GetParam());
  ::moe::testing::OneRank<float> rank(hf.config());
  ASSERT_TRUE(hf.Load(rank.store, rank.session->context()).ok());
  const GoldenRun golden = ReadRun(GetParam());
  const int64_t vocab = hf.config().vocab_size;
  for (int64_t v = 0; v < vocab; ++v) {
    const auto losses = Losses(*rank.model, golden.tokens, static_cast<int32_t>(v));
    for (size_t t = 0; t < losses.size(); ++t) {
      double sum = 0;
      for (int64_t w = 0; w < vocab; ++w) sum += std::exp(double{golden.logits[t * vocab + w]});
      ASSERT_NEAR(losses[t], std::log(sum) - double{golden.logits[t * vocab + v]}, 1e-4)
          << "token " << t << ", logit " << v;
    }
  }
}

TEST_P(HfModelGolden, AStoreForInferenceHasTheSameBitsInTwoBytesAnElement) {
  const HfModel hf = OpenGolden(GetParam());
  const GoldenRun golden = ReadRun(GetParam());
  ::moe::testing::OneRank<BFloat16> trained(hf.config());
  ASSERT_TRUE(hf.Load(trained.store, trained.session->context()).ok());
  ParameterStore store(DType::kBFloat16, 3);
  store.set_use(StoreUse::kInference);
  const Context& context = trained.session->context();
  const auto model = lm::Transformer<BFloat16>::Create(hf.config(), store, context);
  ASSERT_TRUE(model.ok()) << model.status();
  ASSERT_TRUE(hf.Load(store, context).ok());
  EXPECT_EQ(Losses(**model, golden.tokens, 3), Losses(*trained.model, golden.tokens, 3));
  int64_t bytes = 0;
  for (const auto& p : store.parameters()) bytes += p->size() * (p->spec().rows == 1 ? 6 : 2);
  EXPECT_EQ(store.bytes(), bytes);
}

TEST_P(HfModelGolden, ConfigurationsAreWrittenAsTheyAreRead) {
  const HfModel hf = OpenGolden(GetParam());
  ASSERT_TRUE(CheckExpressible(hf.rule(), hf.config()).ok());
  const std::string json = ModelConfigJson(hf.rule(), hf.config(), 64, "float32");
  const Json written = Json::parse(json);
  const Json original = Json::parse(std::ifstream(GoldenFolder(GetParam()) + "/config.json"));
  for (const auto& [key, value] : written.items()) {
    if (key == "rope_theta") {
      EXPECT_EQ(value, original["rope_parameters"]["rope_theta"]);
    } else if (original.contains(key) && key != "sliding_window") {
      EXPECT_EQ(value, original[key]) << key;
    }
  }
  const auto again = ParseModelConfig("config.json", json);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(ModelConfigJson(*again->rule, again->model, 64, "float32"), json);
}

TEST(HfModel, RanksThatShareExpertsHaveTheBitsOfOne) {
  const HfModel hf = OpenGolden("mixtral");
  const GoldenRun golden = ReadRun("mixtral");
  ::moe::testing::OneRank<float> one(hf.config());
  ASSERT_TRUE(hf.Load(one.store, one.session->context()).ok());
  const std::vector<float> expected = Losses(*one.model, golden.tokens, 3);
  const SessionOptions options = {.expert_parallel_size = 2};
  ::moe::testing::RunSessions(2, options, [&](Session& session) -> absl::Status {
    ParameterStore store(DType::kFloat32, 3);
    MOE_ASSIGN_OR_RETURN(const auto model,
                         lm::Transformer<float>::Create(hf.config(), store, session.context()));
    MOE_RETURN_IF_ERROR(hf.Load(store, session.context()));
    EXPECT_EQ(Losses(*model, golden.tokens, 3), expected);
    return absl::OkStatus();
  });
}

TEST(HfModel, AModelOfAnotherShapeIsRefusedByName) {
  const HfModel hf = OpenGolden("mixtral");
  lm::TransformerConfig config = hf.config();
  config.vocab_size = 41;
  ::moe::testing::OneRank<float> rank(config);
  EXPECT_THAT(hf.Load(rank.store, rank.session->context()),
              StatusIs(kInvalidArgument,
                       "'model.embed_tokens.weight' of 656 elements, expected one of the model"));
}

// The golden configuration of a family with changes: null removes a key.
std::string Changed(const std::string& family, const std::string& changes) {
  Json json = Json::parse(std::ifstream(GoldenFolder(family) + "/config.json"));
  json.merge_patch(Json::parse(changes));
  return json.dump();
}

class HfModelFolder : public IoTest {
 protected:
  std::string Copy(const std::string& family) const {
    fs::copy(GoldenFolder(family), Path(family));
    return Path(family);
  }
  // The golden weights with an output layer, which is returned: the embedding's or, if it differs,
  // the model's own, or the embedding but for its last element.
  std::vector<float> WriteWithOutput(const std::string& family, bool differs) const {
    Checkpoint files = Checkpoint::Open(GoldenFolder(family)).value();
    const auto read = [&](const std::string& name) {
      const CheckpointTensor found = files.Find(name).value();
      std::vector<float> values(found.tensor->num_elements);
      EXPECT_TRUE(found.file->ReadFloat32(*found.tensor, absl::MakeSpan(values)).ok());
      return values;
    };
    const std::string embedding = "model.embed_tokens.weight", output = "lm_head.weight";
    std::vector<float> of_output = read(embedding);
    if (differs && files.Contains(output)) of_output = read(output);
    if (differs && !files.Contains(output)) of_output.back() += 1;
    std::list<std::vector<float>> values;
    std::vector<SafetensorsSource> tensors;
    const auto add = [&](const std::string& name, const std::string& shaped_as) {
      tensors.push_back({.name = name,
                         .type = SafetensorsType::kF32,
                         .shape = files.Find(shaped_as).value().tensor->shape,
                         .bytes = BytesOf<float>(values.back())});
    };
    for (const std::string& name : files.Names()) {
      if (name == output) continue;
      values.push_back(read(name));
      add(name, name);
    }
    values.push_back(of_output);
    add(output, embedding);
    EXPECT_TRUE(WriteSafetensors(Path("model.safetensors"), tensors).ok());
    return of_output;
  }
  static void ExpectRefused(const std::string& folder, const std::string& message) {
    EXPECT_THAT(HfModel::Open(folder), StatusIs(kDataLoss, message));
  }
};

TEST_F(HfModelFolder, TensorsThatAreNotTheConfigurationsAreRefusedByName) {
  const std::string folder = Copy("qwen3_moe");
  const auto refused = [&](const std::string& changes, const std::string& message) {
    Write("qwen3_moe/config.json", Changed("qwen3_moe", changes));
    ExpectRefused(folder, message);
  };
  refused(R"({"num_hidden_layers": 3})",
          "model.safetensors: tensor 'model.layers.2.input_layernorm.weight': is missing");
  refused(R"({"num_hidden_layers": 1})", "tensor 'model.layers.1.");
  refused(R"({"num_key_value_heads": 1})",
          "tensor 'model.layers.0.self_attn.k_proj.weight': has shape [12, 16], expected [6, 16] "
          "from the configuration");
  refused(R"({"tie_word_embeddings": false})", "tensor 'lm_head.weight': is missing");
  Write("qwen3_moe/config.json", Changed("qwen3_moe", "{}"));
  EXPECT_TRUE(HfModel::Open(folder).ok());
  fs::remove(folder + "/model.safetensors");
  EXPECT_EQ(HfModel::Open(folder).status().code(), kNotFound);
}

TEST_F(HfModelFolder, ExpertsStayInTheMappedFilesWithTheBitsOfCopies) {
  for (const std::string& family : ModelTypes()) {
    Checkpoint files = Checkpoint::Open(GoldenFolder(family)).value();
    std::vector<SafetensorsSource> tensors;
    std::list<std::vector<BFloat16>> values;
    for (const std::string& name : files.Names()) {
      const CheckpointTensor found = files.Find(name).value();
      std::vector<float> exact(found.tensor->num_elements);
      ASSERT_TRUE(found.file->ReadFloat32(*found.tensor, absl::MakeSpan(exact)).ok());
      values.emplace_back(exact.begin(), exact.end());
      tensors.push_back({.name = name,
                         .type = SafetensorsType::kBF16,
                         .shape = found.tensor->shape,
                         .bytes = BytesOf<BFloat16>(values.back())});
    }
    ASSERT_TRUE(WriteSafetensors(Path("model.safetensors"), tensors).ok());
    Write("config.json", Changed(family, "{}"));
    const auto hf = HfModel::Open(root_.string());
    ASSERT_TRUE(hf.ok()) << hf.status();
    const GoldenRun golden = ReadRun(family);
    std::vector<float> losses[2];
    int64_t bytes[2] = {}, experts = 0;
    for (const LoadBy by : {LoadBy::kCopy, LoadBy::kBorrow}) {
      const auto session = Session::Create({}, std::move(MakeLocalWorld({}).front())).value();
      ParameterStore store(DType::kBFloat16, 3, session->context());
      store.set_use(StoreUse::kInference);
      const auto model =
          lm::Transformer<BFloat16>::Create(hf->config(), store, session->context()).value();
      ASSERT_TRUE(hf->Load(store, session->context(), by).ok());
      losses[by == LoadBy::kBorrow] = Losses(*model, golden.tokens, 3);
      bytes[by == LoadBy::kBorrow] = store.bytes();
      experts = store.borrowed_bytes();
      EXPECT_EQ(experts > 0, by == LoadBy::kBorrow);
    }
    EXPECT_EQ(losses[1], losses[0]) << family;
    EXPECT_EQ(bytes[0] - bytes[1], experts);
  }
}

// As transformers 5.24: tensors that differ are not tied, whatever config.json says; the golden
// logits of a model with an output layer of its own are the same with the flag.
TEST_F(HfModelFolder, AnOutputLayerThatDiffersFromTheEmbeddingIsNotTied) {
  for (const std::string& family : ModelTypes()) {
    SCOPED_TRACE(family);
    const HfModel golden = OpenGolden(family);
    for (const bool differs : {false, true}) {
      const std::vector<float> output = WriteWithOutput(family, differs);
      Write("config.json", Changed(family, R"({"tie_word_embeddings": true})"));
      const auto hf = HfModel::Open(root_.string());
      ASSERT_TRUE(hf.ok()) << hf.status();
      EXPECT_EQ(hf->config().tied_embeddings, !differs);
      ASSERT_EQ(hf->warnings().size(), differs ? 1 : 0);
      ::moe::testing::OneRank<float> rank(hf->config());
      ASSERT_TRUE(hf->Load(rank.store, rank.session->context()).ok());
      const Parameter* const own = rank.store.Find("lm_head.weight");
      ASSERT_EQ(own != nullptr, differs);
      if (!differs) continue;
      EXPECT_THAT(
          hf->warnings()[0],
          HasSubstr("model.safetensors: lm_head.weight is another than model.embed_tokens"));
      EXPECT_EQ(own->ReadMaster(*rank.session->context().compute).value(), output);
      if (golden.config().tied_embeddings) continue;
      ::moe::testing::OneRank<float> expected(golden.config());
      ASSERT_TRUE(golden.Load(expected.store, expected.session->context()).ok());
      const std::vector<int32_t> tokens = ReadRun(family).tokens;
      EXPECT_EQ(Losses(*rank.model, tokens, 3), Losses(*expected.model, tokens, 3));
    }
  }
}

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
      const auto config = ParseModelConfig("config.json", json.dump());
      ASSERT_TRUE(config.ok()) << config.status();
      const Json written =
          Json::parse(ModelConfigJson(*config->rule, config->model, 64, "float32"));
      const Json generation = Json::parse(GenerationConfigJson(config->model));
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
    const auto config = ParseModelConfig(
        "config.json", Changed(family, R"({"max_position_embeddings": null, "bos_token_id": null,
                                           "eos_token_id": null})"));
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->model.max_position_embeddings, positions);
    EXPECT_EQ(config->model.bos_token_id, bos);
    EXPECT_EQ(config->model.eos_token_ids, eos);
  }
}

// As transformers generates: the file that there is, and nothing from the other.
TEST_F(HfModelFolder, TextsEndWithTheTokensOfTheGenerationConfigIfThereIsOne) {
  Write("config.json", R"({"eos_token_id": 7})");
  EXPECT_THAT(ReadEndTokens(root_.string()).value(), ::testing::ElementsAre(7));
  Write("generation_config.json", R"({"eos_token_id": [7, 9]})");
  EXPECT_THAT(ReadEndTokens(root_.string()).value(), ::testing::ElementsAre(7, 9));
  Write("generation_config.json", R"({"eos_token_id": null})");
  EXPECT_THAT(ReadEndTokens(root_.string()).value(), ::testing::IsEmpty());
  Write("generation_config.json", "{}");
  EXPECT_THAT(ReadEndTokens(root_.string()).value(), ::testing::IsEmpty());
  Write("generation_config.json", R"({"eos_token_id": "7"})");
  EXPECT_THAT(ReadEndTokens(root_.string()),
              StatusIs(kDataLoss, "eos_token_id is \"7\", expected"));
  Write("generation_config.json", "[]");
  EXPECT_THAT(ReadEndTokens(root_.string()), StatusIs(kDataLoss, "the document is no object"));
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
  // Of both objects the older one counts, if it says anything.
  const char kBoth[] = R"({"rope_scaling": {"type": "default"}, "rope_theta": 5e5,
      "rope_parameters": {"rope_theta": 7e5}})";
  EXPECT_EQ(parsed("olmoe", kBoth).rotary_base, 5e5f);
  EXPECT_EQ(parsed("olmoe", R"({"rope_scaling": {}, "rope_parameters": {"rope_theta": 7e5}})")
                .rotary_base,
            7e5f);
}

}  // namespace
}  // namespace moe::hf
