// How much memory a point will need, before it runs, and how much there is.
#ifndef MOE_MOE_CLI_MEASURE_MEMORY_ESTIMATE_H_
#define MOE_MOE_CLI_MEASURE_MEMORY_ESTIMATE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "moe/lm/training_loop.h"
#include "moe/lm/transformer_config.h"
#include "moe/train/trainer.h"

namespace moe::sweep {

// Available memory: the least of what the kernel calls available and what the limits of this
// process's control groups (version 1 or 2, and those above) leave, limit - usage + page cache that
// can be dropped. 0 = unknown. `root` is put before /proc and /sys.
int64_t AvailableMemoryBytes(const std::string& root = "");

// The least limit of this process's control groups; 0 = none.
int64_t MemoryLimitBytes(const std::string& root = "");

// Values that determine the memory of a rank.
struct MemoryShape {
  lm::TransformerConfig model;   // a layer alone: num_layers 1
  TrainerOptions trainer = {};   // its dtype, numerics, mesh and ZeRO stage
  int64_t parameters_total = 0;  // over all experts, replicas counted once
  int64_t tokens = 0;            // T: of a micro-batch, which a rank works on at a time
  // Ranks of the world; they matter with ZeRO, and if it saves.
  int ranks = 1;
  bool saves = false;   // checkpoints: a copy of what the rank writes is kept
  double row_skew = 1;  // rows for experts of the rank with the most / mean over ranks, if known
  bool trained = true;  // false: no optimiser, embedding, attention or output layer (layer mode)
};

// Shape of a rank that trains, one of `ranks`. parameters_total: of the model, over all experts.
MemoryShape ShapeOfTraining(const lm::TrainConfig& config, int64_t parameters_total, int ranks);

// Bytes of one rank.
struct MemoryEstimate {
  // Per parameter of the rank: master weight and gradient (float32; layout-invariant: int64 sums),
  // AdamW's two moments when trained, a compute copy where that is not float32; with ZeRO this
  // rank's part (BytesOfElement), the buffers of rounds where sums are in parts, and two blocks of
  // gathered weights where these are; two pages of optimiser state in a file. Where it saves also
  // 12 bytes for each parameter that this rank writes, which is one of those that hold it, unless
  // state is in a file.
  double state_bytes = 0;
  // What forward keeps for backward over all layers, and the scratch of the widest backward step.
  double activation_bytes = 0;
  // The workspace that holds them: 3/2 of it, the middle of what a growing workspace allocates, all
  // of it to twice that.
  double workspace_bytes = 0;
  // What a run reports as its peak (StepMetrics::peak_bytes).
  double used_bytes() const { return state_bytes + activation_bytes; }
  double total_bytes() const { return state_bytes + workspace_bytes; }
};

// The rank with the most rows for experts has T K max(row_skew, EP ceil(E / EP) / E) of them. A
// router that sends more to some than is known beforehand needs more, at most T EP min(K, ceil(E /
// EP)). Buffers of the all-reduce and of the communicator are left out: a few MiB a rank.
MemoryEstimate EstimateMemory(const MemoryShape& shape);

// Why `ranks` of this machine cannot have so much each, with the estimate: more than `max_mib`, the
// value of a flag, or than `available_bytes` (0: unknown). Empty: they can.
std::string TooBig(const MemoryEstimate& estimate, int ranks, int64_t available_bytes,
                   std::optional<double> max_mib = std::nullopt);

}  // namespace moe::sweep

#endif  // MOE_MOE_CLI_MEASURE_MEMORY_ESTIMATE_H_
