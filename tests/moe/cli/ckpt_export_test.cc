// moe ckpt export: names, shapes, values and configuration against the checkpoint.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "comm/local/local_world.h"
#include "moe/checkpoint/reader.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/checkpoint/writer.h"
#include "moe/cli/base/command.h"
#include "moe/cli/ckpt/ckpt.h"
#include "moe/hf/hf_model.h"
#include "moe/io/checkpoint.h"
#include "moe/io/safetensors.h"
#include "moe/lm/run_settings.h"
#include "moe/lm/stage.h"
#include "moe/run/session.h"
#include "tests/moe/checkpoint/faulty_files.h"
#include "tests/moe/io/io_test.h"

namespace moe::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kVocab = 5, kHidden = 8, kWidth = 3, kExperts = 2, kLayers = 2;

lm::TrainConfig TinyConfig() {
  lm::TrainConfig config;
  config.sequence_length = 96;
  config.model.vocab_size = kVocab;
  config.model.hidden_size = kHidden;
  config.model.num_layers = kLayers;
  config.model.num_attention_heads = 2;
  config.model.moe.ffn_hidden_size = kWidth;
  config.model.moe.router.num_experts = kExperts;
  return config;
}

std::vector<CanonicalTensor> TinyTensors() {
  std::vector<CanonicalTensor> tensors = {
      {.name = "model.embed_tokens.weight", .rows = kVocab, .cols = kHidden},
      {.name = "model.norm.weight", .cols = kHidden},
      {.name = "lm_head.weight", .rows = kVocab, .cols = kHidden}};
  for (int64_t l = 0; l < kLayers; ++l) {
    const std::string layer = absl::StrCat("model.layers.", l, ".");
    for (const char* const norm : {"input_layernorm", "post_attention_layernorm"}) {
      tensors.push_back({.name = layer + norm + ".weight", .cols = kHidden});
    }
    for (const char* const part : {"q", "k", "v", "o"}) {
      tensors.push_back({.name = absl::StrCat(layer, "self_attn.", part, "_proj.weight"),
                         .rows = kHidden,
                         .cols = kHidden});
    }
    tensors.push_back({.name = layer + "mlp.gate.weight", .rows = kExperts, .cols = kHidden});
    for (int64_t e = 0; e < kExperts; ++e) {
      const std::string expert = absl::StrCat(layer, "mlp.experts.", e, ".");
      tensors.push_back({.name = expert + "gate_proj.weight", .rows = kWidth, .cols = kHidden});
      tensors.push_back({.name = expert + "up_proj.weight", .rows = kWidth, .cols = kHidden});
      tensors.push_back({.name = expert + "down_proj.weight", .rows = kHidden, .cols = kWidth});
    }
  }
  return tensors;
}

class CkptExportTest : public IoTest {
 protected:
  // Element i of tensor t is 100 t + i; the first of the last tensor is `first_of_last`.
  void Save(const lm::TrainConfig& config, float first_of_last = 0.5f) {
    const std::vector<CanonicalTensor> tensors = TinyTensors();
    std::vector<StatePart> parts;
    values_.clear();
    for (size_t t = 0; t < tensors.size(); ++t) {
      std::vector<float>& values = values_[tensors[t].name];
      for (int64_t i = 0; i < tensors[t].size(); ++i) {
        values.push_back(100.0f * static_cast<float>(t) + static_cast<float>(i));
      }
      if (t + 1 == tensors.size()) values[0] = first_of_last;
      parts.push_back(
          {.tensor = &tensors[t],
           .state = "master",
           .box = {.row_end = tensors[t].rows, .col_end = tensors[t].cols},
           .data = MatrixView<const float>(values.data(), tensors[t].rows, tensors[t].cols)});
    }
    WriteCheckpoint(SectionsOf(config), parts);
  }
  static CheckpointSections SectionsOf(const lm::TrainConfig& config) {
    const auto settings = lm::SettingsOf(config, {});
    return {.numerics = lm::SettingsJson(settings, SettingKind::kNumerics),
            .model = lm::SettingsJson(settings, SettingKind::kModel),
            .trainer = lm::SettingsJson(settings, SettingKind::kTrainer)};
  }
  void WriteCheckpoint(const CheckpointSections& sections, absl::Span<const StatePart> parts) {
    fs::remove_all(Path("run"));
    auto writer = CheckpointWriter::Create({.folder = Path("run"), .files = &disk_}, 0, 1).value();
    ASSERT_TRUE(writer->Start({.step = 7, .sections = sections}, parts).ok());
    const auto world = MakeLocalWorld({.ranks = 1});
    ASSERT_TRUE(writer->Publish(*world[0], *MakeInlineStream()).ok());
  }
  std::string Step() const { return Path("run/") + StepFolderName(7); }

  // Runs the command; returns its exit code and sets error_.
  int Export(std::vector<std::string> more = {}, const std::string& out = "",
             const std::string& format = "mixtral") {
    std::vector<std::string> args = {"export", Step(),  "--format",
                                     format,   "--out", out.empty() ? Path("model") : out};
    args.insert(args.end(), more.begin(), more.end());
    ::testing::internal::CaptureStderr();
    const ExitCode code = CkptCommand({.program = "moe", .args = std::move(args)});
    error_ = ::testing::internal::GetCapturedStderr();
    return static_cast<int>(code);
  }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(Path("model"))) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

  ::moe::testing::FaultyFiles disk_;
  std::map<std::string, std::vector<float>> values_;  // the checkpoint's values, by canonical name
  std::string error_;
};

// WhatWasImportedIsExportedByteForByte checks names, shapes and values.
TEST_F(CkptExportTest, MixtralIsAFolderThatTransformersReads) {
  Save(TinyConfig());
  ASSERT_EQ(Export(), 0) << error_;
  EXPECT_EQ(error_, "");
  EXPECT_THAT(Names(), ::testing::UnorderedElementsAre("config.json", "generation_config.json",
                                                       "model.safetensors"));
  const auto file = SafetensorsFile::Open(Path("model/model.safetensors")).value();
  EXPECT_EQ(file.tensors().size(), values_.size());
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(Json::parse(Read(Path("model/config.json"))),
            Json::parse(R"({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
                "vocab_size": 5, "hidden_size": 8, "intermediate_size": 3, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4,
                "num_local_experts": 2, "num_experts_per_tok": 2, "max_position_embeddings": 96,
                "rope_theta": 10000.0, "rms_norm_eps": 1e-05, "initializer_range": 0.02,
                "hidden_act": "silu", "attention_dropout": 0.0, "sliding_window": null,
                "tie_word_embeddings": false, "bos_token_id": null, "eos_token_id": null,
                "dtype": "float32"})"));
  EXPECT_EQ(Json::parse(Read(Path("model/generation_config.json"))),
            Json::parse(R"({"_from_model_config": true, "bos_token_id": null,
                            "eos_token_id": null})"));
}

// Through the checkpoint's settings.
TEST_F(CkptExportTest, WhatNoPassReadsIsExportedAsItWasImported) {
  lm::TrainConfig config = TinyConfig();
  config.model.max_position_embeddings = 4096;
  config.model.bos_token_id = 1;
  config.model.eos_token_ids = {2, 4};
  Save(config);
  ASSERT_EQ(Export(), 0) << error_;
  const Json model = Json::parse(Read(Path("model/config.json")));
  EXPECT_EQ(model["max_position_embeddings"], 4096);
  const Json generation = Json::parse(Read(Path("model/generation_config.json")));
  for (const Json& tokens : {model, generation}) {
    EXPECT_EQ(tokens["bos_token_id"], 1);
    EXPECT_EQ(tokens["eos_token_id"], Json({2, 4}));
  }
  // Checkpoints from before these settings lack them.
  CheckpointSections sections = SectionsOf(config);
  Json trainer = Json::parse(sections.trainer);
  for (const char* const key : {"max_position_embeddings", "bos_token_id", "eos_token_id"}) {
    EXPECT_EQ(trainer.erase(key), 1) << key;
  }
  sections.trainer = trainer.dump();
  const auto stored = lm::StoredConfig(sections).value();
  EXPECT_EQ(stored.model.max_position_embeddings, 0);
  EXPECT_FALSE(stored.model.bos_token_id.has_value());
  EXPECT_THAT(stored.model.eos_token_ids, ElementsAre());
}

// The tensors of a folder, by name: shape, type and bytes.
std::map<std::string, std::pair<std::vector<int64_t>, std::string>> TensorsOf(
    const std::string& folder) {
  std::map<std::string, std::pair<std::vector<int64_t>, std::string>> tensors;
  auto files = Checkpoint::Open(folder).value();
  for (const std::string& name : files.Names()) {
    const auto found = files.Find(name).value();
    const auto bytes = found.file->Data(*found.tensor);
    tensors[name] = {found.tensor->shape, std::string(bytes.begin(), bytes.end())};
  }
  return tensors;
}

// Every family's golden model, loaded into the reference model, saved and exported again.
TEST_F(CkptExportTest, WhatWasImportedIsExportedByteForByte) {
  for (const std::string& family : hf::ModelTypes()) {
    SCOPED_TRACE(family);
    const std::string folder = absl::StrCat(MOE_GOLDEN_MODELS, "/", family);
    const auto hf = hf::HfModel::Open(folder).value();
    lm::TrainConfig config;
    config.model = hf.config();
    const auto session = Session::Create({}, std::move(MakeLocalWorld({.ranks = 1}).front()));
    ParameterStore store(DType::kFloat32, 1);
    ASSERT_TRUE(lm::Stage<float>::Create(config.model, store, (*session)->context()).ok());
    ASSERT_TRUE(hf.Load(store, (*session)->context()).ok());
    std::vector<StatePart> parts;
    for (const auto& parameter : store.parameters()) {
      const float* data = parameter->master().data();
      for (const CanonicalTensor& part : parameter->parts()) {
        parts.push_back({.tensor = &part,
                         .state = "master",
                         .box = {.row_end = part.rows, .col_end = part.cols},
                         .data = MatrixView<const float>(data, part.rows, part.cols)});
        data += part.size();
      }
    }
    WriteCheckpoint(SectionsOf(config), parts);
    ASSERT_EQ(Export({}, "", family), 0) << error_;
    EXPECT_EQ(TensorsOf(Path("model")), TensorsOf(folder));
    const auto again = hf::HfModel::Open(Path("model")).value();
    fs::remove_all(Path("model"));
    for (const std::string& other : hf::ModelTypes()) {
      if (other == family) continue;
      EXPECT_EQ(Export({}, "", other), 2) << other;
    }
  }
}

TEST_F(CkptExportTest, SixteenBitsAreRoundedOnce) {
  Save(TinyConfig(), 1.0f + 1.0f / 256);  // half way, to even
  for (const auto& [flag, type, name] : {std::tuple("bf16", SafetensorsType::kBF16, "bfloat16"),
                                         std::tuple("f16", SafetensorsType::kF16, "float16")}) {
    ASSERT_EQ(Export({"--dtype", flag}), 0) << error_;
    const auto file = SafetensorsFile::Open(Path("model/model.safetensors")).value();
    const auto* const tensor = file.Find("model.layers.1.block_sparse_moe.experts.1.w2.weight");
    EXPECT_EQ(tensor->type, type);
    std::vector<float> values(tensor->num_elements);
    ASSERT_TRUE(file.ReadFloat32(*tensor, absl::MakeSpan(values)).ok());
    EXPECT_EQ(values[0], type == SafetensorsType::kBF16 ? 1.0f : 1.0f + 1.0f / 256);
    EXPECT_EQ(Json::parse(Read(Path("model/config.json")))["dtype"], name);
    fs::remove_all(Path("model"));
  }
  Save(TinyConfig(), 1e5f);
  EXPECT_EQ(Export({"--dtype", "f16"}), 2);
  EXPECT_THAT(error_, HasSubstr("has the weight 100000, expected --dtype f32"));
  EXPECT_THAT(Names(), ElementsAre());
}

TEST_F(CkptExportTest, ShardsHaveAnIndex) {
  Save(TinyConfig());
  auto reader = CheckpointReader::Open(Step()).value();
  const int64_t embedding = kVocab * kHidden * 4;
  const auto done =
      ckpt::Export(reader, {.folder = Path("model"), .max_shard_bytes = 12 * embedding}).value();
  const Json index = Json::parse(Read(Path("model/model.safetensors.index.json")));
  std::map<std::string, int64_t> bytes;
  int64_t total = 0;
  for (const auto& [name, shard] : index["weight_map"].items()) {
    const auto file = SafetensorsFile::Open(Path("model/" + shard.get<std::string>())).value();
    ASSERT_NE(file.Find(name), nullptr) << name;
    bytes[shard] += file.Find(name)->size_bytes;
    total += file.Find(name)->size_bytes;
  }
  EXPECT_EQ(index["weight_map"].size(), values_.size());
  EXPECT_EQ(index["metadata"]["total_size"], total);
  ASSERT_GT(bytes.size(), 1u);
  EXPECT_EQ(bytes.size() + 3, Names().size());
  EXPECT_EQ(bytes.begin()->first,
            absl::StrCat("model-00001-of-0000", bytes.size(), ".safetensors"));
  for (const auto& [shard, size] : bytes) EXPECT_LE(size, 12 * embedding) << shard;
}

TEST_F(CkptExportTest, WhatIsNoMixtralIsRefused) {
  using Change = std::function<void(lm::TrainConfig&)>;
  const std::vector<std::pair<Change, std::string>> cases = {
      {[](auto& c) { c.model.moe.router.gate = "gshard"; },
       "--router is gshard, expected mixtral, qwen3 or topk"},
      {[](auto& c) { c.model.moe_layer_freq = 2; }, "--moe-layer-freq is 2, expected 1"},
      {[](auto& c) { c.model.moe.activation = Activation::kRelu2; },
       "expected swiglu, geglu or geglu_tanh"},
      {[](auto& c) { c.model.moe.projection_biases = true; }, "--moe-projection-biases is 1"},
      {[](auto& c) { c.model.moe.shared_expert_ffn_hidden_size = 4; },
       "--moe-shared-expert-intermediate-size is 4, expected 0"},
      {[](auto& c) { c.model.moe.router.num_zero_experts = 1; }, "--num-zero-experts is 1"},
      {[](auto& c) { c.model.moe.router.score_function = ScoreFunction::kSigmoid; },
       "--moe-router-score-function is sigmoid, expected softmax"},
      {[](auto& c) { c.model.moe.router.pre_softmax = true; }, "--moe-router-pre-softmax is 1"},
      {[](auto& c) { c.model.moe.router.num_groups = 2; }, "--moe-router-num-groups is 2"},
      {[](auto& c) { c.model.moe.router.scaling_factor = 2.5f; },
       "--moe-router-topk-scaling-factor is 2.5, expected 1"},
      {[](auto& c) { c.model.moe.router.expert_bias = true; }, "enable-expert-bias is 1"},
      {[](auto& c) { c.model.qkv_bias = true; }, "--add-qkv-bias is 1, expected 0"},
      {[](auto& c) { c.model.qk_norm = lm::QkNorm::kHead; },
       "--qk-layernorm is head, expected none"},
      {[](auto& c) { c.model.moe.router.norm_topk_prob = false; }, "norm_topk_prob is 0"},
      {[](auto& c) { c.model.moe.router.norm_epsilon = 0.25f; }, "norm_epsilon is 0.25"}};
  for (const auto& [change, message] : cases) {
    lm::TrainConfig config = TinyConfig();
    change(config);
    Save(config);
    EXPECT_EQ(Export(), 2) << message;
    EXPECT_THAT(error_, HasSubstr(message));
    EXPECT_FALSE(fs::exists(Path("model")));
  }
}

TEST_F(CkptExportTest, ACapacityLimitIsWarnedOf) {
  lm::TrainConfig config = TinyConfig();
  config.model.moe.router.capacity_factor = 1.25;
  Save(config);
  EXPECT_EQ(Export(), 0);
  EXPECT_THAT(error_, HasSubstr("warning: the run dropped tokens beyond"));
  EXPECT_THAT(error_, HasSubstr("1.25"));
}

// An incomplete checkpoint, or one that no run can have, is malformed content.
TEST_F(CkptExportTest, WhatNoRunCanSayIsDamaged) {
  lm::TrainConfig config = TinyConfig();
  config.micro_batch_size = std::numeric_limits<int64_t>::max();
  Save(config);
  EXPECT_EQ(Export(), 3);
  EXPECT_THAT(error_, HasSubstr("--micro-batch-size is 9223372036854775807"));
  fs::remove_all(Path("run"));
  const CanonicalTensor tensor = {.name = "weight", .rows = 1, .cols = 1};
  const float value = 1;
  WriteCheckpoint({}, {{.tensor = &tensor,
                        .state = "master",
                        .box = {.row_end = 1, .col_end = 1},
                        .data = MatrixView<const float>(&value, 1, 1)}});
  EXPECT_EQ(Export(), 3);
  EXPECT_THAT(error_, HasSubstr("the checkpoint does not say"));
}

TEST_F(CkptExportTest, ErrorsHaveTheirExitCodes) {
  Save(TinyConfig());
  EXPECT_EQ(Export({}, "/proc/none/model"), 4) << error_;
  EXPECT_EQ(Export({}, Path("run")), 2);
  EXPECT_THAT(error_, HasSubstr("expected an empty folder, or one that is not there"));

  lm::TrainConfig deeper = TinyConfig();
  deeper.model.num_layers = 3;
  Save(deeper);
  EXPECT_EQ(Export(), 3);
  EXPECT_THAT(error_, HasSubstr("no weights 'model.layers.2.input_layernorm.weight'"));
  lm::TrainConfig shallower = TinyConfig();
  shallower.model.num_layers = 1;
  Save(shallower);
  EXPECT_EQ(Export(), 3);
  EXPECT_THAT(error_, HasSubstr("weights 'model.layers.1.input_layernorm.weight', which its"));

  Save(TinyConfig(), std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(Export(), 3);
  EXPECT_THAT(error_, HasSubstr("down_proj.weight' has 1 values that are not finite"));
  EXPECT_THAT(Names(), ElementsAre());
  EXPECT_EQ(CkptCommand({.program = "moe", .args = {"verify", Step()}}), ExitCode::kBadInput);

  Save(TinyConfig());
  std::fstream(Step() + "/shard-00000-of-00001.safetensors",
               std::ios::in | std::ios::out | std::ios::binary)
      .seekp(-1, std::ios::end)
      .put('x');
  EXPECT_EQ(Export(), 3);
  EXPECT_THAT(error_, HasSubstr("has hash"));
  EXPECT_THAT(Names(), ElementsAre());
  fs::remove(Step() + "/manifest.json");
  EXPECT_EQ(Export(), 2);
}

}  // namespace
}  // namespace moe::cli
