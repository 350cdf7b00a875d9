// The simulator on correct kernels: every result holds for every schedule. Matrix fragments and
// asynchronous copies.
#include "tests/cusim/cusim.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include <cuda/atomic>

#include "kernels/base/cuda_kernel.h"
#include "kernels/base/dtype.h"
#include "tests/cusim/tensor.h"

namespace cusim {
namespace {

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

// out[block, t] = in[block, n - 1 - t], through shared memory, `rounds` times.
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
      // Unsigned: bit 31 belongs to odd lanes.
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

// Halves of a warp synchronise separately, a different number of times.
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
    int count = 0;
    uint32_t more = 0;
    const auto kernel = [&] {
      atomicAdd(&count, 1);
      cuda::atomic_ref<uint32_t, cuda::thread_scope_device>(more).fetch_add(
          1, cuda::memory_order_relaxed);
    };
    RunGrid({3, 50, 0, kernel}, options);
    EXPECT_EQ(count, 150);
    EXPECT_EQ(more, 150u);
  });
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
    const uint64_t first = LastScheduleHash();
    RunGrid(grid, {.seed = seed});
    EXPECT_EQ(LastScheduleHash(), first);
    schedules.insert(first);
  }
  EXPECT_EQ(schedules.size(), 10u);
}

// The order in which threads end must differ, not only the hash.
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

template <typename T>
class CusimMmaTest : public ::testing::Test {};
using Types = ::testing::Types<moe::BFloat16, moe::Float16>;
TYPED_TEST_SUITE(CusimMmaTest, Types);

// Small integers: every product and sum is exact, so that the order of terms does not matter.
TYPED_TEST(CusimMmaTest, MatrixFragmentsLieWherePtxSays) {
  using T = TypeParam;
  const auto a = [](int row, int k) {
    return static_cast<float>((row * 5 + k * 3) % 17 - 8);
  };
  const auto b = [](int k, int column) {
    return static_cast<float>((k * 7 + column * 2) % 13 - 6);
  };
  const auto pair = [](float low, float high) {
    return static_cast<uint32_t>(T(low).bits) | static_cast<uint32_t>(T(high).bits) << 16;
  };
  std::vector<float> d(16 * 8);
  const auto kernel = [&] {
    const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
    const auto a_pair = [&](int row, int k) {
      return pair(a(row, k), a(row, k + 1));
    };
    const uint32_t fa[4] = {a_pair(g, 2 * t), a_pair(g + 8, 2 * t), a_pair(g, 2 * t + 8),
                            a_pair(g + 8, 2 * t + 8)};
    const uint32_t fb[2] = {pair(b(2 * t, g), b(2 * t + 1, g)),
                            pair(b(2 * t + 8, g), b(2 * t + 9, g))};
    float sum[4] = {1, 1, 1, 1};
    MmaM16N8K16<T>(sum, fa, fb);
    for (int i = 0; i < 4; ++i) d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = sum[i];
  };
  RunGrid({1, 32, 0, kernel}, {});
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      float sum = 1;
      for (int k = 0; k < 16; ++k) sum += a(row, k) * b(k, column);
      EXPECT_EQ(d[row * 8 + column], sum) << row << " " << column;
    }
  }
}

// Element (row, column) of matrix j is j * 100 + row * 10 + column.
TEST(CusimTensorTest, LoadedMatricesLieWherePtxSays) {
  std::vector<uint32_t> plain(32 * 4), transposed(32 * 4);
  const auto kernel = [&] {
    MOE_SHARED_ARRAY(MatrixRow, rows, 32);
    const unsigned lane = threadIdx.x;
    for (unsigned c = 0; c < 8; ++c) {
      rows[lane][c] = static_cast<uint16_t>(lane / 8 * 100 + lane % 8 * 10 + c);
    }
    __syncthreads();
    uint32_t out[4];
    LoadMatrices(&rows[lane], out);
    std::copy(out, out + 4, &plain[lane * 4]);
    LoadMatricesTransposed(&rows[lane], out);
    std::copy(out, out + 4, &transposed[lane * 4]);
  };
  RunGrid({1, 32, 0, kernel}, {});
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const uint32_t g = lane / 4, t = lane % 4;
    for (uint32_t j = 0; j < 4; ++j) {
      const uint32_t row = j * 100 + g * 10 + 2 * t, column = j * 100 + 2 * t * 10 + g;
      EXPECT_EQ(plain[lane * 4 + j], row | (row + 1) << 16) << lane << " " << j;
      EXPECT_EQ(transposed[lane * 4 + j], column | (column + 10) << 16) << lane << " " << j;
    }
  }
}

// The source has six bytes; AddressSanitizer would report a read of a seventh.
TEST(CusimTensorTest, AsynchronousCopiesFillUpWithZeros) {
  alignas(16) const uint16_t source[3] = {1, 2, 3};
  std::vector<uint16_t> out(8);
  const auto kernel = [&] {
    MOE_SHARED_ARRAY(MatrixRow, row, 1);
    AsyncCopies copies;
    copies.Copy16(row, source, sizeof(source));
    copies.Commit();
    copies.Wait(0);
    std::copy(row[0].begin(), row[0].end(), out.begin());
  };
  RunGrid({1, 1, 0, kernel}, {});
  EXPECT_EQ(out, (std::vector<uint16_t>{1, 2, 3, 0, 0, 0, 0, 0}));
}

// Two tiles in flight; `pending` = 1 is right, 2 waits for one group too few.
std::vector<float> SumTiles(const std::vector<float>& in, size_t pending, uint32_t seed) {
  std::vector<float> out(32);
  const auto kernel = [&] {
    MOE_SHARED_ARRAY(float, tiles, 2 * 128);
    const unsigned lane = threadIdx.x, tiles_in = static_cast<unsigned>(in.size() / 128);
    AsyncCopies copies;
    const auto fetch = [&](unsigned tile) {
      if (tile < tiles_in) {
        copies.Copy16(tiles + tile % 2 * 128 + lane * 4, &in[tile * 128 + lane * 4]);
      }
      copies.Commit();
    };
    fetch(0);
    fetch(1);
    float sum = 0;
    for (unsigned tile = 0; tile < tiles_in; ++tile) {
      copies.Wait(pending);
      __syncthreads();
      for (unsigned i = 0; i < 4; ++i) sum += tiles[tile % 2 * 128 + (127 - lane * 4 - i)];
      __syncthreads();
      fetch(tile + 2);
    }
    out[lane] = sum;
  };
  RunGrid({1, 32, 0, kernel}, {.seed = seed});
  return out;
}

TEST(CusimTensorTest, AsynchronousCopiesArriveWhenTheyAreWaitedForAndNotBefore) {
  alignas(16) float values[5 * 128];
  for (int i = 0; i < 5 * 128; ++i) values[i] = static_cast<float>(i);
  const std::vector<float> in(values, values + 5 * 128);
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    const auto sums = SumTiles(in, 1, seed);
    for (int lane = 0; lane < 32; ++lane) {
      float want = 0;
      for (int tile = 0; tile < 5; ++tile) {
        for (int i = 0; i < 4; ++i) want += static_cast<float>(tile * 128 + 127 - lane * 4 - i);
      }
      EXPECT_EQ(sums[lane], want);
    }
    EXPECT_NE(SumTiles(in, 2, seed), sums);
  }
}

}  // namespace
}  // namespace cusim
