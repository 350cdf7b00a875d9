// What of a machine the time of a step depends on: published data of GPUs, or measured constants.
#ifndef MOE_MOE_PLAN_MACHINE_H_
#define MOE_MOE_PLAN_MACHINE_H_

#include <string>

#include <absl/strings/string_view.h>
#include <absl/types/span.h>

namespace moe::plan {

// One way of a rank's connection to others: a call of n bytes takes latency_s + n / bytes_per_s.
struct Link {
  double latency_s = 0;
  double bytes_per_s = 0;
};

// One rank's part of it.
struct Machine {
  std::string name;
  double flops = 0;               // per second, of dense products at the limit of many rows
  double half_rows = 0;           // rows of a product at which half of `flops` is reached
  double core_flops = 0;          // per second, of attention's scores and their products by values
  double memory_bytes = 0;        // capacity
  double memory_bytes_per_s = 0;  // reached by what is bound by memory
  double state_bytes_per_s = 0;   // of the optimiser's state, read and written
  double layer_s = 0;    // of each layer and micro-batch, whatever their size: launches, host waits
  Link node, network;    // to ranks of the same node, and of others
  double sum_speed = 1;  // bytes of sums that links move while they move one of rows
  int node_ranks = 8;
  // Share of the gradients' exchange that can run beside backward: 0 where ranks share cores.
  double overlap = 1;
  // Ranks for each core, at least 1. All rates are of a rank while all compute; while some wait,
  // the others have their cores.
  double sharers = 1;

  // Share of a rank's waits for others that these use, if they share its core: an exchange also
  // holds up all of its ranks while the last one computes. Measured (docs/plan.md).
  static constexpr double kHiddenWaits = 0.5;

  // Seconds of a product of so many operations whose matrix meets `rows` rows.
  double ProductSeconds(double operations, double rows) const {
    return rows > 0 ? operations / flops * (1 + half_rows / rows) : 0;
  }
};

// Shares of published peaks that are reached, and the constant of a layer. The defaults are a fit
// to published steps (docs/plan.md).
struct Efficiency {
  double product = 0.6;
  double exchange = 0.6;
  double memory = 0.6;
  double layer_s = 3e-4;
};

// Published figures of a GPU: dense bfloat16 operations, memory, a link within a node and one
// between nodes, each in one direction. Sources: NVIDIA's data sheets of H100 SXM and GB200/GB300
// NVL72; H800's links as in DeepSeek-V3's report (arXiv:2412.19437), section 3.1.
struct GpuData {
  const char* name;
  double flops, memory_bytes, memory_bytes_per_s, node_bytes_per_s, network_bytes_per_s;
  int node_ranks;
};
absl::Span<const GpuData> Gpus();
const GpuData* FindGpu(absl::string_view name);  // nullptr: none

Machine MachineOf(const GpuData& gpu, const Efficiency& reached = {});

// `ranks` that share `cores` of a CPU and its memory: the middle of what short runs measured
// (docs/plan.md), good for an order of layouts and no more.
Machine MachineOfCores(int ranks, int cores, double memory_bytes);

}  // namespace moe::plan

#endif  // MOE_MOE_PLAN_MACHINE_H_
