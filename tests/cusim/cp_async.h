// cp.async in software: copies from global to shared memory that happen behind the thread's back.
#ifndef MOE_TESTS_CUSIM_CP_ASYNC_H_
#define MOE_TESTS_CUSIM_CP_ASYNC_H_

#include <cstddef>
#include <cstring>
#include <vector>

#include "tests/cusim/device.h"

namespace cusim {

// The cp.async.* of one thread, an object on its stack. A copy takes place as late as allowed: in
// the Wait() that covers its group, never before. So a kernel that does not wait, or waits for one
// group too few, computes with what shared memory held before; and ThreadSanitizer sees the copy's
// accesses where the hardware is only bound to have made them.
class AsyncCopies {
 public:
  // cp.async.cg.shared.global, 16 bytes; both addresses must be multiples of 16. The first
  // `source_bytes` are read, the rest are zeros.
  void Copy16(void* shared, const void* global, int source_bytes = 16,
              const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    const auto misaligned = [](const void* p) {
      return reinterpret_cast<uintptr_t>(p) % 16 != 0;
    };
    if (misaligned(shared) || misaligned(global)) {
      KernelFault("misaligned vector access", "cp.async of 16 bytes", {file, line});
    }
    if (source_bytes < 0 || source_bytes > 16) {
      KernelFault("wrong source size", "cp.async of 16 bytes", {file, line});
    }
    open_.push_back({shared, global, source_bytes});
  }

  // cp.async.commit_group
  void Commit() {
    groups_.push_back(open_);
    open_.clear();
  }

  // cp.async.wait_group N: all but the last `pending` groups have arrived.
  void Wait(size_t pending) {
    while (groups_.size() > pending) {
      for (const Copy& copy : groups_.front()) {
        for (int i = 0; i < 16; ++i) {  // in code that the sanitizers instrument
          static_cast<char*>(copy.shared)[i] =
              i < copy.source_bytes ? static_cast<const char*>(copy.global)[i] : char{0};
        }
      }
      groups_.erase(groups_.begin());
    }
  }

 private:
  struct Copy {
    void* shared;
    const void* global;
    int source_bytes;
  };
  std::vector<Copy> open_;
  std::vector<std::vector<Copy>> groups_;
};

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_CP_ASYNC_H_
