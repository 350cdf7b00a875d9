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
          .state_bytes_per_s = gpu.memory_bytes_per_s * reached.memory,
          .layer_s = reached.layer_s,
          .node = {kNodeLatency, gpu.node_bytes_per_s * reached.exchange},
          .network = {kNetworkLatency, gpu.network_bytes_per_s * kNetworkShare},
          .node_ranks = gpu.node_ranks};
}

Machine MachineOfCores(int ranks, int cores, double memory_bytes) {
  const double sharers = std::max(1.0, 1.0 * ranks / cores);
  const double share = std::max(1.0, 1.0 * cores / ranks) / sharers;  // cores of a rank
  return {.name = "CPU",
          .flops = 100e9 * share,
          .half_rows = 80,
          .core_flops = 30e9 * share,
          .memory_bytes = memory_bytes,
          .memory_bytes_per_s = 4e9 * share,
          .state_bytes_per_s = 9e9 * share,
          .node = {.latency_s = 1e-4, .bytes_per_s = 1e9 * share},
          .network = {.latency_s = 2e-4, .bytes_per_s = 1e9 * share},
          .sum_speed = 4,
          .node_ranks = ranks,
          .overlap = 0,
          .sharers = sharers};
}

}  // namespace moe::plan
