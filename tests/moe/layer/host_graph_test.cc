// A layer in the graph of a host: passes in any order, on any thread; the router's loss as a value.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <gtest/gtest.h>

#include "tests/comm/local_ranks.h"
#include "tests/counting_new.h"
#include "tests/moe/layer_harness.h"

namespace moe {
namespace {

using testing::kHidden;
using testing::RunLocalRanks;

constexpr int kCalls = 3;
constexpr std::array<int64_t, kCalls> kRows = {5, 0, 7};

struct Rank : testing::LayerRank {
  std::array<std::vector<float>, kCalls> values;  // values of x

  absl::Status Create(std::unique_ptr<Communicator> world, int threads = 1) {
    const int rank = world->rank();
    const MoeLayerConfig config = {.router = {.num_experts = 4,
                                              .top_k = 2,
                                              .hidden_size = kHidden,
                                              .aux_loss_coeff = 0.1f,
                                              .z_loss_coeff = 0.05f},
                                   .ffn_hidden_size = 12,
                                   .shared_expert_ffn_hidden_size = 8,
                                   .gated_shared_expert = true};
    MOE_RETURN_IF_ERROR(LayerRank::Create(config, testing::LayerDevice(), {.threads = threads},
                                          std::move(world), kRows));
    for (int c = 0; c < kCalls; ++c) {
      values[c] = testing::RowValues(kRows[c], c + 3 * rank);
      MOE_RETURN_IF_ERROR(x[c].Write(values[c], context()));
    }
    return absl::OkStatus();
  }
  absl::Status Forward(int call, Stash* stash, RouterStats* stats = nullptr) {
    return layer->Forward(
        {.context = context(), .stash = stash, .router_stats = {stats, stats == nullptr ? 0u : 1u}},
        x[call].view(), y[call].view());
  }
  // y and dx of all calls, then the gradients of all parameters.
  absl::StatusOr<std::vector<std::vector<float>>> Results() {
    std::vector<std::vector<float>> all;
    for (int c = 0; c < kCalls; ++c) MOE_RETURN_IF_ERROR(Read(c, all));
    MOE_RETURN_IF_ERROR(ReadGradients(all));
    return all;
  }
};

TEST(StashTest, PassesInAnyOrderHaveTheBitsOfOneAfterTheOther) {
  for (const int ranks : {1, 2}) {
    RunLocalRanks(ranks, [](std::unique_ptr<Communicator> world) -> absl::Status {
      MOE_ASSIGN_OR_RETURN(auto other, world->Split(0, world->rank()));
      Rank in_turn, mixed;
      MOE_RETURN_IF_ERROR(in_turn.Create(std::move(world)));
      for (int c = 0; c < kCalls; ++c) {
        const StashHandle stash = in_turn.Take();
        MOE_RETURN_IF_ERROR(in_turn.Forward(c, stash.get()));
        MOE_RETURN_IF_ERROR(in_turn.Backward(c, stash.get()));
      }
      MOE_RETURN_IF_ERROR(mixed.Create(std::move(other), 2));
      const auto expect_empty_workspaces = [&] {
        EXPECT_EQ(mixed.context().workspace->used_bytes(), 0);
        EXPECT_EQ(mixed.context().host_workspace->used_bytes(), 0);
      };
      std::vector<StashHandle> stashes(kCalls);
      for (int c = 0; c < kCalls; ++c) {
        stashes[c] = mixed.Take();
        MOE_RETURN_IF_ERROR(mixed.Forward(c, stashes[c].get()));
        expect_empty_workspaces();
      }
      for (const int c : {1, 0, 2}) {
        absl::Status status;
        std::thread([&] { status = mixed.Backward(c, stashes[c].get()); }).join();
        MOE_RETURN_IF_ERROR(status);
        expect_empty_workspaces();
        stashes[c].reset();
      }
      MOE_ASSIGN_OR_RETURN(const auto expected, in_turn.Results());
      MOE_ASSIGN_OR_RETURN(const auto results, mixed.Results());
      EXPECT_EQ(results, expected);
      return absl::OkStatus();
    });
  }
}

TEST(StashTest, LaterStepsAllocateNothing) {
  if (testing::LayerDevice() == DeviceKind::kCuda) GTEST_SKIP() << "CUDA allocates as it likes";
  RunLocalRanks(1, [](std::unique_ptr<Communicator> world) -> absl::Status {
    Rank rank;
    MOE_RETURN_IF_ERROR(rank.Create(std::move(world)));
    int64_t before = 0;
    for (int step = 0; step < 4; ++step) {
      if (step == 2) before = Allocations();
      std::array<StashHandle, kCalls> stashes;
      for (const int c : {0, 1, 2}) {
        stashes[c] = rank.Take();
        MOE_RETURN_IF_ERROR(rank.Forward(c, stashes[c].get()));
      }
      for (const int c : {2, 0, 1}) {
        MOE_RETURN_IF_ERROR(rank.Backward(c, stashes[c].get()));
        stashes[c].reset();
      }
    }
    EXPECT_EQ(Allocations(), before);
    return absl::OkStatus();
  });
}

// Stashes outlive the model, as in the nodes of a graph.
TEST(StashTest, StashesMayGoOnAnyThreadAndAfterTheLayer) {
  std::vector<StashHandle> left;
  RunLocalRanks(1, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    Rank rank;
    MOE_RETURN_IF_ERROR(rank.Create(std::move(world)));
    for (int i = 0; i < 20; ++i) {
      StashHandle stash = rank.Take();
      MOE_RETURN_IF_ERROR(rank.Forward(0, stash.get()));
      std::thread other([gone = std::move(stash)] {});
      StashHandle meanwhile = rank.Take();
      MOE_RETURN_IF_ERROR(rank.Forward(2, meanwhile.get()));
      MOE_RETURN_IF_ERROR(rank.Backward(2, meanwhile.get()));
      other.join();
      left.push_back(std::move(meanwhile));
    }
    return rank.context().compute->Synchronize();
  });
}

#ifndef NDEBUG
// Memory that a stash has grown to is NaN for its next holder, so that no test reads stale values
// unseen.
TEST(StashTest, DebugBuildsFillWhatIsTakenAgainWithNan) {
  RunLocalRanks(1, [](std::unique_ptr<Communicator> world) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const auto session, Session::Create({}, std::move(world)));
    for (int take = 0; take < 2; ++take) {
      const StashHandle stash = session->stashes().Take();
      MOE_ASSIGN_OR_RETURN(const auto values, stash->device().Array<float>(100));
      if (take == 1) {
        EXPECT_TRUE(std::isnan(values[0]) && std::isnan(values[99]));
      }
      std::fill(values.begin(), values.end(), 1.0f);
    }
    return absl::OkStatus();
  });
}
#endif

// Forward without a stash, as in inference: the host opens no scope.
TEST(StashTest, ForwardWithoutAStashLeavesNothingInTheWorkspace) {
  RunLocalRanks(1, [](std::unique_ptr<Communicator> world) -> absl::Status {
    Rank rank;
    MOE_RETURN_IF_ERROR(rank.Create(std::move(world)));
    MOE_RETURN_IF_ERROR(rank.Forward(0, nullptr));
    EXPECT_EQ(rank.context().workspace->used_bytes(), 0);
    EXPECT_EQ(rank.context().host_workspace->used_bytes(), 0);
    return rank.context().compute->Synchronize();
  });
}

// A Forward on a CUDA device does not wait for the loss: the passes continue with what NaN makes of
// them.
TEST(RouterLossTest, WaitNamesTheLogitThatIsNotFinite) {
  RunLocalRanks(1, [](std::unique_ptr<Communicator> world) -> absl::Status {
    Rank rank;
    MOE_RETURN_IF_ERROR(rank.Create(std::move(world)));
    std::vector<float>& x = rank.values[0];
    x[3 * kHidden] = std::numeric_limits<float>::quiet_NaN();
    MOE_RETURN_IF_ERROR(rank.x[0].Write(x, rank.context()));
    const bool cuda = testing::LayerDevice() == DeviceKind::kCuda;
    const StashHandle stash = rank.Take();
    RouterStats stats;
    const absl::Status forward = rank.Forward(0, stash.get(), &stats);
    EXPECT_EQ(forward.ok(), cuda) << forward;
    EXPECT_TRUE(cuda || absl::StrContains(forward.message(), stats.Wait().message())) << forward;
    if (cuda) MOE_RETURN_IF_ERROR(rank.Backward(0, stash.get()));
    for (int i = 0; i < 2; ++i) {  // whoever asks
      EXPECT_EQ(stats.Wait(),
                absl::DataLossError("layer 0: the router's logit of token 3 for expert 0 is not "
                                    "finite: look at x and the router's weight and bias"));
    }
    return absl::OkStatus();
  });
}

// Central differences of what Forward returns. The loss of a call is 3 times the router's.
TEST(RouterLossTest, BackwardGivesItsGradientTimesWhatArrivesAtIt) {
  RunLocalRanks(1, [](std::unique_ptr<Communicator> world) -> absl::Status {
    Rank rank;
    MOE_RETURN_IF_ERROR(rank.Create(std::move(world)));
    std::vector<float>& x = rank.values[0];
    for (float& value : x) value *= 4;
    const auto loss = [&]() -> absl::StatusOr<double> {
      RouterStats stats;
      MOE_RETURN_IF_ERROR(rank.x[0].Write(x, rank.context()));
      MOE_RETURN_IF_ERROR(rank.Forward(0, nullptr, &stats));
      MOE_RETURN_IF_ERROR(stats.Wait());
      return stats.loss();
    };
    const StashHandle stash = rank.Take();
    MOE_RETURN_IF_ERROR(rank.x[0].Write(x, rank.context()));
    MOE_RETURN_IF_ERROR(rank.Forward(0, stash.get()));
    MOE_RETURN_IF_ERROR(rank.y[0].Write(std::vector<float>(x.size()), rank.context()));  // dy
    MOE_RETURN_IF_ERROR(rank.Backward(0, stash.get(), 3));
    std::vector<float> dx(x.size());
    MOE_RETURN_IF_ERROR(rank.dx[0].Read(dx, rank.context()));
    EXPECT_GT(*std::max_element(dx.begin(), dx.end()), 1e-4);
    constexpr float kStep = 0x1p-6f;
    for (size_t i = 0; i < x.size(); ++i) {
      const float at = x[i];
      x[i] = at + kStep;
      MOE_ASSIGN_OR_RETURN(const double above, loss());
      x[i] = at - kStep;
      MOE_ASSIGN_OR_RETURN(const double below, loss());
      x[i] = at;
      EXPECT_NEAR(dx[i], 3 * (above - below) / (2 * kStep), 2e-6) << i;  // 2^-24 of 0.2 / kStep
    }
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace moe
