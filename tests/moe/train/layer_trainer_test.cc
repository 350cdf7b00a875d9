// Steps of layers through moe::Trainer: the same bits at any layout, and every misuse refused.
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gating/gate.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/layer_harness.h"
#include "tests/moe/status_is.h"

namespace moe {
namespace {

using ::testing::HasSubstr;
using testing::kHidden;
using testing::kMicroBatches;
using testing::kOverlapping;
using testing::kTokens;
using testing::LayerConfig;
using testing::Layout;
using testing::Rows;
using testing::RunLocalRanks;
using testing::RunRound;
using testing::RunSteps;
using testing::View;
using enum absl::StatusCode;
using testing::StatusIs;

using Weights = std::map<std::string, std::vector<float>>;

void Keep(const Trainer& trainer, Weights& weights) {
  for (const auto& p : trainer.parameters().parameters()) {
    weights[p->spec().name].assign(p->master().begin(), p->master().end());
  }
}

bool IsFirst(const Trainer& trainer) {
  return trainer.context().mesh->world().rank() == 0;
}

using Layer = TrainedLayer<float>;

struct LayerSetup {
  Layout layout;
  TrainerOptions options = {.micro_batches = kMicroBatches};
  MoeLayerConfig layer = LayerConfig();
};

// Calls body(trainer, its layer) on every rank.
void RunLayers(const LayerSetup& setup, absl::FunctionRef<absl::Status(Trainer&, Layer&)> body) {
  testing::RunTrainers(setup.layout, setup.options, [&](Trainer& trainer) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(auto* const layer, trainer.AddMoeLayer<float>("mlp.", setup.layer));
    return body(trainer, *layer);
  });
}

// Rounds without a micro-batch (3 and 8 ranks have some), experts' biases learnt from counts of all
// ranks, weights after AdamW.
TEST(LayerTrainerTest, WeightsHaveTheSameBitsAtAnyLayout) {
  Weights one;
  RunLocalRanks(1, [&](std::unique_ptr<Communicator> world) {
    return RunSteps({}, std::move(world), [&](const Trainer& trainer) { Keep(trainer, one); });
  });
  for (const Layout& layout : {kOverlapping, Layout{.ranks = 4, .expert_parallel = 2},
                               Layout{.ranks = 8, .expert_parallel = 4}}) {
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

// Each of the 40 weights of 20 experts is a bucket of its own. Had all been open at a time, their
// rounds would take 37 buffers more, and the rank almost twice the bytes.
TEST(LayerTrainerTest, ALayerHoldsTheRoundSumsOfTwoBucketsOfExpertsAtATime) {
  for (const int overlap : {1, 3}) {
    for (const bool biases : {false, true}) {
      LayerSetup setup = {.layout = {.ranks = 2},
                          .options = {.micro_batches = kMicroBatches,
                                      .zero = ZeroStage::kGradients,
                                      .bucket_bytes = 4096},
                          .layer = LayerConfig(overlap)};
      setup.layer.router.num_experts = 20;
      setup.layer.ffn_hidden_size = 64;
      setup.layer.projection_biases = biases;
      RunLayers(setup, [&](Trainer& trainer, Layer& layer) -> absl::Status {
        MOE_RETURN_IF_ERROR(testing::RunStep(trainer, layer));
        const Trainer::StateBytes bytes = trainer.state_bytes();
        EXPECT_LT(static_cast<double>(bytes.allocated), 1.05 * static_cast<double>(bytes.formula));
        return absl::OkStatus();
      });
    }
  }
}

struct Norms {
  double measured = 0;
  double summed = 0;  // by the test, from all gradients; with one rank alone, which holds them all
};

// Norms of a layer and of a dense parameter of the host's own, whose mean gradient is 1.
Norms NormsOf(const Layout& layout, ZeroStage zero, bool train_experts) {
  Norms norms;
  MoeLayerConfig config = LayerConfig();
  config.train_experts = train_experts;
  const TrainerOptions options = {.micro_batches = kMicroBatches, .zero = zero};
  RunLayers({layout, options, config}, [&](Trainer& trainer, Layer& layer) -> absl::Status {
    const Communicator& all = trainer.context().mesh->world();
    const MicroBatchRange mine = MicroBatchesOf(all.rank(), all.size(), kMicroBatches);
    MOE_ASSIGN_OR_RETURN(Parameter* const dense,
                         trainer.AddParameter({.name = "head", .rows = 5, .cols = 8}));
    for (int64_t r = 0; r < trainer.rounds(); ++r) {
      MOE_RETURN_IF_ERROR(RunRound(trainer, layer));
      if (r < mine.end - mine.begin) {
        MOE_RETURN_IF_ERROR(trainer.AddGradient(*dense, std::vector<float>(40, 1)));
      }
    }
    MOE_RETURN_IF_ERROR(trainer.Reduce());
    MOE_ASSIGN_OR_RETURN(const GradientNorm norm, trainer.MeasureGradients());
    if (all.rank() == 0) norms.measured = norm.value;
    if (all.size() > 1) return trainer.EndStep();
    for (const auto& p : trainer.parameters().parameters()) {
      if (!p->spec().trainable) continue;
      std::vector<float> scratch(static_cast<size_t>(p->size()));
      MOE_RETURN_IF_ERROR(trainer.Gradient(*p, absl::MakeSpan(scratch)));
      for (const float g : scratch) norms.summed += static_cast<double>(g) * g;
    }
    norms.summed = std::sqrt(norms.summed);
    EXPECT_EQ(*trainer.ClipGradNorm(norm.value / 2), norm.value);
    EXPECT_EQ(*trainer.ClipGradNorm(norm.value), norm.value / 2);  // clipped once
    return trainer.EndStep();
  });
  return norms;
}

TEST(LayerTrainerTest, TheGradientNormHasTheSameBitsAtAnyLayoutAndZeroStage) {
  for (const bool train_experts : {true, false}) {
    const Norms one = NormsOf({}, ZeroStage::kNone, train_experts);
    EXPECT_NEAR(one.measured, one.summed, 1e-12 * one.summed);
    EXPECT_GT(one.measured, std::sqrt(40.0));  // the dense parameter's
    for (const ZeroStage zero : {ZeroStage::kNone, ZeroStage::kOptimizer, ZeroStage::kGradients}) {
      for (const Layout& layout :
           {Layout{.ranks = 2, .expert_parallel = 1}, Layout{.ranks = 2, .expert_parallel = 2},
            Layout{.ranks = 3, .expert_parallel = 3}, Layout{.ranks = 3},
            Layout{.ranks = 4, .expert_parallel = 2}}) {
        EXPECT_EQ(NormsOf(layout, zero, train_experts).measured, one.measured)
            << layout.ranks << " ranks, ep " << layout.expert_parallel << ", zero "
            << static_cast<int>(zero) << ", experts trained " << train_experts;
      }
    }
  }
}

// 0 / 0 of experts without tokens, with an epsilon of 0: only some ranks hold each such expert.
TEST(LayerTrainerTest, WeightsThatAStepMakesNotFiniteEndItOnEveryRank) {
  for (const ZeroStage zero : {ZeroStage::kNone, ZeroStage::kOptimizer, ZeroStage::kGradients}) {
    LayerSetup setup = {.layout = {.ranks = 4, .expert_parallel = 2},
                        .options = {.micro_batches = 4, .zero = zero}};
    setup.options.optimizer.epsilon = 0;
    setup.layer.router.gate = "mixtral";
    setup.layer.router.num_experts = 64;  // 4 * 6 tokens leave some without any
    RunLayers(setup, [&](Trainer& trainer, Layer& layer) -> absl::Status {
      MOE_RETURN_IF_ERROR(RunRound(trainer, layer));
      EXPECT_THAT(trainer.Step({.learning_rate = 0.01}),
                  StatusIs(kDataLoss,
                           "values of weights or their moments are not finite, the "
                           "first in tensor 'mlp."));
      return absl::OkStatus();
    });
  }
}

TEST(LayerTrainerTest, MisuseIsRefusedAndSaysWhatWasExpected) {
  RunLayers({.options = {.micro_batches = 1}}, [&](Trainer& trainer, Layer& layer) -> absl::Status {
    EXPECT_THAT(trainer.Step({}), StatusIs(kFailedPrecondition, "0 of 1 rounds have begun"));
    EXPECT_EQ(trainer.AddMoeLayer<BFloat16>("half.", LayerConfig()).status().code(),
              kInvalidArgument);  // a store of float32
    MOE_ASSIGN_OR_RETURN(const Round round, trainer.BeginRound());
    EXPECT_THAT(trainer.AddMoeLayer<float>("late.", LayerConfig()),
                StatusIs(kFailedPrecondition, "comes after the first step"));
    EXPECT_THAT(trainer.BeginRound(), StatusIs(kFailedPrecondition, "has 1 rounds, expected Step"));
    EXPECT_THAT(trainer.BeginStep(), StatusIs(kFailedPrecondition, "has not ended"));
    std::vector<float> x = Rows(round), y(x.size()), dx(x.size());
    EXPECT_THAT(layer.Backward(round, View(y), View(dx)),
                StatusIs(kFailedPrecondition, "has no Forward of this layer"));
    const auto in_memory_of_x = StatusIs(kInvalidArgument, "y is in the memory of x");
    EXPECT_THAT(layer.Forward(round, View(x), View(x)), in_memory_of_x);
    EXPECT_THAT(layer.ForwardRows(x.data(), kTokens, nullptr, x.data()), in_memory_of_x);
    TrainedLayerBase::GraphForward call = {
        .x = x.data(), .rows = kTokens, .cols = kHidden, .y = x.data()};
    EXPECT_THAT(layer.ForwardInGraph(call), in_memory_of_x);
    call.x = nullptr;
    EXPECT_THAT(layer.ForwardInGraph(call), StatusIs(kInvalidArgument, "x [6, 8] is null"));
    MOE_RETURN_IF_ERROR(layer.Forward(round, View(x), View(y)));
    EXPECT_THAT(layer.BackwardRows(y.data(), x.data()), StatusIs(kInvalidArgument, ""));
    EXPECT_THAT(trainer.Step({}), StatusIs(kFailedPrecondition, "still miss gradients"));
    EXPECT_THAT(layer.Backward(round, View(y), View(dx)),
                StatusIs(kFailedPrecondition, "has ended"));
    return absl::OkStatus();
  });
}

// Passes of two rounds in a host's graph, the Backwards in reverse: the sums are those of passes in
// turn. A Forward too many, and a Backward too few, are refused by name.
TEST(LayerTrainerTest, StatesOfAHostsGraphGoThroughAStepInAnyOrder) {
  Weights in_turn, in_graph;
  for (const bool graph : {false, true}) {
    const Layout layout = {.ranks = 2, .expert_parallel = 2};
    RunLayers({.layout = layout}, [&](Trainer& trainer, Layer& layer) -> absl::Status {
      struct Pass {
        std::vector<float> x, y, dx;
        TrainedLayerBase::GraphBackward backward;
      };
      std::vector<Pass> passes(static_cast<size_t>(trainer.rounds()));
      for (Pass& pass : passes) {
        MOE_ASSIGN_OR_RETURN(const Round round, trainer.BeginRound());
        pass.x = pass.y = pass.dx = Rows(round);
        if (!graph) {
          MOE_RETURN_IF_ERROR(layer.Forward(round, View(pass.x), View(pass.y)));
          MOE_RETURN_IF_ERROR(layer.Backward(round, View(pass.y), View(pass.dx)));
          continue;
        }
        TrainedLayerBase::GraphForward call = {.x = pass.x.data(),
                                               .rows = View(pass.x).rows(),
                                               .cols = kHidden + 1,
                                               .y = pass.y.data()};
        EXPECT_THAT(layer.ForwardInGraph(call), StatusIs(kInvalidArgument, "expected both [T, "));
        call.cols = kHidden;
        MOE_ASSIGN_OR_RETURN(pass.backward, layer.ForwardInGraph(call));
        EXPECT_THAT(layer.ForwardInGraph(call),
                    StatusIs(kFailedPrecondition, "expected one in each"));
      }
      for (auto pass = passes.rbegin(); graph && pass != passes.rend(); ++pass) {
        EXPECT_THAT(trainer.Reduce(), StatusIs(kFailedPrecondition, "the layer of mlp.gate"));
        MOE_RETURN_IF_ERROR(pass->backward(pass->y.data(), 1.0f, pass->dx.data()));
        EXPECT_THAT(pass->backward(pass->y.data(), 1.0f, pass->dx.data()),
                    StatusIs(kFailedPrecondition, "another Backward"));
      }
      MOE_RETURN_IF_ERROR(trainer.Step({.learning_rate = 0.01}).status());
      if (IsFirst(trainer)) Keep(trainer, graph ? in_graph : in_turn);
      return absl::OkStatus();
    });
  }
  EXPECT_EQ(in_graph, in_turn);
}

TEST(LayerTrainerTest, AParameterThatComesAfterTheFirstStepIsRefused) {
  RunLayers({.options = {.micro_batches = 1}}, [&](Trainer& trainer, Layer&) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const Round round, trainer.BeginRound());
    EXPECT_THAT(trainer.AddParameter({.name = "late"}),
                StatusIs(kFailedPrecondition, "comes after the first step"));
    MOE_ASSIGN_OR_RETURN(Parameter* const late, trainer.parameters().Add({.name = "late"}));
    EXPECT_THAT(trainer.AddGradient(*late, {1.0f}),
                StatusIs(kFailedPrecondition, "late has no sum of gradients"));
    EXPECT_THAT(std::string(trainer.MarkReady(round, *late).message()),
                HasSubstr("came after the sums"));
    return absl::OkStatus();
  });
}

TEST(LayerTrainerTest, ABackwardOfAHostsGraphIsRefusedWhenItsTrainerIsGone) {
  TrainedLayerBase::GraphBackward backward;
  std::vector<float> x, y, dx;
  RunLayers({}, [&](Trainer& trainer, Layer& layer) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const Round round, trainer.BeginRound());
    x = y = dx = Rows(round);
    MOE_ASSIGN_OR_RETURN(
        backward, layer.ForwardInGraph(
                      {.x = x.data(), .rows = View(x).rows(), .cols = kHidden, .y = y.data()}));
    return absl::OkStatus();
  });
  EXPECT_THAT(backward(y.data(), 1.0f, dx.data()), StatusIs(kFailedPrecondition, "is gone"));
}

// Forward alone between steps: nothing is counted, drawn or moved.
TEST(LayerTrainerTest, AnEvaluationChangesNothing) {
  Weights plain, evaluated;
  for (Weights* const weights : {&plain, &evaluated}) {
    RunLayers({.layout = {.ranks = 3}}, [&](Trainer& trainer, Layer& layer) -> absl::Status {
      for (int step = 1; step <= 2; ++step) {
        for (int pass = 0; pass < 2 && weights == &evaluated; ++pass) {
          MOE_RETURN_IF_ERROR(trainer.BeginEvaluation(7));
          EXPECT_EQ(trainer.rounds(), 3);
          for (int64_t r = 0; r < trainer.rounds(); ++r) {
            MOE_ASSIGN_OR_RETURN(const Round round, trainer.BeginRound());
            std::vector<float> x = Rows(round), y(x.size());
            MOE_RETURN_IF_ERROR(layer.Forward(round, View(x), View(y)));
          }
          MOE_RETURN_IF_ERROR(trainer.EndStep());
        }
        MOE_RETURN_IF_ERROR(testing::RunStep(trainer, layer));
      }
      if (IsFirst(trainer)) Keep(trainer, *weights);
      return absl::OkStatus();
    });
  }
  EXPECT_EQ(evaluated, plain);
}

// The global balance loss compares with the last step's shares, which the first takes as equal.
TEST(LayerTrainerTest, TheFirstStepsGlobalBalanceLossIsTheCoefficient) {
  MoeLayerConfig config = LayerConfig();
  config.router.load_balancing = LoadBalancing::kGlobalAuxLoss;
  config.router.aux_loss_coeff = 0.02f;
  RunLayers({.layer = config}, [&](Trainer& trainer, Layer& layer) -> absl::Status {
    MOE_RETURN_IF_ERROR(RunRound(trainer, layer));
    EXPECT_NEAR(layer.stats().aux_loss, 0.02, 1e-8);
    for (int64_t r = 1; r < trainer.rounds(); ++r) {
      MOE_RETURN_IF_ERROR(RunRound(trainer, layer));
    }
    MOE_RETURN_IF_ERROR(trainer.Step({.learning_rate = 0.01}).status());
    MOE_RETURN_IF_ERROR(RunRound(trainer, layer));
    EXPECT_GT(std::abs(layer.stats().aux_loss - 0.02), 1e-6);
    return absl::OkStatus();
  });
}

TEST(LayerTrainerTest, AStepWithoutAnOptimiserEndsOnceItsGradientsAreSums) {
  const LayerSetup setup = {.layout = {.ranks = 2}, .options = {.micro_batches = 2}};
  RunLayers(setup, [&](Trainer& trainer, Layer& layer) -> absl::Status {
    Weights before, after;
    Keep(trainer, before);
    MOE_RETURN_IF_ERROR(trainer.BeginEvaluation(2));
    EXPECT_THAT(trainer.BeginStep(),
                StatusIs(kFailedPrecondition, "the evaluation after step 0 has not"));
    EXPECT_THAT(trainer.EndStep(), StatusIs(kFailedPrecondition, "0 of 1 rounds have begun"));
    MOE_ASSIGN_OR_RETURN(const Round seen, trainer.BeginRound());
    std::vector<float> x = Rows(seen), y(x.size()), dx(x.size());
    MOE_RETURN_IF_ERROR(layer.Forward(seen, View(x), View(y)));
    EXPECT_THAT(layer.Backward(seen, View(y), View(dx)),
                StatusIs(kFailedPrecondition, "without a stash, as in an evaluation"));
    EXPECT_THAT(trainer.MarkReady(seen, *trainer.parameters().parameters().front()),
                StatusIs(kFailedPrecondition, "an evaluation has no gradients"));
    EXPECT_THAT(trainer.Step({}), StatusIs(kFailedPrecondition, "expected EndStep"));
    MOE_RETURN_IF_ERROR(trainer.EndStep());

    MOE_RETURN_IF_ERROR(RunRound(trainer, layer));
    EXPECT_THAT(trainer.EndStep(), StatusIs(kFailedPrecondition, "are no sums, expected Reduce"));
    EXPECT_THAT(trainer.MeasureGradients(), StatusIs(kFailedPrecondition, "expected Reduce"));
    const Parameter& gate = *trainer.parameters().parameters().front();
    EXPECT_THAT(trainer.Gradient(gate, absl::MakeSpan(x)),
                StatusIs(kFailedPrecondition, "expected Reduce"));
    EXPECT_TRUE(absl::IsInvalidArgument(trainer.AddGradient(gate, {})));
    MOE_RETURN_IF_ERROR(trainer.Reduce());
    EXPECT_GT(trainer.MeasureGradients()->value, 0);
    MOE_RETURN_IF_ERROR(trainer.EndStep());
    MOE_RETURN_IF_ERROR(trainer.BeginRound().status());
    MOE_RETURN_IF_ERROR(trainer.EndStep());  // nothing was marked: forgotten
    Keep(trainer, after);
    after["mlp.gate.e_score_correction_bias"] = before["mlp.gate.e_score_correction_bias"];
    EXPECT_EQ(after, before);  // but for what a router learns
    EXPECT_EQ(trainer.step(), 2);
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

// Weights, biases and selection biases that are not finite would make an expert chosen never, or
// always, without an error.
TEST(LayerTrainerTest, ARouterThatIsNotFiniteEndsTheStepOfEveryGateNamingTheExpert) {
  constexpr int kExpert = 4;
  for (const std::string& gate : GateNames()) {
    for (const char* ending : {"gate.weight", "gate.bias", "e_score_correction_bias"}) {
      for (const float bad :
           {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
            -std::numeric_limits<float>::infinity()}) {
        LayerSetup setup = {.options = {.micro_batches = 1}};
        RouterConfig& router = setup.layer.router;
        router.gate = gate;
        router.layer = 7;
        const int32_t only = FindGate(gate)->only_top_k;
        if (only != 0) router.top_k = only;
        RunLayers(setup, [&](Trainer& trainer, Layer& layer) -> absl::Status {
          const bool weight = absl::string_view(ending) == "gate.weight";
          if (!Spoil(trainer, ending, kExpert * (weight ? kHidden : 1), bad)) {
            return absl::OkStatus();
          }
          MOE_ASSIGN_OR_RETURN(const Round round, trainer.BeginRound());
          std::vector<float> x(kTokens * kHidden, 1.0f), y(x.size());
          const absl::Status status = layer.Forward(round, View(x), View(y));
          EXPECT_THAT(status, StatusIs(kDataLoss, "layer 7: "));
          EXPECT_THAT(std::string(status.message()), HasSubstr("expert 4 is"));
          return absl::OkStatus();
        });
      }
    }
  }
}

// Backward of a layer without a trainer refuses a stash that has no Forward of the layer, was used
// or was given back, and a pass without one.
TEST(MoeLayerTest, BackwardOfAStashThatHasNoForwardOrWithoutSumsIsRefused) {
  testing::RunSessions(1, {}, [&](Session& session) -> absl::Status {
    const Context& context = session.context();
    ParameterStore store(DType::kFloat32, 1);
    MOE_ASSIGN_OR_RETURN(const auto layer,
                         MoeLayer<float>::Create(LayerConfig(), "0.", store, context));
    MOE_ASSIGN_OR_RETURN(const auto other,
                         MoeLayer<float>::Create(LayerConfig(), "1.", store, context));
    std::vector<float> x(kTokens * kHidden, 0.5f), y(x.size()), dx(x.size());
    const auto forward = [&](Stash* stash) {
      return layer->Forward({.context = context, .stash = stash}, View(x), View(y));
    };
    const auto backward = [&](MoeLayer<float>& which, Stash* stash) {
      return which.Backward({.context = context, .stash = stash}, View(x), View(dx),
                            [](Parameter&) { return absl::OkStatus(); });
    };
    StashHandle stash = session.stashes().Take();
    MOE_RETURN_IF_ERROR(forward(stash.get()));
    EXPECT_THAT(backward(*layer, stash.get()),
                StatusIs(kFailedPrecondition,
                         "0.gate.weight has no sum of gradients, expected a GradientReducer"));
    MOE_ASSIGN_OR_RETURN(
        const auto reducer,
        GradientReducer::Create({.max_terms = 1}, store, context, session.gradient_stream()));
    MOE_RETURN_IF_ERROR(reducer->Begin());
    EXPECT_THAT(backward(*layer, nullptr), StatusIs(kFailedPrecondition, "without a stash"));
    const auto no_forward = StatusIs(kFailedPrecondition, "has no Forward of this layer");
    EXPECT_THAT(backward(*other, stash.get()), no_forward);
    const Stash* const before = stash.get();
    stash.reset();
    stash = session.stashes().Take();
    EXPECT_EQ(stash.get(), before);
    EXPECT_THAT(backward(*layer, stash.get()), no_forward);
    MOE_RETURN_IF_ERROR(forward(stash.get()));
    MOE_RETURN_IF_ERROR(backward(*layer, stash.get()));
    EXPECT_THAT(backward(*layer, stash.get()),
                StatusIs(kFailedPrecondition, "was used by another Backward"));
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace moe
