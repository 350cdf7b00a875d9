// What the time of an exchange is split into. Time stands still unless a test moves it.
#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "dispatch/dispatch_plan.h"
#include "kernels/base/workspace.h"
#include "moe/run/phase_clock.h"
#include "tests/comm/forwarding_communicator.h"
#include "tests/comm/local_ranks.h"

namespace moe {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

thread_local int64_t own_ns = 0;  // a clock of each rank
int64_t OwnTime() {
  return own_ns;
}

std::atomic<int64_t> common_ns{0};
int64_t CommonTime() {
  return common_ns;
}

// Reports that its rank lingered as long as a test sets.
class LingeringCommunicator final : public testing::ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  int64_t lingered_ns() const override { return ns; }
  int64_t ns = 17;
};

// Seconds that rank r spends in its two meetings, and how many of them follow the end of its own
// part. The shortest times until that end: 1 of rank 1, 3 of rank 2.
struct Met {
  int64_t seconds, lingered;
};
constexpr Met kMeetings[3][2] = {{{5, 0}, {4, 0}}, {{1, 0}, {4, 0}}, {{3, 0}, {4, 1}}};

TEST(ExchangeSplitTest, WaitIsWhatARankSpendsBeyondTheShortestOfItsGroup) {
  testing::RunLocalRanks(3, [](std::unique_ptr<Communicator> inner) -> absl::Status {
    LingeringCommunicator group(std::move(inner));
    const auto& meetings = kMeetings[group.rank()];
    const auto stream = MakeInlineStream();
    PhaseClock clock(OwnTime);
    const auto pass = [&](int64_t seconds) {
      own_ns += seconds * kSecond;
    };
    const auto part = [&](ExchangePart which, const Met& met) -> absl::Status {
      MOE_RETURN_IF_ERROR(clock.Start(which, group, *stream));
      pass(met.seconds);
      group.ns += met.lingered * kSecond;
      return clock.Stop(which, group, *stream);
    };
    for (const bool kept : {false, true}) {
      if (kept) clock.KeepMeetings();
      MOE_RETURN_IF_ERROR(clock.Start(Phase::kDispatch, nullptr, *stream));
      pass(10);
      MOE_RETURN_IF_ERROR(part(ExchangePart::kMeeting, meetings[0]));
      MOE_RETURN_IF_ERROR(part(ExchangePart::kCopy, {2, 0}));
      MOE_RETURN_IF_ERROR(clock.Stop(Phase::kDispatch, nullptr, *stream));
      MOE_RETURN_IF_ERROR(clock.Start(Phase::kCombine, nullptr, *stream));
      MOE_RETURN_IF_ERROR(part(ExchangePart::kMeeting, meetings[1]));
      pass(20);
      MOE_RETURN_IF_ERROR(clock.Stop(Phase::kCombine, nullptr, *stream));
      MOE_ASSIGN_OR_RETURN(const ExchangeSeconds split, clock.SplitExchanges(group, *stream));
      const auto met = static_cast<double>(meetings[0].seconds + meetings[1].seconds);
      EXPECT_DOUBLE_EQ(split.copy, kept ? 2 + 1 + 3 : 0);
      EXPECT_DOUBLE_EQ(split.wait, kept ? met - 1 - 3 : 0);
      EXPECT_DOUBLE_EQ(split.gather, 30 + (kept ? 0 : met + 2));
      MOE_RETURN_IF_ERROR(clock.Reset());
    }
    MOE_ASSIGN_OR_RETURN(const ExchangeSeconds none, clock.SplitExchanges(group, *stream));
    EXPECT_EQ(none.copy + none.gather + none.wait, 0);
    return absl::OkStatus();
  });
}

// Calls `entered` when its rank is in a collective, peer memory included.
class WatchedCommunicator final : public testing::ForwardingCommunicator {
 public:
  WatchedCommunicator(std::unique_ptr<Communicator> inner, std::function<void()> entered)
      : WatchedCommunicator(*inner, std::move(entered)) {
    owned_ = std::move(inner);
  }
  int64_t lingered_ns() const override { return 0; }  // time stands still
  bool has_peer_memory(DeviceKind kind) const override { return inner_.has_peer_memory(kind); }

 protected:
  absl::StatusOr<std::shared_ptr<PeerBuffer>> DoAllocatePeerBuffer(int64_t bytes,
                                                                   MemoryResource& memory,
                                                                   const Site& site) override {
    return inner_.AllocatePeerBuffer(bytes, memory, site);
  }

 private:
  WatchedCommunicator(Communicator& inner, std::function<void()> entered)
      : ForwardingCommunicator(inner), inner_(inner), entered_(std::move(entered)) {}
  absl::Status Before(int64_t /*bytes*/, Stream& /*stream*/, const Site& /*site*/) override {
    entered_();
    return absl::OkStatus();
  }
  std::unique_ptr<Communicator> Wrap(std::unique_ptr<Communicator> part) override {
    return std::make_unique<WatchedCommunicator>(std::move(part), entered_);
  }

  std::unique_ptr<Communicator> owned_;
  Communicator& inner_;
  const std::function<void()> entered_;
};

// Collectives that rank r of three has entered when it waits for rank 3, which is late: of two hops
// the second, unless rank 3 is its partner in the first. Rows go between nodes {0, 1} and {2, 3}
// first, and return in one hop.
int EnteredBeforeLate(DispatchAlgorithm algorithm, int movement, int r) {
  const bool two_hops = algorithm == DispatchAlgorithm::kHierarchical && movement < 2;
  return two_hops && r != 1 ? 2 : 1;
}

// Rank 3 comes to each of three movements a second after all others wait for it.
absl::Status MoveWithALateRank(std::unique_ptr<Communicator> inner, DispatchAlgorithm algorithm,
                               std::atomic<int>* entered) {
  constexpr int kRanks = 4, kLate = 3;
  const int rank = inner->rank();
  WatchedCommunicator group(std::move(inner), [=] { ++entered[rank]; });
  const auto stream = MakeInlineStream();
  Workspace workspace;
  // Token t goes to expert t, which rank t holds.
  const int64_t slot_offset[] = {0, 1, 2, 3, 4};
  const int32_t expert[] = {0, 1, 2, 3};
  const float weight[] = {1, 1, 1, 1};
  const Routing routing = {.slot_offset = slot_offset,
                           .expert = expert,
                           .weight = weight,
                           .num_experts = 4,
                           .num_routed_experts = 4};
  MOE_ASSIGN_OR_RETURN(const auto dispatcher,
                       Dispatcher<float>::Create({.algorithm = algorithm, .node_size = 2}, group));
  EXPECT_EQ(dispatcher->algorithm(), algorithm);
  MOE_ASSIGN_OR_RETURN(const DispatchPlan plan,
                       DispatchPlan::Build({.routing = routing,
                                            .placement = {4, kRanks},
                                            .options = dispatcher->PlanOptions(1),
                                            .comm = group},
                                           workspace, *stream));
  PhaseClock clock(CommonTime);
  clock.KeepMeetings();
  dispatcher->set_clock(&clock);
  std::vector<float> x(4 * 2, 1), rows(x.size()), home(x.size());
  const MatrixView<float> expert_rows(rows.data(), 4, 2);
  const DispatchCall call = {plan, 0, workspace, *stream};
  const auto move = [&](int movement) -> absl::Status {
    if (movement == 0) {
      return dispatcher->Dispatch(call, {x.data(), 4, 2}, expert_rows);
    }
    if (movement == 1) {
      return dispatcher->DispatchScaled(call, {x.data(), 4, 2}, weight, expert_rows);
    }
    MOE_ASSIGN_OR_RETURN(const auto out, dispatcher->ReturnBuffer(plan, 2, workspace));
    return dispatcher->Return(call, out, {home.data(), 4, 2});
  };
  // At first all come in time, and peer memory grows.
  for (const bool late : {false, true}) {
    for (int movement = 0; movement < 3; ++movement) {
      entered[rank] = 0;
      MOE_RETURN_IF_ERROR(group.Barrier());
      if (late && rank == kLate) {
        for (int r = 0; r < kLate; ++r) {
          const int expected = EnteredBeforeLate(algorithm, movement, r);
          while (entered[r] < expected) std::this_thread::yield();
        }
        common_ns += kSecond;
      }
      MOE_RETURN_IF_ERROR(clock.Start(Phase::kDispatch, nullptr, *stream));
      MOE_RETURN_IF_ERROR(move(movement));
      MOE_RETURN_IF_ERROR(clock.Stop(Phase::kDispatch, nullptr, *stream));
      MOE_RETURN_IF_ERROR(group.Barrier());
    }
    MOE_ASSIGN_OR_RETURN(const ExchangeSeconds split, clock.SplitExchanges(group, *stream));
    EXPECT_EQ(split.copy, 0);
    EXPECT_EQ(split.gather, 0);
    EXPECT_EQ(split.wait, late && rank != kLate ? 3 : 0) << "rank " << rank;
    MOE_RETURN_IF_ERROR(clock.Reset());
  }
  return absl::OkStatus();
}

TEST(ExchangeSplitTest, RanksThatComeInTimeWaitForTheLateOneAlone) {
  for (const DispatchAlgorithm algorithm :
       {DispatchAlgorithm::kStaged, DispatchAlgorithm::kDirect, DispatchAlgorithm::kHierarchical}) {
    SCOPED_TRACE(static_cast<int>(algorithm));
    std::atomic<int> entered[4] = {};
    testing::RunLocalRanks(4, [&](std::unique_ptr<Communicator> group) {
      return MoveWithALateRank(std::move(group), algorithm, entered);
    });
  }
}

}  // namespace
}  // namespace moe
