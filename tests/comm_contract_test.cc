// The contract of Communicator (comm/communicator.h). One source, linked once per backend:
// comm_contract_local_test, comm_contract_mpi_test.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/comm_env.h"

namespace moe {
namespace {

using ::testing::ContainsRegex;
using ::testing::Each;
using ::testing::ElementsAreArray;
using testing::EnvStream;
using ::testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(30);  // of tests in which nobody is missing

class CommContractTest : public ::testing::TestWithParam<std::tuple<int, EnvStream>> {
 protected:
  static int ranks() { return std::get<0>(GetParam()); }
  void SetUp() override {
    if (ranks() > testing::Env().max_ranks()) {
      GTEST_SKIP() << "needs " << ranks() << " ranks, have " << testing::Env().max_ranks();
    }
  }
  static void OnEachRank(absl::FunctionRef<void(Communicator&, Stream&)> body,
                         absl::Duration timeout = kPatience) {
    testing::Env().Run(ranks(), timeout, std::get<1>(GetParam()), body);
  }
};

// Values name their origin, so a misplaced element says where it came from.
int32_t Tagged(int from, int to, int64_t i) {
  return static_cast<int32_t>(from * 10'000'000 + to * 100'000 + i);
}

void Sleep(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

// ---- all-to-all

TEST_P(CommContractTest, AllToAllDeliversBlocksInSourceOrder) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    const int ranks = comm.size();
    std::vector<int32_t> send, expected;
    for (int peer = 0; peer < ranks; ++peer) {
      for (int i = 0; i < 3; ++i) {
        send.push_back(Tagged(comm.rank(), peer, i));
        expected.push_back(Tagged(peer, comm.rank(), i));
      }
    }
    std::vector<int32_t> recv(expected.size(), -1);
    ASSERT_TRUE(comm.AllToAll<int32_t>(send, absl::MakeSpan(recv), stream).ok());
    ASSERT_TRUE(stream.Synchronize().ok());
    EXPECT_THAT(recv, ElementsAreArray(expected));
  });
}

void ExchangeRagged(Communicator& comm, Stream& stream, int64_t unit) {
  const int ranks = comm.size();
  const auto count = [unit](int from, int to) {
    return (from + 2 * to) % 3 * unit;
  };  // with zeros
  std::vector<int64_t> send_counts, recv_counts;
  std::vector<int32_t> send, expected;
  for (int peer = 0; peer < ranks; ++peer) {
    send_counts.push_back(count(comm.rank(), peer));
    recv_counts.push_back(count(peer, comm.rank()));
    for (int64_t i = 0; i < send_counts.back(); ++i) send.push_back(Tagged(comm.rank(), peer, i));
    for (int64_t i = 0; i < recv_counts.back(); ++i) {
      expected.push_back(Tagged(peer, comm.rank(), i));
    }
  }
  std::vector<int32_t> recv(expected.size(), -1);
  ASSERT_TRUE(
      comm.AllToAllV<int32_t>(send, send_counts, absl::MakeSpan(recv), recv_counts, stream).ok());
  ASSERT_TRUE(stream.Synchronize().ok());
  EXPECT_EQ(recv, expected) << "unit " << unit;
}

TEST_P(CommContractTest, AllToAllVDeliversEveryElementInSourceOrder) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    // Below, at and beyond the sizes where copies change their ways.
    for (const int64_t unit :
         {int64_t{1}, int64_t{0}, int64_t{37}, int64_t{1100}, int64_t{66'001}}) {
      ExchangeRagged(comm, stream, unit);
    }
  });
}

TEST_P(CommContractTest, LargeAllToAllVArrivesWhole) {
  if (ranks() != 3) GTEST_SKIP() << "one group will do";
  OnEachRank([](Communicator& comm, Stream& stream) {
    // Every rank receives 3 x 1.6 MB: streamed copies, with odd heads and tails.
    ExchangeRagged(comm, stream, 400'003);
  });
}

TEST_P(CommContractTest, BackToBackExchangesDoNotMix) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    const int ranks = comm.size();
    std::vector<std::vector<int32_t>> send(50), recv(50);
    for (int round = 0; round < 50; ++round) {
      for (int peer = 0; peer < ranks; ++peer)
        send[round].push_back(Tagged(comm.rank(), peer, round));
      recv[round].assign(ranks, -1);
      ASSERT_TRUE(comm.AllToAll<int32_t>(send[round], absl::MakeSpan(recv[round]), stream).ok());
    }
    ASSERT_TRUE(stream.Synchronize().ok());
    for (int round = 0; round < 50; ++round) {
      for (int peer = 0; peer < ranks; ++peer) {
        ASSERT_EQ(recv[round][peer], Tagged(peer, comm.rank(), round));
      }
    }
  });
}

// ---- reductions

template <typename T>
void ExpectAllReduceSum(Communicator& comm, Stream& stream, size_t n) {
  // x[r][i] = 2 r + i mod 7: sums are small integers, exact in every type, bf16 included.
  std::vector<T> x(n);
  const int ranks = comm.size();
  for (size_t i = 0; i < n; ++i) {
    x[i] = static_cast<T>(static_cast<float>(2 * comm.rank() + static_cast<int>(i % 7)));
  }
  ASSERT_TRUE(comm.AllReduce<T>(absl::MakeSpan(x), ReduceOp::kSum, stream).ok());
  ASSERT_TRUE(stream.Synchronize().ok());
  for (size_t i = 0; i < n; ++i) {
    const int expected = ranks * (ranks - 1) + ranks * static_cast<int>(i % 7);
    ASSERT_EQ(static_cast<float>(x[i]), static_cast<float>(expected)) << "i=" << i << " n=" << n;
  }
}

TEST_P(CommContractTest, AllReduceSumsEveryType) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    for (const size_t n : {0, 1, 5, 257, 5000}) {
      ExpectAllReduceSum<float>(comm, stream, n);
      ExpectAllReduceSum<double>(comm, stream, n);
      ExpectAllReduceSum<BFloat16>(comm, stream, n);
      ExpectAllReduceSum<int32_t>(comm, stream, n);
      ExpectAllReduceSum<int64_t>(comm, stream, n);
    }
  });
}

TEST_P(CommContractTest, AllReduceMaxIsTheLargestOfAnyRank) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    std::vector<float> x(33);
    for (int i = 0; i < 33; ++i) {
      // The largest sits on rank i mod R; the smallest are negative.
      x[i] = comm.rank() == i % comm.size() ? static_cast<float>(i) - 40.0F : -100.0F;
    }
    ASSERT_TRUE(comm.AllReduce<float>(absl::MakeSpan(x), ReduceOp::kMax, stream).ok());
    ASSERT_TRUE(stream.Synchronize().ok());
    for (int i = 0; i < 33; ++i) EXPECT_EQ(x[i], static_cast<float>(i) - 40.0F);
  });
}

TEST_P(CommContractTest, AllReduceOfInt64WrapsNowhereBelowItsRange) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    const int64_t part = std::numeric_limits<int64_t>::max() / comm.size();
    std::vector<int64_t> x = {part, -part, comm.rank()};
    ASSERT_TRUE(comm.AllReduce<int64_t>(absl::MakeSpan(x), ReduceOp::kSum, stream).ok());
    ASSERT_TRUE(stream.Synchronize().ok());
    const int64_t ranks = comm.size();
    EXPECT_THAT(x, ElementsAreArray({part * ranks, -part * ranks, ranks * (ranks - 1) / 2}));
  });
}

// Values whose sum depends on the order of its terms.
template <typename T>
std::vector<T> Uneven(int rank, size_t n) {
  std::vector<T> x(n);
  for (size_t i = 0; i < n; ++i) {
    const auto mixed = static_cast<uint32_t>((i + 1) * 2654435761U + 40503U * (rank + 1));
    const float scale = (mixed & 3U) == 0 ? 4096.0F : 1.0F;
    x[i] = static_cast<T>(scale * (static_cast<float>(mixed >> 8U) / 16777216.0F - 0.5F));
  }
  return x;
}

template <typename T>
void ExpectAllReduceSameBits(Communicator& comm, Stream& stream, size_t n) {
  std::vector<T> first = Uneven<T>(comm.rank(), n);
  std::vector<T> second = first;
  ASSERT_TRUE(comm.AllReduce<T>(absl::MakeSpan(first), ReduceOp::kSum, stream).ok());
  ASSERT_TRUE(comm.AllReduce<T>(absl::MakeSpan(second), ReduceOp::kSum, stream).ok());
  std::vector<T> all(n * static_cast<size_t>(comm.size()));
  ASSERT_TRUE(comm.AllGather<T>(first, absl::MakeSpan(all), stream).ok());
  ASSERT_TRUE(stream.Synchronize().ok());
  EXPECT_EQ(std::memcmp(first.data(), second.data(), n * sizeof(T)), 0) << "second run, n=" << n;
  for (int r = 0; r < comm.size(); ++r) {
    EXPECT_EQ(std::memcmp(all.data() + r * n, first.data(), n * sizeof(T)), 0)
        << "rank " << r << ", n=" << n;
  }
}

TEST_P(CommContractTest, AllReduceGivesTheSameBitsOnEveryRankAndEveryRun) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    for (const size_t n : {3, 1000, 20'011}) {
      ExpectAllReduceSameBits<float>(comm, stream, n);
      ExpectAllReduceSameBits<BFloat16>(comm, stream, n);
    }
  });
}

TEST_P(CommContractTest, BFloat16IsSummedInFloat32AndRoundedOnce) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    // 256 + 1 is not a bf16 (8 significant bits): summed in bf16 the ones would all be lost.
    std::vector<BFloat16> x = {BFloat16(comm.rank() == 0 ? 256.0F : 1.0F)};
    std::vector<BFloat16> send(comm.size(), x[0]);
    std::vector<BFloat16> recv(1);
    ASSERT_TRUE(comm.AllReduce<BFloat16>(absl::MakeSpan(x), ReduceOp::kSum, stream).ok());
    ASSERT_TRUE(
        comm.ReduceScatter<BFloat16>(send, absl::MakeSpan(recv), ReduceOp::kSum, stream).ok());
    ASSERT_TRUE(stream.Synchronize().ok());
    const BFloat16 expected(256.0F + static_cast<float>(comm.size() - 1));
    EXPECT_EQ(static_cast<float>(x[0]), static_cast<float>(expected));
    EXPECT_EQ(static_cast<float>(recv[0]), static_cast<float>(expected));
  });
}

TEST_P(CommContractTest, ReduceScatterSumsTheOwnBlock) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    const int ranks = comm.size();
    for (const size_t n : {size_t{0}, size_t{1}, size_t{11}, size_t{3000}}) {
      // send[b][i] on rank r = 100 r + 10 b + i mod 10
      std::vector<int64_t> send(n * static_cast<size_t>(ranks));
      for (size_t j = 0; j < send.size(); ++j) {
        send[j] =
            100 * comm.rank() + 10 * static_cast<int64_t>(j / n) + static_cast<int64_t>(j % n % 10);
      }
      std::vector<int64_t> recv(n, -1);
      ASSERT_TRUE(
          comm.ReduceScatter<int64_t>(send, absl::MakeSpan(recv), ReduceOp::kSum, stream).ok());
      ASSERT_TRUE(stream.Synchronize().ok());
      for (size_t i = 0; i < n; ++i) {
        const int64_t rest = 10 * comm.rank() + static_cast<int64_t>(i % 10);
        ASSERT_EQ(recv[i], 50 * ranks * (ranks - 1) + rest * ranks);
      }
    }
  });
}

TEST_P(CommContractTest, ReduceScatterAndAllGatherWorkInPlace) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    const size_t n = 1500;
    const auto ranks = static_cast<size_t>(comm.size());
    std::vector<int32_t> x(n * ranks, comm.rank() + 1);
    const absl::Span<int32_t> own = absl::MakeSpan(x).subspan(n * comm.rank(), n);
    ASSERT_TRUE(comm.ReduceScatter<int32_t>(x, own, ReduceOp::kSum, stream).ok());
    ASSERT_TRUE(comm.AllGather<int32_t>(own, absl::MakeSpan(x), stream).ok());
    ASSERT_TRUE(stream.Synchronize().ok());
    EXPECT_THAT(x, Each(comm.size() * (comm.size() + 1) / 2));
  });
}

// ---- one to all, all to all

TEST_P(CommContractTest, AllGatherConcatenatesInRankOrder) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{6}, int64_t{70'001}}) {
      std::vector<int32_t> send, expected;
      for (int64_t i = 0; i < n; ++i) send.push_back(Tagged(comm.rank(), 0, i));
      for (int r = 0; r < comm.size(); ++r) {
        for (int64_t i = 0; i < n; ++i) expected.push_back(Tagged(r, 0, i));
      }
      std::vector<int32_t> recv(expected.size(), -1);
      ASSERT_TRUE(comm.AllGather<int32_t>(send, absl::MakeSpan(recv), stream).ok());
      ASSERT_TRUE(stream.Synchronize().ok());
      EXPECT_EQ(recv, expected) << "n=" << n;
    }
  });
}

TEST_P(CommContractTest, BroadcastReachesAllFromEveryRoot) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    for (int root = 0; root < comm.size(); ++root) {
      for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{1001}, int64_t{300'000}}) {
        std::vector<int32_t> x(n, Tagged(comm.rank(), root, n % 100));
        ASSERT_TRUE(comm.Broadcast<int32_t>(absl::MakeSpan(x), root, stream).ok());
        ASSERT_TRUE(stream.Synchronize().ok());
        EXPECT_EQ(x, std::vector<int32_t>(n, Tagged(root, root, n % 100))) << "root " << root;
      }
    }
  });
}

// ---- point to point

TEST_P(CommContractTest, GroupedSendRecvGoesAroundARing) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    const int ranks = comm.size();
    const int next = (comm.rank() + 1) % ranks;
    const int previous = (comm.rank() + ranks - 1) % ranks;
    for (const int64_t n : {int64_t{1}, int64_t{500}, int64_t{200'000}}) {
      const std::vector<int32_t> send(n, Tagged(comm.rank(), next, 0));
      std::vector<int32_t> recv(n, -1);
      ASSERT_TRUE(comm.SendRecv({{.peer = next, .send = send.data(), .bytes = n * 4},
                                 {.peer = previous, .recv = recv.data(), .bytes = n * 4}},
                                stream)
                      .ok());
      ASSERT_TRUE(stream.Synchronize().ok());
      EXPECT_EQ(recv, std::vector<int32_t>(n, Tagged(previous, comm.rank(), 0)));
    }
  });
}

TEST_P(CommContractTest, SendRecvMatchesInOrderBetweenTwoRanks) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    // Three messages of different sizes to everyone (self included), in one group.
    const int ranks = comm.size();
    constexpr int kMessages = 3;
    std::vector<std::vector<int32_t>> send(ranks * kMessages), recv(ranks * kMessages);
    std::vector<SendRecvOp> ops;
    for (int peer = 0; peer < ranks; ++peer) {
      for (int m = 0; m < kMessages; ++m) {
        auto& out = send[peer * kMessages + m];
        auto& in = recv[peer * kMessages + m];
        out.assign(m + 1, Tagged(comm.rank(), peer, m));
        in.assign(m + 1, -1);
        const int64_t bytes = 4 * (m + 1);
        ops.push_back({.peer = peer, .recv = in.data(), .bytes = bytes});
        ops.push_back({.peer = peer, .send = out.data(), .bytes = bytes});
      }
    }
    ASSERT_TRUE(comm.SendRecv(ops, stream).ok());
    ASSERT_TRUE(stream.Synchronize().ok());
    for (int peer = 0; peer < ranks; ++peer) {
      for (int m = 0; m < kMessages; ++m) {
        EXPECT_THAT(recv[peer * kMessages + m], Each(Tagged(peer, comm.rank(), m)));
      }
    }
  });
}

TEST_P(CommContractTest, SendRecvNeedsOnlyTheRanksThatMove) {
  if (ranks() < 2) GTEST_SKIP() << "needs a pair";
  OnEachRank([](Communicator& comm, Stream& stream) {
    int32_t x = comm.rank() == 0 ? 7 : -1;
    if (comm.rank() == 0) {
      ASSERT_TRUE(comm.SendRecv({{.peer = 1, .send = &x, .bytes = 4}}, stream).ok());
    } else if (comm.rank() == 1) {
      ASSERT_TRUE(comm.SendRecv({{.peer = 0, .recv = &x, .bytes = 4}}, stream).ok());
    }
    ASSERT_TRUE(stream.Synchronize().ok());
    EXPECT_EQ(x, comm.rank() < 2 ? 7 : -1);
    EXPECT_TRUE(comm.Barrier().ok());
  });
}

TEST_P(CommContractTest, SendRecvOfNothingReturns) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    ASSERT_TRUE(comm.SendRecv({}, stream).ok());
    const int next = (comm.rank() + 1) % comm.size();
    // 0 bytes are skipped on both sides: the peer need not answer.
    ASSERT_TRUE(comm.SendRecv({{.peer = next, .bytes = 0}}, stream).ok());
    EXPECT_TRUE(stream.Synchronize().ok());
  });
}

// A group progresses together: rank 1 waits for 2 first, but takes what 0 sends meanwhile, without
// which 0 would not come to the send that 2 needs.
TEST_P(CommContractTest, SendRecvGroupTakesWhateverComesFirst) {
  if (ranks() < 3) GTEST_SKIP() << "needs three ranks";
  OnEachRank([](Communicator& comm, Stream& stream) {
    int32_t a = comm.rank() + 10;
    int32_t b = -1;
    int32_t c = -1;
    const int64_t n = 4;
    switch (comm.rank()) {
      case 0:
        ASSERT_TRUE(comm.SendRecv({{.peer = 1, .send = &a, .bytes = n}}, stream).ok());
        ASSERT_TRUE(comm.SendRecv({{.peer = 2, .send = &a, .bytes = n}}, stream).ok());
        break;
      case 1:
        ASSERT_TRUE(comm.SendRecv({{.peer = 2, .recv = &b, .bytes = n},
                                   {.peer = 0, .recv = &c, .bytes = n}},
                                  stream)
                        .ok());
        break;
      case 2:
        ASSERT_TRUE(comm.SendRecv({{.peer = 0, .recv = &b, .bytes = n}}, stream).ok());
        ASSERT_TRUE(comm.SendRecv({{.peer = 1, .send = &a, .bytes = n}}, stream).ok());
        break;
      default:
        break;
    }
    ASSERT_TRUE(stream.Synchronize().ok());
    if (comm.rank() == 1) {
      EXPECT_EQ(b, 12);
      EXPECT_EQ(c, 10);
    }
    if (comm.rank() == 2) {
      EXPECT_EQ(b, 10);
    }
  });
}

// ---- order

TEST_P(CommContractTest, CollectivesFollowWorkAlreadyInTheStream) {
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

TEST_P(CommContractTest, BarrierWaitsForTheLastRank) {
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

TEST_P(CommContractTest, BarrierMayMeetWhileAStreamStillExchanges) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    std::vector<int32_t> x(1000, 1);
    for (int i = 0; i < 20; ++i) {
      ASSERT_TRUE(comm.AllReduce<int32_t>(absl::MakeSpan(x), ReduceOp::kMax, stream).ok());
      ASSERT_TRUE(comm.Barrier().ok());
    }
    EXPECT_TRUE(stream.Synchronize().ok());
  });
}

TEST_P(CommContractTest, FenceMakesPeerMemoryVisible) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    if (!comm.has_peer_memory()) {
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

TEST_P(CommContractTest, SplitOrdersByKeyThenRank) {
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
    ASSERT_TRUE(group->AllGather<int32_t>({&mine, 1}, absl::MakeSpan(members), stream).ok());
    ASSERT_TRUE(stream.Synchronize().ok());
    EXPECT_EQ(members, expected);

    // Equal keys: by rank. A group can be split again.
    const auto again = group->Split(0, 5).value();
    EXPECT_EQ(again->rank(), group->rank());
  });
}

TEST_P(CommContractTest, TwoGroupsWorkAtTheSameTimeOnTwoStreams) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    const auto other = comm.Split(0, comm.rank()).value();
    const auto second = MakeStream({}).value();
    std::vector<int32_t> a(999, 1), b(999, 1);
    for (int i = 0; i < 20; ++i) {
      ASSERT_TRUE(other->AllReduce<int32_t>(absl::MakeSpan(b), ReduceOp::kMax, *second).ok());
      ASSERT_TRUE(comm.AllReduce<int32_t>(absl::MakeSpan(a), ReduceOp::kMax, stream).ok());
    }
    ASSERT_TRUE(other->AllReduce<int32_t>(absl::MakeSpan(b), ReduceOp::kSum, *second).ok());
    ASSERT_TRUE(comm.AllReduce<int32_t>(absl::MakeSpan(a), ReduceOp::kSum, stream).ok());
    ASSERT_TRUE(stream.Synchronize().ok());
    ASSERT_TRUE(second->Synchronize().ok());
    EXPECT_THAT(a, Each(comm.size()));
    EXPECT_THAT(b, Each(comm.size()));
  });
}

// ---- errors

TEST_P(CommContractTest, BadArgumentsAreRefusedAndTheCommunicatorStaysUsable) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    const int ranks = comm.size();
    std::vector<float> x(4 * ranks), y(4 * ranks);
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
    std::vector<uint8_t> bytes(4);
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

TEST_P(CommContractTest, CountsThatDisagreeAreFoundAndEndTheWorld) {
  if (ranks() < 2) GTEST_SKIP() << "one rank agrees with itself";
  OnEachRank(
      [](Communicator& comm, Stream& stream) {
        // Rank 0 sends 3 elements to rank 1, which expects 2.
        std::vector<int64_t> send_counts(comm.size(), 0), recv_counts(comm.size(), 0);
        if (comm.rank() == 0) send_counts[1] = 3;
        if (comm.rank() == 1) recv_counts[0] = 2;
        std::vector<int32_t> send(comm.rank() == 0 ? 3 : 0), recv(comm.rank() == 1 ? 2 : 0);
        (void)comm.AllToAllV<int32_t>(send, send_counts, absl::MakeSpan(recv), recv_counts, stream);
        const absl::Status status = stream.Synchronize();
        if (comm.rank() != 1) return;  // others learn of it now, later or by their deadline
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
        EXPECT_THAT(std::string(status.message()), HasSubstr("expects 8 bytes from rank 0"));
        EXPECT_EQ(comm.Barrier(), status);
      },
      absl::Seconds(2));
}

TEST_P(CommContractTest, MissingPeerGivesDeadlineExceededThatNamesPhaseAndRanks) {
  if (ranks() < 2) GTEST_SKIP() << "one rank waits for nobody";
  constexpr absl::Duration kTimeout = absl::Milliseconds(200);
  OnEachRank(
      [&](Communicator& comm, Stream& stream) {
        if (comm.rank() == 0) return;  // never comes
        comm.SetPhase({.name = "dispatch", .layer = 3, .step = 120});
        std::vector<float> x(10);
        const absl::Time start = absl::Now();
        const absl::Status first = [&] {
          (void)comm.AllReduce<float>(absl::MakeSpan(x), ReduceOp::kSum, stream);
          comm.SetPhase({.name = "combine"});  // not what the enqueued call reports
          return stream.Synchronize();
        }();
        EXPECT_LT(absl::Now() - start, kTimeout + absl::Seconds(2));
        EXPECT_GE(absl::Now() - start, kTimeout / 2);
        EXPECT_EQ(first.code(), absl::StatusCode::kDeadlineExceeded) << first;
        EXPECT_THAT(std::string(first.message()), HasSubstr("dispatch, layer 3, step 120"));
        EXPECT_THAT(std::string(first.message()), ContainsRegex("for ranks? 0.*, deadline 200ms"));
        EXPECT_EQ(comm.Barrier(), first);  // dead for good
        EXPECT_EQ(comm.Split(0, 0).status(), first);
      },
      kTimeout);
}

template <typename Call>
void ExpectLate(Communicator& comm, Call call) {
  if (comm.rank() == 0) return;  // never comes
  const absl::Status status = call();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  // A rank that is slow to start may be named too.
  EXPECT_THAT(std::string(status.message()), ContainsRegex("for ranks? 0,"));
}

TEST_P(CommContractTest, EveryWaitHasADeadline) {
  if (ranks() < 2) GTEST_SKIP() << "one rank waits for nobody";
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

TEST_P(CommContractTest, AbortEndsOwnCallsAndWakesThePeers) {
  if (ranks() < 2) GTEST_SKIP() << "nobody to wake";
  const bool wakes = testing::Env().wakes_peers();
  const absl::Duration timeout = wakes ? absl::Seconds(60) : absl::Milliseconds(500);
  OnEachRank(
      [&](Communicator& comm, Stream& stream) {
        const auto group = comm.Split(0, comm.rank()).value();
        const absl::Time start = absl::Now();
        if (comm.rank() == 0) {
          Sleep(50);
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

std::string ParamName(const ::testing::TestParamInfo<std::tuple<int, EnvStream>>& p) {
  return absl::StrCat("R", std::get<0>(p.param),
                      std::get<1>(p.param) == EnvStream::kInline ? "Inline" : "Queue");
}

INSTANTIATE_TEST_SUITE_P(Ranks, CommContractTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 5, 8),
                                            ::testing::Values(EnvStream::kInline,
                                                              EnvStream::kQueue)),
                         ParamName);

}  // namespace
}  // namespace moe
