// A process beside the ranks of a host decides which of them reports when a job fails.
#ifndef MOE_COMM_MPI_HOST_WATCH_H_
#define MOE_COMM_MPI_HOST_WATCH_H_

#include <cstdint>
#include <optional>
#include <string>

#include <absl/status/status.h>
#include <absl/time/time.h>

#include "comm/communicator.h"
#include "comm/create.h"
#include "comm/descriptor.h"
#include "comm/hosts.h"
#include "comm/watch/last_places.h"

namespace moe {

// A rank that is killed reports nothing, and its launcher leaves the others no time to (Hydra) or a
// second (Open MPI); ranks that miss a deadline would all report it. The first rank of each host
// therefore starts a process that every rank of the host is connected to: it reports the first rank
// that ends without a message, and the place that it had come to, or lets the first that asks
// report, and ends after the last of them.
//
// With several hosts, each reports one failure at most. When a deadline passes on several, a host
// with ranks that others wait for reports at once and the others in turn, so that the launcher has
// ended the job before theirs, if it still reaches them. A rank that is killed is reported where
// other ranks of its host outlive it, where no launcher ends ranks so, or, alone on its host, where
// the launcher reads its standard error from a pipe and outlives it for 1.5 s: which distinguishes
// it from ranks that the launcher ends because of another host. A rank that leaves with an exit
// code, as the last of its host, is reported after the same time: a library may have ended it
// because of a rank of another host, which is then reported before. Where the process cannot be
// started or reached, ranks are not watched and all may report.
class HostWatch {
 public:
  // Starts the process on the first rank of a host. Constructed before MPI and, best, before other
  // threads: it is a fork. The process reports a death by options.report, as kUnavailable.
  explicit HostWatch(const RunOptions& options);
  // Informs the process that this rank ends in order.
  ~HostWatch();
  HostWatch(const HostWatch&) = delete;
  HostWatch& operator=(const HostWatch&) = delete;

  // Connects this rank, whose host is `host`; `places`: its own, nullptr for unknown. Collective
  // over the world, blocks.
  absl::Status Join(Communicator& world, const LastPlaces* places, uint64_t host = HostId());

  // Whether this rank may report its failure `status`, and what to add: which ranks of its host do
  // not fail, and where they are. nullopt: another rank of the host has reported, and ends the job.
  // Blocks for up to four seconds, with several hosts and kDeadlineExceeded; else for one.
  std::optional<std::string> MaySpeak(const absl::Status& status);

 private:
  void Connect(const std::string& name, int rank);
  std::optional<std::string> Answer(absl::Duration longest);  // "" where none comes

  std::string name_;  // abstract address of the process that this rank started
  // The connection. Its number is below those of MPI's and the launcher's: a process that dies
  // closes its files in order, and the watch must be informed before those that end the other
  // ranks.
  Descriptor peer_;
};

}  // namespace moe

#endif  // MOE_COMM_MPI_HOST_WATCH_H_
