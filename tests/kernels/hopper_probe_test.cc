// The instructions of kernels for Hopper GPUs, as they use them: a GPU's first test.
#include "tests/kernels/hopper_probe.h"

#include <cstddef>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/cuda_devices.h"
#include "kernels/base/cuda_status.h"
#include "kernels/base/dtype.h"
#include "tests/kernels/device_memory.h"

namespace moe::testing {
namespace {

// The one-hot matrices of all depths.
template <typename T>
std::vector<T> OneHot(int rows, bool rows_contiguous) {
  constexpr int kDepth = HopperProbe::kDepth;
  std::vector<T> all(size_t(kDepth) * rows * kDepth, T(0.0f));
  for (int d = 0; d < kDepth; ++d) {
    for (int row = 0; row < rows; ++row) {
      const int in_matrix = rows_contiguous ? d * rows + row : row * kDepth + d;
      all[size_t(d) * rows * kDepth + in_matrix] = T(static_cast<float>(row + 1));
    }
  }
  return all;
}

// A simulated GPU multiplies at two depths, a real one at all 64.
template <typename T>
void ProductsOfOneTileAreExact(const TestDevice& device) {
  const DeviceArray<T> a[2] = {device.Copy(OneHot<T>(HopperProbe::kRows, false)),
                               device.Copy(OneHot<T>(HopperProbe::kRows, true))};
  for (const int columns : {16, 32, 64, 128, 192, 256}) {
    if (kSanitized && columns > 32) continue;
    const DeviceArray<T> b[2] = {device.Copy(OneHot<T>(columns, false)),
                                 device.Copy(OneHot<T>(columns, true))};
    for (const int layout : {0, 1, 2, 3}) {
      const bool a_rows = layout % 2 != 0, b_columns = layout / 2 != 0;
      const DeviceArray<int> wrong = device.Copy(std::vector<int>{0});
      const HopperProbe probe = {.float16 = std::is_same_v<T, Float16>,
                                 .a = a[a_rows ? 1 : 0].span().data(),
                                 .b = b[b_columns ? 1 : 0].span().data(),
                                 .a_rows_contiguous = a_rows,
                                 .b_columns_contiguous = b_columns,
                                 .columns = columns,
                                 .blocks = kSimulatedCuda ? 2 : HopperProbe::kDepth,
                                 .step = kSimulatedCuda ? 25 : 1,
                                 .wrong = wrong.span().data()};
      EXPECT_OK(device.stream().Launch([&](void* stream) {
        return CudaStatus(RunHopperProbe(probe, static_cast<cudaStream_t>(stream)), "the probe");
      }));
      EXPECT_EQ(device.Read(wrong), std::vector<int>{0})
          << columns << " columns, contiguous: rows of a " << a_rows << ", columns of b "
          << b_columns;
    }
  }
}

TEST(HopperProbeTest, ProductsOfOneTileAreExactOnADevice) {
  const auto devices = CudaDevices();
  if (!devices.ok() || !devices->front().usable.ok()) GTEST_SKIP() << "no CUDA device";
  if (devices->front().major != 9) GTEST_SKIP() << "not a Hopper GPU: " << devices->front().name;
  const TestDevice device(Device{DeviceKind::kCuda, 0});
  ProductsOfOneTileAreExact<BFloat16>(device);
  ProductsOfOneTileAreExact<Float16>(device);
}

}  // namespace
}  // namespace moe::testing
