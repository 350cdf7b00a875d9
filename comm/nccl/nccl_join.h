// How ranks that are processes come by the id of their world, and meet.
#ifndef MOE_COMM_NCCL_NCCL_JOIN_H_
#define MOE_COMM_NCCL_NCCL_JOIN_H_

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

// A file that all ranks see, through which rank 0 tells the id.
struct NcclIdFile {
  std::string path;
  // The same on all ranks and another for every run (a job's number, a launcher's time): a file
  // that a run before left behind is not taken for this one's. 1 to 256 bytes.
  std::string run_token;
};

// Joins options.size ranks: rank 0 makes the id and writes it, mode 0600, to a file of its own that
// it then links to `file.path`; the others wait for it, at most as long as for all to join. Rank 0
// removes the file once all have joined, or if they do not. options.id is set here.
//
// Whoever reads the file can join the world: it must belong to this user, and nobody else may read
// it.
//   kInvalidArgument     no path, or a token that is empty or too long
//   kAlreadyExists       rank 0 finds a file with this run's token: two runs have one token
//   kPermissionDenied    the file belongs to another user, others may read it, or it is no plain
//                        file
//   kUnavailable         it cannot be written or read
//   kDeadlineExceeded    rank 0 has not written it; says so if a file of another run is there
// else as MakeNcclCommunicator.
absl::StatusOr<std::unique_ptr<Communicator>> JoinNcclByFile(NcclRankOptions options,
                                                             const NcclIdFile& file);

}  // namespace moe

#endif  // MOE_COMM_NCCL_NCCL_JOIN_H_
