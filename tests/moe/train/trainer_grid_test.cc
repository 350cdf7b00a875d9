// Steps of moe::Trainer whose gradients are far from the exact grid's default unit.
#include <cmath>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/moe/layer_harness.h"

namespace moe {
namespace {

using ::testing::HasSubstr;
using testing::kMicroBatches;
using testing::Layout;

// Results of steps whose gradients are 2^log2 times [1, 2) in one tensor and 2^(log2 - 16) times
// [1, 2) in another.
struct GridSteps {
  std::vector<GradientNorm> norms;
  std::vector<int> units;                       // after each step
  std::vector<std::vector<float>> small_means;  // means of the other tensor
};

GridSteps StepOnGrid(const Layout& layout, int log2, ZeroStage zero = ZeroStage::kNone) {
  GridSteps result;
  const TrainerOptions options = {.micro_batches = kMicroBatches, .zero = zero};
  testing::RunTrainers(layout, options, [&](Trainer& trainer) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(Parameter* const large,
                         trainer.AddParameter({.name = "large", .rows = 5, .cols = 8}));
    MOE_ASSIGN_OR_RETURN(Parameter* const small,
                         trainer.AddParameter({.name = "small", .rows = 3, .cols = 8}));
    for (int step = 0; step < 3; ++step) {
      for (int64_t r = 0; r < trainer.rounds(); ++r) {
        MOE_ASSIGN_OR_RETURN(const Round round, trainer.BeginRound());
        if (round.empty()) continue;
        const auto add = [&](Parameter& parameter, int scale_log2) {
          std::vector<float> values(static_cast<size_t>(parameter.size()));
          for (size_t i = 0; i < values.size(); ++i) {
            const auto term = static_cast<float>(i + 3 * static_cast<size_t>(round.micro_batch()));
            values[i] = std::ldexp(1 + term / 97, scale_log2);
          }
          return trainer.AddGradient(parameter, values);
        };
        MOE_RETURN_IF_ERROR(add(*large, log2));
        MOE_RETURN_IF_ERROR(add(*small, log2 - 16));
      }
      const auto norm =
          trainer.Step({.learning_rate = 1e-3, .non_finite = NonFiniteGradients::kSkip});
      MOE_RETURN_IF_ERROR(norm.status());
      if (trainer.context().mesh->world().rank() != 0) continue;
      result.norms.push_back(*norm);
      result.units.push_back(trainer.grid_unit().log2);
      if (zero != ZeroStage::kNone) continue;
      std::vector<float> mean(static_cast<size_t>(small->size()));
      MOE_RETURN_IF_ERROR(trainer.reducer()
                              .Gradient(*small, trainer.gradient_scale(), absl::MakeSpan(mean),
                                        *trainer.context().compute)
                              .status());
      result.small_means.push_back(mean);
    }
    return absl::OkStatus();
  });
  return result;
}

// Error of the means, relative to the tensor's norm.
double ErrorOf(const std::vector<float>& small_mean, int log2) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < small_mean.size(); ++i) {
    double mean = 0;
    for (int64_t m = 0; m < kMicroBatches; ++m) {
      const auto term = static_cast<float>(i + 3 * static_cast<size_t>(m));
      mean += std::ldexp(static_cast<double>(1 + term / 97), log2 - 16) / kMicroBatches;
    }
    error += (small_mean[i] - mean) * (small_mean[i] - mean);
    norm += mean * mean;
  }
  return std::sqrt(error / norm);
}

TEST(TrainerGridTest, AnExactGridTooCoarseForATensorNamesItAndBecomesFiner) {
  for (const int log2 : {-20, -30, -45}) {
    const GridSteps one = StepOnGrid({}, log2);
    ASSERT_EQ(one.norms.size(), 3);
    EXPECT_EQ(one.norms[0].grid_loss_tensor, "small");
    EXPECT_GT(one.norms[0].grid_loss, 1e-6);
    EXPECT_GE(one.norms[0].grid_loss, ErrorOf(one.small_means[0], log2));
    EXPECT_LT(one.units[0], -50);
    for (const int step : {1, 2}) {
      EXPECT_EQ(one.norms[step].grid_loss_tensor, "");
      EXPECT_LE(one.norms[step].grid_loss, 1e-6);
      EXPECT_LE(ErrorOf(one.small_means[step], log2), 1e-6);
      EXPECT_EQ(one.units[step], one.units[0]);
    }
    for (const Layout& layout : {Layout{.ranks = 2}, Layout{.ranks = 4, .expert_parallel = 2}}) {
      for (const ZeroStage zero : {ZeroStage::kNone, ZeroStage::kGradients}) {
        const GridSteps some = StepOnGrid(layout, log2, zero);
        EXPECT_EQ(some.units, one.units);
        for (int step = 0; step < 3; ++step) {
          EXPECT_EQ(some.norms[step].value, one.norms[step].value);
          EXPECT_EQ(some.norms[step].largest, one.norms[step].largest);
          EXPECT_EQ(some.norms[step].grid_loss, one.norms[step].grid_loss);
          EXPECT_EQ(some.norms[step].grid_loss_tensor, one.norms[step].grid_loss_tensor);
        }
        if (zero == ZeroStage::kNone) {
          EXPECT_EQ(some.small_means, one.small_means);
        }
      }
    }
  }
}

// The tensor is an expert's, whose gradient several ranks add up, or one rank alone holds.
TEST(TrainerGridTest, TheTensorThatTheGridTakesMostOfIsOneOnEveryRankAtAnyLayout) {
  const auto seen_by_ranks = [](const Layout& layout) {
    std::vector<GradientNorm> norms(static_cast<size_t>(layout.ranks));
    const TrainerOptions options = {.micro_batches = kMicroBatches, .unit_log2 = -20};
    testing::RunTrainers(layout, options, [&](Trainer& trainer) -> absl::Status {
      MoeLayerConfig config = testing::LayerConfig();
      config.train_router = false;
      MOE_ASSIGN_OR_RETURN(auto* const layer, trainer.AddMoeLayer<float>("mlp.", config));
      MOE_RETURN_IF_ERROR(testing::RunStep(trainer, *layer));
      norms[trainer.context().mesh->world().rank()] = *trainer.gradient_norm();
      return absl::OkStatus();
    });
    return norms;
  };
  const GradientNorm one = seen_by_ranks({})[0];
  EXPECT_THAT(one.grid_loss_tensor, HasSubstr("mlp.experts."));
  for (const Layout& layout : {Layout{.ranks = 2}, Layout{.ranks = 3, .expert_parallel = 3},
                               Layout{.ranks = 4, .expert_parallel = 2}}) {
    for (const GradientNorm& seen : seen_by_ranks(layout)) {
      EXPECT_EQ(seen.grid_loss, one.grid_loss) << layout;
      EXPECT_EQ(seen.grid_loss_tensor, one.grid_loss_tensor) << layout;
    }
  }
}

TEST(TrainerGridTest, PartialsOffTheExactGridSkipAStepAndRaiseItsUnit) {
  const GridSteps steps = StepOnGrid({.ranks = 2}, 30);
  EXPECT_TRUE(steps.norms[0].off_grid());
  EXPECT_TRUE(std::isinf(steps.norms[0].value));
  EXPECT_GT(steps.units[0], -50);
  for (const int step : {1, 2}) {
    EXPECT_TRUE(steps.norms[step].finite());
    EXPECT_LE(ErrorOf(steps.small_means[step], 30), 1e-6);
  }
}

TEST(TrainerGridTest, TheDefaultUnitServesOrdinaryGradients) {
  const TrainerOptions options = {.micro_batches = kMicroBatches};
  testing::RunTrainers({}, options, [&](Trainer& trainer) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(auto* const layer,
                         trainer.AddMoeLayer<float>("mlp.", testing::LayerConfig()));
    EXPECT_EQ(trainer.gradient_norm(), nullptr);
    MOE_RETURN_IF_ERROR(testing::RunStep(trainer, *layer));
    EXPECT_EQ(trainer.grid_unit().log2, -50);
    EXPECT_TRUE(trainer.grid_unit().settled);
    EXPECT_LE(trainer.gradient_norm()->grid_loss, 1e-6);
    EXPECT_GT(trainer.gradient_norm()->largest, 0);
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace moe
