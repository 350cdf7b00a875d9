// The peer memory of the local backend: ranks are threads, and a peer's pointer is good here if
// this rank's device can read the peer's. Internal.
#ifndef MOE_COMM_LOCAL_LOCAL_PEER_BUFFER_H_
#define MOE_COMM_LOCAL_LOCAL_PEER_BUFFER_H_

#include <cstdint>
#include <memory>

#include <absl/status/statusor.h>

#include "comm/communicator.h"
#include "comm/local/local_group.h"
#include "kernels/base/buffer.h"

namespace moe {

// Communicator::AllocatePeerBuffer: memory of the host, of one CUDA device, or of several each of
// which can read the others' (EnablePeerAccess). Else kUnimplemented on all ranks, naming the first
// pair that cannot.
absl::StatusOr<std::shared_ptr<PeerBuffer>> AllocateLocalPeerBuffer(LocalGroup& group,
                                                                    const LocalCaller& caller,
                                                                    int64_t bytes,
                                                                    MemoryResource& memory);

}  // namespace moe

#endif  // MOE_COMM_LOCAL_LOCAL_PEER_BUFFER_H_
