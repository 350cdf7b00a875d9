// The contract of Communicator (comm/communicator.h): what arrives where. Linked once per backend:
// comm_contract_local_test, comm_contract_mpi_test. Failures: comm_contract_failure_test.cc.
#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/comm/comm_env.h"

namespace moe {
namespace {

using ::testing::ElementsAreArray;

using testing::ExpectDone;
using testing::Tagged;

class CommContractTest : public testing::CommTest {};

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
    ExpectDone(comm.AllToAll<int32_t>(send, absl::MakeSpan(recv), stream), stream);
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
  ExpectDone(comm.AllToAllV<int32_t>(send, send_counts, absl::MakeSpan(recv), recv_counts, stream),
             stream);
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
    // Every rank receives 3 x 2 MB, all together more than the caches are trusted with: streamed
    // copies, with odd heads and tails.
    ExchangeRagged(comm, stream, 500'003);
  });
}

TEST_P(CommContractTest, TellsHowLongARankStaysForItsPeers) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    const int64_t before = comm.lingered_ns();
    ExchangeRagged(comm, stream, 37);
    EXPECT_EQ(comm.lingered_ns() > before, comm.backend() != "nccl");
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
  // x[r][i] = 2 r + i mod 7: sums are small integers, exact in every type, 16-bit ones included.
  std::vector<T> x(n);
  const int ranks = comm.size();
  for (size_t i = 0; i < n; ++i) {
    x[i] = static_cast<T>(static_cast<float>(2 * comm.rank() + static_cast<int>(i % 7)));
  }
  ExpectDone(comm.AllReduce<T>(absl::MakeSpan(x), ReduceOp::kSum, stream), stream);
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
      ExpectAllReduceSum<Float16>(comm, stream, n);
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
    ExpectDone(comm.AllReduce<float>(absl::MakeSpan(x), ReduceOp::kMax, stream), stream);
    for (int i = 0; i < 33; ++i) EXPECT_EQ(x[i], static_cast<float>(i) - 40.0F);
  });
}

TEST_P(CommContractTest, AllReduceOfInt64WrapsNowhereBelowItsRange) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    const int64_t part = std::numeric_limits<int64_t>::max() / comm.size();
    std::vector<int64_t> x = {part, -part, comm.rank()};
    ExpectDone(comm.AllReduce<int64_t>(absl::MakeSpan(x), ReduceOp::kSum, stream), stream);
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
  ExpectDone(comm.AllGather<T>(first, absl::MakeSpan(all), stream), stream);
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
      ExpectAllReduceSameBits<Float16>(comm, stream, n);
    }
  });
}

// large + 1 is not a T: summed in T the ones would all be lost.
template <typename T>
void ExpectSummedInFloat32(Communicator& comm, Stream& stream, float large) {
  std::vector<T> x = {T(comm.rank() == 0 ? large : 1.0F)};
  std::vector<T> send(comm.size(), x[0]);
  std::vector<T> recv(1);
  ASSERT_TRUE(comm.AllReduce<T>(absl::MakeSpan(x), ReduceOp::kSum, stream).ok());
  ExpectDone(comm.ReduceScatter<T>(send, absl::MakeSpan(recv), ReduceOp::kSum, stream), stream);
  const T expected(large + static_cast<float>(comm.size() - 1));
  EXPECT_EQ(static_cast<float>(x[0]), static_cast<float>(expected));
  EXPECT_EQ(static_cast<float>(recv[0]), static_cast<float>(expected));
}

TEST_P(CommContractTest, NarrowTypesAreSummedInFloat32AndRoundedOnce) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    ExpectSummedInFloat32<BFloat16>(comm, stream, 256);  // 8 significant bits
    ExpectSummedInFloat32<Float16>(comm, stream, 2048);  // 11
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
      ExpectDone(comm.ReduceScatter<int64_t>(send, absl::MakeSpan(recv), ReduceOp::kSum, stream),
                 stream);
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
    ExpectDone(comm.AllGather<int32_t>(own, absl::MakeSpan(x), stream), stream);
    EXPECT_THAT(x, ::testing::Each(comm.size() * (comm.size() + 1) / 2));
  });
}

// Parts of (r + shift) mod 3 units, some of them empty.
std::vector<int64_t> RaggedCounts(int ranks, int shift, int64_t unit) {
  std::vector<int64_t> counts;
  for (int r = 0; r < ranks; ++r) counts.push_back((r + shift) % 3 * unit);
  return counts;
}

// send[i] on rank r = r + i mod 7, summed over ranks.
template <typename T>
void ExpectOwnPartSummed(Communicator& comm, Stream& stream, const std::vector<int64_t>& counts) {
  const int ranks = comm.size();
  const auto total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  const auto first = std::accumulate(counts.begin(), counts.begin() + comm.rank(), int64_t{0});
  std::vector<T> x;
  for (int64_t i = 0; i < total; ++i)
    x.push_back(static_cast<T>(static_cast<float>(comm.rank() + i % 7)));
  std::vector<T> recv(static_cast<size_t>(counts[comm.rank()]), static_cast<T>(-1.0F));
  const auto own = absl::MakeSpan(x).subspan(static_cast<size_t>(first), recv.size());
  ExpectDone(comm.ReduceScatterV<T>(x, counts, absl::MakeSpan(recv), ReduceOp::kSum, stream),
             stream);
  ExpectDone(comm.ReduceScatterV<T>(x, counts, own, ReduceOp::kSum, stream), stream);
  for (size_t i = 0; i < recv.size(); ++i) {
    const int64_t value = (first + static_cast<int64_t>(i)) % 7;
    const auto expected =
        static_cast<T>(static_cast<float>(ranks * (ranks - 1) / 2 + ranks * value));
    ASSERT_EQ(recv[i], expected) << "i=" << i;
    ASSERT_EQ(own[i], expected) << "in place, i=" << i;
  }
}

TEST_P(CommContractTest, ReduceScatterVSumsTheOwnPartAndInPlace) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    for (int shift = 0; shift < 3; ++shift) {
      for (const int64_t unit : {0, 1, 700}) {
        const std::vector<int64_t> counts = RaggedCounts(comm.size(), shift, unit);
        ExpectOwnPartSummed<float>(comm, stream, counts);
        ExpectOwnPartSummed<BFloat16>(comm, stream, counts);
      }
    }
    // A part that MPI sums in two segments.
    ExpectOwnPartSummed<int64_t>(comm, stream, RaggedCounts(comm.size(), 2, 33'001));
  });
}

TEST_P(CommContractTest, AllGatherVConcatenatesInRankOrderAndInPlace) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    const auto rank = static_cast<size_t>(comm.rank());
    for (int shift = 0; shift < 3; ++shift) {
      for (const int64_t unit : {0, 1, 1000}) {
        const std::vector<int64_t> counts = RaggedCounts(comm.size(), shift, unit);
        std::vector<int32_t> expected;
        size_t first = 0;
        for (int r = 0; r < comm.size(); ++r) {
          if (r == comm.rank()) first = expected.size();
          for (int64_t i = 0; i < counts[r]; ++i) expected.push_back(Tagged(r, shift, i));
        }
        const auto n = static_cast<size_t>(counts[rank]);
        const std::vector<int32_t> send(expected.begin() + first, expected.begin() + first + n);
        std::vector<int32_t> recv(expected.size(), -1), x(expected.size(), -1);
        std::copy(send.begin(), send.end(), x.begin() + first);
        ASSERT_TRUE(comm.AllGatherV<int32_t>(send, absl::MakeSpan(recv), counts, stream).ok());
        ExpectDone(comm.AllGatherV<int32_t>(absl::MakeConstSpan(x).subspan(first, n),
                                            absl::MakeSpan(x), counts, stream),
                   stream);
        EXPECT_EQ(recv, expected);
        EXPECT_EQ(x, expected);
      }
    }
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
      ExpectDone(comm.AllGather<int32_t>(send, absl::MakeSpan(recv), stream), stream);
      EXPECT_EQ(recv, expected) << "n=" << n;
    }
  });
}

TEST_P(CommContractTest, BroadcastReachesAllFromEveryRoot) {
  OnEachRank([](Communicator& comm, Stream& stream) {
    for (int root = 0; root < comm.size(); ++root) {
      for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{1001}, int64_t{300'000}}) {
        std::vector<int32_t> x(n, Tagged(comm.rank(), root, n % 100));
        ExpectDone(comm.Broadcast<int32_t>(absl::MakeSpan(x), root, stream), stream);
        EXPECT_EQ(x, std::vector<int32_t>(n, Tagged(root, root, n % 100))) << "root " << root;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CommContractTest, testing::EveryCommTestParam(),
                         testing::CommTestName);

}  // namespace
}  // namespace moe
