#include "moe/cli/base/provenance.h"

#include <array>
#include <fstream>
#include <thread>

#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <absl/time/clock.h>
#include <absl/time/time.h>
#include <unistd.h>

#include "comm/world_plan.h"
#include "kernels/base/cuda_devices.h"
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

std::string HostName() {
  std::array<char, 256> name = {};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

}  // namespace

std::string ProcValue(const std::string& path, absl::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 1));
    if (parts.size() == 2 && absl::StripAsciiWhitespace(parts[0]) == key) {
      return std::string(absl::StripAsciiWhitespace(parts[1]));
    }
  }
  return "";
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
  add("cores", absl::StrCat(std::thread::hardware_concurrency()));
  add("simd", gemm::SimdTargets().front());
  if (device.kind == DeviceKind::kCuda) {
    const absl::StatusOr<CudaDevice> gpu = CudaDeviceAt(device.index);
    add("gpu", gpu.ok() ? gpu->name : "");
  }
  add("date", absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone()));
  return facts;
}

}  // namespace moe::cli
