// Ranks on CUDA devices, over NCCL. No <nccl.h> here: a build without NCCL has this header, too.
#ifndef MOE_COMM_NCCL_NCCL_WORLD_H_
#define MOE_COMM_NCCL_NCCL_WORLD_H_

#include <array>
#include <memory>
#include <optional>
#include <string>

#include <absl/status/statusor.h>
#include <absl/time/time.h>

#include "comm/communicator.h"

namespace moe {

class LocalFate;

// What the ranks of one world have in common before they meet: the bytes of an ncclUniqueId, also
// of one that the program made. Whoever knows it can join.
using NcclId = std::array<char, 128>;

// Whether this build has NCCL. The library itself is looked for when a rank is made.
bool HasNccl();

// Sets what the CUDA driver and NCCL read from the environment when they start, except variables
// that are set (docs/nccl.md lists them). Called before the first CUDA call, while no other thread
// reads the environment. Nothing in a build without NCCL.
void PrepareForNccl();

// Version of the library: "2.28.9". kUnimplemented, with the remedy: this build has no NCCL, or the
// library is missing or of a version that is not 2.27 to 2.30 (named).
absl::StatusOr<std::string> NcclVersion();

// A new world's id, made on one rank. Errors: as NcclVersion; kUnimplemented, too, where there is
// no driver.
absl::StatusOr<NcclId> MakeNcclId();

struct NcclRankOptions {
  NcclId id = {};
  int rank = 0;
  int size = 1;
  int device = 0;                              // CUDA ordinal; no two ranks may have the same GPU
  absl::Duration timeout = absl::Seconds(60);  // bound of every wait
  // Bound of the wait for all ranks to join, which takes NCCL seconds; unless given, `timeout`.
  std::optional<absl::Duration> join_timeout = {};
  // Ranks that are threads of one process share one (comm/local/local_group.h): when one of them
  // fails, the waits of all end. nullptr: a world of this rank's own, whose peers time out.
  std::shared_ptr<LocalFate> fate = {};
};

// Collective over the `size` ranks that have `id`; blocks the host until all have come.
//
// Collectives in streams of the rank's device are NCCL's kernels: they return when they are
// enqueued and no host waits. (NCCL connects ranks when they first exchange: that call waits for
// them.) AllToAllV and SendRecv are one group of sends and receives; 16-bit types are summed in
// float32, in a scratch that grows. Collectives in CPU streams, over memory of the host, are copied
// to the device and back through a stream of the communicator's own; they begin with a roll call,
// in which all ranks compare their arguments. In a CUDA stream arguments are not compared, for it
// would cost a host wait: ranks that disagree there meet the deadline, or worse (NCCL leaves it
// undefined).
//
// A thread per rank watches operations under way. When one takes longer than `timeout` from the
// moment its stream reached it, or NCCL reports an error, the world is dead: every communicator of
// this rank is aborted, NCCL's kernels leave the streams, and Stream::Synchronize of every stream
// that a collective went into, or that waited for one of its events, returns the error. What such a
// collective had received is undefined. Messages name all other ranks where NCCL does not report
// for which it waits.
//
// Destroying a communicator waits until its work has ended and its peers come to their own end of
// it, at most `timeout`; a peer that is later costs this communicator alone.
//
// Errors: as NcclVersion; as MakeStream for a device that is not there; kInvalidArgument for a rank
// outside its size and for what NCCL refuses, such as one GPU for two ranks; kDeadlineExceeded when
// a rank does not come; kUnavailable for a lost connection.
absl::StatusOr<std::unique_ptr<Communicator>> MakeNcclCommunicator(const NcclRankOptions& options);

}  // namespace moe

#endif  // MOE_COMM_NCCL_NCCL_WORLD_H_
