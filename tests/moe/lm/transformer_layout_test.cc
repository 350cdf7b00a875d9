// The reference model over several ranks: same bits as on one.
#include <algorithm>

#include <absl/synchronization/notification.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "moe/lm/stage.h"
#include "moe/run/deferred_gradients.h"
#include "moe/run/session.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/lm/transformer_harness.h"

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

void ExpectTheBitsOfOneRank(const ModelWork& work, const Layout& layout) {
  const ModelResult one = RunModel<float>(work, {}, Numerics::kLayoutInvariant);
  const ModelResult got = RunModel<float>(work, layout, Numerics::kLayoutInvariant);
  ::moe::testing::ExpectSameBits("row_loss", got.row_loss, one.row_loss);
  ::moe::testing::ExpectSameBits(got.gradients, one.gradients);
}

class TransformerLayouts : public ::testing::TestWithParam<Layout> {};

TEST_P(TransformerLayouts, LossAndGradientsHaveTheBitsOfOneRank) {
  // Five micro-batches: no tested number of ranks above one divides them, so that some ranks pass
  // rounds without tokens, and of seven two have none: their experts serve the others' alone.
  ExpectTheBitsOfOneRank(MakeModelWork(LayoutConfig(), {{5, 3}, {4}, {1, 1, 6}, {7}, {2, 5}}),
                         GetParam());
}

TEST_P(TransformerLayouts, GroupedQueriesAndTiedEmbeddingsHaveTheBitsOfOneRank) {
  const ModelWork work =
      MakeModelWork(::moe::testing::GroupedConfig(QkNorm::kHead), {{5, 3}, {4}, {1, 1, 6}});
  ExpectTheBitsOfOneRank(work, GetParam());
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

// A gated shared expert, and a router that sees jittered tokens.
TransformerConfig JitteredConfig() {
  TransformerConfig config = LayoutConfig();
  config.moe.router.gate = "switch";
  config.moe.router.input_jitter = 0.2f;
  config.moe.router.top_k = 1;
  config.moe.gated_shared_expert = true;
  return config;
}

void ExpectTheBitsOfKeptState(ModelWork work, Recompute recompute) {
  const ModelResult kept = RunModel<float>(work, {}, Numerics::kLayoutInvariant);
  work.config.recompute = recompute;
  for (const Layout& layout :
       {Layout{}, Layout{.ranks = 2, .expert_parallel = 2, .overlap = 2, .threads = 2}}) {
    const ModelResult got = RunModel<float>(work, layout, Numerics::kLayoutInvariant);
    ::moe::testing::ExpectSameBits("row_loss", got.row_loss, kept.row_loss);
    ::moe::testing::ExpectSameBits(got.gradients, kept.gradients);
    if (layout.ranks == 1) {
      EXPECT_EQ(got.ready, kept.ready);
    }
    EXPECT_NEAR(got.aux_loss, kept.aux_loss, 1e-12);  // summed as ranks arrive
  }
}

TEST(Transformer, RecomputedStateHasTheBitsOfKeptOne) {
  for (const Recompute recompute : {Recompute::kActivations, Recompute::kLayer}) {
    for (const TransformerConfig& config :
         {LayoutConfig(), JitteredConfig(), ::moe::testing::GroupedConfig(QkNorm::kHead)}) {
      SCOPED_TRACE(::testing::Message()
                   << NameOf(recompute, kRecomputeWords) << ", gate " << config.moe.router.gate);
      ExpectTheBitsOfKeptState(MakeModelWork(config, {{5, 3}, {4}, {1, 1, 6}}), recompute);
    }
  }
}

// Peak bytes of a rank's stashes, those that a micro-batch keeps, and the slots that the routers of
// two chose.
struct OneRound {
  int64_t stash_bytes = 0, kept_bytes = 0;
  std::vector<int64_t> slots;
};
OneRound RunOneRound(Recompute recompute, QkNorm qk_norm = QkNorm::kNone) {
  TransformerConfig config = LayoutConfig();
  config.qk_norm = qk_norm;
  config.num_layers = 8;
  config.moe_layer_freq = 1;
  config.recompute = recompute;
  ::moe::testing::OneRank<float> rank(config);
  const ModelWork work = MakeModelWork(config, {{50, 14}});
  rank.AddSums();
  OneRound round = {.slots = std::vector<int64_t>(8 * config.moe.router.num_experts)};
  absl::Span<int64_t> of_layers = absl::MakeSpan(round.slots);
  for (MoeLayer<float>* const layer : rank.model->mixtures()) {
    layer->CountSlots(of_layers.first(config.moe.router.num_experts));
    of_layers.remove_prefix(config.moe.router.num_experts);
  }
  std::vector<float> loss(work.tokens.size());
  const std::vector<int64_t> offsets = work.SequenceOffsets(0);
  for (int i = 0; i < 2; ++i) {  // the second one finds memory in one piece
    const StashHandle stash = rank.session->stashes().Take();
    const absl::Status status = ::moe::testing::RunPasses(
        *rank.model,
        {.context = rank.context(), .batch = {.sequence_offsets = offsets}, .stash = stash.get()},
        {work.tokens, work.targets, absl::MakeSpan(loss)});
    EXPECT_TRUE(status.ok()) << status;
    round.kept_bytes = stash->device().used_bytes();
  }
  round.stash_bytes = rank.session->stashes().peak_bytes();
  return round;
}

// The state of one layer and the inputs of eight, in place of the state of eight.
TEST(Transformer, RecomputedLayersTakeLessMemoryAndAreCountedOnce) {
  const OneRound kept = RunOneRound(Recompute::kNone);
  const OneRound recomputed = RunOneRound(Recompute::kLayer);
  EXPECT_LT(recomputed.stash_bytes, kept.stash_bytes / 2);
  EXPECT_EQ(recomputed.slots, kept.slots);
}

// 64 tokens of width 12, float32: two norms, and their statistics; 128 rows of hidden width 7; the
// shared expert's of 4; what norms make of q and k, three heads of width 4 each.
TEST(Transformer, RecomputedActivationsTakeTheBytesOfTheFormulaLess) {
  const OneRound kept = RunOneRound(Recompute::kNone);
  const OneRound recomputed = RunOneRound(Recompute::kActivations);
  const int64_t layer = 4 * (2 * 64 * (12 + 1) + 128 * 7 + 64 * 4);
  EXPECT_EQ(kept.kept_bytes - recomputed.kept_bytes, 8 * layer);
  EXPECT_EQ(recomputed.slots, kept.slots);
  const int64_t heads = 4 * 64 * (2 * 12 + 2 * 3);
  EXPECT_EQ(RunOneRound(Recompute::kNone, QkNorm::kHead).kept_bytes -
                RunOneRound(Recompute::kActivations, QkNorm::kHead).kept_bytes,
            8 * (layer + heads));
}

// Bytes of a stash after both passes of `work`, then of a micro-batch without tokens, which it is
// taken for again; weight gradients are left for later.
int64_t StashBytesOfNoTokens(const ModelWork& work) {
  ::moe::testing::OneRank<float> rank(work.config);
  rank.AddSums();
  int64_t bytes = 0;
  for (const bool tokens : {true, false}) {
    if (tokens && work.tokens.empty()) continue;
    DeferredGradients later;
    Context context = rank.context();
    context.later = &later;
    const StashHandle stash = context.stashes->Take();
    later.Begin(context, *stash);
    std::vector<float> loss(tokens ? work.tokens.size() : 0);
    const std::vector<int64_t> offsets = tokens ? work.SequenceOffsets(0) : std::vector<int64_t>{0};
    const Pass pass = {
        .context = context, .batch = {.sequence_offsets = offsets}, .stash = stash.get()};
    const absl::Status status = ::moe::testing::RunPasses(
        *rank.model, pass,
        tokens ? TokenBatch{work.tokens, work.targets, absl::MakeSpan(loss)} : TokenBatch{});
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(later.Run().ok());
    bytes = stash->device().used_bytes();
  }
  return bytes;
}

// What the micro-batch before it left is memory of others.
TEST(Transformer, AMicroBatchWithoutTokensKeepsNothingOfTheOneBeforeIt) {
  const ModelWork none = {.config = LayoutConfig()};
  EXPECT_EQ(StashBytesOfNoTokens(MakeModelWork(LayoutConfig(), {{5, 3}})),
            StashBytesOfNoTokens(none));
}

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

TEST(Transformer, LostPeerIsReportedWithLayerAndStep) {
  const ModelWork work = MakeModelWork(LayoutConfig(), {{5, 3}});
  absl::Status status;
  absl::Notification called;
  ::moe::testing::RunLocalRanks(
      2,
      [&](std::unique_ptr<Communicator> world) -> absl::Status {
        const bool present = world->rank() == 0;
        MOE_ASSIGN_OR_RETURN(const auto session,
                             Session::Create({.mesh = {.expert = 2}}, std::move(world)));
        ParameterStore store(DType::kFloat32, 3);
        MOE_ASSIGN_OR_RETURN(const auto model,
                             Stage<float>::Create(work.config, store, session->context()));
        if (!present) {
          // Stays alive, but never calls.
          called.WaitForNotificationWithTimeout(absl::Seconds(10));
          return absl::OkStatus();
        }
        std::vector<float> loss(work.tokens.size());
        const std::vector<int64_t> offsets = work.SequenceOffsets(0);
        status = ::moe::testing::RunPasses(*model,
                                           {.context = session->context(),
                                            .batch = {.sequence_offsets = offsets},
                                            .site = {.step = 120}},
                                           {work.tokens, work.targets, absl::MakeSpan(loss)});
        called.Notify();
        return absl::OkStatus();
      },
      absl::Seconds(1));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  // Layer 0 is dense: the first exchange is layer 1's.
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("layer 1, step 120"));
}

TEST(Transformer, ExchangeBytesAndDenseTimeAreCounted) {
  TransformerConfig config = LayoutConfig();
  config.moe_layer_freq = 1;
  ::moe::testing::OneRank<float> rank(config);
  const ModelWork work = MakeModelWork(config, {{5, 3}});
  std::vector<float> loss(work.tokens.size());
  const std::vector<int64_t> offsets = work.SequenceOffsets(0);
  ASSERT_TRUE(::moe::testing::RunPasses(
                  *rank.model, {.context = rank.context(), .batch = {.sequence_offsets = offsets}},
                  {work.tokens, work.targets, absl::MakeSpan(loss)})
                  .ok());
  // Three layers; a rank alone gathers a token's row once per expert and gets it back so: 16 rows
  // each way, of 12 floats.
  for (const MoeLayer<float>* const layer : rank.model->mixtures()) {
    EXPECT_EQ(layer->exchange_bytes().self, (16 + 16) * 12 * 4);
    EXPECT_EQ(layer->exchange_bytes().same_node + layer->exchange_bytes().cross_node, 0);
  }
  for (const Phase phase : {Phase::kAttention, Phase::kDense, Phase::kOutput}) {
    EXPECT_GT(rank.context().clock->seconds(phase), 0) << NameOf(phase);
  }
}

}  // namespace
}  // namespace moe::lm
