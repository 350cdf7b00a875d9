// How often a pass of a layer on CUDA devices blocks the host. No change may add to it: a host that
// waits leaves the device without work.
#include <array>
#include <cmath>
#include <memory>
#include <numeric>
#include <ostream>
#include <vector>

#include <absl/status/status.h>
#include <gtest/gtest.h>

#include "moe/layer/moe_layer.h"
#include "moe/lm/stage.h"
#include "moe/run/session.h"
#include "moe/train/gradient_reducer.h"
#include "tests/comm/nccl_ranks.h"
#include "tests/cusim/fake_streams.h"
#include "tests/moe/layer_harness.h"
#include "tests/moe/lm/transformer_harness.h"

namespace cusim {

void PrintTo(const HostWaits& waits, std::ostream* out) {
  *out << waits.synchronizations << " synchronizations, " << waits.copies << " copies";
}

}  // namespace cusim

namespace moe {
namespace {

using cusim::HostWaits;
using testing::kHidden;
using testing::kTokens;

struct Waits {
  HostWaits forward, backward;
};

enum class Stats : bool { kNotWanted, kWanted };

// Waits of the second forward and backward: the first ones allocate memory.
absl::StatusOr<Waits> WaitsOfPasses(MoeLayerConfig config, Stats wanted,
                                    std::unique_ptr<Communicator> world) {
  const std::array<int64_t, 1> rows = {kTokens};
  testing::LayerRank rank;
  MOE_RETURN_IF_ERROR(rank.Create(config, DeviceKind::kCuda, {}, std::move(world), rows));
  const Context& context = rank.context();
  MOE_RETURN_IF_ERROR(rank.x[0].Write(testing::RowValues(kTokens, 0), context));
  const std::array<int64_t, 3> offsets = {0, kTokens / 2, kTokens};
  Waits waits;
  for (int pass = 0; pass < 2; ++pass) {
    const StashHandle stash = rank.Take();
    RouterStats stats;
    const HostWaits before = cusim::WaitsOfThisThread();
    MOE_RETURN_IF_ERROR(rank.layer->Forward(
        {.context = context,
         .batch = {.micro_batch_offsets = offsets},
         .stash = stash.get(),
         .router_stats = absl::MakeSpan(&stats, wanted == Stats::kWanted ? 1 : 0)},
        rank.x[0].view(), rank.y[0].view()));
    waits.forward = cusim::WaitsOfThisThread() - before;
    const HostWaits between = cusim::WaitsOfThisThread();
    MOE_RETURN_IF_ERROR(rank.Backward(0, stash.get()));
    waits.backward = cusim::WaitsOfThisThread() - between;
    if (wanted == Stats::kWanted) {
      EXPECT_TRUE(std::isnan(stats.loss()));  // not yet computed
      MOE_RETURN_IF_ERROR(stats.Wait());
      EXPECT_GT(stats.loss(), 0);
      EXPECT_EQ(std::accumulate(stats.expert_count.begin(), stats.expert_count.end(), int64_t{0}),
                kTokens * config.router.top_k);
    }
    MOE_RETURN_IF_ERROR(context.compute->Synchronize());
  }
  return waits;
}

MoeLayerConfig Config() {
  return {.router = {.num_experts = 4,
                     .top_k = 2,
                     .hidden_size = kHidden,
                     .aux_loss_coeff = 0.1f,
                     .z_loss_coeff = 0.05f},
          .ffn_hidden_size = 12,
          .shared_expert_ffn_hidden_size = 8,
          .projection_biases = true};
}

MoeLayerConfig WithCapacity() {
  MoeLayerConfig config = Config();
  config.router.capacity_factor = 1.0;
  return config;
}

MoeLayerConfig Padded() {
  MoeLayerConfig config = WithCapacity();
  config.router.pad_to_capacity = true;
  config.router.micro_batch_tokens = kTokens / 2;
  return config;
}

void ExpectWaits(const MoeLayerConfig& config, Stats wanted, int ranks, HostWaits forward,
                 HostWaits backward) {
  testing::RunNcclRanks(
      {.ranks = ranks}, [&](absl::StatusOr<std::unique_ptr<Communicator>> comm, int) {
        ASSERT_TRUE(comm.ok()) << comm.status();
        const auto waits = WaitsOfPasses(config, wanted, *std::move(comm)).value();
        EXPECT_EQ(waits.forward, forward);
        EXPECT_EQ(waits.backward, backward);
      });
}

TEST(HostWaitsTest, OneRank) {
  MoeLayerConfig frozen = Config();
  frozen.train_experts = false;
  for (const MoeLayerConfig& config : {Config(), WithCapacity(), Padded(), frozen}) {
    for (const Stats stats : {Stats::kNotWanted, Stats::kWanted}) {
      ExpectWaits(config, stats, 1, {0, 0}, {0, 0});
    }
  }
}

// Waits of the second round of a model of two MoE layers on one rank.
absl::StatusOr<HostWaits> WaitsOfRound(std::unique_ptr<Communicator> world) {
  MOE_ASSIGN_OR_RETURN(const auto session,
                       Session::Create({.device = DeviceKind::kCuda}, std::move(world)));
  const Context& context = session->context();
  ParameterStore store(DType::kFloat32, 1, context);
  const lm::TransformerConfig config = {.vocab_size = 16,
                                        .hidden_size = kHidden,
                                        .num_layers = 2,
                                        .num_attention_heads = 2,
                                        .moe = Config()};
  MOE_ASSIGN_OR_RETURN(const auto model, lm::Stage<float>::Create(config, store, context));
  MOE_ASSIGN_OR_RETURN(
      const auto reducer,
      GradientReducer::Create({.max_terms = 64}, store, context, session->gradient_stream()));
  MOE_RETURN_IF_ERROR(reducer->Begin());
  const std::vector<int32_t> tokens(kTokens, 3);
  std::vector<float> row_loss(kTokens);
  const std::array<int64_t, 2> offsets = {0, kTokens};
  std::vector<RouterStats> stats(model->moe_layers());
  HostWaits waits;
  for (int round = 0; round < 2; ++round) {
    const StashHandle stash = session->stashes().Take();
    const HostWaits before = cusim::WaitsOfThisThread();
    MOE_RETURN_IF_ERROR(
        testing::RunPasses(*model,
                           {.context = context,
                            .batch = {.sequence_offsets = offsets, .micro_batch_offsets = offsets},
                            .stash = stash.get(),
                            .router_stats = absl::MakeSpan(stats)},
                           {tokens, tokens, absl::MakeSpan(row_loss)}));
    waits = cusim::WaitsOfThisThread() - before;
    for (const RouterStats& layer : stats) EXPECT_GT(layer.loss(), 0);
  }
  return waits;
}

// One wait, for the losses, which a copy brings.
TEST(HostWaitsTest, ARoundOfAModelOnOneRank) {
  testing::RunNcclRanks({.ranks = 1}, [](absl::StatusOr<std::unique_ptr<Communicator>> comm, int) {
    ASSERT_TRUE(comm.ok()) << comm.status();
    const auto waits = WaitsOfRound(*std::move(comm)).value();
    EXPECT_EQ(waits, (HostWaits{1, 1}));
  });
}

// Forward: one for the counts that the plan gathers, which a copy brings.
TEST(HostWaitsTest, RanksOverNccl) {
  MoeLayerConfig in_chunks = Config();
  in_chunks.overlap_degree = 2;
  for (const MoeLayerConfig& config : {Config(), WithCapacity(), Padded(), in_chunks}) {
    for (const Stats stats : {Stats::kNotWanted, Stats::kWanted}) {
      ExpectWaits(config, stats, 2, {1, 1}, {0, 0});
    }
  }
}

// One more for the routing, which its identity experts read on the host, and four copies.
TEST(HostWaitsTest, RanksOverNcclWithIdentityExperts) {
  MoeLayerConfig config = Config();
  config.router.num_zero_experts = 2;
  ExpectWaits(config, Stats::kNotWanted, 2, {2, 5}, {0, 0});
}

}  // namespace
}  // namespace moe
