#include "moe/cli/base/provenance.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <thread>

#include <absl/strings/ascii.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <absl/time/clock.h>
#include <absl/time/time.h>
#include <fmt/format.h>
#include <unistd.h>

#include "comm/hosts.h"
#include "comm/world_plan.h"
#include "kernels/base/cuda_devices.h"
#include "kernels/base/machine_limits.h"
#include "kernels/grouped_gemm/simd_targets.h"
#include "moe_commit.h"

namespace moe::cli {
namespace {

#ifdef NDEBUG
constexpr char kBuild[] = "optimised";
#else
constexpr char kBuild[] = "with assertions";
#endif

std::string Features() {
  const std::string features = absl::StrCat(
      LinkedMpi(), LinkedMpi().empty() || MOE_FEATURES[0] == 0 ? "" : ", ", MOE_FEATURES);
  return features.empty() ? "none" : features;
}

// Result of `read` on a file; empty if the file cannot be read. Lack of memory is no empty file:
// std::bad_alloc is passed on.
template <typename Read>
std::string FromFile(const std::string& path, const Read& read) {
  std::ifstream file(path);
  file.exceptions(std::ios::badbit);
  try {
    return read(file);
  } catch (const std::ios_base::failure&) {
    return "";
  }
}

}  // namespace

std::string ProcValue(const std::string& path, absl::string_view key) {
  return FromFile(path, [&](std::istream& file) -> std::string {
    for (std::string line; std::getline(file, line);) {
      const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 1));
      if (parts.size() == 2 && absl::StripAsciiWhitespace(parts[0]) == key) {
        return std::string(absl::StripAsciiWhitespace(parts[1]));
      }
    }
    return "";
  });
}

std::string FirstLine(const std::string& path) {
  return FromFile(path, [](std::istream& file) {
    std::string line;
    std::getline(file, line);
    return line;
  });
}

Facts BuildFacts() {
  return {{"version", MOE_VERSION},
          {"commit", MOE_COMMIT},
          {"build", absl::StrCat(kBuild, ", compiler ", __VERSION__)},
          {"features", Features()}};
}

Facts Provenance(const Device& device) {
  Facts facts = BuildFacts();
  const auto add = [&](const char* key, std::string value) {
    facts.emplace_back(key, value.empty() ? "unknown" : std::move(value));
  };
  add("host", HostName());
  add("cpu", ProcValue("/proc/cpuinfo", "model name"));
  add("cores", absl::StrCat(UsableCpus()));
  add("simd", gemm::SimdTargets().front());
  if (device.kind == DeviceKind::kCuda) {
    const absl::StatusOr<CudaDevice> gpu = CudaDeviceAt(device.index);
    add("gpu", gpu.ok() ? gpu->name : "");
  }
  add("date", absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone()));
  return facts;
}

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
    return ParseLoad(FirstLine("/proc/loadavg"), static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN)));
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
