// Dense models that get experts: tests/golden/models against the logits that transformers computed.
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "moe/hf/hf_model.h"
#include "moe/run/session.h"
#include "tests/moe/hf/golden_run.h"
#include "tests/moe/lm/transformer_harness.h"
#include "tests/moe/status_is.h"

namespace moe::hf {
namespace {

using enum absl::StatusCode;
using testing::StatusIs;

class UpcycledGolden : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Families, UpcycledGolden, ::testing::ValuesIn(DenseModelTypes()),
                         [](const auto& of) { return of.param; });

// Equal experts whose weights sum to 1 are the dense network: what is left is the rounding of its
// 24 losses of some 4 nats in float32, beside logits in float64.
TEST_P(UpcycledGolden, HasTheLossOfTheDenseModelInTransformers) {
  const GoldenRun golden = ReadRun(GetParam());
  std::vector<int32_t> targets(golden.tokens.begin() + 1, golden.tokens.end());
  targets.push_back(0);
  for (const Upcycling& upcycling : {Upcycling{.experts = 1}, Upcycling{.experts = 5},
                                     Upcycling{.experts = 4, .moe_layer_freq = 2}}) {
    const auto hf = HfModel::Open(GoldenFolder(GetParam()), upcycling);
    ASSERT_TRUE(hf.ok()) << hf.status();
    EXPECT_THAT(hf->warnings(), ::testing::IsEmpty());
    ::moe::testing::OneRank<float> rank(hf->config());
    ASSERT_TRUE(hf->Load(rank.store, rank.session->context()).ok());
    const auto losses = Losses(*rank.model, rank.context(), golden.tokens, targets);
    double sum = 0, expected = 0;
    for (size_t t = 0; t < losses.size(); ++t) {
      sum += losses[t];
      expected += GoldenLoss(golden, hf->config().vocab_size, t, targets[t]);
    }
    const auto count = static_cast<double>(losses.size());
    EXPECT_NEAR(sum / count, expected / count, 1e-6) << upcycling.experts << " experts";
  }
}

// The values of a parameter of a model that starts from the golden Llama.
std::vector<float> Upcycled(const Upcycling& upcycling, const std::string& name) {
  const HfModel hf = HfModel::Open(GoldenFolder("llama"), upcycling).value();
  ::moe::testing::OneRank<float> rank(hf.config());
  EXPECT_TRUE(hf.Load(rank.store, rank.session->context()).ok());
  const Parameter* const parameter = rank.store.Find(name);
  const auto view = parameter->view<float>();
  return {view.data(), view.data() + view.rows() * view.cols()};
}

TEST(UpcyclingTest, AddsNoiseToCopiesAlone) {
  const Upcycling plain = {.experts = 3}, noisy = {.experts = 3, .noise = 0.01, .seed = 7};
  const std::string layer = "model.layers.1.mlp.";
  const std::string down = layer + "experts.2.down_proj.weight";
  const std::vector<float> copy = Upcycled(plain, down), changed = Upcycled(noisy, down);
  double squares = 0;
  for (size_t i = 0; i < copy.size(); ++i) squares += std::pow(changed[i] - copy[i], 2);
  // 320 numbers: their deviation is within a sixth of 0.01, four times its own.
  EXPECT_NEAR(std::sqrt(squares / static_cast<double>(copy.size())), 0.01, 0.0016);
  EXPECT_EQ(Upcycled(plain, layer + "experts.0.down_proj.weight"), copy);
  EXPECT_NE(Upcycled(noisy, layer + "experts.0.down_proj.weight"), changed);
  EXPECT_NE(Upcycled({.experts = 3, .noise = 0.01, .seed = 8}, down), changed);
  for (const std::string& name : {layer + "gate.weight", std::string("model.norm.weight")}) {
    EXPECT_EQ(Upcycled(noisy, name), Upcycled(plain, name)) << name;
  }
}

TEST(UpcyclingTest, NoiseHasTheSameBitsOnTwoRanks) {
  const HfModel hf =
      HfModel::Open(GoldenFolder("qwen3"), {.experts = 4, .noise = 0.1, .seed = 7}).value();
  ExpectTheBitsOfOneRankOnTwo(hf, ReadRun("qwen3").tokens);
}

TEST(UpcyclingTest, RefusesWhatIsNotDense) {
  EXPECT_THAT(
      HfModel::Open(GoldenFolder("mixtral"), {.experts = 4}).status(),
      StatusIs(kUnimplemented,
               "model_type is 'mixtral', which is not supported, expected a dense model to be "
               "upcycled: llama, mistral, qwen2, qwen3"));
  EXPECT_THAT(HfModel::Open(GoldenFolder("llama")).status(),
              StatusIs(kUnimplemented,
                       "model_type is llama, which has no experts: moe train "
                       "--upcycle E makes them"));
  for (const auto& [family, change, said] :
       {std::tuple("mistral", R"({"sliding_window": 4096})", "sliding_window is 4096"),
        {"llama", R"({"mlp_bias": true})", "mlp_bias is true"},
        {"llama", R"({"attention_bias": true})", "attention_bias is true"},
        {"llama", R"({"hidden_act": "relu"})", "hidden_act is 'relu'"},
        {"qwen2", R"({"rope_parameters": {"rope_type": "yarn"}})", "of the type yarn"}}) {
    EXPECT_THAT(ParseDenseConfig("c", Changed(family, change), {.experts = 4}).status(),
                StatusIs(kUnimplemented, said));
  }
  EXPECT_THAT(
      ParseDenseConfig("c", Changed("llama", R"({"intermediate_size": null})"), {.experts = 4})
          .status(),
      StatusIs(kDataLoss, "intermediate_size"));
}

}  // namespace
}  // namespace moe::hf
