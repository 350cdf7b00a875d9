// The order of a schedule's calls, with a module that only says what it was called with.
#include "moe/pipeline/runner.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/local/local_world.h"
#include "moe/pipeline/schedule.h"
#include "moe/run/session.h"
#include "moe/state/parameter.h"

namespace moe {
namespace {

using ::testing::ElementsAre;

class RunnerTest : public ::testing::Test {
 protected:
  // Takes the places of trainer, module and loop; each appends to calls_.
  struct Rounds {
    RunnerTest& test;
    absl::StatusOr<Round> BeginRound() {
      if (test.trains_) test.stash_ = test.session_->stashes().Take();
      const int64_t index = test.next_++;
      return Round(index, index, 1, 0);
    }
    Pass PassOf(const Round& round) const {
      return {.context = test.session_->context(),
              .stash = test.stash_.get(),
              .site = {.round = static_cast<int32_t>(round.index())}};
    }
    absl::Status MarkReady(const Round& round, const Parameter& parameter) {
      return test.Say(parameter.spec().name, round.index());
    }
  };
  struct Layer final : Module<float> {
    explicit Layer(RunnerTest& of) : test(of) {}
    absl::Span<Parameter* const> parameters() const override { return {&test.weight_, 1}; }
    absl::Status Forward(const Pass& pass, MatrixView<const float>, MatrixView<float>) override {
      EXPECT_EQ(pass.batch.step, 7);
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
  struct Loop final : RoundHost {
    explicit Loop(RunnerTest& of) : test(of) {}
    absl::Status BeginRound(const Round& round, Pass& pass) override {
      EXPECT_EQ(pass.stash, test.stash_.get());
      pass.batch.step = 7;
      return test.Say("begin", round.index());
    }
    absl::Status EndRound(const Pass& pass) override { return test.Say("end", pass.site.round); }
    RunnerTest& test;
  };

  absl::Status Say(const std::string& what, int64_t round) {
    calls_.push_back(absl::StrCat(what, round));
    return calls_.back() == fails_ ? absl::AbortedError(fails_) : absl::OkStatus();
  }
  absl::Status Run(int64_t rounds) {
    std::vector<PipelineOp> ops;
    OneStage(rounds, trains_, ops);
    Rounds trainer = {*this};
    Layer layer(*this);
    Loop loop(*this);
    return RunOperations(ops, layer, loop, trainer);
  }

  const std::unique_ptr<Session> session_ =
      *Session::Create({}, std::move(MakeLocalWorld({.ranks = 1}).front()));
  ParameterStore store_{DType::kFloat32, 1};
  Parameter* const weight_ = *store_.Add({.name = "w", .cols = 2});
  bool trains_ = true;
  StashHandle stash_;
  int64_t next_ = 0;
  std::string fails_;
  std::vector<std::string> calls_;
};

TEST_F(RunnerTest, ForwardAndBackwardOfARoundAreNeighbours) {
  ASSERT_TRUE(Run(2).ok());
  EXPECT_THAT(calls_, ElementsAre("begin0", "F0", "B0", "w0", "end0",  //
                                  "begin1", "F1", "B1", "w1", "end1"));
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

}  // namespace
}  // namespace moe
