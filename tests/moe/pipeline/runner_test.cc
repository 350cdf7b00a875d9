// The order of a schedule's calls, and rows between stages, with modules that compute nothing.
#include "moe/pipeline/runner.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/local/local_world.h"
#include "moe/pipeline/schedule.h"
#include "moe/run/session.h"
#include "moe/state/parameter.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/pipeline/stage_rounds.h"

namespace moe {
namespace {

using ::moe::testing::StageLoop;
using ::moe::testing::StageRounds;
using ::testing::ElementsAre;

class RunnerTest : public ::testing::Test {
 protected:
  // Takes the places of trainer, module and loop; each appends to calls_.
  struct Rounds : StageRounds {
    RunnerTest& test;
    absl::Status BeginBackward(const Round& round, int /*chunk*/) {
      return test.Say("backward", round.index());
    }
    absl::Status MarkComplete(const Round& round, const Parameter& parameter) {
      return test.Say(parameter.spec().name, round.index());
    }
  };
  struct Layer final : Module<float> {
    explicit Layer(RunnerTest& of) : test(of) {}
    absl::Span<Parameter* const> parameters() const override { return {&test.weight_, 1}; }
    absl::Status Forward(const Pass& pass, MatrixView<const float>, MatrixView<float>) override {
      EXPECT_EQ(pass.batch.step, 7);
      EXPECT_EQ(pass.stash != nullptr, test.trains_);
      return test.Say("F", pass.site.round);
    }
    absl::Status Backward(const Pass& pass, MatrixView<const float>, MatrixView<float>,
                          GradientReady ready) override {
      EXPECT_EQ(pass.batch.step, 7);
      MOE_RETURN_IF_ERROR(test.Say("B", pass.site.round));
      return ready(*test.weight_);
    }
    RunnerTest& test;
  };
  struct Loop final : StageLoop {
    explicit Loop(RunnerTest& of) : test(of) {}
    absl::Status BeginRound(const Round& round, int /*chunk*/, Pass& pass) override {
      pass.batch.step = 7;
      return test.Say("begin", round.index());
    }
    absl::Status EndRound(const Round& round, int /*chunk*/, const Pass& /*pass*/) override {
      return test.Say("end", round.index());
    }
    RunnerTest& test;
  };

  absl::Status Say(const std::string& what, int64_t round) {
    calls_.push_back(absl::StrCat(what, round));
    return calls_.back() == fails_ ? absl::AbortedError(fails_) : absl::OkStatus();
  }
  absl::Status Run(int64_t rounds) {
    Rounds trainer = {{session_->context(), rounds, trains_}, *this};
    Layer layer(*this);
    Loop loop(*this);
    MOE_ASSIGN_OR_RETURN(const auto runner, PipelineRunner::Create({}, session_->context()));
    return runner->Run<float>({.chunks = {&layer}, .hidden_size = 2}, loop, trainer);
  }

  const std::unique_ptr<Session> session_ =
      *Session::Create({}, std::move(MakeLocalWorld({.ranks = 1}).front()));
  ParameterStore store_{DType::kFloat32, 1};
  Parameter* const weight_ = *store_.Add({.name = "w", .cols = 2});
  bool trains_ = true;
  std::string fails_;
  std::vector<std::string> calls_;
};

TEST_F(RunnerTest, ForwardAndBackwardOfARoundAreNeighbours) {
  ASSERT_TRUE(Run(2).ok());
  EXPECT_THAT(calls_, ElementsAre("begin0", "F0", "backward0", "B0", "w0", "end0",  //
                                  "begin1", "F1", "backward1", "B1", "w1", "end1"));
}

TEST_F(RunnerTest, AnEvaluationHasForwardsAlone) {
  trains_ = false;
  ASSERT_TRUE(Run(2).ok());
  EXPECT_THAT(calls_, ElementsAre("begin0", "F0", "end0", "begin1", "F1", "end1"));
}

TEST_F(RunnerTest, AnErrorEndsTheRun) {
  fails_ = "F1";
  EXPECT_EQ(Run(3), absl::AbortedError("F1"));
  EXPECT_EQ(calls_.back(), "F1");
}

// Part k of a chain adds k + 1 to the rows on their way forward and doubles gradients on their way
// back, after a while of its own; the ends check what came.
class Part final : public Module<float> {
 public:
  Part(int part, int parts) : part_(part), parts_(parts) {}
  absl::Span<Parameter* const> parameters() const override { return {}; }
  absl::Status Forward(const Pass& pass, MatrixView<const float> x, MatrixView<float> y) override {
    Work(pass);
    const auto round = static_cast<float>(pass.site.round);
    const float before = round + static_cast<float>(part_ * (part_ + 1) / 2);
    if (part_ > 0) {
      EXPECT_THAT(Values(x), ::testing::Each(before));
    }
    if (pass.stash != nullptr) x_.Begin(pass.stash) = x;
    Fill(y, before + static_cast<float>(part_ + 1));
    return absl::OkStatus();
  }
  absl::Status Backward(const Pass& pass, MatrixView<const float> dy, MatrixView<float> dx,
                        GradientReady /*ready*/) override {
    Work(pass);
    const float after = std::ldexp(1.0f + static_cast<float>(pass.site.round), parts_ - 1 - part_);
    if (part_ + 1 < parts_) {
      EXPECT_THAT(Values(dy), ::testing::Each(after));
    }
    // The rows of the forward are still there.
    if (part_ > 0) {
      EXPECT_THAT(Values(*x_.Find(pass.stash)),
                  ::testing::Each(static_cast<float>(pass.site.round) +
                                  static_cast<float>(part_ * (part_ + 1) / 2)));
    }
    Fill(dx, 2 * after);
    return absl::OkStatus();
  }

 private:
  static std::vector<float> Values(MatrixView<const float> m) {
    return {m.data(), m.data() + m.rows() * m.cols()};
  }
  static void Fill(MatrixView<float> m, float value) {
    std::fill_n(m.data(), m.rows() * m.cols(), value);
  }
  void Work(const Pass& pass) const {
    absl::SleepFor(absl::Microseconds((pass.site.round * 7919 + part_ * 104729) % 200));
  }
  const int part_, parts_;
  PerStash<MatrixView<const float>> x_;
};

struct EveryFourthRoundEmpty : StageRounds {
  Round RoundAt(int64_t index) const { return Round(index % 4 == 3 ? -1 : index, index, 1, 0); }
};

TEST(PipelineRunnerTest, RowsGoThroughAllParts) {
  for (const PipelineShape& shape :
       {PipelineShape{ScheduleKind::kGPipe, 2}, PipelineShape{ScheduleKind::k1F1B, 3},
        PipelineShape{ScheduleKind::kZeroBubbleH1, 3},
        PipelineShape{ScheduleKind::kInterleaved, 2, 3},
        PipelineShape{ScheduleKind::kInterleaved, 3, 2},
        PipelineShape{ScheduleKind::k1F1BOverlap, 3},
        PipelineShape{ScheduleKind::k1F1BOverlap, 2, 2}}) {
    ::moe::testing::RunLocalRanks(
        shape.stages, [&](std::unique_ptr<Communicator> world) -> absl::Status {
          const int stage = world->rank();
          MOE_ASSIGN_OR_RETURN(
              const auto session,
              Session::Create({.mesh = {.pipeline = shape.stages}, .overlap_exchange = true},
                              std::move(world)));
          const Context& context = session->context();
          MOE_ASSIGN_OR_RETURN(const auto runner, PipelineRunner::Create(shape, context));
          std::vector<std::unique_ptr<Part>> parts;
          PipelineModel<float> model = {.hidden_size = 5};
          for (int c = 0; c < shape.chunks; ++c) {
            parts.push_back(std::make_unique<Part>(shape.PartOf(stage, c), shape.parts()));
            model.chunks.push_back(parts.back().get());
          }
          StageLoop loop;
          for (const bool trains : {false, true, true}) {
            EveryFourthRoundEmpty rounds = {{context, PaddedRounds(shape, 7), trains}};
            MOE_RETURN_IF_ERROR(runner->Run(model, loop, rounds));
          }
          return absl::OkStatus();
        });
  }
}

}  // namespace
}  // namespace moe
