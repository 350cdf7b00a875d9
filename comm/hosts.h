// The hosts that ranks run on, and the nodes that dispatch makes of them.
#ifndef MOE_COMM_HOSTS_H_
#define MOE_COMM_HOSTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "kernels/base/stream.h"

namespace moe {

// The host that this process runs on: its boot id, or, where that cannot be read, its name, with
// its network and process namespaces, hashed; 0 without boot id and name. Containers of one machine
// are hosts of their own: their processes have neither sockets nor memory in common. Processes of
// one host share CLOCK_MONOTONIC.
uint64_t HostId();
// Name of this host for messages; "?" where the system does not report one.
std::string HostName();

// `host` of every rank, [R]. Collective, blocks the host.
absl::StatusOr<std::vector<uint64_t>> HostsOf(uint64_t host, Communicator& comm, Stream& stream,
                                              const Site& site = {});

// The divisors of `ranks` next to the node size `wanted`: "2 or 4", or one of them.
std::string NearestNodeSizes(int wanted, int ranks);

// Nodes of a group's ranks.
struct Nodes {
  int size = 1;                   // ranks of a node of hierarchical dispatch: rank r is on r / size
  std::vector<uint64_t> of_rank;  // [R] where bytes are counted; the same for ranks of one node
};
// The nodes of a group whose ranks run on `hosts` [R]. With `node_size` > 0 every node_size
// consecutive ranks are one; kInvalidArgument, with the nearest size that fits, where such a node
// would have ranks of two hosts. With 0 the nodes are the hosts. Their `size` is then the largest
// divisor of R with which no node has ranks of two hosts: R on one host, the ranks of a host where
// all have as many, one after the other.
absl::StatusOr<Nodes> NodesOf(int node_size, absl::Span<const uint64_t> hosts);

}  // namespace moe

#endif  // MOE_COMM_HOSTS_H_
