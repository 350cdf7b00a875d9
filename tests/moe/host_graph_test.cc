// A layer in the graph of a host: passes in any order, on any thread; the router's loss as a value.
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "moe/gradient_reducer.h"
#include "moe/moe_layer.h"
#include "moe/session.h"
#include "tests/comm/local_ranks.h"
#include "tests/counting_new.h"

namespace moe {
namespace {

constexpr int kCalls = 3;
constexpr std::array<int64_t, kCalls> kTokens = {5, 0, 7};
constexpr int64_t kHidden = 8;

// One layer on one rank, and the rows of three calls.
struct Rank {
  std::unique_ptr<Session> session;
  std::unique_ptr<ParameterStore> store;
  std::unique_ptr<MoeLayer<float>> layer;
  std::unique_ptr<GradientReducer> reducer;
  std::array<std::vector<float>, kCalls> x, y, dx;

  absl::Status Create(std::unique_ptr<Communicator> world, int threads = 1) {
    const int rank = world->rank(), ranks = world->size();
    MOE_ASSIGN_OR_RETURN(
        session,
        Session::Create({.expert_parallel_size = ranks, .threads = threads}, std::move(world)));
    store = std::make_unique<ParameterStore>(DType::kFloat32, 1);
    const MoeLayerConfig config = {.router = {.num_experts = 4,
                                              .top_k = 2,
                                              .hidden_size = kHidden,
                                              .aux_loss_coeff = 0.1f,
                                              .z_loss_coeff = 0.05f},
                                   .ffn_hidden_size = 12,
                                   .shared_expert_ffn_hidden_size = 8,
                                   .gated_shared_expert = true};
    MOE_ASSIGN_OR_RETURN(layer, MoeLayer<float>::Create(config, "", *store, session->context()));
    MOE_ASSIGN_OR_RETURN(
        reducer, GradientReducer::Create({.max_terms = kCalls * ranks}, *store, session->context(),
                                         session->gradient_stream()));
    for (int c = 0; c < kCalls; ++c) {
      x[c].resize(kTokens[c] * kHidden);
      y[c] = dx[c] = x[c];
      for (size_t i = 0; i < x[c].size(); ++i) {
        x[c][i] = std::sin(static_cast<float>(i * i + 7 * static_cast<size_t>(c + 3 * rank)));
      }
    }
    return reducer->Begin();
  }
  MatrixView<float> View(std::vector<float>& rows) const {
    return {rows.data(), static_cast<int64_t>(rows.size()) / kHidden, kHidden};
  }
  absl::Status Forward(int call, MoeLayerSaved<float>& saved) {
    return layer->Forward(View(x[call]), {}, View(y[call]), &saved, nullptr);
  }
  absl::Status Backward(int call, MoeLayerSaved<float>& saved) {
    return layer->Backward(View(y[call]), saved, 1, View(dx[call]),
                           [](Parameter&) { return absl::OkStatus(); });
  }
  absl::StatusOr<std::vector<float>> Gradients() {
    const auto all = store->parameters();
    for (auto p = all.rbegin(); p != all.rend(); ++p) {
      MOE_RETURN_IF_ERROR(reducer->MarkReady(**p));
    }
    MOE_RETURN_IF_ERROR(reducer->Finish());
    std::vector<float> values, scratch;
    for (const auto& p : all) {
      scratch.resize(p->size());
      MOE_ASSIGN_OR_RETURN(const auto gradient, reducer->Gradient(*p, 1, absl::MakeSpan(scratch),
                                                                  *session->context().compute));
      values.insert(values.end(), gradient.begin(), gradient.end());
    }
    return values;
  }
};

TEST(SavedMemoryTest, PassesInAnyOrderHaveTheBitsOfOneAfterTheOther) {
  for (const int ranks : {1, 2}) {
    testing::RunLocalRanks(ranks, [](std::unique_ptr<Communicator> world) -> absl::Status {
      MOE_ASSIGN_OR_RETURN(auto other, world->Split(0, world->rank()));
      Rank in_turn, mixed;
      MOE_RETURN_IF_ERROR(in_turn.Create(std::move(world)));
      for (int c = 0; c < kCalls; ++c) {
        const WorkspaceScope scope(*in_turn.session->context().workspace);
        MoeLayerSaved<float> saved;
        MOE_RETURN_IF_ERROR(in_turn.Forward(c, saved));
        MOE_RETURN_IF_ERROR(in_turn.Backward(c, saved));
      }
      MOE_RETURN_IF_ERROR(mixed.Create(std::move(other), 2));
      const Workspace& workspace = *mixed.session->context().workspace;
      std::vector<MoeLayerSaved<float>> saved(kCalls);
      for (int c = 0; c < kCalls; ++c) {
        saved[c] = mixed.layer->MakeSaved();
        MOE_RETURN_IF_ERROR(mixed.Forward(c, saved[c]));
        EXPECT_EQ(workspace.used_bytes(), 0);
      }
      for (const int c : {1, 0, 2}) {
        absl::Status status;
        std::thread([&] { status = mixed.Backward(c, saved[c]); }).join();
        MOE_RETURN_IF_ERROR(status);
        EXPECT_EQ(workspace.used_bytes(), 0);
        saved[c] = {};
      }
      EXPECT_EQ(mixed.y, in_turn.y);
      EXPECT_EQ(mixed.dx, in_turn.dx);
      MOE_ASSIGN_OR_RETURN(const auto expected, in_turn.Gradients());
      MOE_ASSIGN_OR_RETURN(const auto gradients, mixed.Gradients());
      EXPECT_EQ(gradients, expected);
      return absl::OkStatus();
    });
  }
}

TEST(SavedMemoryTest, LaterStepsAllocateNothing) {
  testing::RunLocalRanks(1, [](std::unique_ptr<Communicator> world) -> absl::Status {
    Rank rank;
    MOE_RETURN_IF_ERROR(rank.Create(std::move(world)));
    const Context& context = rank.session->context();
    int64_t before = 0;
    for (int step = 0; step < 4; ++step) {
      if (step == 2) before = Allocations() + context.workspace->allocations();
      std::array<MoeLayerSaved<float>, kCalls> saved;
      for (const int c : {0, 1, 2}) {
        saved[c] = rank.layer->MakeSaved();
        MOE_RETURN_IF_ERROR(rank.Forward(c, saved[c]));
      }
      for (const int c : {2, 0, 1}) {
        MOE_RETURN_IF_ERROR(rank.Backward(c, saved[c]));
        saved[c] = {};
      }
    }
    EXPECT_EQ(Allocations() + context.workspace->allocations(), before);
    return absl::OkStatus();
  });
}

// As the nodes of a graph that outlives the model.
TEST(SavedMemoryTest, StatesMayGoOnAnyThreadAndAfterTheLayer) {
  std::vector<MoeLayerSaved<float>> left;
  testing::RunLocalRanks(1, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    Rank rank;
    MOE_RETURN_IF_ERROR(rank.Create(std::move(world)));
    for (int i = 0; i < 20; ++i) {
      MoeLayerSaved<float> saved = rank.layer->MakeSaved();
      MOE_RETURN_IF_ERROR(rank.Forward(0, saved));
      std::thread other([gone = std::move(saved)] {});
      MoeLayerSaved<float> meanwhile = rank.layer->MakeSaved();
      MOE_RETURN_IF_ERROR(rank.Forward(2, meanwhile));
      MOE_RETURN_IF_ERROR(rank.Backward(2, meanwhile));
      other.join();
      left.push_back(std::move(meanwhile));
    }
    return absl::OkStatus();
  });
}

// Forward without a state, as inference has it: the host opens no scope.
TEST(SavedMemoryTest, ForwardWithoutAStateLeavesNothingInTheWorkspace) {
  testing::RunLocalRanks(1, [](std::unique_ptr<Communicator> world) -> absl::Status {
    Rank rank;
    MOE_RETURN_IF_ERROR(rank.Create(std::move(world)));
    MOE_RETURN_IF_ERROR(
        rank.layer->Forward(rank.View(rank.x[0]), {}, rank.View(rank.y[0]), nullptr, nullptr));
    EXPECT_EQ(rank.session->context().workspace->used_bytes(), 0);
    return absl::OkStatus();
  });
}

// Central differences of what Forward returns. The loss of a call is 3 times the router's.
TEST(RouterLossTest, BackwardGivesItsGradientTimesWhatArrivesAtIt) {
  testing::RunLocalRanks(1, [](std::unique_ptr<Communicator> world) -> absl::Status {
    Rank rank;
    MOE_RETURN_IF_ERROR(rank.Create(std::move(world)));
    std::vector<float>& x = rank.x[0];
    for (float& value : x) value *= 4;
    const auto loss = [&]() -> double {
      RouterStats stats;
      EXPECT_TRUE(
          rank.layer->Forward(rank.View(x), {}, rank.View(rank.y[0]), nullptr, &stats).ok());
      return stats.loss();
    };
    MoeLayerSaved<float> saved = rank.layer->MakeSaved();
    MOE_RETURN_IF_ERROR(rank.Forward(0, saved));
    std::vector<float> dy(x.size());
    MOE_RETURN_IF_ERROR(rank.layer->Backward(rank.View(dy), saved, 3, rank.View(rank.dx[0]),
                                             [](Parameter&) { return absl::OkStatus(); }));
    EXPECT_GT(*std::max_element(rank.dx[0].begin(), rank.dx[0].end()), 1e-4);
    constexpr float kStep = 0x1p-6f;
    for (size_t i = 0; i < x.size(); ++i) {
      const float at = x[i];
      x[i] = at + kStep;
      const double above = loss();
      x[i] = at - kStep;
      const double difference = (above - loss()) / (2 * kStep);
      x[i] = at;
      EXPECT_NEAR(rank.dx[0][i], 3 * difference, 2e-6) << i;  // rounding: 2^-24 of 0.2 / kStep
    }
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace moe
