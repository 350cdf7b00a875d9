// How ranks that are processes, on one host or several, come by the id of their world, and meet.
#ifndef MOE_COMM_NCCL_NCCL_STORE_H_
#define MOE_COMM_NCCL_NCCL_STORE_H_

#include <memory>
#include <string>

#include <absl/status/statusor.h>

#include "comm/communicator.h"
#include "comm/nccl/nccl_world.h"

namespace moe {

// Joins the ranks of `meeting` (of MPI, say) to a NCCL world of the same ranks: its rank 0 makes
// the id and broadcasts it. options.rank, size and id are set here. Collective over `meeting`,
// which is not used afterwards. Where rank 0 cannot make an id, every rank returns why.
absl::StatusOr<std::unique_ptr<Communicator>> JoinNcclOver(Communicator& meeting,
                                                           NcclRankOptions options);

// Where rank 0 listens, as all ranks name it.
struct NcclStore {
  // A name, or an IPv4 or IPv6 address, of the machine of rank 0, which listens there and at no
  // other of its addresses: 127.0.0.1, ::1 and localhost are for the ranks of one host. A name is
  // looked up once, by the system's resolver and within its time limits.
  std::string host;
  int port = 0;  // 1 to 65535
  // The same on all ranks, 16 to 256 bytes that nobody can guess: 32 random ones, say. It never
  // travels.
  std::string secret;
};

// Joins options.size ranks: rank 0 makes the id and listens until every other rank has fetched it,
// each once; the others try to connect until rank 0 listens. That wait has the deadline of joining
// (options.join_timeout, else timeout), and so has NCCL's own that follows. options.id is set here.
//
// Both sides prove that they know the secret before rank 0 tells anything. Nothing is encrypted,
// see SECURITY.md. Connections that prove nothing, say too much or nothing at all cost the others
// nothing, and end after 3 s; rank 0 logs the address of who has another secret, and goes on. A
// rank that has come already is refused, and one whose size differs; rank 0 logs that, too, and
// waits for the right one.
//
//   kInvalidArgument     store.host is empty or unknown, store.port or the secret's length out of
//                        range; the size is not rank 0's
//   kUnauthenticated     rank 0 has another secret (not known on rank 0)
//   kAlreadyExists       rank 0 has handed out the id to a rank of this number
//   kUnavailable         rank 0 cannot listen there, with the system's reason
//   kDeadlineExceeded    on rank 0: names the ranks that did not come; elsewhere: rank 0 did not
//                        answer, with its address and why the last try failed
// Where rank 0 cannot make an id, all ranks return why. Else as MakeNcclCommunicator;
// kUnimplemented in a build without NCCL.
absl::StatusOr<std::unique_ptr<Communicator>> JoinNcclByTcp(NcclRankOptions options,
                                                            const NcclStore& store);

}  // namespace moe

#endif  // MOE_COMM_NCCL_NCCL_STORE_H_
