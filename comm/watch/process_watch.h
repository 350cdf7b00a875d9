// The ranks of a process under watch: their fault, where they are, and the files of their flight
// recorders.
#ifndef MOE_COMM_WATCH_PROCESS_WATCH_H_
#define MOE_COMM_WATCH_PROCESS_WATCH_H_

#include <memory>
#include <string>

#include <absl/strings/string_view.h>

#include "comm/watch/rank_watch.h"

namespace moe {

struct ProcessWatchOptions {
  Fault fault = {};
  // Folder of the dumps, flight.rank<R>.jsonl; nothing is written while it does not exist. Empty:
  // no dumps.
  std::string folder = {};
  bool at_end = false;  // whether ranks that have not failed are dumped by the destructor
};

// One per process at a time. On SIGUSR2 it dumps, and logs a line for each rank with its last place
// and the time since then: "rank 1 on host a in experts (layer 0, step 2) for 1.5s".
//
// A dump is one object (rank, ranks, host, pid, reason, recorded, last place, the two clocks of its
// time), then FlightRecorder::Lines. It replaces the file of an earlier one, by renaming.
class ProcessWatch {
 public:
  explicit ProcessWatch(const ProcessWatchOptions& options);
  ~ProcessWatch();  // waits for a dump under way, at most kLongestDump
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  static constexpr absl::Duration kLongestDump = absl::Seconds(1);

  // That of rank `rank` of this process; its first call removes dumps of old runs. Any thread.
  std::shared_ptr<RankWatch> Of(int rank, int ranks);

  // Dumps all ranks of this process, and returns when the files are written or kLongestDump is
  // over: a disk that hangs must not keep a failure from being reported. The first call counts:
  // later ones only wait. Any thread.
  void Dump(absl::string_view reason) noexcept;

 private:
  struct State;  // shared with the thread that writes, which may be left in a call that hangs

  const std::shared_ptr<State> state_;
};

}  // namespace moe

#endif  // MOE_COMM_WATCH_PROCESS_WATCH_H_
