// Origin of a result, for files of results and `moe --version`: the build, the machine, and whether
// others use the machine.
#ifndef MOE_MOE_CLI_BASE_PROVENANCE_H_
#define MOE_MOE_CLI_BASE_PROVENANCE_H_

#include <string>
#include <utility>
#include <vector>

#include <absl/strings/string_view.h>

#include "kernels/base/stream.h"

namespace moe::cli {

// Keys and values in the order in which they are shown. An unknown value is "unknown".
using Facts = std::vector<std::pair<std::string, std::string>>;

// version; commit: 12 digits, "+" behind them where a file that git tracks differed from it,
// "unknown" where the sources were no checkout; build: "optimised" or "with assertions", and the
// compiler; features: "openmpi, CUDA, NCCL", or "none".
Facts BuildFacts();

// BuildFacts, then host; cpu: its model; cores that this process may run on; simd: the target that
// products run on, as kernels name it; gpu, with a CUDA `device` alone: its model; date: of the
// call, UTC, "2026-11-24T19:37:23Z". No environment variables.
Facts Provenance(const Device& device = {});

// The value behind "key: value" of a /proc file; empty if there is none.
std::string ProcValue(const std::string& path, absl::string_view key);
// The first line of a file; empty if there is none.
std::string FirstLine(const std::string& path);

// Use of this machine's cores, by others too, which makes measured times longer and noisier.
struct MachineLoad {
  double average = 0;  // over the last minute, this process' own past included
  int running = 0;     // threads that run or could run now, the caller's included; 0: unknown
  int cores = 0;       // hardware threads of the machine, of which `running` are
};

// Load from the text of /proc/loadavg; MachineLoad() for a text of another form.
MachineLoad ParseLoad(absl::string_view text, int cores);

// The quietest of a few readings of /proc/loadavg within 15 ms: a thread that runs all the time is
// in each.
MachineLoad LookAtLoad();

// "2 other threads run on 2 cores (load average 3.91)" if threads that are not `own` leave fewer
// than min(wanted, cores) cores; otherwise empty.
std::string BusyText(const MachineLoad& load, int own, int wanted);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_PROVENANCE_H_
