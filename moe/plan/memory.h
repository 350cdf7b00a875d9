// How much memory a rank will need, before it runs.
#ifndef MOE_MOE_PLAN_MEMORY_H_
#define MOE_MOE_PLAN_MEMORY_H_

#include <cstdint>

#include "moe/lm/training_loop.h"
#include "moe/lm/transformer_config.h"
#include "moe/train/trainer.h"

namespace moe::plan {

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

// Shape of a rank that trains, one of `ranks`.
MemoryShape ShapeOfTraining(const lm::TrainConfig& config, int ranks);

// Bytes of one rank: parameters, gradients and optimiser by what a rank keeps of each
// (BytesOfElement), activations by the workspace's peak.
struct MemoryEstimate {
  double weight_bytes = 0;     // what layers read: the compute copy, in float32 the masters
  double gradient_bytes = 0;   // sums: float32, in layout-invariant numerics int64
  double optimizer_bytes = 0;  // AdamW's moments if trained, and masters beside a compute copy
  // Buffers of rounds where sums are in parts, two blocks of gathered weights where these are, two
  // pages of optimiser state in a file; where it saves, unless state is in a file, 12 bytes for
  // each parameter that this rank writes, which is one of those that hold it.
  double buffer_bytes = 0;
  // What forward keeps for backward over all layers, and the scratch of the widest backward step.
  double activation_bytes = 0;
  // The workspace that holds them: 3/2 of it, the middle of what a growing workspace allocates, all
  // of it to twice that.
  double workspace_bytes = 0;
  double state_bytes() const {
    return weight_bytes + gradient_bytes + optimizer_bytes + buffer_bytes;
  }
  // What a run reports as its peak (StepMetrics::peak_bytes).
  double used_bytes() const { return state_bytes() + activation_bytes; }
  double total_bytes() const { return state_bytes() + workspace_bytes; }
};

// The rank with the most rows for experts has T K max(row_skew, EP ceil(E / EP) / E) of them. A
// router that sends more to some than is known beforehand needs more, at most T EP min(K, ceil(E /
// EP)). Buffers of the all-reduce and of the communicator are left out: a few MiB a rank.
MemoryEstimate EstimateMemory(const MemoryShape& shape);

}  // namespace moe::plan

#endif  // MOE_MOE_PLAN_MEMORY_H_
