// Products of Hopper GPUs beside kernels of other streams: they leave multiprocessors free, end
// beside a kernel that does not, and have the same bits on any number of blocks.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/buffer.h"
#include "kernels/base/cuda_devices.h"
#include "kernels/base/cuda_status.h"
#include "kernels/base/dtype.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/grouped_gemm/weight_gradient.h"
#include "tests/kernels/device_memory.h"
#include "tests/kernels/hopper_probe.h"
#if defined(MOE_TEST_SCHEDULES)
#include "tests/cusim/fake_streams.h"
#endif

namespace moe::testing {
namespace {

using Use = SpareMultiprocessors::Use;

bool HasHopper() {
  const auto devices = CudaDevices();
  return devices.ok() && devices->front().usable.ok() && devices->front().major == 9;
}

// Different in neighbouring rows and columns, and not small integers.
std::vector<BFloat16> Values(int64_t count, uint32_t seed) {
  std::vector<BFloat16> values(static_cast<size_t>(count));
  uint32_t state = seed;
  for (BFloat16& value : values) {
    state = state * 1664525u + 1013904223u;
    value = BFloat16(static_cast<float>(state >> 16) / 32768.0f - 1.0f);
  }
  return values;
}

// All products of one matrix of weights [cols, depth] by wgmma, on x [rows, depth].
struct Products {
  Products(const TestDevice& of, int64_t row_count, int64_t col_count, int64_t depth_of_all)
      : device(of),
        rows(row_count),
        cols(col_count),
        depth(depth_of_all),
        x(device.Copy(Values(rows * depth, 1))),
        weight(device.Copy(Values(cols * depth, 2))),
        y(device.Copy(std::vector<BFloat16>(static_cast<size_t>(rows * cols)))),
        dx(device.Copy(std::vector<BFloat16>(static_cast<size_t>(rows * depth)))),
        d_weight(device.Copy(std::vector<float>(static_cast<size_t>(cols * depth)))),
        workspace(device.memory()) {}

  absl::Status Forward() {
    const WorkspaceScope scope(workspace);
    return Gemm<BFloat16>(x.view(rows, depth, depth), weight.view(cols, depth, depth),
                          y.view(rows, cols, cols), workspace, device.stream(), {.spare = &spare});
  }
  absl::Status InputGradient() {
    const WorkspaceScope scope(workspace);
    return GemmInputGradient<BFloat16>(y.view(rows, cols, cols), weight.view(cols, depth, depth),
                                       dx.view(rows, depth, depth), workspace, device.stream(),
                                       {.spare = &spare});
  }
  absl::Status WeightGradient() {
    const WorkspaceScope scope(workspace);
    bool empty = true;
    const GradAccumulator sum(d_weight.span(), &empty);
    return AddWeightGradient<BFloat16>(y.view(rows, cols, cols), x.view(rows, depth, depth), sum,
                                       workspace, device.stream(), {.spare = &spare});
  }

  const TestDevice& device;
  const int64_t rows, cols, depth;
  const DeviceArray<BFloat16> x, weight, y, dx;
  const DeviceArray<float> d_weight;
  Workspace workspace;
  SpareMultiprocessors spare;
};

template <typename T>
bool SameMemory(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && !a.empty() &&
         std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Blocks in pairs and by themselves; more tiles than blocks.
TEST(SpareMultiprocessorsTest, ProductsHaveTheSameBitsOnAnyNumberOfBlocks) {
  if (kSanitized) GTEST_SKIP() << "a matter of bits";
  if (!HasHopper()) GTEST_SKIP() << "no Hopper GPU";
  const TestDevice device(Device{DeviceKind::kCuda, 0});
  for (const int64_t cols : {512, 640}) {
    Products products(device, kSimulatedCuda ? 16 : 20000, cols, 64);
    std::vector<BFloat16> y, dx;
    std::vector<float> d_weight;
    for (const int spare : {0, 1, 2, 16, 67}) {
      if (kSimulatedCuda && spare > 2) break;  // half of four
      products.spare = SpareMultiprocessors(spare);
      const Use use(&products.spare);
      ASSERT_OK(products.Forward());
      ASSERT_OK(products.InputGradient());
      ASSERT_OK(products.WeightGradient());
      const auto got_y = device.Read(products.y), got_dx = device.Read(products.dx);
      const auto got_d_weight = device.Read(products.d_weight);
      if (spare == 0) {
        y = got_y;
        dx = got_dx;
        d_weight = got_d_weight;
      }
      EXPECT_TRUE(SameMemory(got_y, y)) << cols << " columns, " << spare << " spare";
      EXPECT_TRUE(SameMemory(got_dx, dx)) << cols << " columns, " << spare << " spare";
      EXPECT_TRUE(SameMemory(got_d_weight, d_weight)) << cols << " columns, " << spare << " spare";
    }
  }
}

TEST(SpareMultiprocessorsTest, AreSpareWhileSomethingUsesThem) {
  SpareMultiprocessors spare(16);
  EXPECT_EQ(spare.now(), 0);
  {
    const Use one(&spare);
    const Use two(&spare), none(nullptr);
    EXPECT_EQ(spare.now(), 16);
  }
  EXPECT_EQ(spare.now(), 0);
}

#if defined(MOE_TEST_SCHEDULES)
// How often a transfer of two blocks, which comes when the product may be under way, runs beside it
// on a device of 4 multiprocessors. `spare`: what is left to it.
int64_t Overlaps(int spare, absl::Status (Products::*product)()) {
  const cusim::ScopedMachine machine({.room = true});
  const TestDevice device(Device{DeviceKind::kCuda, 0});
  const auto stream = MakeTransferStream({DeviceKind::kCuda, 0}).value();
  Products products(device, 16, 256, 64);
  products.spare = SpareMultiprocessors(spare);
  const Use use(&products.spare);
  const int64_t before = cusim::Overlaps();
  for (uint32_t seed = 1; seed <= 6; ++seed) {
    cusim::SeedStreams(seed);
    EXPECT_OK((products.*product)());
    for (uint32_t i = 0; i < seed; ++i) cusim::Streams::Get().RunSome();
    EXPECT_OK(stream->Launch([](void* native) {
      cusim::EnqueueTransfer(static_cast<cudaStream_t>(native), 2);
      return absl::OkStatus();
    }));
    EXPECT_OK(device.stream().Synchronize());
    EXPECT_OK(stream->Synchronize());
  }
  return cusim::Overlaps() - before;
}

TEST(SpareMultiprocessorsTest, ATransferRunsBesideAProductThatLeavesThemAlone) {
  if (kSanitized) GTEST_SKIP() << "a matter of orders";
  for (const auto product :
       {&Products::Forward, &Products::InputGradient, &Products::WeightGradient}) {
    EXPECT_GT(Overlaps(2, product), 0);
    EXPECT_EQ(Overlaps(0, product), 0);
  }
}
#endif

double MillisecondsOf(const std::function<absl::Status()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_OK(work());
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

// 16 multiprocessors are occupied, as by an exchange: the product ends before they are free. Then a
// kernel of 16 blocks begins and ends while a product is under way that leaves it room. A simulated
// GPU runs kernels one after the other and shows the bits alone.
TEST(SpareMultiprocessorsTest, AProductEndsBesideAKernelThatOccupiesMultiprocessors) {
  if (!HasHopper()) GTEST_SKIP() << "no Hopper GPU";
  constexpr int kOccupied = 16;
  const TestDevice device(Device{DeviceKind::kCuda, 0});
  const auto transfers = MakeTransferStream({DeviceKind::kCuda, 0}).value();
  Products products(device, kSimulatedCuda ? 40 : 16384, kSimulatedCuda ? 256 : 4096,
                    kSimulatedCuda ? 64 : 4096);
  const auto product = [&]() -> absl::Status {
    MOE_RETURN_IF_ERROR(products.Forward());
    return device.stream().Synchronize();
  };
  const Buffer pinned = Buffer::Allocate(3 * int64_t{sizeof(int)}, *PinnedMemory().value()).value();
  int* const flags = pinned.span<int>().data();
  const auto occupy = [&](int64_t most_polls) {
    std::memset(flags, 0, 3 * sizeof(int));
    EXPECT_OK(transfers->Launch([&](void* stream) {
      return CudaStatus(RunOccupant({.blocks = kOccupied,
                                     .most_polls = most_polls,
                                     .begun = flags,
                                     .stop = flags + 1,
                                     .ended = flags + 2},
                                    static_cast<cudaStream_t>(stream)),
                        "occupant");
    }));
  };
  const volatile int& begun = flags[0];
  const volatile int& ended = flags[2];

  ASSERT_OK(product());
  const double alone_ms = MillisecondsOf(product);
  const std::vector<BFloat16> alone = device.Read(products.y);
  products.spare = SpareMultiprocessors(kOccupied);
  for (const bool spares : {false, true}) {
    const Use use(spares ? &products.spare : nullptr);
    const double spare_ms = MillisecondsOf(product);
    EXPECT_OK(device.stream().Zero(products.y.span().data(),
                                   std::ssize(alone) * int64_t{sizeof(BFloat16)}));
    EXPECT_OK(device.stream().Synchronize());
    occupy(kSimulatedCuda ? 0 : int64_t{1} << 22);  // some seconds
    while (!kSimulatedCuda && begun < kOccupied && !HasFailure()) std::this_thread::yield();
    const double beside_ms = MillisecondsOf(product);
    EXPECT_TRUE(kSimulatedCuda || ended == 0) << "the product waited for the other kernel";
    flags[1] = 1;
    EXPECT_OK(transfers->Synchronize());
    EXPECT_EQ(ended, kOccupied);
    EXPECT_TRUE(SameMemory(device.Read(products.y), alone));
    std::printf("product: %.3f ms alone, with %d spare %.3f, beside %d occupied ones %.3f\n",
                alone_ms, spares ? kOccupied : 0, spare_ms, kOccupied, beside_ms);
  }

  double transfer_ms[2];
  for (const bool spares : {false, true}) {
    const Use use(spares ? &products.spare : nullptr);
    ASSERT_OK(products.Forward());
    const Event after = device.stream().Record().value();
    transfer_ms[spares ? 1 : 0] = MillisecondsOf([&] {
      occupy(0);
      return transfers->Synchronize();
    });
    const bool product_runs =
        cudaEventQuery(static_cast<cudaEvent_t>(after.state()->native_handle())) ==
        cudaErrorNotReady;
    EXPECT_TRUE(kSimulatedCuda || !spares || product_runs) << "the transfer waited for the product";
    ASSERT_OK(device.stream().Synchronize());
  }
  std::printf("kernel of %d blocks beside a product: %.3f ms, with as many spare %.3f\n", kOccupied,
              transfer_ms[0], transfer_ms[1]);
}

}  // namespace
}  // namespace moe::testing
