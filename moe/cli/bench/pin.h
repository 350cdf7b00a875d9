// Keeps a rank on cores of its own.
#ifndef MOE_MOE_CLI_BENCH_PIN_H_
#define MOE_MOE_CLI_BENCH_PIN_H_

#include <absl/status/status.h>

#include "comm/communicator.h"
#include "moe/cli/base/launch.h"

namespace moe::cli {

// Keeps this thread, and those it starts, on `threads` of the CPUs that the process may use, from
// the (rank * threads)-th on, round robin. On a busy machine the scheduler may put two ranks on one
// core while another idles, which measures the scheduler. kInternal if the system refuses.
absl::Status PinToCores(int rank, int threads);

// The same for a rank of `launch`: processes by their rank on this machine, threads by `world`'s.
absl::Status PinRank(const Launch& launch, const Communicator& world, int threads);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BENCH_PIN_H_
