// The simulator on kernels with one planted fault each. In every build the scheduler must find and
// name faults of synchronisation; ThreadSanitizer and AddressSanitizer must name the line of a
// fault in memory, and other builds find what they can.
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

#if defined(__SANITIZE_THREAD__)
// The first race ends the program, like every other fault.
extern "C" const char* __tsan_default_options() {
  return "halt_on_error=1";
}
#endif

namespace cusim {
namespace {

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
  // Whether the lane ends first or last depends on the schedule: both are found.
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

// The instruction of Store is one to global memory.
TEST_F(CusimFaultDeathTest, StoreToSharedMemoryOrToALocalVariable) {
  const auto shared = [] {
    MOE_SHARED_ARRAY(uint4, tile, 1);
    moe::cuda::StoreShared<4>({}, &tile[0].x);
    moe::cuda::Store<4>({}, &tile[0].x);
  };
  const auto local = [] {
    alignas(16) unsigned values[4] = {};
    moe::cuda::Store<4>({}, values);
  };
  EXPECT_DEATH(RunGrid({1, 1, 0, shared}, {}), "store beside global memory: .*shared");
  EXPECT_DEATH(RunGrid({1, 1, 0, local}, {}), "store beside global memory: .*local");
}

// Dynamic memory begins at a multiple of 1,024.
TEST_F(CusimFaultDeathTest, StaticAndDynamicSharedMemoryTogetherBeyondTheDevices) {
  const auto kernel = [] {
    MOE_SHARED_ARRAY(float, tile, 4);
    tile[0] = 0;
  };
  const Options small = {.most_shared_bytes = 99 << 10};
  RunGrid({1, 1, 98 << 10, kernel}, small);
  EXPECT_DEATH(RunGrid({1, 1, (98 << 10) + 16, kernel}, small),
               "too much shared memory: 101392 bytes, static and dynamic, of 101376");
}

TEST_F(CusimFaultDeathTest, KernelLaunchedFromAKernel) {
  const auto inner = [] {
  };
  const auto outer = [&] {
    RunGrid({1, 1, 0, inner}, {});
  };
  EXPECT_DEATH(RunGrid({1, 1, 0, outer}, {}), "from inside a kernel");
}

// A missing barrier: wrong results on any schedule, and a race whatever the results are.
// Between the two lines, __syncthreads was removed.
constexpr int kWriteLine = __LINE__ + 4, kReadLine = kWriteLine + 1;
void ReverseWithoutBarrier(const int* in, int* out) {
  MOE_SHARED_ARRAY(int, tile, 64);
  const unsigned t = threadIdx.x;
  tile[t] = in[t];
  out[t] = tile[63 - t];
}

#if defined(__SANITIZE_THREAD__)

TEST_F(CusimFaultDeathTest, RemovedBarrierIsARaceOnItsLine) {
  std::vector<int> in(64, 1), out(64);
  const auto kernel = [&] {
    ReverseWithoutBarrier(in.data(), out.data());
  };
  EXPECT_DEATH(RunGrid({1, 64, 0, kernel}, {}), Named("data race", kReadLine));
  EXPECT_DEATH(RunGrid({1, 64, 0, kernel}, {}), Named("data race", kWriteLine));
}

// The reader passes its second barrier too early: the write after the first is not ordered before
// it.
TEST_F(CusimFaultDeathTest, RemovedSecondBarrierOfALoopIsARace) {
  const auto kernel = [] {
    MOE_SHARED_ARRAY(int, tile, 64);
    int value = static_cast<int>(threadIdx.x);
    for (int round = 0; round < 3; ++round) {
      tile[threadIdx.x] = value;
      __syncthreads();
      value = tile[63 - threadIdx.x];
    }
  };
  EXPECT_DEATH(RunGrid({1, 64, 0, kernel}, {}), "data race");
}

TEST_F(CusimFaultDeathTest, RelaxedStoreWhereReleaseIsNeededIsARace) {
  const auto send = [](cuda::memory_order order) {
    for (uint32_t seed = 1; seed <= 8; ++seed) {
      int data = 0;
      uint32_t flag = 0;
      const auto kernel = [&] {
        const cuda::atomic_ref<uint32_t, cuda::thread_scope_device> ready(flag);
        if (blockIdx.x == 0) {
          data = 7;
          ready.store(1, order);
        } else if (ready.load(cuda::memory_order_acquire) != 0) {
          data += 1;
        }
      };
      RunGrid({2, 1, 0, kernel}, {.seed = seed});
    }
  };
  send(cuda::memory_order_release);
  EXPECT_DEATH(send(cuda::memory_order_relaxed), "data race");
}

// A shuffle moves registers; it does not order memory as __syncwarp does.
TEST_F(CusimFaultDeathTest, ShuffleInPlaceOfSyncwarpIsARace) {
  std::vector<int> values(32), out(32);
  const auto kernel = [&] {
    values[threadIdx.x] = 1;
    __shfl_xor_sync(0xffffffffu, 0, 1);
    out[threadIdx.x] = values[31 - threadIdx.x];
  };
  EXPECT_DEATH(RunGrid({1, 32, 0, kernel}, {}), "data race");
}

// Blocks run one after the other here, and concurrently on a GPU: they are not ordered.
TEST_F(CusimFaultDeathTest, BlocksThatWriteOneElementRace) {
  std::vector<int> out(4);
  const auto kernel = [&] {
    out[blockIdx.x / 2] = static_cast<int>(threadIdx.x);
  };
  EXPECT_DEATH(RunGrid({8, 1, 0, kernel}, {.resident_blocks = 1}), "data race");
}

#else

TEST_F(CusimFaultDeathTest, RemovedBarrierGivesWrongResultsOnEverySchedule) {
  std::vector<int> in(64, 1), out(64);
  for (uint32_t seed = 1; seed <= 10; ++seed) {
    const auto kernel = [&] {
      ReverseWithoutBarrier(in.data(), out.data());
    };
    RunGrid({1, 64, 0, kernel}, {.seed = seed});
    EXPECT_NE(out, in);
  }
  EXPECT_LT(kWriteLine, kReadLine);
}

#endif

#if defined(__SANITIZE_ADDRESS__)

TEST_F(CusimFaultDeathTest, OutOfBoundsGlobalRead) {
  const std::vector<int> in(64);
  std::vector<int> out(64);
  constexpr int kLine = __LINE__ + 2;
  const auto kernel = [&] {
    out[threadIdx.x] = in.data()[threadIdx.x + 1];
  };
  EXPECT_DEATH(RunGrid({1, 64, 0, kernel}, {}),
               Named("heap-buffer-overflow.*READ of size 4", kLine));
}

TEST_F(CusimFaultDeathTest, OutOfBoundsSharedReadAndWrite) {
  constexpr int kRead = __LINE__ + 5, kWrite = kRead + 4;
  std::vector<int> out(64);
  const auto reads = [&] {
    MOE_SHARED_ARRAY(int, tile, 64);
    tile[threadIdx.x] = 1;
    out[threadIdx.x] = *(static_cast<const int*>(tile) + threadIdx.x + 1);
  };
  const auto writes = [] {
    int* const tile = static_cast<int*>(DynamicShared());
    *(tile + threadIdx.x - 1) = 1;
  };
  EXPECT_DEATH(RunGrid({1, 64, 0, reads}, {}), Named("use-after-poison.*READ of size 4", kRead));
  EXPECT_DEATH(RunGrid({1, 64, 64 * sizeof(int), writes}, {}),
               Named("use-after-poison.*WRITE of size 4", kWrite));
}

TEST_F(CusimFaultDeathTest, MisalignedVectorAccessByHandIsUndefinedBehaviour) {
  alignas(16) float values[8] = {};
  constexpr int kLine = __LINE__ + 2;
  const auto kernel = [&] {
    return reinterpret_cast<const uint4*>(values + 1)->x;
  };
  EXPECT_DEATH(RunGrid({1, 1, 0, kernel}, {}), Named("", kLine) + ".*misaligned address");
}

#else

TEST_F(CusimFaultDeathTest, OutOfBoundsSharedWriteIsFoundWhenTheBlockEnds) {
  const auto after = [] {
    int* const tile = static_cast<int*>(DynamicShared());
    tile[threadIdx.x + 1] = 1;
  };
  const auto before = [] {
    MOE_SHARED_ARRAY(int, tile, 64);
    *(static_cast<int*>(tile) + threadIdx.x - 1) = 1;
  };
  EXPECT_DEATH(RunGrid({1, 64, 64 * sizeof(int), after}, {}),
               "out-of-bounds write to shared memory.*block \\(0, 0, 0\\)");
  EXPECT_DEATH(RunGrid({1, 64, 0, before}, {}), "out-of-bounds write to shared memory");
}

#endif

}  // namespace
}  // namespace cusim
