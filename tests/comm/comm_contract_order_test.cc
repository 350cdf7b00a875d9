// The contract of Communicator (comm/communicator.h): point to point, order between streams, peer
// memory and groups. Linked with comm_contract_test.cc once per backend.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/comm/comm_env.h"

namespace moe {
namespace {

using ::testing::Each;
using testing::ExpectDone;
using testing::Tagged;

class CommOrderTest : public testing::CommTest {};

void Sleep(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

// ---- point to point

TEST_P(CommOrderTest, GroupedSendRecvGoesAroundARing) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    const int ranks = comm.size();
    const int next = (comm.rank() + 1) % ranks;
    const int previous = (comm.rank() + ranks - 1) % ranks;
    for (const int64_t n : {int64_t{1}, int64_t{500}, int64_t{200'000}}) {
      const std::vector<int32_t> send(n, Tagged(comm.rank(), next, 0));
      std::vector<int32_t> recv(n, -1);
      ExpectDone(comm.SendRecv({{.peer = next, .send = send.data(), .bytes = n * 4},
                                {.peer = previous, .recv = recv.data(), .bytes = n * 4}},
                               stream),
                 stream);
      EXPECT_EQ(recv, std::vector<int32_t>(n, Tagged(previous, comm.rank(), 0)));
    }
  });
}

TEST_P(CommOrderTest, SendRecvMatchesInOrderBetweenTwoRanks) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    // Three messages of different sizes to everyone (self included), in one group.
    const int ranks = comm.size();
    constexpr int64_t kMessages = 3;
    std::vector<std::vector<int32_t>> send(static_cast<size_t>(ranks * kMessages)),
        recv(send.size());
    std::vector<SendRecvOp> ops;
    for (int peer = 0; peer < ranks; ++peer) {
      for (int64_t m = 0; m < kMessages; ++m) {
        auto& out = send[peer * kMessages + m];
        auto& in = recv[peer * kMessages + m];
        out.assign(m + 1, Tagged(comm.rank(), peer, m));
        in.assign(m + 1, -1);
        const int64_t bytes = 4 * (m + 1);
        ops.push_back({.peer = peer, .recv = in.data(), .bytes = bytes});
        ops.push_back({.peer = peer, .send = out.data(), .bytes = bytes});
      }
    }
    ExpectDone(comm.SendRecv(ops, stream), stream);
    for (int peer = 0; peer < ranks; ++peer) {
      for (int64_t m = 0; m < kMessages; ++m) {
        EXPECT_THAT(recv[peer * kMessages + m], Each(Tagged(peer, comm.rank(), m)));
      }
    }
  });
}

TEST_P(CommOrderTest, SendRecvOfNothingReturns) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    ASSERT_TRUE(comm.SendRecv({}, stream).ok());
    const int next = (comm.rank() + 1) % comm.size();
    // 0 bytes are skipped on both sides: the peer need not answer.
    ASSERT_TRUE(comm.SendRecv({{.peer = next, .bytes = 0}}, stream).ok());
    EXPECT_TRUE(stream.Synchronize().ok());
  });
}

// A group progresses together: rank 1 waits for 2 first, but takes what 0 sends meanwhile, without
// which 0 would not come to the send that 2 needs. Other ranks do not call it.
TEST_P(CommOrderTest, SendRecvGroupTakesWhateverComesFirst) {
  if (ranks() < 3) GTEST_SKIP() << "needs three ranks";
  OnEachRank([](Communicator& comm, Stream& stream) {
    const int32_t a = comm.rank() + 10;
    int32_t b = -1, c = -1;
    const auto move = [&](std::initializer_list<SendRecvOp> ops) {
      ExpectDone(comm.SendRecv(ops, stream), stream);
    };
    if (comm.rank() == 0) {
      move({{.peer = 1, .send = &a, .bytes = 4}});
      move({{.peer = 2, .send = &a, .bytes = 4}});
    } else if (comm.rank() == 1) {
      move({{.peer = 2, .recv = &b, .bytes = 4}, {.peer = 0, .recv = &c, .bytes = 4}});
      EXPECT_EQ(b, 12);
      EXPECT_EQ(c, 10);
    } else if (comm.rank() == 2) {
      move({{.peer = 0, .recv = &b, .bytes = 4}});
      move({{.peer = 1, .send = &a, .bytes = 4}});
      EXPECT_EQ(b, 10);
    }
    EXPECT_TRUE(comm.Barrier().ok());
  });
}

// ---- order

TEST_P(CommOrderTest, CollectivesFollowWorkAlreadyInTheStream) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    std::vector<int64_t> x(4, 0);
    ASSERT_TRUE(stream
                    .Enqueue([&x, rank = comm.rank()] {
                      Sleep(rank == 0 ? 30 : 1);
                      std::fill(x.begin(), x.end(), 1);
                      return absl::OkStatus();
                    })
                    .ok());
    ASSERT_TRUE(comm.AllReduce<int64_t>(absl::MakeSpan(x), ReduceOp::kSum, stream).ok());
    std::vector<int64_t> seen;
    ASSERT_TRUE(stream
                    .Enqueue([&x, &seen] {
                      seen = x;
                      return absl::OkStatus();
                    })
                    .ok());
    ASSERT_TRUE(stream.Synchronize().ok());
    EXPECT_THAT(seen, Each(comm.size()));
  });
}

TEST_P(CommOrderTest, BarrierWaitsForTheLastRank) {
  std::atomic<int> arrived{0};
  OnEachRank([&arrived](Communicator& comm, Stream&) {
    if (comm.rank() == comm.size() - 1) Sleep(30);
    arrived.fetch_add(1);
    const absl::Time before = absl::Now();
    ASSERT_TRUE(comm.Barrier().ok());
    if (testing::Env().wakes_peers()) {
      EXPECT_EQ(arrived.load(), comm.size());  // ranks share this counter
    } else if (comm.size() > 1 && comm.rank() == 0) {
      EXPECT_GT(absl::Now() - before, absl::Milliseconds(5));
    }
  });
}

TEST_P(CommOrderTest, BarrierMayMeetWhileAStreamStillExchanges) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    std::vector<int32_t> x(1000, 1);
    for (int i = 0; i < 20; ++i) {
      ASSERT_TRUE(comm.AllReduce<int32_t>(absl::MakeSpan(x), ReduceOp::kMax, stream).ok());
      ASSERT_TRUE(comm.Barrier().ok());
    }
    EXPECT_TRUE(stream.Synchronize().ok());
  });
}

// More than there are addresses, on one rank of processes. (Sanitizers end a program that asks an
// allocator for it, as ranks that are threads would.)
TEST_P(CommOrderTest, PeerMemoryThatOneRankLacksIsAnErrorOnAll) {
  OnEachRank([](Communicator& comm, Stream&) {
    if (comm.backend() != "mpi") return;
    const bool last = comm.rank() == comm.size() - 1;
    const auto status = comm.AllocatePeerBuffer(last ? int64_t{1} << 60 : 64).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()),
                ::testing::HasSubstr(
                    absl::StrCat("rank ", comm.size() - 1, " has no 1152921504606846976 bytes")));
    EXPECT_TRUE(comm.AllocatePeerBuffer(64).ok());  // the world lives
  });
}

// A page that is not there when the memory is given is a signal when it is used.
TEST_P(CommOrderTest, PeerMemoryIsThereBeforeItIsUsed) {
  OnEachRank([](Communicator& comm, Stream&) {
    if (!comm.has_peer_memory(DeviceKind::kCpu)) return;
    const int64_t page = sysconf(_SC_PAGESIZE);
    const auto buffer = comm.AllocatePeerBuffer(8 * page).value();
    const auto first = reinterpret_cast<uintptr_t>(buffer->local().data());
    std::array<unsigned char, 7> present = {};  // whole pages, wherever the memory begins
    void* const whole = reinterpret_cast<void*>((first + page - 1) / page * page);
    ASSERT_EQ(mincore(whole, present.size() * page, present.data()), 0);
    EXPECT_THAT(present, Each(::testing::Truly([](unsigned char byte) { return byte & 1; })));
    ASSERT_TRUE(comm.Barrier().ok());
  });
}

TEST_P(CommOrderTest, FenceMakesPeerMemoryVisible) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    if (!comm.has_peer_memory(DeviceKind::kCpu)) {
      EXPECT_EQ(comm.AllocatePeerBuffer(64).status().code(), absl::StatusCode::kUnimplemented);
      ASSERT_TRUE(comm.Fence(stream).ok());  // still a barrier in stream order
      EXPECT_TRUE(stream.Synchronize().ok());
      return;
    }
    // Sizes differ; the last rank has none when there are others.
    const int64_t mine = comm.size() > 1 ? 64 * (comm.size() - 1 - comm.rank()) : 64;
    const auto buffer = comm.AllocatePeerBuffer(mine).value();
    ASSERT_EQ(static_cast<int64_t>(buffer->local().size()), mine);
    EXPECT_THAT(buffer->local(), Each(std::byte{0}));
    EXPECT_EQ(buffer->peer(comm.rank()), buffer->local().data());
    for (int round = 1; round <= 10; ++round) {
      const auto value = [round](int r) {
        return static_cast<std::byte>(16 * round + r);
      };
      ASSERT_TRUE(stream
                      .Enqueue([&] {
                        std::fill(buffer->local().begin(), buffer->local().end(),
                                  value(comm.rank()));
                        return absl::OkStatus();
                      })
                      .ok());
      ASSERT_TRUE(comm.Fence(stream).ok());  // publish
      ASSERT_TRUE(stream
                      .Enqueue([&] {
                        for (int r = 0; r < comm.size(); ++r) {
                          const int64_t bytes = comm.size() > 1 ? 64 * (comm.size() - 1 - r) : 64;
                          EXPECT_THAT(absl::MakeConstSpan(buffer->peer(r), bytes), Each(value(r)));
                        }
                        return absl::OkStatus();
                      })
                      .ok());
      ASSERT_TRUE(comm.Fence(stream).ok());  // release
      ASSERT_TRUE(stream.Synchronize().ok());
    }
  });
}

// ---- groups

TEST_P(CommOrderTest, SplitOrdersByKeyThenRank) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    // Odd and even ranks; within a group the order is reversed; rank 2 stays out.
    const int color = comm.rank() == 2 ? -1 : comm.rank() % 2;
    const auto group = comm.Split(color, -comm.rank()).value();
    if (comm.rank() == 2) {
      EXPECT_EQ(group, nullptr);
      return;
    }
    std::vector<int32_t> expected;
    for (int r = comm.size() - 1; r >= 0; --r) {
      if (r != 2 && r % 2 == color) expected.push_back(r);
    }
    ASSERT_EQ(group->size(), static_cast<int>(expected.size()));
    EXPECT_EQ(expected[group->rank()], comm.rank());
    EXPECT_EQ(group->timeout(), comm.timeout());
    const int32_t mine = comm.rank();
    std::vector<int32_t> members(expected.size(), -1);
    ExpectDone(group->AllGather<int32_t>({&mine, 1}, absl::MakeSpan(members), stream), stream);
    EXPECT_EQ(members, expected);

    // Equal keys: by rank. A group can be split again.
    const auto again = group->Split(0, 5).value();
    EXPECT_EQ(again->rank(), group->rank());
  });
}

TEST_P(CommOrderTest, TwoGroupsWorkAtTheSameTimeOnTwoStreams) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    const auto other = comm.Split(0, comm.rank()).value();
    const auto second = MakeStream({}).value();
    std::vector<int32_t> a(999, 1), b(999, 1);
    for (int i = 0; i < 20; ++i) {
      ASSERT_TRUE(other->AllReduce<int32_t>(absl::MakeSpan(b), ReduceOp::kMax, *second).ok());
      ASSERT_TRUE(comm.AllReduce<int32_t>(absl::MakeSpan(a), ReduceOp::kMax, stream).ok());
    }
    ASSERT_TRUE(other->AllReduce<int32_t>(absl::MakeSpan(b), ReduceOp::kSum, *second).ok());
    ExpectDone(comm.AllReduce<int32_t>(absl::MakeSpan(a), ReduceOp::kSum, stream), stream);
    ASSERT_TRUE(second->Synchronize().ok());
    EXPECT_THAT(a, Each(comm.size()));
    EXPECT_THAT(b, Each(comm.size()));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CommOrderTest, testing::EveryCommTestParam(),
                         testing::CommTestName);

}  // namespace
}  // namespace moe
