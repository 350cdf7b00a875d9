#include "kernels/base/trace.h"

#include <chrono>

namespace moe {

int64_t MonotonicNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int TraceRecorder::LaneOf(const void* stream) const {
  for (size_t i = 0; i < lanes_.size(); ++i) {
    if (lanes_[i].stream == stream) return static_cast<int>(i);
  }
  return 0;
}

}  // namespace moe
