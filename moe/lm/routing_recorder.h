// What the routers of a rank decided in a step, for moe/io/routing_trace.h.
#ifndef MOE_MOE_LM_ROUTING_RECORDER_H_
#define MOE_MOE_LM_ROUTING_RECORDER_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "kernels/base/stream.h"
#include "moe/io/routing_trace.h"

namespace moe::lm {

class RoutingRecorder {
 public:
  // num_experts: those that are dispatched.
  RoutingRecorder(int moe_layers, int num_experts)
      : moe_layers_(moe_layers),
        num_experts_(num_experts),
        counts_(1 + static_cast<size_t>(moe_layers) * num_experts, 0) {}

  // At the start of a step.
  void Clear() { std::fill(counts_.begin(), counts_.end(), 0); }
  void AddTokens(int64_t tokens) { counts_[0] += tokens; }
  // [MoE layer][E]; Transformer::CountSlots adds to it.
  absl::Span<int64_t> slots() { return absl::MakeSpan(counts_).subspan(1); }

  // Of the step, on rank 0 a record for each MoE layer, elsewhere none. Collective over `world`,
  // blocks the host: 8 (1 + layers E) bytes go to rank 0.
  absl::StatusOr<std::vector<RoutingTraceRecord>> Gather(int64_t step, Communicator& world,
                                                         Stream& stream) const;

 private:
  const int moe_layers_, num_experts_;
  std::vector<int64_t> counts_;  // tokens, then slots
};

}  // namespace moe::lm

#endif  // MOE_MOE_LM_ROUTING_RECORDER_H_
