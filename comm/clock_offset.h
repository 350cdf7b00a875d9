// How far the clocks of ranks are apart, so that their time stamps can be drawn on one axis.
#ifndef MOE_COMM_CLOCK_OFFSET_H_
#define MOE_COMM_CLOCK_OFFSET_H_

#include <cstdint>

#include <absl/functional/function_ref.h>
#include <absl/status/statusor.h>

#include "comm/communicator.h"
#include "kernels/base/stream.h"

namespace moe {

struct ClockOffset {
  int64_t offset_ns = 0;  // own clock + offset = rank 0's clock
  int64_t error_ns = 0;   // bound of the error; 0 on rank 0's host
};

// Estimates the offset of this rank's clock `now_ns` against rank 0's. Ranks whose `host` is rank
// 0's share its clock: offset 0. Every other rank exchanges 16 pings with rank 0 and uses the
// fastest one: the error is at most half its round trip (Cristian, "Probabilistic clock
// synchronization", 1989, doi:10.1007/BF01784024). Collective, blocks the host.
absl::StatusOr<ClockOffset> EstimateClockOffset(uint64_t host, absl::FunctionRef<int64_t()> now_ns,
                                                Communicator& comm, Stream& stream,
                                                const Site& site = {});

}  // namespace moe

#endif  // MOE_COMM_CLOCK_OFFSET_H_
