// The reference model over several ranks: same bits as on one.
#include <algorithm>
#include <cstring>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/lm/transformer.h"
#include "tests/transformer_harness.h"

namespace moe::lm {
namespace {

using ::moe::testing::Layout;
using ::moe::testing::MakeModelWork;
using ::moe::testing::ModelResult;
using ::moe::testing::ModelWork;
using ::moe::testing::RunModel;

TransformerConfig LayoutConfig() {
  TransformerConfig config = {.vocab_size = 11,
                              .hidden_size = 12,
                              .num_layers = 3,
                              .num_attention_heads = 3,
                              .init_std = 0.3,
                              .moe_layer_freq = 2};
  config.moe.router = {.num_experts = 5, .top_k = 2, .aux_loss_coeff = 0.1f, .z_loss_coeff = 0.1f};
  config.moe.ffn_hidden_size = 7;
  config.moe.shared_expert_ffn_hidden_size = 4;
  return config;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void ExpectSameBits(const ModelResult& got, const ModelResult& expected) {
  EXPECT_TRUE(SameBits(got.row_loss, expected.row_loss)) << "row_loss";
  ASSERT_EQ(got.gradients.size(), expected.gradients.size());
  for (const auto& [name, gradient] : expected.gradients) {
    ASSERT_TRUE(got.gradients.contains(name)) << name;
    EXPECT_TRUE(SameBits(got.gradients.at(name), gradient)) << name;
  }
}

class TransformerLayouts : public ::testing::TestWithParam<Layout> {};

TEST_P(TransformerLayouts, LossAndGradientsHaveTheBitsOfOneRank) {
  // Five micro-batches: no tested number of ranks above one divides them, so that some ranks pass
  // rounds without tokens.
  const ModelWork work = MakeModelWork(LayoutConfig(), {{5, 3}, {4}, {1, 1, 6}, {7}, {2, 5}});
  const ModelResult one = RunModel<float>(work, {}, Numerics::kLayoutInvariant);
  const ModelResult got = RunModel<float>(work, GetParam(), Numerics::kLayoutInvariant);
  ExpectSameBits(got, one);
}

TEST_P(TransformerLayouts, BFloat16LossAndGradientsHaveTheBitsOfOneRank) {
  const ModelWork work = MakeModelWork(LayoutConfig(), {{5, 3}, {4}, {1, 1, 6}});
  const ModelResult one = RunModel<BFloat16>(work, {}, Numerics::kLayoutInvariant);
  const ModelResult got = RunModel<BFloat16>(work, GetParam(), Numerics::kLayoutInvariant);
  ExpectSameBits(got, one);
}

INSTANTIATE_TEST_SUITE_P(
    All, TransformerLayouts,
    ::testing::Values(Layout{.ranks = 2, .expert_parallel = 1},
                      Layout{.ranks = 2, .expert_parallel = 2},
                      Layout{.ranks = 3, .expert_parallel = 3},
                      Layout{.ranks = 4, .expert_parallel = 2},
                      Layout{.ranks = 7, .expert_parallel = 7},
                      Layout{.ranks = 2, .expert_parallel = 2, .overlap = 2, .threads = 2},
                      Layout{.ranks = 3,
                             .expert_parallel = 3,
                             .dispatch = DispatchAlgorithm::kDirect,
                             .overlap = 2}));

// Names of parameters that every rank has.
std::vector<std::string> Replicated(std::vector<std::string> names) {
  names.erase(std::remove_if(names.begin(), names.end(),
                             [](const std::string& name) {
                               return name.find(".experts.") != std::string::npos;
                             }),
              names.end());
  return names;
}

TEST(Transformer, EveryParameterIsReadyOncePerRoundInTheSameOrderOnAllRanks) {
  // One micro-batch on two ranks: rank 0's range is empty.
  const ModelWork work = MakeModelWork(LayoutConfig(), {{5, 3}});
  const ModelResult got =
      RunModel<float>(work, {.ranks = 2, .expert_parallel = 2}, Numerics::kFast);
  EXPECT_EQ(Replicated(got.ready[0]), Replicated(got.ready[1]));

  std::vector<std::string> all = Replicated(got.ready[0]);
  for (const auto& order : got.ready) {
    std::copy_if(order.begin(), order.end(), std::back_inserter(all), [](const std::string& name) {
      return name.find(".experts.") != std::string::npos;
    });
  }
  std::sort(all.begin(), all.end());
  std::vector<std::string> expected;
  for (const auto& [name, tensor] : got.weights) expected.push_back(name);
  EXPECT_EQ(all, expected);

  EXPECT_EQ(got.ready[0].front(), "lm_head.weight");
  EXPECT_EQ(got.ready[0][1], "model.norm.weight");
  EXPECT_EQ(got.ready[0].back(), "model.embed_tokens.weight");
}

TEST(Transformer, RankWithoutTokensStillServesItsExperts) {
  const ModelWork work = MakeModelWork(LayoutConfig(), {{5, 3}});
  const ModelResult one = RunModel<float>(work, {}, Numerics::kLayoutInvariant);
  const ModelResult two =
      RunModel<float>(work, {.ranks = 2, .expert_parallel = 2}, Numerics::kLayoutInvariant);
  ExpectSameBits(two, one);
  // Rank 0 has no tokens and holds experts 0 to 2: their gradients come from rank 1's tokens.
  bool served = false;
  for (int e = 0; e < 3; ++e) {
    for (const float g :
         two.gradients.at(absl::StrCat("model.layers.1.mlp.experts.", e, ".down_proj.weight"))) {
      served = served || g != 0;
    }
  }
  EXPECT_TRUE(served);
}

}  // namespace
}  // namespace moe::lm
