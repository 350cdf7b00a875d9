// Measurements of a training loop in a step, as integers: their sums over ranks are exact, so
// metrics have the same bits at any layout.
#ifndef MOE_MOE_LM_STEP_TOTALS_H_
#define MOE_MOE_LM_STEP_TOTALS_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "comm/mesh/mesh.h"
#include "gating/router_stats.h"
#include "kernels/base/stream.h"
#include "moe/checkpoint/checkpointer.h"
#include "moe/io/routing_trace.h"

namespace moe::lm {

// Sums over the micro-batches of this rank; over all ranks once fields() are summed. Real values
// are rounded to multiples of 2^-30 as they are added, losses row by row, so any rank may add a
// row.
class StepTotals {
 public:
  explicit StepTotals(int moe_layers) : moe_layers_(moe_layers) {}

  void Clear() { fields_ = {}; }
  // Fields to be summed over ranks (Trainer::SumOverRanks).
  absl::Span<int64_t> fields() { return absl::MakeSpan(fields_); }
  // Add a micro-batch of at least one token: the losses of those of its tokens that have one, where
  // the output layer is, and the statistics of routers, of each where it is.
  void AddLosses(absl::Span<const float> row_loss, int64_t tokens);
  void AddRouters(absl::Span<const RouterStats> routers);
  // Sets this rank's votes; votes() returns their sums.
  void Vote(const CheckpointVotes& votes) {
    fields_[kStop] = votes.stop;
    fields_[kWriting] = votes.writing;
  }
  CheckpointVotes votes() const { return {.stop = fields_[kStop], .writing = fields_[kWriting]}; }

  int64_t tokens() const { return fields_[kTokens]; }
  int64_t slots() const { return fields_[kSlots]; }
  int64_t dropped() const { return fields_[kDropped]; }
  // Number of losses and router measures that are not finite.
  int64_t non_finite() const { return fields_[kNonFinite]; }
  // Mean of all losses; with as many of each micro-batch also the mean of their means, whose
  // gradient a step takes. 0 without any.
  float MeanLoss() const;
  // Sum over MoE layers of the load-balance loss, mean over micro-batches.
  double MeanAuxLoss(int64_t micro_batches) const;
  // Entropy of a token's router probabilities, nats: mean over tokens and MoE layers.
  double MeanEntropy() const;

 private:
  enum Field : size_t {
    kLoss,
    kLosses,
    kTokens,
    kAuxLoss,
    kEntropy,
    kSlots,
    kDropped,
    kNonFinite,
    kStop,
    kWriting,
    kFields
  };

  // limit: largest |value| in units; larger values count as not finite.
  void AddReal(Field field, double value, double limit);

  const int moe_layers_;
  std::array<int64_t, kFields> fields_ = {};
};

// Decisions of a rank's routers in a step, for moe/io/routing_trace.h.
class RoutingRecorder {
 public:
  // num_experts: number of experts with dispatch, identity experts apart.
  RoutingRecorder(int moe_layers, int num_experts)
      : moe_layers_(moe_layers),
        num_experts_(num_experts),
        counts_(1 + static_cast<size_t>(moe_layers) * num_experts, 0) {}

  // To be called at the start of a step.
  void Clear() { std::fill(counts_.begin(), counts_.end(), 0); }
  void AddTokens(int64_t tokens) { counts_[0] += tokens; }
  // [MoE layer][E]; Stage::CountSlots adds to it.
  absl::Span<int64_t> slots() { return absl::MakeSpan(counts_).subspan(1); }

  // Records of the step, one for each MoE layer, on rank 0; none on other ranks. `stage_of`: the
  // pipeline stage of each MoE layer, whose ranks a record names, from 0. Collective over the
  // world, blocks the host: each rank sends 8 (1 + layers E) bytes to rank 0.
  absl::StatusOr<std::vector<RoutingTraceRecord>> Gather(int64_t step,
                                                         absl::Span<const int> stage_of, Mesh& mesh,
                                                         Stream& stream) const;

 private:
  const int moe_layers_, num_experts_;
  std::vector<int64_t> counts_;  // tokens, then slots
};

// (max c - mean c) / mean c of the worst layer, over the first `experts` entries of each layer's
// load (identity experts come after them); 0 without tokens.
double MaxViolation(const std::vector<std::vector<int64_t>>& expert_load, int32_t experts);
// Number of experts that no token chose, over all layers.
int DeadExperts(const std::vector<std::vector<int64_t>>& expert_load, int32_t experts);

}  // namespace moe::lm

#endif  // MOE_MOE_LM_STEP_TOTALS_H_
