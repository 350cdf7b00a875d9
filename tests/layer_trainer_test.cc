// Steps of layers through moe::Trainer: the same bits at any layout, every misuse refused, and a
// rank that dies at any collective ends all of them.
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/time/clock.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/create.h"
#include "gating/gate.h"
#include "moe/trainer.h"
#include "tests/dying_communicator.h"
#include "tests/local_ranks.h"

namespace moe {
namespace {

using testing::Death;
using testing::DyingCommunicator;
using ::testing::HasSubstr;
using testing::RunLocalRanks;

constexpr int64_t kTokens = 6, kHidden = 8, kMicroBatches = 5;

MoeLayerConfig LayerConfig(int overlap) {
  return {.router = {.gate = "deepseek-v3", .num_experts = 6, .top_k = 2, .hidden_size = kHidden},
          .ffn_hidden_size = 12,
          .overlap_degree = overlap};
}

// Rows of one micro-batch, whichever rank has it.
std::vector<float> Rows(const Round& round) {
  std::vector<float> rows(round.empty() ? 0 : kTokens * kHidden);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = std::sin(static_cast<float>(i * i + 31 * static_cast<size_t>(round.micro_batch())));
  }
  return rows;
}

MatrixView<float> View(std::vector<float>& rows) {
  return {rows.data(), static_cast<int64_t>(rows.size()) / kHidden, kHidden};
}

// Forward and backward of a round; the loss is half the sum of squares of y + x.
absl::Status RunRound(Trainer& trainer, TrainedLayer<float>& layer, float poison = 0) {
  MOE_ASSIGN_OR_RETURN(const Round round, trainer.BeginRound());
  std::vector<float> x = Rows(round), y(x.size()), dx(x.size());
  MOE_RETURN_IF_ERROR(layer.Forward(round, View(x), View(y)));
  for (size_t i = 0; i < y.size(); ++i) y[i] += x[i];
  if (!y.empty()) y[0] += poison;
  return layer.Backward(round, View(y), View(dx));
}

absl::Status RunStep(Trainer& trainer, TrainedLayer<float>& layer) {
  for (int64_t r = 0; r < trainer.rounds(); ++r) {
    MOE_RETURN_IF_ERROR(RunRound(trainer, layer));
  }
  return trainer.Step({.learning_rate = 0.01}).status();
}

struct Layout {
  int ranks = 1, expert_parallel = 1, overlap = 1;
};

TrainerOptions Options(const Layout& layout) {
  return {.session = {.expert_parallel_size = layout.expert_parallel,
                      .overlap_exchange = layout.overlap > 1},
          .micro_batches = kMicroBatches};
}

absl::Status RunSteps(const Layout& layout, std::unique_ptr<Communicator> world,
                      const std::function<void(const Trainer&)>& look) {
  MOE_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(Options(layout), std::move(world)));
  MOE_ASSIGN_OR_RETURN(auto* const layer,
                       trainer->AddMoeLayer<float>("mlp.", LayerConfig(layout.overlap)));
  for (int step = 1; step <= 3; ++step) MOE_RETURN_IF_ERROR(RunStep(*trainer, *layer));
  look(*trainer);
  return absl::OkStatus();
}

using Weights = std::map<std::string, std::vector<float>>;

void Keep(const Trainer& trainer, Weights& weights) {
  for (const auto& p : trainer.parameters().parameters()) {
    weights[p->spec().name].assign(p->master().begin(), p->master().end());
  }
}

// Rounds without a micro-batch (3 and 8 ranks have some), experts' biases learnt from counts of all
// ranks, weights after AdamW.
TEST(LayerTrainerTest, WeightsHaveTheSameBitsAtAnyLayout) {
  Weights one;
  RunLocalRanks(1, [&](std::unique_ptr<Communicator> world) {
    return RunSteps({}, std::move(world), [&](const Trainer& trainer) { Keep(trainer, one); });
  });
  for (const Layout layout : {Layout{3, 3, 2}, Layout{4, 2, 1}, Layout{8, 4, 1}}) {
    Weights all;
    std::mutex mu;
    RunLocalRanks(layout.ranks, [&](std::unique_ptr<Communicator> world) {
      return RunSteps(layout, std::move(world), [&](const Trainer& trainer) {
        const std::lock_guard<std::mutex> lock(mu);
        Keep(trainer, all);
      });
    });
    EXPECT_EQ(all, one) << layout.ranks << " ranks";
  }
}

TEST(LayerTrainerTest, MisuseIsRefusedAndSaysWhatWasExpected) {
  RunLocalRanks(1, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const auto trainer,
                         Trainer::Create({.micro_batches = 1}, std::move(world)));
    MOE_ASSIGN_OR_RETURN(auto* const layer, trainer->AddMoeLayer<float>("mlp.", LayerConfig(1)));
    const auto message = [](const absl::Status& status) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      return std::string(status.message());
    };
    EXPECT_THAT(message(trainer->Step({}).status()), HasSubstr("0 of 1 rounds have begun"));
    EXPECT_EQ(trainer->AddMoeLayer<BFloat16>("half.", LayerConfig(1)).status().code(),
              absl::StatusCode::kInvalidArgument);  // a store of float32
    MOE_ASSIGN_OR_RETURN(const Round round, trainer->BeginRound());
    EXPECT_THAT(message(trainer->AddMoeLayer<float>("late.", LayerConfig(1)).status()),
                HasSubstr("comes after the first step"));
    EXPECT_THAT(message(trainer->BeginRound().status()), HasSubstr("has 1 rounds, expected Step"));
    EXPECT_THAT(message(trainer->BeginStep()), HasSubstr("has not ended"));
    std::vector<float> x = Rows(round), y(x.size()), dx(x.size());
    EXPECT_THAT(message(layer->Backward(round, View(y), View(dx))), HasSubstr("is of no Forward"));
    MOE_RETURN_IF_ERROR(layer->Forward(round, View(x), View(y)));
    EXPECT_THAT(message(trainer->Step({}).status()), HasSubstr("still miss gradients"));
    EXPECT_THAT(message(layer->Backward(round, View(y), View(dx))), HasSubstr("has ended"));
    return absl::OkStatus();
  });
}

// Forward alone between steps: nothing is counted, drawn or moved.
TEST(LayerTrainerTest, AnEvaluationChangesNothing) {
  Weights plain, evaluated;
  for (Weights* const weights : {&plain, &evaluated}) {
    RunLocalRanks(3, [&](std::unique_ptr<Communicator> world) -> absl::Status {
      const bool first = world->rank() == 0;
      MOE_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(Options({}), std::move(world)));
      MOE_ASSIGN_OR_RETURN(auto* const layer, trainer->AddMoeLayer<float>("mlp.", LayerConfig(1)));
      for (int step = 1; step <= 2; ++step) {
        for (int pass = 0; pass < 2 && weights == &evaluated; ++pass) {
          MOE_RETURN_IF_ERROR(trainer->BeginEvaluation(7));
          EXPECT_EQ(trainer->rounds(), 3);
          for (int64_t r = 0; r < trainer->rounds(); ++r) {
            MOE_ASSIGN_OR_RETURN(const Round round, trainer->BeginRound());
            std::vector<float> x = Rows(round), y(x.size());
            MOE_RETURN_IF_ERROR(layer->Forward(round, View(x), View(y)));
          }
          MOE_RETURN_IF_ERROR(trainer->EndStep());
        }
        MOE_RETURN_IF_ERROR(RunStep(*trainer, *layer));
      }
      if (first) Keep(*trainer, *weights);
      return absl::OkStatus();
    });
  }
  EXPECT_EQ(evaluated, plain);
}

TEST(LayerTrainerTest, AStepWithoutAnOptimiserEndsOnceItsGradientsAreSums) {
  RunLocalRanks(2, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const auto trainer,
                         Trainer::Create({.micro_batches = 2}, std::move(world)));
    MOE_ASSIGN_OR_RETURN(auto* const layer, trainer->AddMoeLayer<float>("mlp.", LayerConfig(1)));
    Weights before, after;
    Keep(*trainer, before);
    const auto message = [](const absl::Status& status) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      return std::string(status.message());
    };
    MOE_RETURN_IF_ERROR(trainer->BeginEvaluation(2));
    EXPECT_THAT(message(trainer->BeginStep()), HasSubstr("the evaluation after step 0 has not"));
    EXPECT_THAT(message(trainer->EndStep()), HasSubstr("0 of 1 rounds have begun"));
    MOE_ASSIGN_OR_RETURN(const Round seen, trainer->BeginRound());
    std::vector<float> x = Rows(seen), y(x.size()), dx(x.size());
    MOE_RETURN_IF_ERROR(layer->Forward(seen, View(x), View(y)));
    EXPECT_THAT(message(layer->Backward(seen, View(y), View(dx))), HasSubstr("is of no Forward"));
    EXPECT_THAT(message(trainer->MarkReady(seen, *trainer->parameters().parameters().front())),
                HasSubstr("an evaluation has no gradients"));
    EXPECT_THAT(message(trainer->Step({}).status()), HasSubstr("expected EndStep"));
    MOE_RETURN_IF_ERROR(trainer->EndStep());

    MOE_RETURN_IF_ERROR(RunRound(*trainer, *layer));
    EXPECT_THAT(message(trainer->EndStep()), HasSubstr("are no sums, expected Reduce"));
    EXPECT_THAT(message(trainer->NonFinite().status()), HasSubstr("expected Reduce"));
    MOE_RETURN_IF_ERROR(trainer->Reduce());
    EXPECT_EQ(*trainer->NonFinite(), 0);
    MOE_RETURN_IF_ERROR(trainer->EndStep());
    MOE_RETURN_IF_ERROR(trainer->BeginRound().status());
    MOE_RETURN_IF_ERROR(trainer->EndStep());  // nothing was marked: forgotten
    Keep(*trainer, after);
    after["mlp.gate.e_score_correction_bias"] = before["mlp.gate.e_score_correction_bias"];
    EXPECT_EQ(after, before);  // but for what a router learns
    EXPECT_EQ(trainer->step(), 2);
    return absl::OkStatus();
  });
}

// Writes `value` into the first parameter of this name ending; false if there is none.
bool Spoil(Trainer& trainer, absl::string_view ending, size_t at, float value) {
  for (const auto& p : trainer.parameters().parameters()) {
    if (!absl::EndsWith(p->spec().name, ending)) continue;
    p->master()[at] = value;
    EXPECT_TRUE(trainer.parameters().RefreshCompute(*p, *trainer.context().compute).ok());
    return true;
  }
  return false;
}

// An expert that is never chosen, or always, without a word: of weights, biases and selections.
TEST(LayerTrainerTest, ARouterThatIsNotFiniteEndsTheStepOfEveryGateNamingTheExpert) {
  constexpr int kExpert = 4;
  for (const std::string& gate : GateNames()) {
    for (const char* ending : {"gate.weight", "gate.bias", "e_score_correction_bias"}) {
      for (const float bad :
           {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
            -std::numeric_limits<float>::infinity()}) {
        RunLocalRanks(1, [&](std::unique_ptr<Communicator> world) -> absl::Status {
          MOE_ASSIGN_OR_RETURN(const auto trainer,
                               Trainer::Create({.micro_batches = 1}, std::move(world)));
          MoeLayerConfig config = LayerConfig(1);
          config.router.gate = gate;
          config.router.layer = 7;
          const int32_t only = FindGate(gate)->only_top_k;
          if (only != 0) config.router.top_k = only;
          MOE_ASSIGN_OR_RETURN(auto* const layer, trainer->AddMoeLayer<float>("mlp.", config));
          const bool weight = absl::string_view(ending) == "gate.weight";
          if (!Spoil(*trainer, ending, kExpert * (weight ? kHidden : 1), bad)) {
            return absl::OkStatus();
          }
          MOE_ASSIGN_OR_RETURN(const Round round, trainer->BeginRound());
          std::vector<float> x(kTokens * kHidden, 1.0f), y(x.size());
          const absl::Status status = layer->Forward(round, View(x), View(y));
          EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << gate << " " << ending << bad;
          EXPECT_THAT(std::string(status.message()), HasSubstr("layer 7: "));
          EXPECT_THAT(std::string(status.message()), HasSubstr("expert 4 is"));
          return absl::OkStatus();
        });
      }
    }
  }
}

// Of a layer without a trainer: what lies in a scope that has ended, or was used, is no state.
TEST(MoeLayerTest, BackwardOfSavedStateThatIsGoneIsRefused) {
  RunLocalRanks(1, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const auto session, Session::Create({}, std::move(world)));
    const Context& context = session->context();
    ParameterStore store(DType::kFloat32, 1);
    MOE_ASSIGN_OR_RETURN(const auto layer,
                         MoeLayer<float>::Create(LayerConfig(1), "", store, context));
    MOE_ASSIGN_OR_RETURN(
        const auto reducer,
        GradientReducer::Create({.max_terms = 1}, store, context, session->gradient_stream()));
    std::vector<float> x(kTokens * kHidden, 0.5f), y(x.size()), dx(x.size());
    const auto backward = [&](MoeLayerSaved<float>& saved) {
      return layer->Backward(View(x), saved, 1.0f, View(dx),
                             [](Parameter&) { return absl::OkStatus(); });
    };
    MoeLayerSaved<float> saved, released;
    EXPECT_THAT(std::string(backward(saved).message()), HasSubstr("is of no Forward"));
    {
      const WorkspaceScope scope(*context.workspace);
      MOE_RETURN_IF_ERROR(layer->Forward(View(x), {}, View(y), &released, nullptr));
    }
    const WorkspaceScope scope(*context.workspace);
    MOE_RETURN_IF_ERROR(layer->Forward(View(x), {}, View(y), &saved, nullptr));
    EXPECT_THAT(std::string(backward(released).message()),
                HasSubstr("lies in a workspace scope that has ended"));
    MOE_RETURN_IF_ERROR(backward(saved));
    EXPECT_THAT(std::string(backward(saved).message()), HasSubstr("was used by another Backward"));
    return absl::OkStatus();
  });
}

// One infinity on one rank: every rank hears of it, and no weight moves.
TEST(LayerTrainerTest, GradientsThatAreNotFiniteEndTheStepOnEveryRank) {
  RunLocalRanks(3, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    const bool bad = world->rank() == 2;
    MOE_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(Options({3, 3, 1}), std::move(world)));
    MOE_ASSIGN_OR_RETURN(auto* const layer, trainer->AddMoeLayer<float>("mlp.", LayerConfig(1)));
    Weights before, after;
    Keep(*trainer, before);
    for (int64_t r = 0; r < trainer->rounds(); ++r) {
      MOE_RETURN_IF_ERROR(
          RunRound(*trainer, *layer, bad ? std::numeric_limits<float>::infinity() : 0.0f));
    }
    MOE_RETURN_IF_ERROR(trainer->Reduce());
    MOE_ASSIGN_OR_RETURN(const int64_t count, trainer->NonFinite());
    EXPECT_GT(count, 0);
    EXPECT_EQ(trainer->Step({.learning_rate = 0.01}).status().code(), absl::StatusCode::kDataLoss);
    Keep(*trainer, after);
    EXPECT_EQ(after, before);
    return absl::OkStatus();
  });
}

// Rank 1 dies at its at-th collective; false if it has fewer.
bool RunWithDeath(const Layout& layout, int at) {
  constexpr int kVictim = 1;
  const absl::Duration timeout = absl::Seconds(20);
  const auto death = std::make_shared<Death>();
  std::atomic<int> collectives{0};
  death->comes = [&](const CommPhase&) {
    return ++collectives == at;
  };
  std::vector<absl::Status> results(layout.ranks);
  const absl::Time start = absl::Now();
  const RunOptions options = {.plan = {.ranks = layout.ranks}, .timeout = timeout};
  const absl::Status status = RunRanks(options, [&](std::unique_ptr<Communicator> world) {
    const int rank = world->rank();
    if (rank == kVictim) world = std::make_unique<DyingCommunicator>(std::move(world), death);
    results[rank] = RunSteps(layout, std::move(world), [](const Trainer&) {});
    return results[rank];
  });
  EXPECT_EQ(status, death->dead ? absl::AbortedError("this rank is dead") : absl::OkStatus());
  EXPECT_LT(absl::Now() - start, timeout) << "death " << at;  // told, not timed out
  for (int r = 0; r < layout.ranks; ++r) {
    EXPECT_EQ(results[r].ok(), !death->dead) << "death " << at << " rank " << r << results[r];
  }
  return death->dead;
}

// At every collective of three steps: memory that the streams still use must not go (sanitizers),
// and nobody waits for the deadline.
TEST(LayerTrainerTest, ARankThatDiesAtAnyCollectiveEndsAllRanks) {
  int deaths = 0;
  while (RunWithDeath({3, 3, 2}, deaths + 1)) ++deaths;
  EXPECT_GT(deaths, 50);
}

}  // namespace
}  // namespace moe
