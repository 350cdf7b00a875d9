// The fake NCCL: it moves what NCCL moves, and names the rule that a caller breaks. Both ranks of a
// world belong to one thread here, which non-blocking communicators allow.
#include "tests/cusim/fake_nccl.h"

#include <functional>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/cusim/fake_memory.h"
#include "tests/cusim/fake_streams.h"

namespace {

using ::testing::ElementsAre;

constexpr int kRanks = 2;
constexpr uint32_t kSeeds = 20;

ncclConfig_t NonBlocking() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

class FakeNccl : public ::testing::Test {
 protected:
  struct Rank {
    ncclComm_t comm = nullptr;
    cudaStream_t stream = nullptr, second = nullptr;
    int* send = nullptr;  // [kNumbers], device memory
    int* recv = nullptr;
  };
  static constexpr size_t kNumbers = 4;
  static constexpr size_t kBytes = kNumbers * sizeof(int);

  void SetUp() override {
    ::testing::FLAGS_gtest_death_test_style = "threadsafe";
    ncclUniqueId id;
    ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    for (int r = 0; r < kRanks; ++r) {
      ASSERT_EQ(cudaSetDevice(r), cudaSuccess);
      ncclConfig_t config = NonBlocking();
      ASSERT_EQ(ncclCommInitRankConfig(&ranks_[r].comm, kRanks, id, r, &config), ncclInProgress);
      for (cudaStream_t* stream : {&ranks_[r].stream, &ranks_[r].second}) {
        ASSERT_EQ(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), cudaSuccess);
      }
      ranks_[r].send = static_cast<int*>(cusim::AllocateDevice(r, kBytes));
      ranks_[r].recv = static_cast<int*>(cusim::AllocateDevice(r, kBytes));
      const std::vector<int> values = {10 * r, 10 * r + 1, 10 * r + 2, 10 * r + 3};
      Copy(ranks_[r].send, values.data(), ranks_[r].stream);
    }
    for (const Rank& rank : ranks_) Post(rank);
  }
  void TearDown() override {
    for (const Rank& rank : ranks_) (void)ncclCommAbort(rank.comm);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  static void Copy(void* to, const void* from, cudaStream_t stream) {
    ASSERT_EQ(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDefault, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  }
  static std::vector<int> Read(const int* data, cudaStream_t stream) {
    std::vector<int> values(kNumbers);
    Copy(values.data(), data, stream);
    return values;
  }
  // Polls until the last call is in the stream.
  static void Post(const Rank& rank) {
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress)
      ASSERT_EQ(ncclCommGetAsyncError(rank.comm, &state), ncclSuccess);
    ASSERT_EQ(state, ncclSuccess);
  }
  static ncclResult_t AllReduce(const Rank& rank, size_t count = kNumbers) {
    return ncclAllReduce(rank.send, rank.recv, count, ncclInt32, ncclSum, rank.comm, rank.stream);
  }
  static void Clear(int* data, cudaStream_t stream) {
    ASSERT_EQ(cudaMemsetAsync(data, 0, kBytes, stream), cudaSuccess);
  }
  static void Split(const Rank& rank) {
    ncclConfig_t config = NonBlocking();
    ncclComm_t made = nullptr;
    (void)ncclCommSplit(rank.comm, 0, 0, &made, &config);
  }
  // Expects that its rule is reported under at least one of the seeds.
  static void OnSeeds(const std::function<void()>& body) {
    for (uint32_t seed = 1; seed <= kSeeds; ++seed) {
      cusim::SeedStreams(seed);
      body();
    }
  }

  Rank ranks_[kRanks];
};

TEST_F(FakeNccl, MovesWhatIsSentOnceAllHaveCome) {
  for (const Rank& rank : ranks_) {
    (void)AllReduce(rank);
    Post(rank);
  }
  for (const Rank& rank : ranks_) {
    EXPECT_THAT(Read(rank.recv, rank.stream), ElementsAre(10, 12, 14, 16));
    ASSERT_EQ(ncclGroupStart(), ncclSuccess);
    const int peer = rank.comm == ranks_[0].comm ? 1 : 0;
    EXPECT_EQ(ncclSend(rank.send, kNumbers, ncclInt32, peer, rank.comm, rank.stream), ncclSuccess);
    EXPECT_EQ(ncclRecv(rank.recv, kNumbers, ncclInt32, peer, rank.comm, rank.stream), ncclSuccess);
    (void)ncclGroupEnd();
    Post(rank);
  }
  EXPECT_THAT(Read(ranks_[0].recv, ranks_[0].stream), ElementsAre(10, 11, 12, 13));
  EXPECT_THAT(Read(ranks_[1].recv, ranks_[1].stream), ElementsAre(0, 1, 2, 3));
}

TEST_F(FakeNccl, SplitsByColorInTheOrderOfKeys) {
  ncclComm_t made[kRanks] = {};
  ncclConfig_t config = NonBlocking();
  for (int r = 0; r < kRanks; ++r) {
    ASSERT_EQ(ncclCommSplit(ranks_[r].comm, 0, -r, &made[r], &config), ncclInProgress);
    EXPECT_EQ(made[r], nullptr);
  }
  for (const Rank& rank : ranks_) Post(rank);
  for (int r = 0; r < kRanks; ++r) {
    Post({.comm = made[r]});
    (void)ncclAllGather(ranks_[r].send, ranks_[r].recv, 1, ncclInt32, made[r], ranks_[r].stream);
    Post({.comm = made[r]});
  }
  const std::vector<int> all = Read(ranks_[0].recv, ranks_[0].stream);
  EXPECT_EQ(all[0], 10);  // rank 1 has the smaller key
  EXPECT_EQ(all[1], 0);
  for (ncclComm_t comm : made) (void)ncclCommAbort(comm);
}

using FakeNcclDeathTest = FakeNccl;

TEST_F(FakeNcclDeathTest, OrderAndCountsOfCollectives) {
  EXPECT_DEATH(
      {
        (void)AllReduce(ranks_[0]);
        (void)ncclBroadcast(ranks_[1].send, ranks_[1].recv, kNumbers, ncclInt32, 0, ranks_[1].comm,
                            ranks_[1].stream);
      },
      "the same collectives in the same order: call 0 is ncclBroadcast.* and ncclAllReduce");
  EXPECT_DEATH(
      {
        (void)AllReduce(ranks_[0]);
        (void)AllReduce(ranks_[1], kNumbers - 1);
      },
      "ncclAllReduce of 3 elements.*ncclAllReduce of 4 elements");
  EXPECT_DEATH(
      {
        Split(ranks_[0]);
        (void)AllReduce(ranks_[1]);
      },
      "call 0 is ncclAllReduce.* and ncclCommSplit");
}

TEST_F(FakeNcclDeathTest, CountsOfTransfers) {
  EXPECT_DEATH(
      {
        (void)ncclSend(ranks_[0].send, 3, ncclInt32, 1, ranks_[0].comm, ranks_[0].stream);
        Post(ranks_[0]);
        (void)ncclRecv(ranks_[1].recv, 2, ncclInt32, 0, ranks_[1].comm, ranks_[1].stream);
        Post(ranks_[1]);
        (void)cudaStreamSynchronize(ranks_[1].stream);
      },
      "the same count: rank 0 sends 12 bytes, rank 1 expects 8");
}

TEST_F(FakeNcclDeathTest, LifeOfACommunicator) {
  EXPECT_DEATH(
      {
        (void)ncclCommAbort(ranks_[0].comm);
        (void)AllReduce(ranks_[0]);
      },
      "ncclAllReduce: the communicator was aborted or destroyed");
  EXPECT_DEATH((void)ncclCommDestroy(ranks_[0].comm), "ncclCommDestroy: finalize first");
  EXPECT_DEATH(
      {
        (void)ncclCommFinalize(ranks_[0].comm);
        (void)AllReduce(ranks_[0]);
      },
      "ncclAllReduce: the communicator's last call is in progress");
  EXPECT_DEATH(
      {
        (void)AllReduce(ranks_[0]);
        Post(ranks_[0]);
        Split(ranks_[0]);
      },
      "ncclCommSplit: operations of the communicator are under way");
}

TEST_F(FakeNcclDeathTest, CallsInProgress) {
  EXPECT_DEATH(
      {
        for (int i = 0; i < 100; ++i) (void)AllReduce(ranks_[0]);
      },
      "last call is in progress: poll ncclCommGetAsyncError");
  EXPECT_DEATH(OnSeeds([&] {
                 (void)AllReduce(ranks_[0]);
                 Clear(ranks_[0].send, ranks_[0].stream);
                 Post(ranks_[0]);
               }),
               "work was put into the stream while the call was in progress");
}

TEST_F(FakeNcclDeathTest, Buffers) {
  EXPECT_DEATH(
      {
        int host = 0;
        (void)ncclAllReduce(&host, &host, 1, ncclInt32, ncclSum, ranks_[0].comm, ranks_[0].stream);
        Post(ranks_[0]);
        (void)cudaStreamSynchronize(ranks_[0].stream);
      },
      "buffers must be memory of the communicator's device");
  // A second stream changes the buffers without an event edge.
  const auto meddle = [&](int* data) {
    for (const Rank& rank : ranks_) {
      (void)AllReduce(rank);
      Post(rank);
    }
    Clear(data, ranks_[0].second);
    Copy(ranks_[0].send, std::vector<int>{0, 1, 2, 3}.data(), ranks_[0].second);
    for (const Rank& rank : ranks_) ASSERT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
  };
  EXPECT_DEATH(OnSeeds([&] { meddle(ranks_[0].send); }), "the send buffer was changed");
  EXPECT_DEATH(OnSeeds([&] { meddle(ranks_[0].recv); }), "the receive buffer was written");
}

// TearDown aborts it.
TEST_F(FakeNccl, AnAbortDoesNotWaitForACallThatIsNotInItsStreamYet) {
  const Rank& rank = ranks_[0];
  ncclResult_t result = ncclSuccess;
  while (result == ncclSuccess) {
    result =
        ncclAllReduce(rank.send, rank.recv, kNumbers, ncclInt32, ncclSum, rank.comm, rank.stream);
  }
  EXPECT_EQ(result, ncclInProgress);
}

TEST_F(FakeNcclDeathTest, ThreadsAndGroups) {
  EXPECT_DEATH(
      {
        const auto poll = [&] {
          ncclResult_t state = ncclSuccess;
          while (true) (void)ncclCommGetAsyncError(ranks_[0].comm, &state);
        };
        std::thread other(poll);
        poll();
      },
      "two threads are inside one communicator");
  EXPECT_DEATH((void)ncclGroupEnd(), "there is no group to end");
}

}  // namespace
