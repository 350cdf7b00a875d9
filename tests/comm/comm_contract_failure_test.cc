// The contract of Communicator (comm/communicator.h) when something goes wrong. Linked with
// comm_contract_test.cc once per backend.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/comm/comm_env.h"

namespace moe {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

class CommFailureTest : public testing::CommTest {
 protected:
  // Where every case waits for a deadline a pair on the caller's thread and a group on queues are
  // enough.
  static bool IsSample() {
    const auto [ranks, stream] = GetParam();
    return ranks == (stream == testing::EnvStream::kInline ? 2 : 4);
  }
};

TEST_P(CommFailureTest, BadArgumentsAreRefusedAndTheCommunicatorStaysUsable) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    const int ranks = comm.size();
    std::vector<float> x(size_t{4} * ranks), y(size_t{4} * ranks);
    const absl::Span<float> out = absl::MakeSpan(y);
    const std::vector<int64_t> good(ranks, 4);
    const auto refused = [](const absl::Status& status) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    };
    const std::vector<int64_t> too_many(ranks + 1, 0);
    refused(comm.AllToAllV<float>({}, too_many, {}, too_many, stream));
    std::vector<int64_t> bad = good;
    bad[0] = -1;
    refused(comm.AllToAllV<float>(x, bad, out, good, stream));
    bad[0] = std::numeric_limits<int64_t>::max();  // the sum must not wrap around
    refused(comm.AllToAllV<float>(x, good, out, bad, stream));
    bad[0] = 3;
    refused(comm.AllToAllV<float>(x, bad, out, good, stream));
    refused(comm.AllToAllV<float>(x, good, absl::MakeSpan(x), good, stream));  // overlap
    refused(comm.AllToAll<float>(x, out.subspan(1), stream));
    if (ranks > 1)
      refused(comm.AllToAll<float>(absl::MakeConstSpan(x).subspan(1), out.subspan(1), stream));
    refused(comm.AllGather<float>(x, out.subspan(1), stream));
    refused(comm.ReduceScatter<float>(absl::MakeConstSpan(x).subspan(1), out.first(4),
                                      ReduceOp::kSum, stream));
    const auto part = out.first(4);
    bad[0] = 3;  // not the size of the buffer, nor of rank 0's part
    refused(comm.ReduceScatterV<float>(x, bad, part, ReduceOp::kSum, stream));
    refused(comm.AllGatherV<float>(part, absl::MakeSpan(x), bad, stream));
    bad[0] = -1;
    refused(comm.ReduceScatterV<float>(x, bad, part, ReduceOp::kSum, stream));
    refused(comm.AllGatherV<float>(part, absl::MakeSpan(x), bad, stream));
    refused(comm.ReduceScatterV<float>(x, too_many, part, ReduceOp::kSum, stream));
    refused(comm.AllGatherV<float>(part, absl::MakeSpan(x), too_many, stream));
    refused(comm.ReduceScatterV<float>(x, good, out.first(3), ReduceOp::kSum, stream));
    refused(comm.AllGatherV<float>(out.first(3), absl::MakeSpan(x), good, stream));
    if (ranks > 1) {  // beside the own part
      refused(comm.AllGatherV<float>(absl::MakeConstSpan(x).subspan(2, 4), absl::MakeSpan(x), good,
                                     stream));
    }
    std::vector<uint8_t> bytes(4);
    refused(comm.ReduceScatterV<uint8_t>(bytes, std::vector<int64_t>(ranks, 0), {}, ReduceOp::kSum,
                                         stream));
    refused(comm.AllReduce<uint8_t>(absl::MakeSpan(bytes), ReduceOp::kSum, stream));
    refused(comm.Broadcast<float>(out, ranks, stream));
    refused(comm.Broadcast<float>(out, -1, stream));
    refused(comm.SendRecv({{.peer = ranks, .send = x.data(), .bytes = 4}}, stream));
    refused(comm.SendRecv({{.peer = 0, .send = x.data(), .bytes = -4}}, stream));
    refused(comm.SendRecv({{.peer = 0, .bytes = 4}}, stream));
    refused(comm.SendRecv({{.peer = 0, .send = x.data(), .recv = y.data(), .bytes = 4}}, stream));
    refused(comm.Split(-2, 0).status());

    ASSERT_TRUE(comm.AllToAllV<float>(x, good, out, good, stream).ok());
    EXPECT_TRUE(stream.Synchronize().ok());
    EXPECT_TRUE(comm.Barrier().ok());
  });
}

// What a rank learns of a call on whose arguments ranks disagree: by its own comparison, or from a
// rank that saw it first.
void ExpectDisagreement(Communicator& comm, Stream& stream,
                        const ::testing::Matcher<std::string>& says) {
  const absl::Status status = stream.Synchronize();
  if (status.code() != absl::StatusCode::kAborted) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  }
  EXPECT_THAT(std::string(status.message()), says);
  EXPECT_EQ(comm.Barrier(), status);
}

TEST_P(CommFailureTest, CountsThatDisagreeAreFoundAndEndTheWorld) {
  if (ranks() < 2) GTEST_SKIP() << "one rank agrees with itself";
  OnEachRank(
      [](Communicator& comm, Stream& stream) {
        // Rank 0 sends 3 elements to rank 1, which expects 2.
        std::vector<int64_t> send_counts(comm.size(), 0), recv_counts(comm.size(), 0);
        if (comm.rank() == 0) send_counts[1] = 3;
        if (comm.rank() == 1) recv_counts[0] = 2;
        std::vector<int32_t> send(comm.rank() == 0 ? 3 : 0), recv(comm.rank() == 1 ? 2 : 0);
        (void)comm.AllToAllV<int32_t>(send, send_counts, absl::MakeSpan(recv), recv_counts, stream);
        // Others learn of it now, later or by their deadline.
        if (comm.rank() != 1) return stream.Synchronize().IgnoreError();
        ExpectDisagreement(comm, stream, HasSubstr("expects 8 bytes from rank 0"));
      },
      absl::Seconds(2));
}

TEST_P(CommFailureTest, PartsThatDisagreeAreFoundAndEndTheWorld) {
  if (ranks() < 2) GTEST_SKIP() << "one rank agrees with itself";
  for (const bool gathers : {false, true}) {
    OnEachRank(
        [gathers](Communicator& comm, Stream& stream) {
          // Ranks 0 and 1 each think that it is the other that has an element less.
          std::vector<int64_t> counts(comm.size(), 0);
          counts[0] = comm.rank() == 0 ? 3 : 2;
          counts[1] = comm.rank() == 0 ? 2 : 3;
          std::vector<int32_t> x(5);
          const auto all = absl::MakeSpan(x);
          const auto own = comm.rank() == 0   ? all.first(3)
                           : comm.rank() == 1 ? all.subspan(2)
                                              : all.first(0);
          (void)(gathers ? comm.AllGatherV<int32_t>(own, all, counts, stream)
                         : comm.ReduceScatterV<int32_t>(all, counts, own, ReduceOp::kSum, stream));
          if (comm.rank() > 1) return stream.Synchronize().IgnoreError();
          ExpectDisagreement(comm, stream, HasSubstr("bytes from rank"));
        },
        absl::Seconds(2));
  }
}

TEST_P(CommFailureTest, ReductionsOfDifferentLengthAreRefusedOnEveryRank) {
  if (ranks() < 2) GTEST_SKIP() << "one rank agrees with itself";
  OnEachRank([](Communicator& comm, Stream& stream) {
    std::vector<int64_t> x(comm.rank() == 0 ? 5 : 6);
    (void)comm.AllReduce<int64_t>(absl::MakeSpan(x), ReduceOp::kSum, stream);
    ExpectDisagreement(comm, stream, AllOf(HasSubstr("5 x i64"), HasSubstr("6 x i64")));
  });
}

// `sent` bytes to a receiver of `expected`.
void ExpectSizesRefused(Communicator& comm, Stream& stream, absl::Span<std::byte> memory,
                        int64_t sent, int64_t expected) {
  std::byte* const x = memory.data();
  if (comm.rank() == 0) (void)comm.SendRecv({{.peer = 1, .send = x, .bytes = sent}}, stream);
  if (comm.rank() == 1) (void)comm.SendRecv({{.peer = 0, .recv = x, .bytes = expected}}, stream);
  const absl::Status status = stream.Synchronize();
  if (comm.rank() != 1) return;
  if (!testing::Env().compares_sizes()) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    return;
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat("expects ", expected, " bytes from rank 0")));
}

TEST_P(CommFailureTest, SendAndReceiveOfDifferentSizeAreRefusedByTheReceiver) {
  if (ranks() < 2) GTEST_SKIP() << "needs a pair";
  for (const int64_t sent : {4, 12}) {
    OnEachRank(
        [&](Communicator& comm, Stream& stream) {
          std::vector<std::byte> memory(12);
          ExpectSizesRefused(comm, stream, absl::MakeSpan(memory), sent, 8);
        },
        testing::Env().compares_sizes() ? absl::Seconds(2) : absl::Milliseconds(200));
  }
}

// Enqueues a call in which rank 0 takes part.
using CallWithRank0 = absl::Status (*)(Communicator&, absl::Span<float>, Stream&, const Site&);
constexpr CallWithRank0 kCallsWithRank0[] = {
    [](Communicator& comm, absl::Span<float> x, Stream& stream, const Site& site) {
      return comm.AllReduce(x, ReduceOp::kSum, stream, site);
    },
    [](Communicator& comm, absl::Span<float> x, Stream& stream, const Site& site) {
      return comm.SendRecv({{.peer = 0, .recv = x.data(), .bytes = 4}}, stream, site);
    },
    [](Communicator& comm, absl::Span<float>, Stream& stream, const Site& site) {
      return comm.Fence(stream, site);
    },
};

void ExpectDeadline(CallWithRank0 call, Communicator& comm, Stream& stream,
                    absl::Duration timeout) {
  std::vector<float> x(10);
  const absl::Time start = absl::Now();
  const absl::Status first = [&] {
    Site site = {.name = "dispatch", .layer = 3, .step = 120};
    (void)call(comm, absl::MakeSpan(x), stream, site);
    site = {.name = "combine"};  // the enqueued call has its own
    return stream.Synchronize();
  }();
  EXPECT_LT(absl::Now() - start, timeout + absl::Seconds(2));
  EXPECT_GE(absl::Now() - start, timeout / 2);
  EXPECT_EQ(first.code(), absl::StatusCode::kDeadlineExceeded) << first;
  EXPECT_THAT(std::string(first.message()), HasSubstr("(dispatch, layer 3, step 120)"));
  EXPECT_THAT(std::string(first.message()), ContainsRegex("for ranks? 0.*, deadline 200ms"));
  EXPECT_EQ(comm.Barrier(), first);  // dead for good
  EXPECT_EQ(comm.Split(0, 0).status(), first);
}

TEST_P(CommFailureTest, MissingPeerGivesDeadlineExceededThatNamesSiteAndRanks) {
  if (!IsSample()) GTEST_SKIP() << "a pair and a group are enough";
  constexpr absl::Duration kTimeout = absl::Milliseconds(200);
  for (const CallWithRank0 call : kCallsWithRank0) {
    OnEachRank(
        [&](Communicator& comm, Stream& stream) {
          if (comm.rank() != 0) ExpectDeadline(call, comm, stream, kTimeout);  // 0 never comes
        },
        kTimeout);
  }
}

template <typename Call>
void ExpectLate(Communicator& comm, Call call) {
  if (comm.rank() == 0) return;  // never comes
  const absl::Status status = call();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  // A rank that is slow to start may be named too.
  EXPECT_THAT(std::string(status.message()), ContainsRegex("for ranks? 0,"));
}

TEST_P(CommFailureTest, EveryWaitHasADeadline) {
  if (!IsSample()) GTEST_SKIP() << "a pair and a group are enough";
  using Body = absl::Status (*)(Communicator&, Stream&);
  // Each leaves rank 0 out; each world dies of it.
  const std::vector<Body> bodies = {
      [](Communicator& comm, Stream&) { return comm.Barrier(); },
      [](Communicator& comm, Stream&) { return comm.Split(0, 0).status(); },
      [](Communicator& comm, Stream& stream) {
        (void)comm.Fence(stream);
        return stream.Synchronize();
      },
      [](Communicator& comm, Stream& stream) {
        std::vector<int32_t> x(1), y(comm.size());
        (void)comm.AllGather<int32_t>(x, absl::MakeSpan(y), stream);
        return stream.Synchronize();
      },
      [](Communicator& comm, Stream& stream) {
        std::vector<int32_t> x(1);
        (void)comm.Broadcast<int32_t>(absl::MakeSpan(x), 0, stream);
        return stream.Synchronize();
      },
      [](Communicator& comm, Stream& stream) {
        int32_t x = 0;
        (void)comm.SendRecv({{.peer = 0, .recv = &x, .bytes = 4}}, stream);
        return stream.Synchronize();
      },
  };
  for (size_t i = 0; i < bodies.size(); ++i) {
    SCOPED_TRACE(absl::StrCat("call ", i));
    OnEachRank([&](Communicator& comm,
                   Stream& stream) { ExpectLate(comm, [&] { return bodies[i](comm, stream); }); },
               absl::Milliseconds(100));
  }
}

// A call that has failed gives its memory back: a peer that comes later writes nothing there.
TEST_P(CommFailureTest, WhatComesLateIsWrittenNowhere) {
  if (ranks() != 2 || std::get<1>(GetParam()) != testing::EnvStream::kInline) {
    GTEST_SKIP() << "a pair on one kind of stream is enough";
  }
  constexpr absl::Duration kTimeout = absl::Milliseconds(100);
  for (const int64_t bytes : {int64_t{4}, int64_t{1} << 20}) {
    std::vector<uint8_t> sent(bytes, 1), mine(bytes, 0);
    bool failed = false;
    OnEachRank(
        [&](Communicator& comm, Stream& stream) {
          if (comm.rank() == 0) {
            absl::SleepFor(4 * kTimeout);
            (void)comm.SendRecv({{.peer = 1, .send = sent.data(), .bytes = bytes}}, stream);
            (void)stream.Synchronize();
            return;
          }
          (void)comm.SendRecv({{.peer = 0, .recv = mine.data(), .bytes = bytes}}, stream);
          failed = !stream.Synchronize().ok();
          std::fill(mine.begin(), mine.end(), uint8_t{2});  // its next use
        },
        kTimeout);  // returns after both have met outside: what is on its way has come
    EXPECT_TRUE(!failed || std::count(mine.begin(), mine.end(), 2) == bytes) << bytes;
  }
}

// The deadline is for silence: a wait that takes longer than it lives while peers still come.
TEST_P(CommFailureTest, TheDeadlineStartsAgainWheneverAPeerComes) {
  if (ranks() != 4 || std::get<1>(GetParam()) != testing::EnvStream::kInline) {
    GTEST_SKIP() << "one who comes in between is enough, and a barrier has no stream";
  }
  if (!testing::Env().sees_progress()) GTEST_SKIP() << "the backend sees no progress";
  constexpr absl::Duration kTimeout = absl::Seconds(1);
  OnEachRank(
      [&](Communicator& comm, Stream&) {
        EXPECT_TRUE(comm.Barrier().ok());
        // 0.4 s of room for a busy machine.
        absl::SleepFor(0.6 * kTimeout * std::min(comm.rank(), 2));
        const absl::Status status = comm.Barrier();
        EXPECT_TRUE(status.ok()) << status;
      },
      kTimeout);
}

// Backends may move large transfers in pieces of their own; a whole piece too many is found, too.
TEST_P(CommFailureTest, SizesThatDifferByAPowerOfTwoAreFound) {
  if (ranks() != 2 || std::get<1>(GetParam()) != testing::EnvStream::kInline ||
      !testing::Env().compares_sizes()) {
    GTEST_SKIP() << "a pair on one kind of stream is enough";
  }
  constexpr int64_t kBytes = int64_t{16} << 20;
  std::vector<std::byte> x(2 * kBytes), y(2 * kBytes);  // here: nobody waits for them
  for (const int64_t sent : {kBytes, 2 * kBytes}) {
    OnEachRank(
        [&](Communicator& comm, Stream& stream) {
          ExpectSizesRefused(comm, stream, absl::MakeSpan(comm.rank() == 0 ? x : y), sent,
                             3 * kBytes - sent);
        },
        absl::Seconds(1));
  }
}

TEST_P(CommFailureTest, AbortEndsOwnCallsAndWakesThePeers) {
  if (!IsSample()) GTEST_SKIP() << "a pair and a group are enough";
  const bool wakes = testing::Env().wakes_peers();
  const absl::Duration timeout = wakes ? absl::Seconds(60) : absl::Milliseconds(500);
  OnEachRank(
      [&](Communicator& comm, Stream& stream) {
        const auto group = comm.Split(0, comm.rank()).value();
        const absl::Time start = absl::Now();
        if (comm.rank() == 0) {
          absl::SleepFor(absl::Milliseconds(50));
          comm.Abort(absl::DataLossError("weights are damaged"));
          EXPECT_EQ(comm.Barrier().code(), absl::StatusCode::kAborted);
          EXPECT_EQ(group->Barrier().code(), absl::StatusCode::kAborted);  // one fate
          return;
        }
        // Half of the others wait in the group, half in the world.
        std::vector<float> x(10);
        Communicator& waiting = comm.rank() % 2 == 0 ? comm : *group;
        (void)waiting.AllReduce<float>(absl::MakeSpan(x), ReduceOp::kSum, stream);
        const absl::Status status = stream.Synchronize();
        EXPECT_LT(absl::Now() - start, absl::Seconds(10));
        EXPECT_EQ(status.code(),
                  wakes ? absl::StatusCode::kAborted : absl::StatusCode::kDeadlineExceeded)
            << status;
        if (wakes) {
          EXPECT_THAT(std::string(status.message()), HasSubstr("weights are damaged"));
        }
        EXPECT_EQ(comm.Barrier(), status);
      },
      timeout);
}

INSTANTIATE_TEST_SUITE_P(Ranks, CommFailureTest, testing::EveryCommTestParam(),
                         testing::CommTestName);

}  // namespace
}  // namespace moe
