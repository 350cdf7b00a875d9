// The simulator on kernels with one planted fault each, which the scheduler must find and name in
// every build.
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <cuda/atomic>

#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "tests/cusim/cusim.h"
#include "tests/cusim/faults.h"
#include "tests/cusim/tensor.h"

namespace cusim {
namespace {

using DeviceFlag = cuda::atomic_ref<uint32_t, cuda::thread_scope_device>;

TEST_F(CusimFaultDeathTest, DivergentBarrier) {
  constexpr int kFirst = __LINE__ + 2;
  const auto kernel = [] {
    if (threadIdx.x < 16) __syncthreads();
    if (threadIdx.x >= 16) __syncthreads();
  };
  EXPECT_DEATH(RunGrid({1, 32, 0, kernel}, {}), Named("divergent barrier", kFirst));
  EXPECT_DEATH(RunGrid({1, 32, 0, kernel}, {}), Named("divergent barrier", kFirst + 1));
}

TEST_F(CusimFaultDeathTest, MaskWithoutTheCaller) {
  constexpr int kLine = __LINE__ + 2;
  const auto kernel = [] {
    __shfl_sync(0x0000ffffu, 1, 0);
  };
  EXPECT_DEATH(RunGrid({1, 32, 0, kernel}, {}), Named("wrong warp mask", kLine));
}

TEST_F(CusimFaultDeathTest, MaskBeyondTheWarp) {
  constexpr int kLine = __LINE__ + 2;
  const auto kernel = [] {
    __ballot_sync(0xffffffffu, 1);
  };
  EXPECT_DEATH(RunGrid({1, 48, 0, kernel}, {}), Named("wrong warp mask.*only 0xffff", kLine));
}

TEST_F(CusimFaultDeathTest, MasksThatDiffer) {
  constexpr int kLine = __LINE__ + 2;
  const auto kernel = [] {
    __syncwarp(threadIdx.x == 7 ? 0x000000ffu : 0xffffffffu);
  };
  EXPECT_DEATH(RunGrid({1, 32, 0, kernel}, {}), Named("wrong warp mask.*0xff.*0xff", kLine));
}

TEST_F(CusimFaultDeathTest, ShuffleFromALaneOutsideTheMask) {
  constexpr int kLine = __LINE__ + 2;
  const auto kernel = [] {
    if (threadIdx.x < 16) __shfl_xor_sync(0x0000ffffu, 1, 16);
  };
  EXPECT_DEATH(RunGrid({1, 32, 0, kernel}, {}), Named("wrong warp mask", kLine));
}

TEST_F(CusimFaultDeathTest, LanesInDifferentOperations) {
  const auto kernel = [] {
    if (threadIdx.x < 16) {
      __syncwarp();
    } else {
      __ballot_sync(0xffffffffu, 1);
    }
  };
  EXPECT_DEATH(RunGrid({1, 32, 0, kernel}, {}), "divergent warp operation: .*wait in");
}

TEST_F(CusimFaultDeathTest, ExitedLane) {
  constexpr int kLine = __LINE__ + 3;
  const auto kernel = [] {
    if (threadIdx.x % 32 == 9) return;
    __shfl_xor_sync(0xffffffffu, 1, 1);
  };
  // Whether the lane ends first or last is the schedule's choice: both are found.
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    EXPECT_DEATH(RunGrid({1, 32, 0, kernel}, {.seed = seed}),
                 Named("exited lane: .*lane 9", kLine));
  }
}

TEST_F(CusimFaultDeathTest, Deadlock) {
  constexpr int kBarrier = __LINE__ + 3, kWarp = __LINE__ + 5;
  const auto kernel = [] {
    if (threadIdx.x == 0) {
      __syncthreads();
    } else {
      __syncwarp(0x00000003u);
    }
  };
  const std::string stuck = "deadlock: 2 threads";
  EXPECT_DEATH(RunGrid({1, 2, 0, kernel}, {}), Named(stuck + ".*waits in __syncthreads", kBarrier));
  EXPECT_DEATH(RunGrid({1, 2, 0, kernel}, {}), Named(stuck + ".*waits in a warp operation", kWarp));
}

TEST_F(CusimFaultDeathTest, Livelock) {
  uint32_t never = 0;
  const auto kernel = [&] {
    while (DeviceFlag(never).load(cuda::memory_order_acquire) == 0) __nanosleep(20);
  };
  EXPECT_DEATH(RunGrid({1, 2, 0, kernel}, {}), "livelock: .*block \\(0, 0, 0\\)");
}

// Blocks that wait for a block that cannot start until one of them ends.
TEST_F(CusimFaultDeathTest, WaitingForABlockThatIsNotResident) {
  uint32_t arrived = 0;
  const auto kernel = [&] {
    DeviceFlag flag(arrived);
    flag.fetch_add(1, cuda::memory_order_acq_rel);
    while (flag.load(cuda::memory_order_acquire) != 3) __nanosleep(20);
  };
  RunGrid({3, 1, 0, kernel}, {.resident_blocks = 3});
  arrived = 0;
  EXPECT_DEATH(RunGrid({3, 1, 0, kernel}, {.resident_blocks = 2}), "livelock");
}

TEST_F(CusimFaultDeathTest, MisalignedVectorAccess) {
  alignas(16) float values[8] = {};
  const auto loads = [&] {
    moe::cuda::Load<4>(values + 1);
  };
  const auto stores = [&] {
    moe::cuda::Store<4, float>({}, values + 2);
  };
  constexpr int kLine = __LINE__ + 3;
  const auto copies = [&] {
    MOE_SHARED_ARRAY(float, tile, 8);
    AsyncCopies().Copy16(tile, values + 3);
  };
  EXPECT_DEATH(RunGrid({1, 1, 0, loads}, {}),
               "misaligned vector access: Load.*thread \\(0, 0, 0\\)");
  EXPECT_DEATH(RunGrid({1, 1, 0, stores}, {}), "misaligned vector access: Store");
  EXPECT_DEATH(RunGrid({1, 1, 0, copies}, {}), Named("misaligned vector access: cp.async", kLine));
}

TEST_F(CusimFaultDeathTest, KernelLaunchedFromAKernel) {
  const auto inner = [] {
  };
  const auto outer = [&] {
    RunGrid({1, 1, 0, inner}, {});
  };
  EXPECT_DEATH(RunGrid({1, 1, 0, outer}, {}), "from inside a kernel");
}

}  // namespace
}  // namespace cusim
