// The peer memory of processes of one host. Internal.
#ifndef MOE_COMM_MPI_MPI_PEER_BUFFER_H_
#define MOE_COMM_MPI_MPI_PEER_BUFFER_H_

#include <cstdint>
#include <memory>

#include <absl/status/statusor.h>

#include "comm/communicator.h"
#include "comm/mpi/mpi_lane.h"

namespace moe {

// Communicator::AllocatePeerBuffer: collective over `host`, whose ranks are processes of one host.
// Each makes a file without a name in memory, which the others map by way of /proc, so that nothing
// is left behind by a process that dies.
// Errors, on all ranks alike: kUnimplemented, naming who cannot map whose memory (containers with
// process ids of their own, other users); kResourceExhausted; those of `host`.
absl::StatusOr<std::shared_ptr<PeerBuffer>> AllocateMpiPeerBuffer(MpiLane& host,
                                                                  const CommPhase& phase,
                                                                  int64_t bytes);

}  // namespace moe

#endif  // MOE_COMM_MPI_MPI_PEER_BUFFER_H_
