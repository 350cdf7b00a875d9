// A layer's passes as CUDA graphs: the bits of passes without, from what has changed since the
// capture; no kernel launched and no host held; what is refused.
#include <array>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/local/local_world.h"
#include "kernels/base/cuda_devices.h"
#include "moe/lm/trainer.h"
#include "tests/cusim/cusim.h"
#include "tests/cusim/fake_streams.h"
#include "tests/moe/layer_harness.h"
#include "tests/moe/lm/train_harness.h"

namespace moe {
namespace {

using ::testing::HasSubstr;
using testing::kHidden;
using testing::kTokens;
using testing::Layout;

constexpr int kPasses = 6;

MoeLayerConfig Config() {
  return {.router = {.gate = "topk",
                     .num_experts = 4,
                     .top_k = 2,
                     .hidden_size = kHidden,
                     .capacity_factor = 1.0,
                     .pad_to_capacity = true,
                     .micro_batch_tokens = kTokens / 2,
                     .aux_loss_coeff = 0.1f,
                     .z_loss_coeff = 0.05f},
          .ffn_hidden_size = 12,
          .shared_expert_ffn_hidden_size = 8,
          .gated_shared_expert = true,
          .projection_biases = true};
}

// On the device.
struct Rank : testing::LayerRank {
  absl::Status Create(const MoeLayerConfig& config, bool overlap = false) {
    const std::array<int64_t, 3> rows = {kTokens, kTokens, kTokens};
    return LayerRank::Create(config, DeviceKind::kCuda, {.overlap_exchange = overlap},
                             std::move(MakeLocalWorld({}).front()), rows);
  }
  absl::Status Forward(int call, int seed, MoeLayerSaved<float>* saved, RouterStats* stats) {
    MOE_RETURN_IF_ERROR(x[call].Write(testing::RowValues(kTokens, seed), context()));
    return Forward(call, saved, stats);
  }
  absl::Status Forward(int call, MoeLayerSaved<float>* saved, RouterStats* stats) {
    const std::array<int64_t, 3> offsets = {0, kTokens / 2, kTokens};
    return layer->Forward(x[call].view(), {.micro_batch_offsets = offsets}, y[call].view(), saved,
                          stats);
  }
};

class LayerGraphTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto devices = CudaDevices(); !devices.ok()) GTEST_SKIP() << devices.status();
  }
};

// Passes over other rows each time, with another gradient of the router's loss in the last, and
// what the router learns from steps between them.
std::vector<std::vector<float>> ResultsOf(MoeLayerConfig config, bool graph, bool overlap) {
  std::vector<std::vector<float>> results;
  config.cuda_graph = graph;
  const auto run = [&]() -> absl::Status {
    Rank rank;
    MOE_RETURN_IF_ERROR(rank.Create(config, overlap));
    for (int pass = 0; pass < kPasses; ++pass) {
      const Context& context = rank.context();
      const WorkspaceScope scope(*context.workspace), host_scope(*context.host_workspace);
      MoeLayerSaved<float> saved;
      RouterStats stats;
      MOE_RETURN_IF_ERROR(rank.Forward(0, pass, &saved, &stats));
      MOE_RETURN_IF_ERROR(rank.Backward(0, saved, pass + 1 < kPasses ? 1 : 0.5f));
      MOE_RETURN_IF_ERROR(rank.Read(0, results));
      MOE_RETURN_IF_ERROR(stats.Wait());
      results.push_back({static_cast<float>(stats.aux_loss), static_cast<float>(stats.z_loss),
                         static_cast<float>(stats.entropy_sum),
                         static_cast<float>(stats.dropped_slots)});
      MOE_RETURN_IF_ERROR(rank.layer->EndStep(stats.expert_count));
    }
    return rank.ReadGradients(results);
  };
  const absl::Status status = run();
  EXPECT_TRUE(status.ok()) << status;
  return results;
}

TEST_F(LayerGraphTest, PassesHaveTheBitsOfThoseWithoutGraphs) {
  MoeLayerConfig biased = Config();
  biased.router.gate = "deepseek-v3";
  biased.router.bias_update_rate = 0.5f;
  biased.router.load_balancing = LoadBalancing::kGlobalAuxLoss;
  MoeLayerConfig one = Config();
  one.router.gate = "switch";
  one.router.top_k = 1;
  one.router.drop_policy = DropPolicy::kPosition;
  one.train_experts = false;
  for (const auto& [name, config] :
       {std::pair("topk", Config()), std::pair("deepseek-v3", biased), std::pair("switch", one)}) {
    for (const bool overlap : {false, true}) {
      SCOPED_TRACE(absl::StrCat(name, overlap ? ", two streams" : ""));
      const int64_t before = cusim::GraphLaunches();
      const auto with = ResultsOf(config, true, overlap);
      // Forward: all but the first. Backward: the first overwrites sums, the last has a loss of its
      // own, and between them one is the first of its kind.
      EXPECT_EQ(cusim::GraphLaunches() - before, kPasses - 1 + kPasses - 3);
      EXPECT_EQ(with, ResultsOf(config, false, overlap));
    }
  }
}

// Several forwards before their backwards.
TEST_F(LayerGraphTest, StatesOfTheirOwnHaveGraphsEach) {
  const auto results_of = [](bool graph) {
    std::vector<std::vector<float>> results;
    MoeLayerConfig config = Config();
    config.cuda_graph = graph;
    const auto run = [&]() -> absl::Status {
      Rank rank;
      MOE_RETURN_IF_ERROR(rank.Create(config));
      for (int step = 0; step < 4; ++step) {
        std::array<MoeLayerSaved<float>, 3> saved;
        for (int call = 0; call < 3; ++call) {
          saved[call] = rank.layer->MakeSaved();
          MOE_RETURN_IF_ERROR(rank.Forward(call, 3 * step + call, &saved[call], nullptr));
        }
        for (const int call : {1, 0, 2}) {
          MOE_RETURN_IF_ERROR(rank.Backward(call, saved[call]));
          MOE_RETURN_IF_ERROR(rank.Read(call, results));
        }
      }
      return rank.ReadGradients(results);
    };
    const absl::Status status = run();
    EXPECT_TRUE(status.ok()) << status;
    return results;
  };
  EXPECT_EQ(results_of(true), results_of(false));
}

TEST_F(LayerGraphTest, AReplayLaunchesNoKernelAndHoldsNoHost) {
  MoeLayerConfig config = Config();
  config.cuda_graph = true;
  for (const bool with_stats : {false, true}) {
    Rank rank;
    ASSERT_TRUE(rank.Create(config).ok());
    const Context& context = rank.context();
    for (int pass = 0; pass < kPasses; ++pass) {
      const WorkspaceScope scope(*context.workspace), host_scope(*context.host_workspace);
      MoeLayerSaved<float> saved;
      RouterStats stats;
      ASSERT_TRUE(rank.x[0].Write(std::vector<float>(kTokens * kHidden, 0.5f), context).ok());
      const cusim::HostWaits before = cusim::WaitsOfThisThread();
      const int64_t launches = cusim::Launches(), graphs = cusim::GraphLaunches();
      ASSERT_TRUE(rank.Forward(0, &saved, with_stats ? &stats : nullptr).ok());
      ASSERT_TRUE(rank.Backward(0, saved).ok());
      const cusim::HostWaits waited = cusim::WaitsOfThisThread() - before;
      ASSERT_TRUE(context.compute->Synchronize().ok());
      if (pass + 1 < kPasses) continue;
      EXPECT_TRUE(waited == cusim::HostWaits());
      EXPECT_EQ(cusim::Launches() - launches, 0);
      EXPECT_EQ(cusim::GraphLaunches() - graphs, 2);
    }
  }
}

struct GraphCase {
  MoeLayerConfig layer = Config();
  DeviceKind device = DeviceKind::kCuda;
  int ranks = 1;
  GroupedGemmKernel gemm = GroupedGemmKernel::kAuto;

  absl::Status Check() const { return CheckCudaGraph(layer, device, ranks, gemm); }
};

TEST_F(LayerGraphTest, SaysWhatItNeeds) {
  EXPECT_TRUE(GraphCase().Check().ok());
  const auto refused = [](const char* part, void (*change)(GraphCase&)) {
    GraphCase c;
    change(c);
    EXPECT_THAT(std::string(c.Check().message()), HasSubstr(part));
  };
  refused("cuda_graph on the CPU, expected a CUDA device",
          [](GraphCase& c) { c.device = DeviceKind::kCpu; });
  refused("with 2 expert-parallel ranks, expected 1", [](GraphCase& c) { c.ranks = 2; });
  refused("with grouped_gemm cublas, expected auto or mma",
          [](GraphCase& c) { c.gemm = GroupedGemmKernel::kCublas; });
  refused("without pad_to_capacity", [](GraphCase& c) { c.layer.router.pad_to_capacity = false; });
  refused("with router gshard, expected one that runs on the",
          [](GraphCase& c) { c.layer.router.gate = "gshard"; });
  refused("with num_zero_experts 1, expected 0", [](GraphCase& c) {
    c.layer.router.gate = "longcat";
    c.layer.router.num_zero_experts = 1;
  });
  refused("with input_jitter 0.25, expected 0", [](GraphCase& c) {
    c.layer.router.gate = "switch";
    c.layer.router.top_k = 1;
    c.layer.router.input_jitter = 0.25f;
  });
  refused("expected staged",
          [](GraphCase& c) { c.layer.dispatcher.algorithm = DispatchAlgorithm::kDirect; });
  MoeLayerConfig config = Config();
  config.cuda_graph = true;
  config.router.pad_to_capacity = false;
  EXPECT_TRUE(absl::IsInvalidArgument(Rank().Create(config)));
}

// Whole steps: evaluation between them, weights that change, gradients that are reduced.
TEST_F(LayerGraphTest, TrainingHasTheBitsOfThatWithoutGraphs) {
  lm::TrainConfig config = lm::testing::SmallConfig();
  config.device = DeviceKind::kCuda;
  config.model.num_layers = 1;
  config.steps = 3;
  config.sequence_length = 4;
  config.micro_batches = 3;
  config.eval_interval = 2;
  config.eval_sequences = 4;
  RouterConfig& router = config.model.moe.router;
  router.gate = "deepseek-v3";
  router.bias_update_rate = 0.05f;
  router.z_loss_coeff = 0.01f;
  router.capacity_factor = 1.0;
  router.pad_to_capacity = true;
  const auto compare = [&](const Layout& layout) {
    config.model.moe.cuda_graph = false;
    const lm::testing::Trace without = lm::testing::TrainIn(config, layout);
    config.model.moe.cuda_graph = true;
    const int64_t before = cusim::GraphLaunches();
    ExpectSameTrace(lm::testing::TrainIn(config, layout), without);
    return cusim::GraphLaunches() - before;
  };
  // Forwards of 9 rounds but the first; of 3 evaluations (before, after step 2, after the last)
  // with 2 micro-batches each but the first; backwards of the first rounds of 3 steps and of the 6
  // others, but the first of each.
  EXPECT_EQ(compare({}), 8 + 5 + 2 + 5);
  config.steps = 2;
  config.micro_batches = 4;
  config.eval_interval = 0;
  config.dtype = DType::kFloat16;
  router.num_experts = 2;
  router.gate = "mixtral";
  config.zero = ZeroStage::kGradients;
  EXPECT_GT(compare({.ranks = 2, .overlap = 2}), 0);
}

}  // namespace
}  // namespace moe
