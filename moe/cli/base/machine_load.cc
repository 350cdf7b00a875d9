#include "moe/cli/base/machine_load.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <thread>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/str_split.h>
#include <fmt/format.h>
#include <unistd.h>

namespace moe::cli {

MachineLoad ParseLoad(absl::string_view text, int cores) {
  MachineLoad load;
  const std::vector<absl::string_view> words = absl::StrSplit(text, ' ');
  if (words.size() < 4) return load;
  const std::pair<absl::string_view, absl::string_view> threads = absl::StrSplit(words[3], '/');
  if (absl::SimpleAtod(words[0], &load.average) && absl::SimpleAtoi(threads.first, &load.running)) {
    load.cores = cores;
    return load;
  }
  return {};
}

MachineLoad LookAtLoad() {
  const auto look = [] {
    std::ifstream file("/proc/loadavg");
    std::string line;
    std::getline(file, line);
    return ParseLoad(line, static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN)));
  };
  MachineLoad quietest = look();
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    const MachineLoad now = look();
    if (now.running < quietest.running) quietest = now;
  }
  return quietest;
}

std::string BusyText(const MachineLoad& load, int own, int wanted) {
  const int others = load.running - own;
  if (others <= 0 || others + std::min(wanted, load.cores) <= load.cores) return "";
  return fmt::format("{} other thread{} on {} core{} (load average {:.2f})", others,
                     others == 1 ? " runs" : "s run", load.cores, load.cores == 1 ? "" : "s",
                     load.average);
}

}  // namespace moe::cli
