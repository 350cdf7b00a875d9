#include "moe/plan/machine.h"

#include <algorithm>

namespace moe::plan {
namespace {

constexpr GpuData kGpus[] = {
    {"h100", 989e12, 80e9, 3.35e12, 450e9, 50e9, 8},
    {"h800", 989e12, 80e9, 3.35e12, 200e9, 50e9, 8},
    {"b200", 2250e12, 180e9, 8e12, 900e9, 50e9, 8},
    {"gb200", 2450e12, 186e9, 8e12, 900e9, 50e9, 64},
    {"gb300", 2450e12, 279e9, 8e12, 900e9, 100e9, 64},
};

// Of the last tile of 128 rows of each expert, half is empty in the mean.
constexpr double kHalfRows = 64;
constexpr double kCoreShare = 0.5;  // of the peak that fused attention reaches
constexpr double kNetworkShare = 0.85;
constexpr double kNodeLatency = 8e-6, kNetworkLatency = 20e-6;

}  // namespace

absl::Span<const GpuData> Gpus() {
  return kGpus;
}

const GpuData* FindGpu(absl::string_view name) {
  const auto* const found = std::find_if(std::begin(kGpus), std::end(kGpus),
                                         [&](const GpuData& gpu) { return name == gpu.name; });
  return found == std::end(kGpus) ? nullptr : found;
}

Machine MachineOf(const GpuData& gpu, const Efficiency& reached) {
  return {.name = gpu.name,
          .flops = gpu.flops * reached.product,
          .half_rows = kHalfRows,
          .core_flops = gpu.flops * kCoreShare,
          .memory_bytes = gpu.memory_bytes,
          .memory_bytes_per_s = gpu.memory_bytes_per_s * reached.memory,
          .layer_s = reached.layer_s,
          .node = {kNodeLatency, gpu.node_bytes_per_s * reached.exchange},
          .network = {kNetworkLatency, gpu.network_bytes_per_s * kNetworkShare},
          .node_ranks = gpu.node_ranks};
}

}  // namespace moe::plan
