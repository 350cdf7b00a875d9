#include "moe/hf/hf_weights.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <absl/strings/match.h>
#include <gmock/gmock.h>

#include "kernels/base/status_macros.h"
#include "moe/hf/family.h"
#include "tests/moe/io/io_test.h"
#include "tests/moe/status_is.h"

namespace moe::hf {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using enum absl::StatusCode;
using testing::StatusIs;

// H 2, F 2, E 2, K 1.
constexpr char kGptOssConfig[] = R"({"model_type": "gpt_oss", "hidden_size": 2,
    "intermediate_size": 2, "num_local_experts": 2, "num_experts_per_tok": 1,
    "num_hidden_layers": 4})";

struct Source {
  std::string name;
  std::vector<int64_t> shape;
  SafetensorsType type = SafetensorsType::kF32;
};

// The tensors of a gpt-oss layer of H 2, F 2, E 2.
std::vector<Source> GptOssTensors(const std::string& prefix) {
  return {
      {prefix + "router.weight", {2, 2}},           {prefix + "router.bias", {2}},
      {prefix + "experts.gate_up_proj", {2, 2, 4}}, {prefix + "experts.gate_up_proj_bias", {2, 4}},
      {prefix + "experts.down_proj", {2, 2, 2}},    {prefix + "experts.down_proj_bias", {2, 2}}};
}

// All parameters of the layer that a rank with the second expert alone holds, as `like` but for
// names and shapes.
void AddLayer(const std::string& prefix, ParameterStore& store, ParameterSpec like = {}) {
  like.initializer = Initializer::kZeros;
  for (const auto& [name, rows, cols] : std::vector<std::tuple<std::string, int64_t, int64_t>>{
           {"gate.weight", 2, 2},
           {"gate.bias", 1, 2},
           {"experts.1.gate_up_proj.weight", 4, 2},
           {"experts.1.gate_up_proj.bias", 1, 4},
           {"experts.1.down_proj.weight", 2, 2},
           {"experts.1.down_proj.bias", 1, 2}}) {
    like.name = prefix + name;
    like.rows = rows;
    like.cols = cols;
    EXPECT_TRUE(store.Add(like).ok());
  }
}

class HfWeightsTest : public IoTest {
 protected:
  // Element i of every tensor is i.
  std::string WriteTensors(const std::vector<Source>& sources) const {
    std::vector<float> values(64);
    std::iota(values.begin(), values.end(), 0.0f);
    std::vector<SafetensorsSource> tensors;
    for (const Source& s : sources) {
      int64_t size = BitsOf(s.type) / 8;
      for (const int64_t dim : s.shape) size *= dim;
      tensors.push_back({.name = s.name,
                         .type = s.type,
                         .shape = s.shape,
                         .bytes = BytesOf<float>(values).first(size)});
    }
    const std::string path = Path("model.safetensors");
    EXPECT_TRUE(WriteSafetensors(path, tensors).ok());
    return path;
  }

  absl::StatusOr<LayerWeights> Find(const std::string& config, const std::string& path,
                                    std::optional<int64_t> layer = std::nullopt) const {
    MOE_ASSIGN_OR_RETURN(const HfConfig parsed, ParseHfConfig("config.json", config));
    MOE_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(path));
    return LayerWeights::Find(parsed, std::move(checkpoint), layer);
  }

  LayerWeights GptOss() const {
    auto weights = Find(kGptOssConfig, WriteTensors(GptOssTensors("model.layers.0.mlp.")));
    EXPECT_TRUE(weights.ok()) << weights.status();
    return *std::move(weights);
  }

  void ExpectDataLoss(const std::string& config, const std::vector<Source>& tensors,
                      const std::string& part, std::optional<int64_t> layer = std::nullopt) {
    const std::string path = WriteTensors(tensors);
    const auto weights = Find(config, path, layer);
    ASSERT_FALSE(weights.ok());
    EXPECT_THAT(weights, StatusIs(kDataLoss, path));
    EXPECT_THAT(std::string(weights.status().message()), HasSubstr(part));
  }
};

TEST_F(HfWeightsTest, GptOssTensorsAreTransposedAndUnwoven) {
  const LayerWeights weights = GptOss();
  ParameterStore store(DType::kFloat32, 0);
  AddLayer("", store);
  const auto stream = MakeInlineStream();
  ASSERT_TRUE(weights.Load(store, *stream, *stream).ok());
  // Expert 1's part of [E, H, 2F] is [[8, 9, 10, 11], [12, 13, 14, 15]]: columns g0 u0 g1 u1.
  EXPECT_THAT(store.Find("experts.1.gate_up_proj.weight")->master(),
              ElementsAre(8, 12, 10, 14, 9, 13, 11, 15));
  EXPECT_THAT(store.Find("experts.1.gate_up_proj.bias")->master(), ElementsAre(4, 6, 5, 7));
  // [E, F, H]: [[4, 5], [6, 7]] transposed
  EXPECT_THAT(store.Find("experts.1.down_proj.weight")->master(), ElementsAre(4, 6, 5, 7));
}

TEST_F(HfWeightsTest, FrozenMatricesOf16BitsAreLoadedWithoutMasters) {
  const LayerWeights weights = GptOss();
  ParameterStore store(DType::kBFloat16, 0);
  AddLayer("", store, {.trainable = false});
  const auto stream = MakeInlineStream();
  ASSERT_TRUE(weights.Load(store, *stream, *stream).ok());
  EXPECT_THAT(*store.Find("experts.1.gate_up_proj.weight")->ReadMaster(*stream),
              ElementsAre(8, 12, 10, 14, 9, 13, 11, 15));
  EXPECT_THAT(store.Find("experts.1.gate_up_proj.bias")->master(), ElementsAre(4, 6, 5, 7));
  EXPECT_EQ(store.bytes(), (4 + 8 + 4) * 2 + (2 + 4 + 2) * 6);
}

TEST_F(HfWeightsTest, LayersOfOneStoreAreLoadedByTheirPrefixes) {
  const LayerWeights weights = GptOss();
  ParameterStore store(DType::kFloat32, 0);
  for (const char* prefix : {"layers.1.", "layers.10."}) AddLayer(prefix, store);
  const auto stream = MakeInlineStream();
  const auto loaded = [&](int layer) {
    const auto all = store.parameters().subspan(layer * 6, 6);
    return std::count_if(all.begin(), all.end(),
                         [](const auto& parameter) { return parameter->master().back() != 0; });
  };
  ASSERT_TRUE(weights.Load(store, *stream, *stream, "layers.1.").ok());
  EXPECT_EQ(loaded(0), 6);
  EXPECT_EQ(loaded(1), 0);
  ASSERT_TRUE(weights.Load(store, *stream, *stream, "layers.10.").ok());
  EXPECT_EQ(loaded(1), 6);
}

TEST_F(HfWeightsTest, LoadRefusesWhatIsNotTheWholeLayerNamingTheParameter) {
  const LayerWeights weights = GptOss();
  ParameterStore store(DType::kFloat32, 0);
  const auto stream = MakeInlineStream();
  const auto expect_refused = [&](absl::string_view prefix, absl::StatusCode code,
                                  const std::string& named) {
    EXPECT_THAT(weights.Load(store, *stream, *stream, prefix), StatusIs(code, named));
  };
  const auto add = [&](const std::string& name, int64_t rows, int64_t cols) {
    const ParameterSpec spec = {
        .name = name, .rows = rows, .cols = cols, .initializer = Initializer::kZeros};
    EXPECT_TRUE(store.Add(spec).ok());
  };
  constexpr auto kInvalid = kInvalidArgument;
  expect_refused("", kNotFound, "starts with ''");
  AddLayer("layer.", store);
  // Named without its prefix, it is no parameter that this layer has.
  expect_refused("", kInvalid, "'layer.gate.weight'");
  expect_refused("layer", kInvalid, "'layer.gate.weight'");
  expect_refused("other.", kNotFound, "other.");
  add("layer.extra", 2, 1);  // no tensor fills it
  expect_refused("layer.", kInvalid, "'layer.extra'");
  add("small.gate.weight", 1, 2);
  expect_refused("small.", kInvalid, "'small.gate.weight'");
  // Without what every rank has, and without half of an expert.
  add("bare.gate.weight", 2, 2);
  expect_refused("bare.", kInvalid, "'bare.gate.bias' is not in the store");
  add("bare.gate.bias", 1, 2);
  EXPECT_TRUE(weights.Load(store, *stream, *stream, "bare.").ok());  // a rank without experts
  add("bare.experts.0.down_proj.weight", 2, 2);
  expect_refused("bare.", kInvalid, "'bare.experts.0.down_proj.bias' is not in the store");
  for (const auto& parameter : store.parameters()) {
    if (absl::StartsWith(parameter->spec().name, "bare.gate.")) continue;
    EXPECT_THAT(parameter->master(), Each(0)) << parameter->spec().name;
  }
}

void ExpectCoversEveryElementOnce(const TensorLayout& layout) {
  MoeLayerConfig moe = {.ffn_hidden_size = 3, .shared_expert_ffn_hidden_size = 5};
  moe.router.num_experts = 4;
  moe.router.hidden_size = 7;
  std::map<ParameterKind, std::vector<int>> covered;
  for (const TensorRule& rule : layout.tensors) {
    std::vector<int>& count = covered[rule.parameter];
    count.resize(ShapeOf(rule.parameter, moe).size());
    int64_t size = 1;
    for (const int64_t dim : TensorShape(rule, moe)) size *= dim;
    if (rule.experts == ExpertAxis::kStacked) size /= moe.router.num_experts;
    std::vector<int> read(size);
    ForEachElement(rule, moe, [&](int64_t i, int64_t j) {
      ++count.at(i);
      ++read.at(j);
    });
    EXPECT_THAT(read, Each(1)) << rule.name;
  }
  for (const auto& [kind, count] : covered) EXPECT_THAT(count, Each(1)) << ParameterName(kind, 0);
}

// Covers every rule of every layout of every model.
TEST(TensorRules, EveryElementOfEveryParameterComesFromOneTensor) {
  for (const Family& family : Families()) {
    SCOPED_TRACE(std::string(family.model_type));
    for (const TensorLayout& layout : LayoutsOf(family)) ExpectCoversEveryElementOnce(layout);
  }
}

TEST_F(HfWeightsTest, LayerIsTheFirstWithExpertsOrTheOneAskedFor) {
  std::vector<Source> tensors = GptOssTensors("language_model.model.layers.1.mlp.");
  for (const Source& s : GptOssTensors("language_model.model.layers.3.mlp.")) tensors.push_back(s);
  // Beyond num_hidden_layers: no layer of this model.
  for (const Source& s : GptOssTensors("language_model.model.layers.4.mlp.")) tensors.push_back(s);
  const std::string path = WriteTensors(tensors);
  const auto first = Find(kGptOssConfig, path).value();
  EXPECT_EQ(first.layer(), 1);
  EXPECT_THAT(first.available_layers(), ElementsAre(1, 3));
  const auto third = Find(kGptOssConfig, path, 3).value();
  EXPECT_EQ(third.layer(), 3);
  EXPECT_EQ(third.tensors()[0].found.tensor->name,
            "language_model.model.layers.3.mlp.router.weight");
  EXPECT_TRUE(absl::IsOutOfRange(Find(kGptOssConfig, path, 4).status()));
  EXPECT_TRUE(absl::IsOutOfRange(Find(kGptOssConfig, path, -1).status()));
  EXPECT_TRUE(absl::IsDataLoss(Find(kGptOssConfig, path, 2).status()));
}

TEST_F(HfWeightsTest, RefusesTensorsThatDoNotFitTheConfiguration) {
  const std::string prefix = "model.layers.0.mlp.";
  std::vector<Source> tensors = GptOssTensors(prefix);
  tensors[4].shape = {2, 2, 3};
  ExpectDataLoss(kGptOssConfig, tensors,
                 "experts.down_proj': has shape [2, 2, 3], expected [2, 2, 2]");
  tensors[4].shape = {8};
  ExpectDataLoss(kGptOssConfig, tensors, "has shape [8], expected [2, 2, 2]");
  tensors = GptOssTensors(prefix);
  tensors[2].type = SafetensorsType::kF8E4M3;
  ExpectDataLoss(kGptOssConfig, tensors, "is F8_E4M3, expected F32, F16, BF16 or F64");
  tensors = GptOssTensors(prefix);
  tensors.pop_back();
  ExpectDataLoss(kGptOssConfig, tensors, "experts.down_proj_bias': is missing");
  tensors = GptOssTensors(prefix);
  tensors[2].name += "_blocks";
  ExpectDataLoss(kGptOssConfig, tensors, "MXFP4");
  ExpectDataLoss(kGptOssConfig, {{"model.layers.00.mlp.router.weight", {2, 2}}}, "is missing");
  ExpectDataLoss(kGptOssConfig, {}, "is missing");
}

constexpr char kQwen3Config[] = R"({"model_type": "qwen3_moe", "hidden_size": 2,
    "moe_intermediate_size": 2, "num_experts": 2, "num_experts_per_tok": 1,
    "num_hidden_layers": 4, "mlp_only_layers": [2]})";

TEST_F(HfWeightsTest, ADenseLayerIsNoChoice) {
  EXPECT_THAT(Find(kQwen3Config, WriteTensors({}), 2), StatusIs(kOutOfRange, "0, 1, 3"));
}

// Each message names what both layouts have in that place.
TEST_F(HfWeightsTest, ARouterWithoutExpertsOrWithExpertsTwiceIsRefused) {
  const std::string prefix = "model.layers.0.mlp.";
  const std::string one = prefix + "experts.0.gate_proj.weight";
  std::vector<Source> tensors = {{prefix + "gate.weight", {2, 2}}};
  ExpectDataLoss(kQwen3Config, tensors,
                 one + "': is missing, and so is '" + prefix + "experts.gate_up_proj'");
  tensors.push_back({prefix + "experts.down_proj", {2, 2, 2}});
  ExpectDataLoss(kQwen3Config, tensors, "experts.gate_up_proj': is missing");
  tensors.push_back({one, {2, 2}});
  ExpectDataLoss(kQwen3Config, tensors,
                 one + "': is there, and so is '" + prefix + "experts.down_proj'");
}

}  // namespace
}  // namespace moe::hf
