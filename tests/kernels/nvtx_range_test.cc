// kernels/base/nvtx_range.h, as a tool sees it (nvtx_recorder.cc).
#include "kernels/base/nvtx_range.h"

#include <cstdlib>
#include <string>

#include <dlfcn.h>
#include <gtest/gtest.h>

namespace moe {
namespace {

TEST(NvtxRangeTest, AToolSeesNamesAndNesting) {
  {
    const NvtxRange layer("layer");
    const NvtxRange gate("gate");
  }
  const NvtxRange open("open");
  const char* const path = std::getenv("NVTX_INJECTION64_PATH");
  ASSERT_NE(path, nullptr);
  void* const tool = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  ASSERT_NE(tool, nullptr) << "NVTX has not loaded " << path;
  const auto recorded = reinterpret_cast<const char* (*)()>(dlsym(tool, "NvtxRecorded"));
  ASSERT_NE(recorded, nullptr);
  EXPECT_EQ(std::string(recorded()), "<layer<gate>><open");
}

}  // namespace
}  // namespace moe
