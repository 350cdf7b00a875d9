// How far the clocks of ranks are apart, so that their time stamps can be drawn on one axis.
#ifndef MOE_COMM_CLOCK_OFFSET_H_
#define MOE_COMM_CLOCK_OFFSET_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/statusor.h>

#include "comm/communicator.h"
#include "kernels/base/stream.h"

namespace moe {

struct ClockOffset {
  int64_t offset_ns = 0;  // own clock + offset = rank 0's clock
  int64_t error_ns = 0;   // bound of the error; 0 on rank 0's host
};

// The host that this process runs on: its boot id, or, where that cannot be read, its name, hashed;
// 0 without either. Hosts with equal ids count as one that shares CLOCK_MONOTONIC.
uint64_t HostId();
// Name of this host for messages; "?" where the system does not report one.
std::string HostName();

// `host` of every rank, [R]. Collective, blocks the host.
absl::StatusOr<std::vector<uint64_t>> HostsOf(uint64_t host, Communicator& comm, Stream& stream,
                                              const Site& site = {});

// Estimates the offset of this rank's clock `now_ns` against rank 0's. Ranks whose `host` is rank
// 0's share its clock: offset 0. Every other rank exchanges 16 pings with rank 0 and uses the
// fastest one: the error is at most half its round trip (Cristian, "Probabilistic clock
// synchronization", 1989, doi:10.1007/BF01784024). Collective, blocks the host.
absl::StatusOr<ClockOffset> EstimateClockOffset(uint64_t host, absl::FunctionRef<int64_t()> now_ns,
                                                Communicator& comm, Stream& stream,
                                                const Site& site = {});

}  // namespace moe

#endif  // MOE_COMM_CLOCK_OFFSET_H_
