// What becomes of the other ranks when one of a NCCL world fails: each within the deadline, with a
// message that says who waited, in what, for whom and how long.
#include <atomic>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/synchronization/notification.h>
#include <absl/time/clock.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/nccl/nccl_api.h"
#include "comm/nccl/nccl_world.h"
#include "kernels/base/log.h"
#include "tests/comm/nccl_ranks.h"
#include "tests/cusim/fake_streams.h"

namespace moe {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using testing::Fates;
using ::testing::HasSubstr;
using testing::OnNcclRanks;
using testing::RunNcclRanks;
using testing::TestDevice;

constexpr absl::Duration kTimeout = absl::Milliseconds(300);
constexpr absl::Duration kSlack = absl::Seconds(2);

std::string Text(const absl::Status& status) {
  return std::string(status.message());
}

// Runs `call`, which must fail within the deadline and the slack.
absl::Status InTime(const std::function<absl::Status()>& call, absl::Duration timeout = kTimeout) {
  const absl::Time start = absl::Now();
  absl::Status status = call();
  EXPECT_FALSE(status.ok());
  EXPECT_LT(absl::Now() - start, timeout + kSlack) << status;
  return status;
}

void ExpectLate(const absl::Status& status, int rank, const std::string& place) {
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(Text(status),
              AllOf(HasSubstr(absl::StrCat("rank ", rank, " on host ")), HasSubstr(place),
                    ContainsRegex("waited [0-9.]+m?s for ranks? "), HasSubstr("deadline 300ms")));
}

// ---- the library

TEST(NcclLibraryTest, OneThatIsMissingIsNamedWithTheRemedy) {
  const absl::Status status = OpenNccl("/nowhere/libnccl.so.2").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
  EXPECT_THAT(Text(status),
              AllOf(HasSubstr("/nowhere/libnccl.so.2"), HasSubstr("LD_LIBRARY_PATH")));
}

TEST(NcclLibraryTest, OneWithoutItsFunctionsIsRefused) {
  const absl::Status status = OpenNccl("libm.so.6").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
  EXPECT_THAT(Text(status), HasSubstr("libm.so.6 has no ncclGetVersion"));
}

TEST(NcclLibraryTest, VersionsFrom2_27To2_30AreTaken) {
  for (const int version : {22700, 22809, 23007}) {
    const cusim::ScopedNccl nccl({.version = version});
    EXPECT_TRUE(MakeNcclId().ok()) << version;
  }
  const std::pair<int, const char*> refused[] = {{22605, "2.26.5"}, {23100, "2.31.0"}};
  for (const auto& [version, text] : refused) {
    const cusim::ScopedNccl nccl({.version = version});
    for (const absl::Status& status : {MakeNcclId().status(), MakeNcclCommunicator({}).status()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
      EXPECT_THAT(Text(status), AllOf(HasSubstr(text), HasSubstr("expected 2.27 to 2.30")));
    }
  }
}

TEST(NcclLibraryTest, WhatItReadsFromTheEnvironmentIsSetUnlessItIsThere) {
  const std::pair<const char*, const char*> variables[] = {{"CUDA_MODULE_LOADING", "EAGER"},
                                                           {"NCCL_LAUNCH_ORDER_IMPLICIT", "1"},
                                                           {"NCCL_LAUNCH_RACE_FATAL", "0"}};
  for (const auto& [name, value] : variables) {
    ::unsetenv(name);
    PrepareForNccl();
    EXPECT_STREQ(std::getenv(name), value);
    ::setenv(name, "of the user", 1);
    PrepareForNccl();
    EXPECT_STREQ(std::getenv(name), "of the user");
    ::setenv(name, value, 1);
  }
}

// ---- joining

TEST(NcclJoinTest, ARankThatNeverJoinsIsMissed) {
  for (const Fates fates : {Fates::kOwn, Fates::kShared}) {
    const absl::Time start = absl::Now();
    RunNcclRanks({.join_timeout = kTimeout, .fates = fates, .absent = 2},
                 [&](absl::StatusOr<std::unique_ptr<Communicator>> comm, int rank) {
                   const absl::Status status = comm.status();
                   EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
                   EXPECT_THAT(Text(status), AllOf(HasSubstr(absl::StrCat("rank ", rank)),
                                                   ContainsRegex("for ranks [01], 2, deadline"),
                                                   HasSubstr("in joining NCCL: waited")));
                   if (fates == Fates::kOwn) ExpectLate(status, rank, "joining NCCL");
                 });
    EXPECT_LT(absl::Now() - start, kTimeout + kSlack);
  }
}

TEST(NcclJoinTest, ALibraryThatHangsIsLeft) {
  const cusim::ScopedNccl nccl({.init_hangs = true});
  RunNcclRanks({.ranks = 2, .join_timeout = kTimeout, .fates = Fates::kOwn},
               [](absl::StatusOr<std::unique_ptr<Communicator>> comm, int rank) {
                 ExpectLate(comm.status(), rank, "joining NCCL");
               });
}

TEST(NcclJoinTest, OneGpuForTwoRanksIsRefused) {
  const NcclId id = MakeNcclId().value();
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      const absl::Status status =
          MakeNcclCommunicator({.id = id, .rank = r, .size = 2, .device = 0, .timeout = kTimeout})
              .status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(Text(status),
                  AllOf(HasSubstr(absl::StrCat("rank ", r)), HasSubstr("joining NCCL")));
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(NcclJoinTest, BadRanksAndDevicesAreRefusedBeforeAnybodyIsMet) {
  EXPECT_EQ(MakeNcclCommunicator({.rank = 2, .size = 2}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MakeNcclCommunicator({.device = 77}).status().code(), absl::StatusCode::kUnimplemented);
}

// ---- operations

using DeviceCall = absl::Status (*)(Communicator&, const TestDevice&);

constexpr Site kSite = {.name = "dispatch", .layer = 3, .step = 120};

// One of each kind, in which rank 0 takes part: at kSite, but for the last kUnplaced.
const DeviceCall kCalls[] = {
    [](Communicator& comm, const TestDevice& device) {
      const auto x = device.Copy<float>({1, 2});
      (void)comm.AllReduce<float>(x.span(), ReduceOp::kSum, device.stream(), kSite);
      return device.stream().Synchronize();
    },
    [](Communicator& comm, const TestDevice& device) {
      const auto x = device.Copy<int32_t>({1});
      const auto y = device.Copy(std::vector<int32_t>(static_cast<size_t>(comm.size())));
      (void)comm.AllGather<int32_t>(x.span(), y.span(), device.stream(), kSite);
      return device.stream().Synchronize();
    },
    [](Communicator& comm, const TestDevice& device) {
      const auto n = static_cast<size_t>(comm.size());
      const auto x = device.Copy(std::vector<int32_t>(n)), y = device.Copy(std::vector<int32_t>(n));
      (void)comm.AllToAll<int32_t>(x.span(), y.span(), device.stream(), kSite);
      return device.stream().Synchronize();
    },
    [](Communicator& comm, const TestDevice& device) {
      const auto x = device.Copy<int32_t>({1});
      (void)comm.SendRecv({{.peer = 0, .recv = x.span().data(), .bytes = 4}}, device.stream(),
                          kSite);
      return device.stream().Synchronize();
    },
    [](Communicator& comm, const TestDevice& device) {
      (void)comm.Fence(device.stream(), kSite);
      return device.stream().Synchronize();
    },
    [](Communicator& comm, const TestDevice&) { return comm.Barrier(); },
    [](Communicator& comm, const TestDevice&) { return comm.Split(0, 0).status(); },
};
constexpr size_t kUnplaced = 2;

TEST(NcclFaultTest, EveryWaitForARankThatStaysAwayHasADeadline) {
  for (size_t i = 0; i < std::size(kCalls); ++i) {
    SCOPED_TRACE(i);
    OnNcclRanks({.ranks = 3, .timeout = kTimeout, .fates = Fates::kOwn},
                [&](Communicator& comm, const TestDevice& device) {
                  if (comm.rank() == 0) return;  // never comes
                  const absl::Status status = InTime([&] { return kCalls[i](comm, device); });
                  const bool placed = i + kUnplaced < std::size(kCalls);
                  ExpectLate(status, comm.rank(), placed ? "(dispatch, layer 3, step 120)" : "");
                  EXPECT_THAT(Text(status), ContainsRegex("for ranks? 0"));
                  // Dead for good, wherever it is asked.
                  EXPECT_EQ(comm.Barrier(), status);
                  EXPECT_EQ(comm.Fence(*MakeInlineStream()), status);
                  EXPECT_EQ(comm.Split(0, 0).status(), status);
                });
  }
}

TEST(NcclFaultTest, APeerThatDiesInsideAGroupIsMissed) {
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    const cusim::ScopedNccl nccl({.dies_in_group = 1});
    OnNcclRanks({.ranks = 3, .timeout = kTimeout, .fates = Fates::kOwn, .seed = seed},
                [](Communicator& comm, const TestDevice& device) {
                  // A rank that had its part before may see it one call later.
                  const absl::Status status = InTime([&] {
                    const absl::Status first = kCalls[2](comm, device);
                    return first.ok() ? kCalls[2](comm, device) : first;
                  });
                  ExpectLate(status, comm.rank(), "in AllToAllV (dispatch, layer 3, step 120)");
                });
  }
}

// The network tells one rank at once, long before the deadline; it tells the others of its process.
TEST(NcclFaultTest, AnErrorThatNcclReportsEndsTheWaitsOfAll) {
  std::atomic<int> waiting = 0;
  OnNcclRanks({.ranks = 3, .timeout = absl::Seconds(60)}, [&](Communicator& comm,
                                                              const TestDevice& device) {
    if (comm.rank() == 2) {
      while (waiting < 2) std::this_thread::yield();
      cusim::RaiseInNccl(1, ncclRemoteError);
      EXPECT_EQ(comm.Barrier().code(), absl::StatusCode::kAborted);
      return;
    }
    const auto x = device.Copy<float>({1, 2});
    EXPECT_TRUE(comm.AllReduce<float>(x.span(), ReduceOp::kSum, device.stream(),
                                      {.name = "all-reduce", .step = 9})
                    .ok());
    ++waiting;
    const absl::Status status =
        InTime([&] { return device.stream().Synchronize(); }, absl::Seconds(10));
    EXPECT_EQ(status.code(),
              comm.rank() == 1 ? absl::StatusCode::kUnavailable : absl::StatusCode::kAborted)
        << status;
    EXPECT_THAT(Text(status),
                AllOf(HasSubstr("rank 1 on host "), HasSubstr("in AllReduce (all-reduce, step 9)"),
                      HasSubstr("remote process"), HasSubstr(", after ")));
  });
}

// What NCCL makes of counts that differ is its own affair; the wait ends.
TEST(NcclFaultTest, CountsThatDifferOnDevicesMeetTheDeadline) {
  const cusim::ScopedNccl nccl({.mismatch_hangs = true});
  OnNcclRanks({.ranks = 2, .timeout = kTimeout, .fates = Fates::kOwn},
              [](Communicator& comm, const TestDevice& device) {
                const auto x = device.Copy(std::vector<int32_t>(comm.rank() == 0 ? 5 : 6));
                const absl::Status status = InTime([&] {
                  (void)comm.AllReduce<int32_t>(x.span(), ReduceOp::kSum, device.stream());
                  return device.stream().Synchronize();
                });
                ExpectLate(status, comm.rank(), "in AllReduce");
              });
}

// Over memory of the host all compare first, and every rank says the same.
TEST(NcclFaultTest, CountsThatDifferOnTheHostAreNamedByAll) {
  OnNcclRanks({.ranks = 3, .timeout = absl::Seconds(60), .fates = Fates::kOwn},
              [](Communicator& comm, const TestDevice&) {
                std::vector<int64_t> out(3), in(3);
                if (comm.rank() == 0) out[1] = 3;
                if (comm.rank() == 1) in[0] = 2;
                std::vector<int32_t> send(comm.rank() == 0 ? 3 : 0), recv(comm.rank() == 1 ? 2 : 0);
                const absl::Status status = InTime(
                    [&] {
                      return comm.AllToAllV<int32_t>(send, out, absl::MakeSpan(recv), in,
                                                     *MakeInlineStream());
                    },
                    absl::Seconds(3));
                EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
                EXPECT_THAT(Text(status),
                            HasSubstr("rank 1 expects 8 bytes from rank 0, which sends 12"));
              });
}

TEST(NcclFaultTest, AbortFromAnotherThreadEndsAWaitForTheStream) {
  for (const Fates fates : {Fates::kOwn, Fates::kShared}) {
    const absl::Duration timeout = fates == Fates::kOwn ? kTimeout : absl::Seconds(60);
    OnNcclRanks({.ranks = 2, .timeout = timeout, .fates = fates}, [&](Communicator& comm,
                                                                      const TestDevice& device) {
      if (comm.rank() == 1) {
        if (fates == Fates::kShared) absl::SleepFor(absl::Milliseconds(300));
        return;
      }
      std::thread other([&] {
        absl::SleepFor(absl::Milliseconds(50));
        comm.Abort(absl::DataLossError("weights are damaged"));
      });
      const absl::Status status = InTime([&] { return kCalls[0](comm, device); }, absl::Seconds(3));
      EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
      EXPECT_THAT(Text(status), HasSubstr("weights are damaged"));
      other.join();
    });
  }
}

// A communicator that dies takes the other communicators of its rank with it, and their streams.
TEST(NcclFaultTest, OneFateForAllCommunicatorsOfARank) {
  OnNcclRanks({.ranks = 3, .timeout = kTimeout, .fates = Fates::kOwn},
              [](Communicator& comm, const TestDevice& device) {
                const auto group = comm.Split(0, comm.rank()).value();
                const TestDevice second({DeviceKind::kCuda, comm.rank()});
                if (comm.rank() == 0) return;
                const auto x = second.Copy<float>({1});
                (void)group->AllReduce<float>(x.span(), ReduceOp::kSum, second.stream());
                const absl::Status status = InTime([&] { return kCalls[0](comm, device); });
                EXPECT_EQ(second.stream().Synchronize(), status);
                EXPECT_EQ(group->Barrier(), status);
              });
}

// Work of the communicator that was made first stands in a stream behind work that is stuck:
// neither can be aborted alone.
TEST(NcclFaultTest, CommunicatorsWithWorkInOneStreamAreAbortedTogether) {
  OnNcclRanks({.ranks = 2, .timeout = kTimeout, .fates = Fates::kOwn},
              [](Communicator& comm, const TestDevice& device) {
                const auto group = comm.Split(0, comm.rank()).value();
                if (comm.rank() == 1) return;
                const auto x = device.Copy<float>({1}), y = device.Copy<float>({2});
                (void)group->AllReduce<float>(x.span(), ReduceOp::kSum, device.stream());
                (void)comm.AllReduce<float>(y.span(), ReduceOp::kSum, device.stream());
                ExpectLate(InTime([&] { return device.stream().Synchronize(); }), 0,
                           "in AllReduce");
              });
}

// What is computed from sums that did not come is an error, too, in streams that saw no collective.
TEST(NcclFaultTest, AStreamThatWaitsForADeadOneIsDead) {
  OnNcclRanks({.ranks = 2, .timeout = kTimeout, .fates = Fates::kOwn},
              [](Communicator& comm, const TestDevice& device) {
                const TestDevice later({DeviceKind::kCuda, comm.rank()});
                if (comm.rank() == 1) return;
                const auto x = device.Copy<float>({1});
                (void)comm.AllReduce<float>(x.span(), ReduceOp::kSum, device.stream());
                const Event summed = device.stream().Record().value();
                EXPECT_TRUE(later.stream().WaitFor(summed).ok());
                ExpectLate(InTime([&] { return later.stream().Synchronize(); }), 0, "in AllReduce");
                EXPECT_EQ(MakeInlineStream()->WaitFor(summed).code(),
                          absl::StatusCode::kDeadlineExceeded);
              });
}

// A call takes two events; without the second, the first goes back.
TEST(NcclFaultTest, ACallWithoutItsEventsEndsTheWorldAndKeepsNone) {
  const size_t before = cusim::LiveEvents();
  absl::Notification called;  // until then the peer keeps its events
  const auto body = [&](Communicator& comm, const TestDevice& device) {
    if (comm.rank() == 1) return called.WaitForNotification();
    const auto x = device.Copy<float>({1});
    cusim::LimitEvents(cusim::LiveEvents() + 1);
    const absl::Status status = comm.AllReduce<float>(x.span(), ReduceOp::kSum, device.stream());
    cusim::LimitEvents(SIZE_MAX);
    EXPECT_THAT(Text(status), HasSubstr("cudaErrorMemoryAllocation"));
    called.Notify();
  };
  OnNcclRanks({.ranks = 2, .timeout = kTimeout}, body);
  EXPECT_EQ(cusim::LiveEvents(), before);
}

// The rank goes on without it: its calls, its end, and a line that names rank and lane.
TEST(NcclFaultTest, AnAbortThatHangsIsLeftBehind) {
  static auto& lines = *new std::string;
  static std::mutex mu;
  SetLogCallback([](LogLevel, absl::string_view line) {
    const std::lock_guard<std::mutex> lock(mu);
    absl::StrAppend(&lines, line, "\n");
  });
  {
    const cusim::ScopedNccl nccl({.abort_hangs = 0});
    const absl::Time start = absl::Now();
    OnNcclRanks({.ranks = 2, .timeout = kTimeout, .fates = Fates::kOwn},
                [](Communicator& comm, const TestDevice& device) {
                  if (comm.rank() == 1) return;
                  ExpectLate(InTime([&] { return kCalls[0](comm, device); }), 0, "in AllReduce");
                  comm.Abort(absl::DataLossError("weights are damaged"));  // does not wait
                });
    EXPECT_LT(absl::Now() - start, 2 * kTimeout + kSlack);
  }
  SetLogCallback(nullptr);
  const std::lock_guard<std::mutex> lock(mu);
  EXPECT_THAT(lines, ContainsRegex("rank 0 on host .* in ncclCommAbort of the communicator of "
                                   "ranks 0, 1: .* left behind"));
}

// After a world has died its devices serve another.
TEST(NcclFaultTest, TheDevicesServeAnotherWorldAfterwards) {
  OnNcclRanks({.ranks = 2, .timeout = kTimeout}, [](Communicator& comm, const TestDevice& device) {
    if (comm.rank() == 1) return;
    EXPECT_FALSE(kCalls[0](comm, device).ok());
  });
  OnNcclRanks({.ranks = 2}, [](Communicator& comm, const TestDevice& device) {
    EXPECT_TRUE(kCalls[0](comm, device).ok());
  });
}

}  // namespace
}  // namespace moe
