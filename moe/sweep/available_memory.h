// How much memory this machine can still give.
#ifndef MOE_MOE_SWEEP_AVAILABLE_MEMORY_H_
#define MOE_MOE_SWEEP_AVAILABLE_MEMORY_H_

#include <cstdint>
#include <string>

namespace moe::sweep {

// The least of what the kernel calls available and what the limits of this process's control groups
// (version 1 or 2, and those above) leave: limit - usage + page cache that can go. 0 = unknown.
// `root` stands before /proc and /sys.
int64_t AvailableMemoryBytes(const std::string& root = "");

}  // namespace moe::sweep

#endif  // MOE_MOE_SWEEP_AVAILABLE_MEMORY_H_
