// Modules of a program's own: the trainer sums their counts, and those of the loop, over all ranks.
#include <algorithm>
#include <memory>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "moe/train/trainer.h"
#include "tests/moe/layer_harness.h"
#include "tests/moe/status_is.h"

namespace moe {
namespace {

using ::testing::ElementsAre;
using testing::RunTrainers;
using testing::StatusIs;

constexpr int kRanks = 3;

// Counts 1 and 10 times the rank's number from 1.
struct CountingModule : TrainedModule {
  explicit CountingModule(int rank) : of_rank(rank + 1) {}
  int64_t count_size() const override { return 2; }
  absl::Status TakeCounts(absl::Span<int64_t> counts) override {
    counts[0] = of_rank;
    counts[1] = 10 * of_rank;
    return absl::OkStatus();
  }
  absl::Status CheckPasses() const override { return passes; }
  absl::Status EndStep(absl::Span<const int64_t> counts) override {
    ended.emplace_back(counts.begin(), counts.end());
    return absl::OkStatus();
  }

  const int64_t of_rank;
  absl::Status passes = absl::OkStatus();
  std::vector<std::vector<int64_t>> ended;
};

void RunModules(absl::FunctionRef<absl::Status(Trainer&, CountingModule&, CountingModule&)> body) {
  RunTrainers({.ranks = kRanks}, {}, [&](Trainer& trainer) -> absl::Status {
    const int rank = trainer.context().mesh->world().rank();
    MOE_RETURN_IF_ERROR(
        trainer.AddParameter({.name = "weight", .rows = 1, .cols = 1, .init_std = 1}).status());
    MOE_ASSIGN_OR_RETURN(auto* const first, trainer.Add(std::make_unique<CountingModule>(rank)));
    MOE_ASSIGN_OR_RETURN(auto* const second, trainer.Add(std::make_unique<CountingModule>(rank)));
    return body(trainer, *first, *second);
  });
}

TEST(TrainerModuleTest, EveryStepEndsWithTheSumsOverRanksOnce) {
  RunModules([](Trainer& trainer, CountingModule& first, CountingModule& second) -> absl::Status {
    for (int step = 0; step < 2; ++step) {
      MOE_RETURN_IF_ERROR(trainer.BeginRound().status());
      MOE_RETURN_IF_ERROR(trainer.Step({}).status());
    }
    MOE_RETURN_IF_ERROR(trainer.BeginEvaluation(kRanks));
    MOE_RETURN_IF_ERROR(trainer.BeginRound().status());
    MOE_RETURN_IF_ERROR(trainer.EndStep());
    EXPECT_THAT(first.ended, ElementsAre(ElementsAre(6, 60), ElementsAre(6, 60)));
    EXPECT_EQ(second.ended, first.ended);
    EXPECT_THAT(trainer.Add(std::make_unique<CountingModule>(0)),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         "a module comes after the first step, expected before"));
    return absl::OkStatus();
  });
}

TEST(TrainerModuleTest, ALoopHasItsSumsBeforeWeightsMoveAndAfterAnEvaluation) {
  RunModules([](Trainer& trainer, CountingModule& first, CountingModule& second) -> absl::Status {
    std::vector<int64_t> loop(3);
    trainer.SumOverRanks(absl::MakeSpan(loop));
    for (const bool evaluates : {false, true, false}) {
      std::fill(loop.begin(), loop.end(), first.of_rank);
      if (evaluates) MOE_RETURN_IF_ERROR(trainer.BeginEvaluation(kRanks));
      MOE_RETURN_IF_ERROR(trainer.BeginRound().status());
      if (!evaluates) {
        MOE_RETURN_IF_ERROR(trainer.Reduce());
        EXPECT_THAT(loop, ElementsAre(6, 6, 6));
        MOE_RETURN_IF_ERROR(trainer.Step({}).status());
      } else {
        MOE_RETURN_IF_ERROR(trainer.EndStep());
      }
      EXPECT_THAT(loop, ElementsAre(6, 6, 6));
    }
    EXPECT_THAT(first.ended, ElementsAre(ElementsAre(6, 60), ElementsAre(6, 60)));
    EXPECT_EQ(second.ended, first.ended);
    return absl::OkStatus();
  });
}

TEST(TrainerModuleTest, AModuleThatMissesAPassIsNamedBeforeGradientsAreSummed) {
  RunModules([](Trainer& trainer, CountingModule&, CountingModule& second) -> absl::Status {
    second.passes = absl::FailedPreconditionError("a Backward is missing");
    MOE_RETURN_IF_ERROR(trainer.BeginRound().status());
    EXPECT_THAT(trainer.Reduce(),
                StatusIs(absl::StatusCode::kFailedPrecondition, "a Backward is missing"));
    second.passes = absl::OkStatus();
    return trainer.Step({}).status();
  });
}

}  // namespace
}  // namespace moe
