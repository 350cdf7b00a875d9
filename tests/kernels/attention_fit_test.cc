// Which simulated GPUs have room for the tensor-core tiles of attention's gradients.
#include <cstdint>
#include <utility>

#include <gtest/gtest.h>

#include "kernels/attention/attention_cuda.h"
#include "tests/cusim/fake_streams.h"

namespace moe::attention {
namespace {

bool FitsBackward(int major, int minor, int64_t depth) {
  const cusim::ScopedMachine machine({.major = major, .minor = minor});
  const CudaBackward<BFloat16> backward = {.q = {nullptr, 1, depth, depth}, .heads = 1};
  return FitsMma(backward);
}

// A block may have 99 KiB of shared memory on 8.6, 8.9 and 12.0, 163 on 8.0 and 227 on 9.0.
TEST(AttentionFitTest, LittleSharedMemoryLeavesNoRoomForHeadsAbove64) {
  for (const int64_t depth : {64, 65, 128, 256}) {
    EXPECT_TRUE(FitsBackward(8, 0, depth)) << depth;
    EXPECT_TRUE(FitsBackward(9, 0, depth)) << depth;
    for (const auto& [major, minor] : {std::pair(8, 6), {8, 9}, {12, 0}}) {
      EXPECT_EQ(FitsBackward(major, minor, depth), depth == 64) << major << "." << minor;
    }
  }
}

}  // namespace
}  // namespace moe::attention
