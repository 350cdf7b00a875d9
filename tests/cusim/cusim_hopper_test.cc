// Barriers that count bytes, bulk tensor copies and products of a warpgroup: a pipeline of them,
// and the same with one planted fault each.
#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/cuda_hopper.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_tensor_map.h"
#include "kernels/base/dtype.h"
#include "tests/cusim/cusim.h"
#include "tests/cusim/faults.h"

namespace moe::cuda {
namespace {

using cusim::CusimFaultDeathTest;
using cusim::RunGrid;

enum class Plant : uint8_t {
  kNone,
  kWrongParity,
  kTooFewBytes,
  kTooManyBytes,
  kEarlyRelease,
  kMissingFence,
  kMissingSumsFence,
  kSumsReadEarly,
  kSumsWrittenEarly,
  kNoRelease,
  kNoWait,
  kReleaseHere,
  kReleaseInOneOfTwo,
  kNoFirstBarrier,
  kNoLastBarrier,
  kCopyToOne,
};

constexpr int kRows = 64, kColumns = 16, kStages = 2, kStageDepth = 64;
constexpr int kBytesA = kRows * kStageDepth * 2, kBytesB = kColumns * kStageDepth * 2;
constexpr int kStageBytes = kBytesA + kBytesB;

// out [64, 16] = a [64, depth] * b [16, depth]^T; a may have fewer rows.
struct Product {
  Product(int a_rows, int depth_of_all)
      : rows(a_rows), depth(depth_of_all), a(Fill(rows * depth)), b(Fill(kColumns * depth)) {
    EXPECT_EQ(Encode(a, rows, kRows, a_map), cudaSuccess);
    EXPECT_EQ(Encode(b, kColumns, kColumns, b_map), cudaSuccess);
  }

  // The first element of the array at a multiple of 16 bytes.
  static BFloat16* Aligned(std::vector<BFloat16>& values) {
    const auto at = reinterpret_cast<uintptr_t>(values.data());
    return values.data() + (16 - at % 16) % 16 / 2;
  }
  static std::vector<BFloat16> Fill(int count) {
    std::vector<BFloat16> values(static_cast<size_t>(count) + 8);
    BFloat16* const first = Aligned(values);
    for (int i = 0; i < count; ++i) {
      first[i] = BFloat16(static_cast<float>(i * 37 % 101 - 50) / 64);
    }
    return values;
  }
  cudaError_t Encode(std::vector<BFloat16>& values, int count, int box, TensorMap& map) const {
    return EncodeTensorMap({.data = Aligned(values),
                            .size = {depth, count, 1},
                            .stride_bytes = {depth * 2, depth * count * 2},
                            .box = {kStageDepth, static_cast<uint32_t>(box), 1}},
                           map);
  }

  // Row by row.
  std::vector<float> Expected() {
    std::vector<float> sums(kRows * kColumns);
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < kColumns; ++column) {
        float& sum = sums[static_cast<size_t>(row * kColumns + column)];
        for (int k = 0; k < depth; ++k) {
          sum += static_cast<float>(Aligned(a)[row * depth + k]) *
                 static_cast<float>(Aligned(b)[column * depth + k]);
        }
      }
    }
    return sums;
  }

  // Each block of a cluster has the whole product; the first one copies a and the last one b for
  // all of them.
  void Kernel(Plant plant, float* out) const {
    const unsigned blocks = cusim::ClusterBlocks(), rank = ClusterRank();
    MOE_DYNAMIC_SHARED(tiles);
    MOE_SHARED_ARRAY(TransactionBarrier, full, kStages);
    MOE_SHARED_ARRAY(TransactionBarrier, empty, kStages);
    if (threadIdx.x == 0) {
      for (int s = 0; s < kStages; ++s) {
        full[s].Init(1);
        empty[s].Init(4 * blocks);
      }
      if (plant != Plant::kMissingFence) FenceBarriersOfCluster();
    }
    if (plant == Plant::kNoFirstBarrier) {
      __syncthreads();
    } else {
      ClusterBarrier();
    }
    const int steps = (depth + kStageDepth - 1) / kStageDepth;
    if (threadIdx.x < kWarpgroupThreads) {
      for (int i = 0; i < steps && threadIdx.x == 0; ++i) {
        const int s = i % kStages;
        empty[s].Wait(static_cast<uint32_t>(i / kStages % 2) ^ 1);
        const int wrong_by = plant == Plant::kTooFewBytes    ? -kBytesB
                             : plant == Plant::kTooManyBytes ? 16
                                                             : 0;
        full[s].ArriveExpecting(static_cast<uint32_t>(kStageBytes + wrong_by));
        const unsigned copied = plant == Plant::kCopyToOne ? 1 : blocks;
        if (rank == 0) {
          CopyTileToCluster(a_map, i * kStageDepth, 0, 0, tiles + s * kStageBytes, full[s], copied);
        }
        if (rank == blocks - 1) {
          CopyTileToCluster(b_map, i * kStageDepth, 0, 0, tiles + s * kStageBytes + kBytesA,
                            full[s], copied);
        }
      }
      if (plant != Plant::kNoLastBarrier) ClusterBarrier();
      return;
    }
    const unsigned lane = threadIdx.x % kWarpLanes;
    const auto release = [&](TransactionBarrier& stage) {
      if (lane >= blocks || plant == Plant::kNoRelease) return;
      if (plant == Plant::kReleaseInOneOfTwo && lane > 0) return;
      stage.ArriveIn(plant == Plant::kReleaseHere ? rank : lane);
    };
    float sums[kColumns / 2] = {};
    for (int i = 0; i < steps; ++i) {
      const int s = i % kStages;
      const auto parity = static_cast<uint32_t>(i / kStages % 2);
      if (plant != Plant::kNoWait) full[s].Wait(parity ^ (plant == Plant::kWrongParity ? 1 : 0));
      if (plant != Plant::kMissingSumsFence) FenceSums(sums);
      const unsigned char* const stage = tiles + s * kStageBytes;
      for (int k = 0; k < kStageDepth; k += kProductDepth) {
        AddProduct<BFloat16, kColumns, Major::kDepth>(sums, OperandAt(stage + k * 2, 0),
                                                      OperandAt(stage + kBytesA + k * 2, 0), true);
      }
      CommitProducts();
      if (plant == Plant::kEarlyRelease) release(empty[s]);
      if (plant == Plant::kSumsReadEarly && threadIdx.x == kWarpgroupThreads) out[0] = sums[0];
      if (plant == Plant::kSumsWrittenEarly) sums[0] = 0;
      WaitForProducts<0>(sums);
      if (plant != Plant::kEarlyRelease) release(empty[s]);
      if (plant == Plant::kSumsReadEarly) return;
    }
    const int t = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
    for (int i = 0; i < kColumns / 2; ++i) {
      const int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8;
      out[blockIdx.x * kRows * kColumns + row * kColumns + i / 4 * 8 + t % 4 * 2 + i % 2] = sums[i];
    }
    if (plant != Plant::kNoLastBarrier) ClusterBarrier();
  }

  // Of all blocks, one after the other.
  std::vector<float> Run(Plant plant, uint32_t seed, unsigned clusters = 1,
                         unsigned cluster_blocks = 1) const {
    const unsigned blocks = clusters * cluster_blocks;
    std::vector<float> out(size_t{blocks} * kRows * kColumns);
    const auto kernel = [&] {
      Kernel(plant, out.data());
    };
    RunGrid({blocks, 2 * kWarpgroupThreads, kStages * kStageBytes, kernel, cluster_blocks},
            {.seed = seed, .resident_blocks = 4});
    return out;
  }

  int rows, depth;
  std::vector<BFloat16> a, b;
  TensorMap a_map, b_map;
};

TEST(CusimHopperTest, PipelineOfTilesHasTheSumsOfAPlainLoopUnderEverySchedule) {
  Product product(kRows, 5 * kStageDepth);
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    EXPECT_EQ(product.Run(Plant::kNone, seed), product.Expected());
  }
}

TEST(CusimHopperTest, BlocksOfAClusterCopyForEachOther) {
  Product product(kRows, 5 * kStageDepth);
  const auto expected = product.Expected();
  for (uint32_t seed = 1; seed <= 8; ++seed) {
    const auto out = product.Run(Plant::kNone, seed, 3, 2);
    for (size_t block = 0; block < 6; ++block) {
      const auto* const first = out.data() + block * expected.size();
      EXPECT_EQ(std::vector<float>(first, first + expected.size()), expected);
    }
  }
}

// Neither the rows nor the depth fill a tile; AddressSanitizer would report a read beyond the
// arrays.
TEST(CusimHopperTest, TilesBeyondTheTensorAreZeros) {
  Product product(50, kStageDepth + 8);
  const auto out = product.Run(Plant::kNone, 1);
  EXPECT_EQ(out, product.Expected());
  EXPECT_EQ(out[50 * kColumns], 0);
}

TEST_F(CusimFaultDeathTest, PlantedInAPipelineOfTiles) {
  const Product product(kRows, 5 * kStageDepth);
  const struct {
    Plant plant;
    const char* fault;
  } cases[] = {
      {Plant::kWrongParity, "operand that is not there yet.*cusim_hopper_test.cc"},
      {Plant::kNoWait, "operand that is not there yet"},
      {Plant::kTooFewBytes, "too few transaction bytes.*cusim_hopper_test.cc"},
      {Plant::kTooManyBytes,
       "deadlock.*parity 0 of the barrier of.*misses 0 arrivals and 16 bytes"},
      {Plant::kNoRelease, "deadlock.*parity 0 of the barrier of.*misses 4 arrivals and 0 bytes"},
      {Plant::kMissingFence, "missing fence.proxy.async: between the initialisation"},
      {Plant::kMissingSumsFence, "missing wgmma.fence"},
      {Plant::kSumsWrittenEarly, "sums written in flight"},
  };
  for (const auto& [plant, fault] : cases) {
    EXPECT_DEATH(product.Run(plant, 1), fault) << static_cast<int>(plant);
  }
}

// Whether a copy begins while the product reads depends on the schedule.
TEST_F(CusimFaultDeathTest, StageReleasedBeforeItsProductsHaveEnded) {
  const Product product(kRows, 8 * kStageDepth);
  const auto some_seeds = [&] {
    for (uint32_t seed = 1; seed <= 8; ++seed) product.Run(Plant::kEarlyRelease, seed);
  };
  EXPECT_DEATH(some_seeds(), "write to operands in flight|data race");
}

// So do what a stage's next copy meets in the other block, and which block ends first.
TEST_F(CusimFaultDeathTest, PlantedInACluster) {
  const Product product(kRows, 8 * kStageDepth);
  const auto some_seeds = [&](Plant plant) {
    for (uint32_t seed = 1; seed <= 16; ++seed) product.Run(plant, seed, 1, 2);
  };
  EXPECT_DEATH(some_seeds(Plant::kEarlyRelease), "write to operands in flight|data race");
  EXPECT_DEATH(some_seeds(Plant::kReleaseHere),
               "write to operands in flight|too few transaction bytes|operand that is not there");
  EXPECT_DEATH(some_seeds(Plant::kReleaseInOneOfTwo), "deadlock.*misses 8 arrivals and 0 bytes");
  EXPECT_DEATH(some_seeds(Plant::kCopyToOne), "deadlock");
  EXPECT_DEATH(some_seeds(Plant::kNoLastBarrier),
               "block that has ended.*cusim_hopper_test.cc|missing cluster barrier: between");
  EXPECT_DEATH(product.Run(Plant::kNoFirstBarrier, 1, 1, 2),
               "missing cluster barrier: before|before it was initialised");
  EXPECT_DEATH(product.Run(Plant::kNoRelease, 1, 1, 2), "deadlock.*misses 8 arrivals and 0 bytes");
}

TEST(CusimHopperTest, SumsAreNaNBeforeTheyAreWaitedFor) {
  Product product(kRows, kStageDepth);
  EXPECT_TRUE(std::isnan(product.Run(Plant::kSumsReadEarly, 1)[0]));
}

// Threads write the operands themselves.
void MultiplyOnes(bool fence, bool write_again, int warps, float* out) {
  MOE_DYNAMIC_SHARED(tiles);
  auto* const elements = reinterpret_cast<BFloat16*>(tiles);
  const unsigned t = threadIdx.x;
  for (unsigned i = t; i < (kBytesA + kBytesB) / 2; i += blockDim.x) elements[i] = BFloat16(1.0f);
  if (fence) FenceAsyncProxy();
  __syncthreads();
  if (t / kWarpLanes >= static_cast<unsigned>(warps)) return;
  float sums[kColumns / 2] = {};
  FenceSums(sums);
  AddProduct<BFloat16, kColumns, Major::kDepth>(sums, OperandAt(tiles, 0),
                                                OperandAt(tiles + kBytesA, 0), false);
  CommitProducts();
  if (write_again) {
    __syncthreads();
    if (t == 0) elements[0] = BFloat16(2.0f);
  }
  WaitForProducts<0>(sums);
  out[t] = sums[0];
}

TEST_F(CusimFaultDeathTest, OperandsThatThreadsWrite) {
  std::vector<float> out(kWarpgroupThreads);
  const auto run = [&](bool fence, bool write_again, int warps) {
    const auto kernel = [&] {
      MultiplyOnes(fence, write_again, warps, out.data());
    };
    RunGrid({1, kWarpgroupThreads, kStageBytes, kernel}, {});
  };
  run(true, false, 4);
  EXPECT_EQ(out, std::vector<float>(kWarpgroupThreads, 16));
  EXPECT_DEATH(run(false, false, 4), "missing fence.proxy.async: between a write to an operand");
  EXPECT_DEATH(run(true, true, 4), "write to operands in flight|data race");
  EXPECT_DEATH(run(true, false, 3), "divergent warpgroup");
}

TEST_F(CusimFaultDeathTest, MoreRegistersThanThereAre) {
  const auto kernel = [] {
    threadIdx.x < kWarpgroupThreads ? GiveRegistersBack<40>() : TakeRegisters<232>();
  };
  RunGrid({1, 3 * kWarpgroupThreads, 0, kernel}, {});
  EXPECT_DEATH(RunGrid({1, 4 * kWarpgroupThreads, 0, kernel}, {}), "wrong number of registers");
}

// 384 threads are launched with 168 registers each.
TEST_F(CusimFaultDeathTest, RegistersInTheWrongDirection) {
  const auto run = [](auto kernel) {
    RunGrid({1, 3 * kWarpgroupThreads, 0, kernel}, {});
  };
  run([] { GiveRegistersBack<168>(); });
  run([] { TakeRegisters<168>(); });
  EXPECT_DEATH(run([] { GiveRegistersBack<176>(); }), "setmaxnreg.dec from 168 to 176");
  EXPECT_DEATH(run([] { TakeRegisters<160>(); }), "setmaxnreg.inc from 168 to 160");
}

// On a GPU the third warpgroup's registers never become free.
TEST_F(CusimFaultDeathTest, RegistersThatNobodyGivesBack) {
  const auto kernel = [] {
    if (threadIdx.x >= kWarpgroupThreads) TakeRegisters<232>();
  };
  EXPECT_DEATH(RunGrid({1, 3 * kWarpgroupThreads, 0, kernel}, {}),
               "80896 registers in one block of 64512");
}

TEST_F(CusimFaultDeathTest, BarrierOfOneArrivalTooMany) {
  const auto run = [](int arrivals) {
    const auto kernel = [&] {
      MOE_SHARED_ARRAY(TransactionBarrier, barrier, 1);
      barrier[0].Init(2);
      barrier[0].ArriveExpecting(64);
      for (int i = 1; i < arrivals; ++i) barrier[0].Arrive();
    };
    RunGrid({1, 1, 0, kernel}, {});
  };
  run(2);
  EXPECT_DEATH(run(3), "more arrivals than the 2 of a phase");
}

TEST(CusimHopperTest, DriverRefusesTensorsThatItsCopyEngineCannotRead) {
  alignas(16) const BFloat16 data[8 * 64] = {};
  const auto encode = [&](auto change) {
    TensorMap map;
    TensorShape shape = {
        .data = data, .size = {64, 8, 1}, .stride_bytes = {128, 1024}, .box = {64, 8, 1}};
    change(shape);
    return EncodeTensorMap(shape, map);
  };
  using Shape = TensorShape;
  EXPECT_EQ(encode([](Shape&) {}), cudaSuccess);
  EXPECT_EQ(encode([&](Shape& s) { s.data = data + 1; }), cudaErrorInvalidValue);
  EXPECT_EQ(encode([](Shape& s) { s.stride_bytes[0] = 120; }), cudaErrorInvalidValue);
  EXPECT_EQ(encode([](Shape& s) { s.box[1] = 257; }), cudaErrorInvalidValue);
  EXPECT_EQ(encode([](Shape& s) { s.size[0] = 0; }), cudaErrorInvalidValue);
  EXPECT_EQ(encode([](Shape& s) { s.box[0] = 32; }), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace moe::cuda
