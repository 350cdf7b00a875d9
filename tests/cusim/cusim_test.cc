// The simulator on correct kernels: every result holds for every schedule.
#include "tests/cusim/cusim.h"

#include <cstdint>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include <cuda/atomic>

#include "kernels/base/cuda_kernel.h"

namespace cusim {
namespace {

using DeviceFlag = cuda::atomic_ref<uint32_t, cuda::thread_scope_device>;

// Runs `check(options)` under several seeds, with one, two and all blocks at a time.
template <typename Check>
void ForSchedules(Check check) {
  for (const int resident : {1, 2, 1000}) {
    for (uint32_t seed = 1; seed <= 4; ++seed) {
      SCOPED_TRACE(::testing::Message() << "seed " << seed << " resident " << resident);
      check(Options{.seed = seed, .resident_blocks = resident});
    }
  }
}

TEST(CusimTest, EveryThreadOfEveryBlockRunsOnce) {
  const dim3 grid(3, 2, 2), block(5, 3, 3);  // 45 threads: a full warp and a part of one
  ForSchedules([&](const Options& options) {
    std::vector<int> runs(size_t{12} * 45);
    const auto kernel = [&] {
      const unsigned in_grid = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
      const unsigned in_block = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
      ++runs[in_grid * 45 + in_block];
    };
    RunGrid({grid, block, 0, kernel}, options);
    EXPECT_EQ(runs, std::vector<int>(runs.size(), 1));
  });
}

// out[block, t] = in[block, n - 1 - t], by way of shared memory, `rounds` times over.
void ReverseKernel(const int* in, int* out, int rounds) {
  MOE_SHARED_ARRAY(int, tile, 48);
  int* const again = static_cast<int*>(DynamicShared());
  const unsigned t = threadIdx.x, n = blockDim.x;
  int value = in[blockIdx.x * n + t];
  for (int r = 0; r < rounds; ++r) {
    tile[t] = value;
    __syncthreads();
    again[t] = tile[n - 1 - t];
    __syncthreads();
    value = again[t];
  }
  out[blockIdx.x * n + t] = value;
}

TEST(CusimTest, BarriersOrderSharedMemoryAndBlocksHaveTheirOwn) {
  const unsigned blocks = 5, threads = 48;
  std::vector<int> in(size_t{blocks} * threads), reversed(in.size());
  for (unsigned i = 0; i < in.size(); ++i) {
    in[i] = static_cast<int>(1000 + i);
    reversed[i / threads * threads + threads - 1 - i % threads] = in[i];
  }
  ForSchedules([&](const Options& options) {
    std::vector<int> out(in.size(), -1);
    const auto kernel = [&] {
      ReverseKernel(in.data(), out.data(), 3);
    };
    RunGrid({blocks, threads, threads * sizeof(int), kernel}, options);
    EXPECT_EQ(out, reversed);
  });
}

TEST(CusimTest, ABarrierWaitsForThreadsThatHaveNotEnded) {
  ForSchedules([&](const Options& options) {
    std::vector<int> out(64);
    const auto kernel = [&] {
      if (threadIdx.x >= 40) return;
      MOE_SHARED_ARRAY(int, tile, 40);
      tile[threadIdx.x] = static_cast<int>(threadIdx.x);
      __syncthreads();
      out[threadIdx.x] = tile[39 - threadIdx.x];
    };
    RunGrid({1, 64, 0, kernel}, options);
    for (int t = 0; t < 64; ++t) EXPECT_EQ(out[t], t < 40 ? 39 - t : 0);
  });
}

TEST(CusimTest, ShufflesAndVotesMoveTheValuesThatCudaSays) {
  ForSchedules([&](const Options& options) {
    struct Lane {
      int at, at8, exclusive_or, up, up8, down, down8;
      uint32_t ballot, match, largest, smallest;
    };
    std::vector<Lane> lanes(32);
    const auto kernel = [&] {
      const int lane = static_cast<int>(threadIdx.x), value = 100 + lane;
      Lane& mine = lanes[lane];
      mine.at = __shfl_sync(~0u, value, 3);
      mine.at8 = __shfl_sync(~0u, value, 3, 8);
      mine.exclusive_or = __shfl_xor_sync(~0u, value, 16);
      mine.up = __shfl_up_sync(~0u, value, 2);
      mine.up8 = __shfl_up_sync(~0u, value, 2, 8);
      mine.down = __shfl_down_sync(~0u, value, 5);
      mine.down8 = __shfl_down_sync(~0u, value, 5, 8);
      mine.ballot = __ballot_sync(~0u, lane % 3 == 0);
      mine.match = __match_any_sync(~0u, lane / 8);
      // Unsigned: bit 31 is of odd lanes.
      const uint32_t number = static_cast<uint32_t>(lane) << 31 | static_cast<uint32_t>(lane + 1);
      mine.largest = __reduce_max_sync(~0u, number);
      mine.smallest = __reduce_min_sync(~0u, number);
    };
    RunGrid({1, 32, 0, kernel}, options);
    for (int lane = 0; lane < 32; ++lane) {
      const Lane& mine = lanes[lane];
      EXPECT_EQ(mine.at, 103);
      EXPECT_EQ(mine.at8, 100 + lane / 8 * 8 + 3);
      EXPECT_EQ(mine.exclusive_or, 100 + (lane ^ 16));
      EXPECT_EQ(mine.up, 100 + (lane < 2 ? lane : lane - 2));
      EXPECT_EQ(mine.up8, 100 + (lane % 8 < 2 ? lane : lane - 2));
      EXPECT_EQ(mine.down, 100 + (lane > 26 ? lane : lane + 5));
      EXPECT_EQ(mine.down8, 100 + (lane % 8 > 2 ? lane : lane + 5));
      EXPECT_EQ(mine.ballot, 0x49249249u);
      EXPECT_EQ(mine.match, 0xffu << (lane / 8 * 8));
      EXPECT_EQ(mine.largest, 0x80000020u);
      EXPECT_EQ(mine.smallest, 1u);
    }
  });
}

// Halves of a warp meet separately, a different number of times.
TEST(CusimTest, GroupsOfOneWarpMeetOnTheirOwn) {
  ForSchedules([&](const Options& options) {
    std::vector<int> sum(32);
    const auto kernel = [&] {
      const int lane = static_cast<int>(threadIdx.x);
      const uint32_t mask = lane < 16 ? 0x0000ffffu : 0xffff0000u;
      int value = lane;
      for (int round = 0; round < (lane < 16 ? 1 : 3); ++round) {
        for (int width = 8; width >= 1; width /= 2) value += __shfl_xor_sync(mask, value, width);
      }
      __syncwarp();
      sum[lane] = value;
    };
    RunGrid({1, 32, 0, kernel}, options);
    for (int lane = 0; lane < 32; ++lane) EXPECT_EQ(sum[lane], lane < 16 ? 120 : 376 * 16 * 16);
  });
}

TEST(CusimTest, SyncwarpOrdersMemoryOfItsLanes) {
  ForSchedules([&](const Options& options) {
    std::vector<int> values(32), out(32);
    const auto kernel = [&] {
      values[threadIdx.x] = static_cast<int>(threadIdx.x);
      __syncwarp();
      out[threadIdx.x] = values[31 - threadIdx.x];
    };
    RunGrid({1, 32, 0, kernel}, options);
    for (int t = 0; t < 32; ++t) EXPECT_EQ(out[t], 31 - t);
  });
}

TEST(CusimTest, AtomicsLoseNoUpdate) {
  ForSchedules([&](const Options& options) {
    int count = 0, locked = 0;
    uint32_t lock = 0;
    const auto kernel = [&] {
      atomicAdd(&count, 1);
      DeviceFlag flag(lock);
      while (flag.exchange(1, cuda::memory_order_acquire) != 0) __nanosleep(20);
      ++locked;
      flag.store(0, cuda::memory_order_release);
    };
    RunGrid({3, 50, 0, kernel}, options);
    EXPECT_EQ(count, 150);
    EXPECT_EQ(locked, 150);
  });
}

// Block b waits for block b - 1: all of them must be resident.
TEST(CusimTest, BlocksWaitForEachOtherByFlags) {
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    uint32_t turn = 0;
    std::vector<int> order;
    const auto kernel = [&] {
      if (threadIdx.x != 0) return;
      DeviceFlag flag(turn);
      while (flag.load(cuda::memory_order_acquire) != blockIdx.x) __nanosleep(20);
      order.push_back(static_cast<int>(blockIdx.x));
      flag.store(blockIdx.x + 1, cuda::memory_order_release);
    };
    RunGrid({6, 32, 0, kernel}, {.seed = seed, .resident_blocks = 6});
    EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4, 5}));
  }
}

// Virtual ranks: each has a grid that sends to all and a grid that waits for all.
TEST(CusimTest, GridsRunGridsAndExchangeThroughPeerMemory) {
  constexpr unsigned kRanks = 3, kCount = 40;
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    std::vector<std::vector<int>> received(kRanks, std::vector<int>(size_t{kRanks} * kCount));
    std::vector<std::vector<uint32_t>> arrived(kRanks, std::vector<uint32_t>(kRanks));
    std::vector<std::vector<int>> sums(kRanks, std::vector<int>(kRanks));
    std::vector<Grid> grids;
    for (unsigned rank = 0; rank < kRanks; ++rank) {
      const auto send = [&, rank] {
        const unsigned peer = blockIdx.x;
        for (unsigned i = threadIdx.x; i < kCount; i += blockDim.x) {
          received[peer][rank * kCount + i] = static_cast<int>(1000 * rank + 100 * peer + i);
        }
        __syncthreads();
        if (threadIdx.x != 0) return;
        DeviceFlag(arrived[peer][rank]).store(1, cuda::memory_order_release);
      };
      const auto receive = [&, rank] {
        const unsigned peer = blockIdx.x;
        DeviceFlag flag(arrived[rank][peer]);
        while (flag.load(cuda::memory_order_acquire) == 0) __nanosleep(20);
        for (unsigned i = 0; i < kCount; ++i) sums[rank][peer] += received[rank][peer * kCount + i];
      };
      grids.push_back({kRanks, 32, 0, send});
      grids.push_back({kRanks, 1, 0, receive});
    }
    RunGrids(grids, {.seed = seed});
    for (unsigned rank = 0; rank < kRanks; ++rank) {
      for (unsigned peer = 0; peer < kRanks; ++peer) {
        EXPECT_EQ(sums[rank][peer], kCount * (1000 * peer + 100 * rank) + 780);
      }
    }
  }
}

TEST(CusimTest, OneSeedIsOneScheduleAndSeedsDiffer) {
  std::vector<int> in(size_t{5} * 48), out(in.size());
  const auto kernel = [&] {
    ReverseKernel(in.data(), out.data(), 2);
  };
  const Grid grid = {5, 48, 48 * sizeof(int), kernel};
  std::set<uint64_t> schedules;
  for (uint32_t seed = 1; seed <= 10; ++seed) {
    RunGrid(grid, {.seed = seed});
    const Stats first = LastRun();
    RunGrid(grid, {.seed = seed});
    EXPECT_EQ(LastRun().schedule_hash, first.schedule_hash);
    EXPECT_EQ(LastRun().switches, first.switches);
    schedules.insert(first.schedule_hash);
  }
  EXPECT_EQ(schedules.size(), 10u);
}

// The order in which threads end differs too, not only a number that is called a hash.
TEST(CusimTest, SeedsChangeTheOrderOfThreads) {
  std::set<std::vector<unsigned>> orders;
  for (uint32_t seed = 1; seed <= 10; ++seed) {
    std::vector<unsigned> order(8);
    unsigned ended = 0;
    const auto kernel = [&] {
      order[atomicAdd(&ended, 1u)] = threadIdx.x;
    };
    RunGrid({1, 8, 0, kernel}, {.seed = seed});
    orders.insert(order);
  }
  EXPECT_GE(orders.size(), 8u);
}

}  // namespace
}  // namespace cusim
