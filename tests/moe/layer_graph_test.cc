// A layer's passes as CUDA graphs: the bits of passes without, from what has changed since the
// capture; no kernel launched and no host held; what is refused.
#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/cuda_devices.h"
#include "moe/gradient_reducer.h"
#include "moe/lm/trainer.h"
#include "moe/moe_layer.h"
#include "moe/session.h"
#include "tests/comm/local_ranks.h"
#include "tests/cusim/cusim.h"
#include "tests/cusim/fake_streams.h"
#include "tests/moe/lm/train_harness.h"
#include "tests/moe/trained_layer.h"

namespace moe {
namespace {

using testing::DeviceRows;
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

// A layer of one rank on the device.
struct Rank {
  std::unique_ptr<Session> session;
  std::unique_ptr<ParameterStore> store;
  std::unique_ptr<MoeLayer<float>> layer;
  std::unique_ptr<GradientReducer> reducer;
  std::array<DeviceRows, 3> x, y, dx;

  const Context& context() const { return session->context(); }

  absl::Status Create(const MoeLayerConfig& config, bool overlap = false) {
    testing::RunLocalRanks(1, [&](std::unique_ptr<Communicator> world) -> absl::Status {
      MOE_ASSIGN_OR_RETURN(
          session, Session::Create({.device = {DeviceKind::kCuda, 0}, .overlap_exchange = overlap},
                                   std::move(world)));
      return absl::OkStatus();
    });
    store = std::make_unique<ParameterStore>(DType::kFloat32, 1, context());
    MOE_ASSIGN_OR_RETURN(layer, MoeLayer<float>::Create(config, "", *store, context()));
    MOE_ASSIGN_OR_RETURN(reducer, GradientReducer::Create({.max_terms = 64}, *store, context(),
                                                          session->gradient_stream()));
    for (auto* rows : {&x, &y, &dx}) {
      for (DeviceRows& each : *rows) {
        MOE_ASSIGN_OR_RETURN(each, DeviceRows::Create(kTokens, context()));
      }
    }
    return reducer->Begin();
  }
  absl::Status Forward(int call, int seed, MoeLayerSaved<float>* saved, RouterStats* stats) {
    std::vector<float> values(kTokens * kHidden);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = std::sin(static_cast<float>(i * i + 31 * static_cast<size_t>(seed)));
    }
    MOE_RETURN_IF_ERROR(x[call].Write(values, context()));
    const std::array<int64_t, 3> offsets = {0, kTokens / 2, kTokens};
    return layer->Forward(x[call].view(), {.micro_batch_offsets = offsets}, y[call].view(), saved,
                          stats);
  }
  absl::Status Backward(int call, MoeLayerSaved<float>& saved, float d_router_loss = 1) {
    return layer->Backward(y[call].view(), saved, d_router_loss, dx[call].view(),
                           [](Parameter&) { return absl::OkStatus(); });
  }
  // y and dx of a call.
  absl::Status Read(int call, std::vector<std::vector<float>>& into) {
    for (auto* rows : {&y, &dx}) {
      MOE_RETURN_IF_ERROR((*rows)[call].Read(into.emplace_back(kTokens * kHidden), context()));
    }
    return absl::OkStatus();
  }
  // The sums of all gradients.
  absl::Status ReadGradients(std::vector<std::vector<float>>& into) {
    const auto parameters = store->parameters();
    for (auto p = parameters.rbegin(); p != parameters.rend(); ++p) {
      if ((*p)->spec().trainable) MOE_RETURN_IF_ERROR(reducer->MarkReady(**p));
    }
    MOE_RETURN_IF_ERROR(reducer->Finish());
    for (const auto& p : parameters) {
      if (!p->spec().trainable) continue;
      MOE_ASSIGN_OR_RETURN(Buffer scratch,
                           Buffer::Allocate(p->size() * int64_t{sizeof(float)}, *context().memory));
      const absl::Span<float> gradient = scratch.span<float>();
      MOE_RETURN_IF_ERROR(reducer->Gradient(*p, 1, gradient, *context().compute).status());
      MOE_RETURN_IF_ERROR(context().compute->CopyBytes(
          gradient.data(), into.emplace_back(static_cast<size_t>(p->size())).data(),
          scratch.bytes()));
      MOE_RETURN_IF_ERROR(context().compute->Synchronize());
    }
    return absl::OkStatus();
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
      const std::array<int64_t, 3> offsets = {0, kTokens / 2, kTokens};
      ASSERT_TRUE(rank.layer
                      ->Forward(rank.x[0].view(), {.micro_batch_offsets = offsets},
                                rank.y[0].view(), &saved, with_stats ? &stats : nullptr)
                      .ok());
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

TEST_F(LayerGraphTest, SaysWhatItNeeds) {
  const auto error_of = [](const MoeLayerConfig& config) {
    return std::string(
        CheckCudaGraph(config, DeviceKind::kCuda, 1, GroupedGemmKernel::kAuto).message());
  };
  MoeLayerConfig config = Config();
  EXPECT_EQ(error_of(config), "");
  EXPECT_THAT(
      std::string(CheckCudaGraph(config, DeviceKind::kCpu, 1, GroupedGemmKernel::kAuto).message()),
      HasSubstr("cuda_graph on the CPU, expected a CUDA device"));
  EXPECT_THAT(
      std::string(CheckCudaGraph(config, DeviceKind::kCuda, 2, GroupedGemmKernel::kAuto).message()),
      HasSubstr("with 2 expert-parallel ranks, expected 1"));
  EXPECT_THAT(
      std::string(
          CheckCudaGraph(config, DeviceKind::kCuda, 1, GroupedGemmKernel::kCublas).message()),
      HasSubstr("with grouped_gemm cublas, expected auto or mma"));
  config.router.pad_to_capacity = false;
  EXPECT_THAT(error_of(config), HasSubstr("without pad_to_capacity"));
  config = Config();
  config.router.gate = "gshard";
  EXPECT_THAT(error_of(config), HasSubstr("with router gshard, expected one that runs on the"));
  config.router.gate = "longcat";
  config.router.num_zero_experts = 1;
  EXPECT_THAT(error_of(config), HasSubstr("with num_zero_experts 1, expected 0"));
  config = Config();
  config.router.gate = "switch";
  config.router.top_k = 1;
  config.router.input_jitter = 0.25f;
  EXPECT_THAT(error_of(config), HasSubstr("with input_jitter 0.25, expected 0"));
  config = Config();
  config.dispatcher.algorithm = DispatchAlgorithm::kDirect;
  EXPECT_THAT(error_of(config), HasSubstr("expected staged"));
  config = Config();
  config.cuda_graph = true;
  config.router.pad_to_capacity = false;
  EXPECT_TRUE(absl::IsInvalidArgument(Rank().Create(config)));
}

// Whole steps: evaluation between them, weights that change, gradients that are reduced.
TEST_F(LayerGraphTest, TrainingHasTheBitsOfThatWithoutGraphs) {
  const lm::Corpus corpus = lm::testing::MakeCorpus();
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
    const lm::testing::Trace without = lm::testing::TrainIn(config, layout, corpus);
    config.model.moe.cuda_graph = true;
    const int64_t before = cusim::GraphLaunches();
    ExpectSameTrace(lm::testing::TrainIn(config, layout, corpus), without);
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
