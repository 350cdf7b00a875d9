// How much memory this machine has, and whether what is planned fits.
#ifndef MOE_MOE_CLI_MEASURE_MACHINE_MEMORY_H_
#define MOE_MOE_CLI_MEASURE_MACHINE_MEMORY_H_

#include <cstdint>
#include <optional>
#include <string>

#include "moe/plan/memory.h"

namespace moe::measure {

// Available memory: the least of what the kernel calls available and what the limits of this
// process's control groups (version 1 or 2, and those above) leave, limit - usage + page cache that
// can be dropped. 0 = unknown. `root` is put before /proc and /sys.
int64_t AvailableMemoryBytes(const std::string& root = "");

// Memory of the machine, in use or not, or the limit of this process's control groups if that is
// less: the same for all processes. 0 = unknown.
int64_t TotalMemoryBytes(const std::string& root = "");

// The least limit of this process's control groups; 0 = none.
int64_t MemoryLimitBytes(const std::string& root = "");

// Why `ranks` of this machine cannot have so much each, with the estimate: more than `max_mib`, the
// value of a flag, or than `available_bytes` (0: unknown). Empty: they can.
std::string TooBig(const plan::MemoryEstimate& estimate, int ranks, int64_t available_bytes,
                   std::optional<double> max_mib = std::nullopt);

}  // namespace moe::measure

#endif  // MOE_MOE_CLI_MEASURE_MACHINE_MEMORY_H_
