// GradientReducer and Optimizer: sums over ranks, bucket partition, overlap, clipping by the true
// global norm.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/train/optimizer.h"
#include "tests/moe/layer_harness.h"

namespace moe {
namespace {

using testing::GradientOf;
using testing::RunSessions;

// Adds what `fill` writes to the parameter's gradient, and marks it ready.
absl::Status Contribute(Parameter& parameter, const std::function<void(absl::Span<float>)>& fill,
                        GradientReducer& reducer, const Context& context) {
  MOE_ASSIGN_OR_RETURN(const GradAccumulator sum, parameter.OpenGradient());
  MOE_RETURN_IF_ERROR(sum.Add(
      [&](absl::Span<float> out, Write write) {
        const std::vector<float> before(out.begin(), out.end());
        fill(out);
        for (size_t i = 0; write == Write::kAdd && i < out.size(); ++i) out[i] += before[i];
        return absl::OkStatus();
      },
      *context.workspace, *context.compute));
  return reducer.MarkReady(parameter);
}

// Sizes that straddle every bucket limit used below.
constexpr int64_t kSizes[] = {3, 5, 70, 1, 64, 17, 250};

absl::StatusOr<std::vector<Parameter*>> AddParameters(ParameterStore& store, int ep_rank) {
  std::vector<Parameter*> parameters;
  for (size_t i = 0; i < std::size(kSizes); ++i) {
    const bool expert = i % 3 == 1;
    MOE_ASSIGN_OR_RETURN(
        Parameter* const p,
        store.Add({.name = expert ? absl::StrCat("p", i, ".expert", ep_rank) : absl::StrCat("p", i),
                   .rows = kSizes[i],
                   .holders = expert ? MeshGroup::kExpertData : MeshGroup::kStage}));
    parameters.push_back(p);
  }
  return parameters;
}

// A partial that identifies its rank, parameter and element.
float Partial(int rank, int parameter, int64_t i) {
  return static_cast<float>(0.37 * (rank + 1) + 1e-3 * parameter + 1e-5 * static_cast<double>(i));
}

// Reduces one step on `ranks` ranks and returns rank 0's gradients, all parameters in order.
std::vector<float> ReduceOnce(int ranks, int ep, Numerics numerics, int64_t bucket_bytes,
                              AllReduceAlgorithm algorithm, int* buckets) {
  std::vector<float> result;
  const SessionOptions options = {.mesh = {.expert = ep}, .numerics = numerics};
  RunSessions(ranks, options, [&](Session& session) -> absl::Status {
    const Context& context = session.context();
    const int rank = context.mesh->world().rank();
    ParameterStore store(DType::kFloat32, 1);
    MOE_ASSIGN_OR_RETURN(const auto parameters, AddParameters(store, rank % ep));
    MOE_ASSIGN_OR_RETURN(
        const auto reducer,
        GradientReducer::Create(
            {.bucket_bytes = bucket_bytes, .algorithm = algorithm, .max_terms = 64}, store, context,
            session.gradient_stream()));
    for (int step = 0; step < 2; ++step) {  // the second must not see the first
      MOE_RETURN_IF_ERROR(reducer->Begin());
      // Odd ranks finish in another order: the launch order must still agree.
      std::vector<int> order(parameters.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
      if (rank % 2 == 1) std::reverse(order.begin(), order.end());
      for (const int p : order) {
        const auto partials = [&](absl::Span<float> out) {
          for (size_t i = 0; i < out.size(); ++i)
            out[i] = Partial(rank, p, static_cast<int64_t>(i));
        };
        MOE_RETURN_IF_ERROR(Contribute(*parameters[p], partials, *reducer, context));
      }
      MOE_RETURN_IF_ERROR(reducer->Finish());
    }
    if (rank != 0) return absl::OkStatus();
    *buckets = static_cast<int>(reducer->buckets().size());
    for (const Parameter* p : parameters) {
      MOE_ASSIGN_OR_RETURN(const auto g, GradientOf(*p, *reducer, context));
      result.insert(result.end(), g.begin(), g.end());
    }
    return absl::OkStatus();
  });
  return result;
}

TEST(GradientReducerTest, SumsOverTheRanksThatHoldTheParameter) {
  for (const auto numerics : {Numerics::kFast, Numerics::kLayoutInvariant}) {
    int buckets = 0;
    const auto got = ReduceOnce(4, 2, numerics, 1 << 20, AllReduceAlgorithm::kRing, &buckets);
    size_t at = 0;
    for (size_t p = 0; p < std::size(kSizes); ++p) {
      for (int64_t i = 0; i < kSizes[p]; ++i, ++at) {
        double sum = 0;
        // Rank 0 shares its experts with rank 2, everything else with all.
        for (int r = 0; r < 4; r += p % 3 == 1 ? 2 : 1) sum += Partial(r, static_cast<int>(p), i);
        // Three additions of values below 4: half an ulp of 4 each, 2^-22 * 3 / 2.
        ASSERT_NEAR(got[at], sum, 3 * 0x1p-23) << "p" << p << "[" << i << "]";
      }
    }
    ASSERT_EQ(at, got.size());
  }
}

TEST(GradientReducerTest, OneBucketEqualsManyBuckets) {
  for (const auto numerics : {Numerics::kFast, Numerics::kLayoutInvariant}) {
    for (const auto algorithm : {AllReduceAlgorithm::kRing, AllReduceAlgorithm::kDirect}) {
      int one = 0, many = 0;
      const auto a = ReduceOnce(2, 1, numerics, 1 << 20, algorithm, &one);
      const auto b = ReduceOnce(2, 1, numerics, 1, algorithm, &many);
      EXPECT_EQ(one, 2);  // replicated, experts
      EXPECT_EQ(many, static_cast<int>(std::size(kSizes)));
      EXPECT_EQ(a, b);  // two ranks: x + y in any bucket layout
    }
  }
}

TEST(GradientReducerTest, LayoutInvariantSumsDoNotDependOnTheAlgorithmOrBuckets) {
  int buckets = 0;
  const auto ring =
      ReduceOnce(5, 1, Numerics::kLayoutInvariant, 1 << 20, AllReduceAlgorithm::kRing, &buckets);
  EXPECT_EQ(ring, ReduceOnce(5, 1, Numerics::kLayoutInvariant, 300, AllReduceAlgorithm::kDirect,
                             &buckets));
}

// A gradient without partials is 0, whatever the step before left there, beside gradients that have
// partials.
TEST(GradientReducerTest, ParametersWithoutAPartialHaveNoGradient) {
  for (const auto numerics : {Numerics::kFast, Numerics::kLayoutInvariant}) {
    RunSessions(2, {.numerics = numerics}, [&](Session& session) -> absl::Status {
      const Context& context = session.context();
      const bool odd = context.mesh->world().rank() == 1;
      ParameterStore store(DType::kFloat32, 1);
      constexpr int kParameters = 6;
      for (int i = 0; i < kParameters; ++i) {
        MOE_RETURN_IF_ERROR(store.Add({.name = absl::StrCat("w", i), .rows = 11 + i}).status());
      }
      MOE_ASSIGN_OR_RETURN(
          const auto reducer,
          GradientReducer::Create({.max_terms = 6}, store, context, session.gradient_stream()));
      for (int step = 0; step < 8; ++step) {
        // Ranks with partials: both, one, none; in each step another parameter begins.
        const auto adders = [&](const Parameter& p) {
          return step == 7 ? 0 : 2 - (p.index() + step) / 2 % 3;
        };
        MOE_RETURN_IF_ERROR(reducer->Begin());
        for (const auto& p : store.parameters()) {
          for (int round = 0; adders(*p) > (odd ? 0 : 1) && round < 3; ++round) {
            MOE_ASSIGN_OR_RETURN(const GradAccumulator sum, p->OpenGradient());
            MOE_RETURN_IF_ERROR(sum.Add(
                [&](absl::Span<float> out, Write write) {
                  for (float& x : out) x = write == Write::kAdd ? x + 0.5f : 0.5f;
                  return absl::OkStatus();
                },
                *context.workspace, *context.compute));
          }
          MOE_RETURN_IF_ERROR(reducer->MarkReady(*p));
        }
        MOE_RETURN_IF_ERROR(reducer->Finish());
        for (const auto& p : store.parameters()) {
          MOE_ASSIGN_OR_RETURN(const auto sum, GradientOf(*p, *reducer, context));
          EXPECT_THAT(sum, ::testing::Each(1.5f * static_cast<float>(adders(*p))))
              << p->spec().name << ", step " << step;
        }
      }
      return absl::OkStatus();
    });
  }
}

TEST(GradientReducerTest, UntrainedStateHasNoGradientAndTheOptimizerLeavesIt) {
  RunSessions(2, {}, [&](Session& session) -> absl::Status {
    const Context& context = session.context();
    ParameterStore store(DType::kFloat32, 1);
    MOE_ASSIGN_OR_RETURN(Parameter* const state,
                         store.Add({.name = "bias", .cols = 3, .trainable = false}));
    MOE_ASSIGN_OR_RETURN(Parameter* const weight, store.Add({.name = "weight", .cols = 2}));
    const std::vector<float> before(state->master().begin(), state->master().end());
    MOE_ASSIGN_OR_RETURN(
        const auto reducer,
        GradientReducer::Create({.max_terms = 2}, store, context, session.gradient_stream()));
    MOE_ASSIGN_OR_RETURN(const auto optimizer, Optimizer::Create({}, store, *reducer, context));
    MOE_RETURN_IF_ERROR(reducer->Begin());
    EXPECT_EQ(reducer->MarkReady(*state).code(), absl::StatusCode::kInvalidArgument);
    const auto ones = [](absl::Span<float> out) {
      std::fill(out.begin(), out.end(), 1.0f);
    };
    MOE_RETURN_IF_ERROR(Contribute(*weight, ones, *reducer, context));
    MOE_RETURN_IF_ERROR(reducer->Finish());
    std::vector<float> scratch(3);
    EXPECT_EQ(
        reducer->Gradient(*state, 1, absl::MakeSpan(scratch), *context.compute).status().code(),
        absl::StatusCode::kInvalidArgument);
    MOE_ASSIGN_OR_RETURN(const GradientNorm norm,
                         optimizer->Step({.gradient_scale = 0.5, .learning_rate = 1e-3}));
    EXPECT_EQ(norm.value, std::sqrt(2.0));
    EXPECT_EQ(std::vector<float>(state->master().begin(), state->master().end()), before);
    return absl::OkStatus();
  });
}

// One NaN in an expert's gradient on one rank: every rank reports it, and no weight moves.
TEST(OptimizerTest, GradientsThatAreNotFiniteMoveNoWeightOnAnyRank) {
  for (const auto numerics : {Numerics::kFast, Numerics::kLayoutInvariant}) {
    const SessionOptions options = {.mesh = {.expert = 3}, .numerics = numerics};
    RunSessions(3, options, [&](Session& session) -> absl::Status {
      const Context& context = session.context();
      const int rank = context.mesh->world().rank();
      ParameterStore store(DType::kFloat32, 1);
      MOE_RETURN_IF_ERROR(store.Add({.name = "dense", .rows = 4}).status());
      MOE_RETURN_IF_ERROR(store
                              .Add({.name = absl::StrCat("expert", rank),
                                    .rows = 9,
                                    .holders = MeshGroup::kExpertData})
                              .status());
      MOE_ASSIGN_OR_RETURN(
          const auto reducer,
          GradientReducer::Create({.max_terms = 3}, store, context, session.gradient_stream()));
      MOE_ASSIGN_OR_RETURN(const auto optimizer, Optimizer::Create({}, store, *reducer, context));
      std::vector<std::vector<float>> before;
      MOE_RETURN_IF_ERROR(reducer->Begin());
      for (const auto& p : store.parameters()) {
        before.emplace_back(p->master().begin(), p->master().end());
        const bool bad = rank == 1 && p->spec().holders == MeshGroup::kExpertData;
        const auto fill = [&](absl::Span<float> out) {
          std::fill(out.begin(), out.end(), 1.0f);
          if (bad) out[2] = std::numeric_limits<float>::quiet_NaN();
        };
        MOE_RETURN_IF_ERROR(Contribute(*p, fill, *reducer, context));
      }
      MOE_RETURN_IF_ERROR(reducer->Finish());
      EXPECT_EQ(optimizer->Step({.learning_rate = 0.1}).status().code(),
                absl::StatusCode::kDataLoss);
      MOE_ASSIGN_OR_RETURN(
          const GradientNorm skipped,
          optimizer->Step({.learning_rate = 0.1, .non_finite = NonFiniteGradients::kSkip}));
      EXPECT_TRUE(std::isinf(skipped.value));
      EXPECT_EQ(skipped.ClipFactor(1).status().code(), absl::StatusCode::kDataLoss);
      EXPECT_EQ(skipped.non_finite, numerics == Numerics::kFast ? 0 : 1);
      for (size_t i = 0; i < before.size(); ++i) {
        const auto after = store.parameters()[i]->master();
        EXPECT_EQ(std::vector<float>(after.begin(), after.end()), before[i]);
      }
      return absl::OkStatus();
    });
  }
}

TEST(GradientReducerTest, TheNumberOfTermsIsRequiredWhereSumsAreExact) {
  RunSessions(1, {}, [&](Session& session) -> absl::Status {
    ParameterStore store(DType::kFloat32, 1);
    EXPECT_EQ(
        GradientReducer::Create({}, store, session.context(), session.gradient_stream()).status(),
        absl::InvalidArgumentError("GradientReducer: max_terms is 0, expected the number of "
                                   "micro-batches of a step over all ranks, at least 1"));
    return absl::OkStatus();
  });
}

// As many terms as max_terms declares, each the largest of the grid: their sum is about the largest
// that an int64 holds. A larger term is counted on every rank, as infinities are, not wrapped.
TEST(GradientReducerTest, TheSumOfAllTermsStaysWithinTheGridAtItsEdge) {
  constexpr int kRanks = 3;
  const auto most = std::nextafter(static_cast<float>(INT64_MAX / kRanks), 0.0f) * 0x1p-50f;
  for (const float x : {most, -most, std::nextafter(most, 1e30f), -INFINITY}) {
    RunSessions(kRanks, {}, [&](Session& session) -> absl::Status {
      const Context& context = session.context();
      ParameterStore store(DType::kFloat32, 1);
      MOE_ASSIGN_OR_RETURN(Parameter* const p, store.Add({.name = "w", .rows = 1}));
      MOE_ASSIGN_OR_RETURN(const auto reducer,
                           GradientReducer::Create({.max_terms = kRanks}, store, context,
                                                   session.gradient_stream()));
      MOE_RETURN_IF_ERROR(reducer->Begin());
      MOE_RETURN_IF_ERROR(Contribute(
          *p, [&](absl::Span<float> out) { out[0] = x; }, *reducer, context));
      MOE_RETURN_IF_ERROR(reducer->Finish());
      const bool fits = std::fabs(x) <= most;
      EXPECT_EQ(reducer->Norm(1)->non_finite, fits ? 0 : kRanks);
      EXPECT_EQ(reducer->MarkReady(*p).code(), absl::StatusCode::kFailedPrecondition);
      MOE_ASSIGN_OR_RETURN(const auto sum, GradientOf(*p, *reducer, context));
      EXPECT_EQ(sum[0], fits ? static_cast<float>(kRanks * static_cast<double>(x)) : 0.0f);
      return absl::OkStatus();
    });
  }
}

TEST(OptimizerTest, ClipsByTheGlobalNormWithEveryExpertCountedOnce) {
  for (const int ep : {1, 2}) {
    RunSessions(2, {.mesh = {.expert = ep}}, [&](Session& session) -> absl::Status {
      const Context& context = session.context();
      const int rank = context.mesh->world().rank();
      ParameterStore store(DType::kFloat32, 1);
      MOE_RETURN_IF_ERROR(store.Add({.name = "dense", .rows = 4}).status());
      for (int e = 0; e < 2; ++e) {
        if (ep == 2 && rank != e) continue;
        MOE_RETURN_IF_ERROR(store
                                .Add({.name = absl::StrCat("expert", e),
                                      .rows = 9,
                                      .holders = MeshGroup::kExpertData})
                                .status());
      }
      MOE_ASSIGN_OR_RETURN(
          const auto reducer,
          GradientReducer::Create({.max_terms = 2}, store, context, session.gradient_stream()));
      MOE_ASSIGN_OR_RETURN(const auto optimizer,
                           Optimizer::Create({.clip_grad = 1.0}, store, *reducer, context));
      MOE_RETURN_IF_ERROR(reducer->Begin());
      for (const auto& p : store.parameters()) {
        // Summed over the ranks that hold it, every element is 1.
        const bool shared = p->spec().holders == MeshGroup::kStage || ep == 1;
        const auto fill = [&](absl::Span<float> out) {
          std::fill(out.begin(), out.end(), shared ? 0.5f : 1.0f);
        };
        MOE_RETURN_IF_ERROR(Contribute(*p, fill, *reducer, context));
      }
      MOE_RETURN_IF_ERROR(reducer->Finish());
      MOE_ASSIGN_OR_RETURN(const GradientNorm norm, optimizer->Step({.learning_rate = 1e-3}));
      EXPECT_EQ(norm.value, std::sqrt(4.0 + 9.0 + 9.0)) << "ep " << ep;
      EXPECT_EQ(*norm.ClipFactor(2), 2 / norm.value);
      EXPECT_EQ(*norm.ClipFactor(5), 1);
      EXPECT_EQ(norm.ClipFactor(-1).status().code(), absl::StatusCode::kInvalidArgument);
      return absl::OkStatus();
    });
  }
}

TEST(LearningRateScheduleTest, WarmsUpAndDecaysByHand) {
  const LearningRateSchedule cosine = {
      .peak = 1, .minimum = 0.1, .warmup_steps = 4, .total_steps = 12};
  LearningRateSchedule linear = cosine, constant = cosine;
  linear.decay = LearningRateDecay::kLinear;
  constant.decay = LearningRateDecay::kConstant;
  const LearningRateSchedule torch = {.peak = 2, .total_steps = 3};  // CosineAnnealingLR(T_max=3)
  const LearningRateSchedule warm_up_alone = {.peak = 2, .warmup_steps = 4, .total_steps = 4};
  const struct {
    const LearningRateSchedule& schedule;
    int64_t step;
    double rate;
  } cases[] = {{cosine, 1, 0.25},
               {cosine, 4, 1},
               {cosine, 5, 1},
               {cosine, 9, 0.55},  // half way: the mean
               {cosine, 12, 0.1 + 0.45 * (1 + std::cos(7 * std::acos(-1.0) / 8))},
               {cosine, 13, 0.1},
               {cosine, 99, 0.1},
               {torch, 1, 2},
               {torch, 2, 1.5},
               {torch, 3, 0.5},
               {warm_up_alone, 1, 0.5},
               {warm_up_alone, 4, 2},
               {linear, 2, 0.5},
               {linear, 7, 0.775},  // a quarter of the way
               {linear, 99, 0.1},
               {constant, 2, 0.5},
               {constant, 99, 1}};
  for (const auto& [schedule, step, rate] : cases) {
    EXPECT_DOUBLE_EQ(schedule.At(step), rate) << step << " of " << schedule.total_steps;
  }
  EXPECT_DOUBLE_EQ((LearningRateSchedule{.peak = 2, .total_steps = 1}.At(1)), 2.0);
}

TEST(ParameterStoreTest, InitialValuesDependOnSeedAndNameOnly) {
  ParameterStore a(DType::kFloat32, 7), b(DType::kFloat32, 7), other(DType::kFloat32, 8);
  ASSERT_TRUE(b.Add({.name = "first", .rows = 5, .cols = 3}).ok());
  const auto get = [](ParameterStore& store, const std::string& name) {
    Parameter* const p = store.Add({.name = name, .rows = 50, .cols = 40, .init_std = 0.5}).value();
    return std::vector<float>(p->master().begin(), p->master().end());
  };
  const auto x = get(a, "w");
  EXPECT_EQ(x, get(b, "w"));
  EXPECT_NE(x, get(b, "v"));
  EXPECT_NE(x, get(other, "w"));
  double squares = 0;
  for (const float v : x) squares += double{v} * v;
  // Variance 0.25 over 2000 samples: five standard errors of sqrt(2 / n).
  EXPECT_NEAR(squares / 2000, 0.25, 0.25 * 5 * std::sqrt(2.0 / 2000));
  EXPECT_EQ(a.Add({.name = "w"}).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace moe
