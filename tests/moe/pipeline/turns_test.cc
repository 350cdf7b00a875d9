// Passes that take turns: in which order, and that each computes while the other one exchanges.
#include "moe/run/turns.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/synchronization/notification.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/layer/moe_layer.h"
#include "moe/pipeline/runner.h"
#include "moe/run/session.h"
#include "tests/comm/forwarding_communicator.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/pipeline/own_rows.h"
#include "tests/moe/pipeline/stage_rounds.h"

namespace moe {
namespace {

using ::testing::ElementsAre;

class TurnsTest : public ::testing::Test {
 protected:
  // A body of `turns` turns, which notes each.
  absl::Status Body(const char* name, int turns) {
    for (int i = 0; i < turns; ++i) {
      if (i > 0) turns_->Yield();
      seen_.push_back(absl::StrCat(name, i));
    }
    return absl::OkStatus();
  }
  absl::Status Run(absl::FunctionRef<absl::Status()> first,
                   absl::FunctionRef<absl::Status()> second) {
    return turns_->Run(first, second, [&](const absl::Status& status) {
      seen_.push_back(absl::StrCat("failed: ", status.message()));
    });
  }

  const std::unique_ptr<Turns> turns_ = *Turns::Create();
  std::vector<std::string> seen_;
};

TEST_F(TurnsTest, BodiesRunInTurnsUntilOneEnds) {
  ASSERT_TRUE(Run([&] { return Body("a", 2); }, [&] { return Body("b", 4); }).ok());
  EXPECT_THAT(seen_, ElementsAre("a0", "b0", "a1", "b1", "b2", "b3"));
  seen_.clear();
  ASSERT_TRUE(Run([&] { return Body("a", 3); }, [&] { return Body("b", 1); }).ok());
  EXPECT_THAT(seen_, ElementsAre("a0", "b0", "a1", "a2"));
  turns_->Yield();  // nobody waits
}

TEST_F(TurnsTest, TheFirstErrorIsToldBeforeTheOtherGoesOn) {
  const auto fails = [&](const char* name) -> absl::Status {
    EXPECT_TRUE(Body(name, 2).ok());
    return absl::AbortedError(name);
  };
  EXPECT_EQ(Run([&] { return Body("a", 3); }, [&] { return fails("b"); }), absl::AbortedError("b"));
  EXPECT_THAT(seen_, ElementsAre("a0", "b0", "a1", "b1", "failed: b", "a2"));
  seen_.clear();
  EXPECT_EQ(Run([&] { return fails("a"); }, [&] { return fails("b"); }), absl::AbortedError("a"));
  EXPECT_THAT(seen_, ElementsAre("a0", "b0", "a1", "failed: a", "b1"));
  const auto throws = []() -> absl::Status {
    throw std::runtime_error("thrown");
  };
  EXPECT_EQ(Run([&] { return Body("a", 1); }, throws), absl::InternalError("exception: thrown"));
}

// What ranks send to one another's experts: forward of round 1 and backward of round 0, one after
// the other.
constexpr std::array<std::pair<const char*, int>, 4> kExchanges = {
    {{"dispatch", 1}, {"combine backward", 0}, {"combine", 1}, {"dispatch backward", 0}}};

// Each of kExchanges is on its way until the next one comes to the stream, for which the other pass
// has to compute. Without turns the first one would never end.
class HoldingCommunicator final : public testing::ForwardingCommunicator {
 public:
  using Sent = std::array<absl::Notification, kExchanges.size()>;
  HoldingCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<Sent> sent)
      : ForwardingCommunicator(std::move(inner)), sent_(std::move(sent)) {}

 private:
  absl::Status Before(int64_t /*bytes*/, Stream& stream, const Site& site) override {
    for (size_t i = 0; i < kExchanges.size(); ++i) {
      if (site.name != std::string(kExchanges[i].first) || site.round != kExchanges[i].second) {
        continue;
      }
      if (!(*sent_)[i].HasBeenNotified()) (*sent_)[i].Notify();
      if (i + 1 == kExchanges.size()) break;
      return stream.Enqueue([sent = sent_, i]() -> absl::Status {
        if ((*sent)[i + 1].WaitForNotificationWithTimeout(absl::Seconds(20))) {
          return absl::OkStatus();
        }
        return absl::DeadlineExceededError(
            absl::StrCat("nothing computed during ", kExchanges[i].first));
      });
    }
    return absl::OkStatus();
  }
  std::unique_ptr<Communicator> Wrap(std::unique_ptr<Communicator> part) override {
    return std::make_unique<HoldingCommunicator>(std::move(part), sent_);
  }

  const std::shared_ptr<Sent> sent_;
};

constexpr int64_t kHidden = 4;

// Whether the trace shows exchange `i` of kExchanges on its way during the other pass.
bool IsBesideTheOtherPass(const TraceRecorder& trace, size_t i) {
  const auto& [name, round] = kExchanges[i];
  const auto find = [&](const char* event, int of_round) {
    return std::find_if(trace.events().begin(), trace.events().end(), [&](const TraceEvent& e) {
      return std::strcmp(e.name, event) == 0 && e.call == of_round;
    });
  };
  const auto exchange = find(name, round);
  const auto other = find(round == 0 ? "forward" : "backward", 1 - round);
  return exchange != trace.events().end() && other != trace.events().end() &&
         trace.lane_name(exchange->lane) == "exchange" && exchange->begin_ns < other->end_ns &&
         other->begin_ns < exchange->end_ns;
}

// Two rounds of one frozen layer, whose experts two ranks share; `seen` is told the trace.
absl::Status RunTwoRounds(std::unique_ptr<Communicator> world, const absl::Status& backward,
                          const std::function<void(const TraceRecorder&)>& seen) {
  MOE_ASSIGN_OR_RETURN(
      const auto session,
      Session::Create({.mesh = {.expert = 2}, .overlap_exchange = true, .trace_capacity = 1000},
                      std::move(world)));
  ParameterStore store(DType::kFloat32, 1, session->context());
  MOE_ASSIGN_OR_RETURN(
      const auto layer,
      MoeLayer<float>::Create({.router = {.num_experts = 4, .top_k = 2, .hidden_size = kHidden},
                               .ffn_hidden_size = 8,
                               .train_router = false,
                               .train_experts = false},
                              "mlp.", store, session->context()));
  MOE_ASSIGN_OR_RETURN(
      const auto runner,
      PipelineRunner::Create({.schedule = ScheduleKind::k1F1BOverlap}, session->context()));
  session->trace()->Switch(true);
  testing::OwnRows module(*layer, /*rows=*/6, backward);
  testing::StageLoop loop;
  testing::StageRounds rounds = {session->context(), 2};
  MOE_RETURN_IF_ERROR(
      runner->Run<float>({.chunks = {&module}, .hidden_size = kHidden}, loop, rounds));
  seen(*session->trace());
  return absl::OkStatus();
}

// No times are compared: what one exchange waits for is the other pass. Costs some milliseconds.
TEST(PassesInTurnsTest, EachComputesWhileTheOtherOneExchanges) {
  testing::RunLocalRanks(2, [](std::unique_ptr<Communicator> inner) -> absl::Status {
    auto world = std::make_unique<HoldingCommunicator>(
        std::move(inner), std::make_shared<HoldingCommunicator::Sent>());
    return RunTwoRounds(std::move(world), absl::OkStatus(), [](const TraceRecorder& trace) {
      for (size_t i = 0; i < kExchanges.size(); ++i) {
        EXPECT_TRUE(IsBesideTheOtherPass(trace, i)) << kExchanges[i].first;
      }
    });
  });
}

// While the forward beside it, and all passes of the other rank, wait for an exchange.
TEST(PassesInTurnsTest, AFailedPassEndsAllOfThem) {
  testing::RunLocalRanks(2, [](std::unique_ptr<Communicator> world) -> absl::Status {
    const bool fails = world->rank() == 1;
    const absl::Status lost = absl::DataLossError("lost");
    const absl::Status status = RunTwoRounds(std::move(world), fails ? lost : absl::OkStatus(),
                                             [](const TraceRecorder&) {});
    EXPECT_EQ(status == lost, fails);
    EXPECT_THAT(status.message(), ::testing::HasSubstr("lost"));
    return absl::OkStatus();
  });
}

TEST(PassesInTurnsTest, ThereIsAStreamForExchanges) {
  testing::RunLocalRanks(1, [](std::unique_ptr<Communicator> world) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const auto session, Session::Create({}, std::move(world)));
    const absl::Status refused =
        PipelineRunner::Create({.schedule = ScheduleKind::k1F1BOverlap}, session->context())
            .status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(refused.message(), ::testing::HasSubstr("overlap_exchange"));
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace moe
