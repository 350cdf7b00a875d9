// Whole public models: tests/golden/models against the logits that transformers computed.
#include "moe/hf/hf_model.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/run/session.h"
#include "tests/moe/hf/golden_run.h"
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

HfModel OpenGolden(const std::string& family) {
  auto model = HfModel::Open(GoldenFolder(family));
  EXPECT_TRUE(model.ok()) << model.status();
  return *std::move(model);
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
    const auto losses = Losses(*rank.model, rank.context(), golden.tokens, static_cast<int32_t>(v));
    for (size_t t = 0; t < losses.size(); ++t) {
      ASSERT_NEAR(losses[t], GoldenLoss(golden, vocab, t, v), 1e-4)
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
  const auto model = lm::Stage<BFloat16>::Create(hf.config(), store, context).value();
  ASSERT_TRUE(hf.Load(store, context).ok());
  EXPECT_EQ(Losses(*model, context, golden.tokens, 3),
            Losses(*trained.model, context, golden.tokens, 3));
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
  const auto again = ParseModelConfig("config.json", json).value();
  EXPECT_EQ(ModelConfigJson(*again.rule, again.model, 64, "float32"), json);
}

TEST(HfModel, RanksThatShareExpertsHaveTheBitsOfOne) {
  ExpectTheBitsOfOneRankOnTwo(OpenGolden("mixtral"), ReadRun("mixtral").tokens);
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

TEST(HfModel, ARankLoadsItsBoxOfATensor) {
  const HfModel hf = OpenGolden("mixtral");
  ::moe::testing::OneRank<float> whole(hf.config());
  ASSERT_TRUE(hf.Load(whole.store, whole.session->context()).ok());
  const std::string name = "model.embed_tokens.weight";
  const MatrixView<const float> all = whole.store.Find(name)->view<float>();
  const int64_t rows = all.rows(), cols = all.cols();
  for (const TensorBox& box :
       {TensorBox{rows / 2, rows, 0, cols}, TensorBox{0, rows, cols / 2, cols}}) {
    ParameterStore store(DType::kFloat32, 1);
    const Parameter& held = **store.Add({.name = "embedding",
                                         .rows = box.rows(),
                                         .cols = box.cols(),
                                         .parts = {{.name = name, .rows = rows, .cols = cols}},
                                         .boxes = {box}});
    ASSERT_TRUE(hf.Load(store, whole.session->context()).ok());
    for (int64_t r = 0; r < box.rows(); ++r) {
      for (int64_t c = 0; c < box.cols(); ++c) {
        EXPECT_EQ(held.view<float>()(r, c), all(box.row_begin + r, box.col_begin + c));
      }
    }
  }
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
  refused(R"({"num_key_value_heads": 1})",
          "tensor 'model.layers.0.self_attn.k_proj.weight': has shape [12, 16], expected [6, 16] "
          "from the configuration");
  refused(R"({"tie_word_embeddings": false})", "tensor 'lm_head.weight': is missing");
  Write("qwen3_moe/config.json", Changed("qwen3_moe", "{}"));
  EXPECT_TRUE(HfModel::Open(folder).ok());
  fs::remove(folder + "/model.safetensors");
  EXPECT_EQ(HfModel::Open(folder).status().code(), kNotFound);
}

// As transformers: with a warning, where most of a file may be another's.
TEST_F(HfModelFolder, TensorsThatTheConfigurationDoesNotHaveAreOneWarning) {
  const std::string folder = Copy("qwen3_moe");
  EXPECT_THAT(HfModel::Open(folder)->warnings(), ::testing::IsEmpty());
  Write("qwen3_moe/config.json", Changed("qwen3_moe", R"({"num_hidden_layers": 1})"));
  const auto model = HfModel::Open(folder).value();
  ASSERT_EQ(model.warnings().size(), 1);
  // Two norms, two of heads, four projections, a router and four experts of three.
  EXPECT_THAT(model.warnings()[0],
              ::testing::AllOf(
                  HasSubstr("model.safetensors: 21 tensor(s) not read, which qwen3_moe's "
                            "configuration does not have: model.layers.1.input_layernorm.weight, "),
                  HasSubstr(" and 18 more")));
}

// As transformers saves it with save_original_format=False: experts fused, and Qwen3-MoE's names
// without "model.".
TEST_F(HfModelFolder, FusedExpertsAndBareNamesAreTheSameModel) {
  for (const std::string family : {"mixtral", "qwen3_moe"}) {
    SCOPED_TRACE(family);
    const std::string folder = Copy(family);
    fs::copy_file(folder + "/fused.safetensors", folder + "/model.safetensors",
                  fs::copy_options::overwrite_existing);
    const auto fused = HfModel::Open(folder).value();
    EXPECT_THAT(fused.warnings(), ::testing::IsEmpty());
    const HfModel golden = OpenGolden(family);
    ::moe::testing::OneRank<float> got(fused.config()), expected(golden.config());
    ASSERT_TRUE(fused.Load(got.store, got.session->context()).ok());
    ASSERT_TRUE(golden.Load(expected.store, expected.session->context()).ok());
    for (const auto& parameter : expected.store.parameters()) {
      const std::string& name = parameter->spec().name;
      EXPECT_EQ(got.store.Find(name)->master(), parameter->master()) << name;
    }
    const size_t tensors = Checkpoint::Open(folder)->Names().size();
    EXPECT_EQ(fused.tensors().size(), tensors);
    Write(family + "/config.json", Changed(family, R"({"tie_word_embeddings": false})"));
    if (family == "qwen3_moe") ExpectRefused(folder, "tensor 'lm_head.weight': is missing");
  }
}

TEST_F(HfModelFolder, ExpertsInTwoLayoutsOrInPartOfOneAreRefused) {
  Write("config.json", Changed("mixtral", "{}"));
  const std::string one = "model.layers.1.block_sparse_moe.experts.2.w3.weight",
                    fused = "model.layers.1.mlp.experts.down_proj";
  const auto write = [&](const std::string& file, const std::string& without,
                         const std::string& with) {
    Checkpoint from = Checkpoint::Open(GoldenFolder("mixtral") + file).value();
    std::list<std::vector<float>> values;
    std::vector<SafetensorsSource> tensors;
    std::vector<std::string> names = from.Names();
    if (!with.empty()) names.push_back(with);
    for (const std::string& name : names) {
      if (name == without) continue;
      const auto found = from.Find(name == with ? names.front() : name).value();
      values.emplace_back(found.tensor->num_elements);
      tensors.push_back({.name = name,
                         .type = SafetensorsType::kF32,
                         .shape = found.tensor->shape,
                         .bytes = BytesOf<float>(values.back())});
    }
    ASSERT_TRUE(WriteSafetensors(Path("model.safetensors"), tensors).ok());
  };
  write("/model.safetensors", one, "");
  ExpectRefused(root_.string(), absl::StrCat("tensor '", one, "': is missing"));
  write("/fused.safetensors", fused, "");
  ExpectRefused(root_.string(), absl::StrCat("tensor '", fused, "': is missing"));
  write("/model.safetensors", "", fused);
  ExpectRefused(root_.string(), absl::StrCat("': is there, and so is '", fused,
                                             "', expected the layer's experts one by one or"));
}

TEST_F(HfModelFolder, ExpertsStayInTheMappedFilesWithTheBitsOfCopies) {
  std::vector<std::pair<std::string, std::string>> models;
  for (const std::string& family : ModelTypes()) models.emplace_back(family, "");
  models.emplace_back("mixtral", "/fused.safetensors");
  for (const auto& [family, file] : models) {
    Checkpoint files = Checkpoint::Open(GoldenFolder(family) + file).value();
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
    const auto hf = HfModel::Open(root_.string()).value();
    const GoldenRun golden = ReadRun(family);
    std::vector<float> losses[2];
    int64_t bytes[2] = {}, experts = 0;
    for (const LoadBy by : {LoadBy::kCopy, LoadBy::kBorrow}) {
      const auto session = Session::Create({}, std::move(MakeLocalWorld({}).front())).value();
      ParameterStore store(DType::kBFloat16, 3, session->context());
      store.set_use(StoreUse::kInference);
      const auto model =
          lm::Stage<BFloat16>::Create(hf.config(), store, session->context()).value();
      ASSERT_TRUE(hf.Load(store, session->context(), by).ok());
      losses[by == LoadBy::kBorrow] = Losses(*model, session->context(), golden.tokens, 3);
      bytes[by == LoadBy::kBorrow] = store.bytes();
      experts = store.borrowed_bytes();
      EXPECT_EQ(experts > 0, by == LoadBy::kBorrow);
    }
    EXPECT_EQ(losses[1], losses[0]) << family;
    EXPECT_EQ(bytes[0] - bytes[1], experts);
    // Mixtral's gate and up projections lie apart, unless they are fused.
    if (family != "mixtral") continue;
    EXPECT_EQ(experts, 2 * 4 * (file.empty() ? 1 : 3) * 12 * 16 * 2);
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
      const auto hf = HfModel::Open(root_.string()).value();
      EXPECT_EQ(hf.config().tied_embeddings, !differs);
      ASSERT_EQ(hf.warnings().size(), differs ? 1 : 0);
      ::moe::testing::OneRank<float> rank(hf.config());
      ASSERT_TRUE(hf.Load(rank.store, rank.session->context()).ok());
      const Parameter* const own = rank.store.Find("lm_head.weight");
      ASSERT_EQ(own != nullptr, differs);
      if (!differs) continue;
      EXPECT_THAT(
          hf.warnings()[0],
          HasSubstr("model.safetensors: lm_head.weight is another than model.embed_tokens"));
      EXPECT_EQ(own->ReadMaster(*rank.session->context().compute).value(), output);
      if (golden.config().tied_embeddings) continue;
      ::moe::testing::OneRank<float> expected(golden.config());
      ASSERT_TRUE(golden.Load(expected.store, expected.session->context()).ok());
      const std::vector<int32_t> tokens = ReadRun(family).tokens;
      EXPECT_EQ(Losses(*rank.model, rank.context(), tokens, 3),
                Losses(*expected.model, expected.context(), tokens, 3));
    }
  }
}

// As transformers generates: the file that there is, and nothing from the other.
TEST_F(HfModelFolder, TextsEndWithTheTokensOfTheGenerationConfigIfThereIsOne) {
  Write("config.json", R"({"eos_token_id": 7})");
  EXPECT_THAT(ReadEndTokens(root_.string()).value(), ::testing::ElementsAre(7));
  Write("generation_config.json", R"({"eos_token_id": [7, 9], "x": Infinity})");
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

}  // namespace
}  // namespace moe::hf
