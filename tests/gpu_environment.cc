// In every test labelled gpu: it needs a GPU, and says so where none is, instead of testing CPUs.
#include <cstdlib>

#include <gtest/gtest.h>

#include "kernels/base/cuda_devices.h"

namespace moe {
namespace {

class GpuEnvironment : public ::testing::Environment {
 public:
  void SetUp() override {
    if (std::getenv("MOE_TEST_GPU") == nullptr) return;
    const auto devices = CudaDevices();
    if (absl::IsUnimplemented(devices.status())) {
      GTEST_SKIP() << "no GPU: " << devices.status();  // what ctest looks for
    }
    ASSERT_TRUE(devices.ok()) << devices.status();
    ASSERT_TRUE(devices->front().usable.ok()) << devices->front().usable;
  }
};

[[maybe_unused]] ::testing::Environment* const gpu =
    ::testing::AddGlobalTestEnvironment(new GpuEnvironment);

}  // namespace
}  // namespace moe
