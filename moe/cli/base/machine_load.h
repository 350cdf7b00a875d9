// Whether others use this machine's cores, which makes measured times longer and noisier.
#ifndef MOE_MOE_CLI_BASE_MACHINE_LOAD_H_
#define MOE_MOE_CLI_BASE_MACHINE_LOAD_H_

#include <string>

#include <absl/strings/string_view.h>

namespace moe::cli {

struct MachineLoad {
  double average = 0;  // over the last minute, this process' own past included
  int running = 0;     // threads that run or could run now, the caller's included; 0: unknown
  int cores = 0;       // hardware threads of the machine, of which `running` are
};

// Of the text of /proc/loadavg; nothing is known of other texts.
MachineLoad ParseLoad(absl::string_view text, int cores);

// The quietest of a few looks at /proc/loadavg within 15 ms: what runs all the time is in each.
MachineLoad LookAtLoad();

// "2 other threads run on 2 cores (load average 3.91)" where those that are not `own` leave less
// than min(wanted, cores) cores; else empty.
std::string BusyText(const MachineLoad& load, int own, int wanted);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_MACHINE_LOAD_H_
