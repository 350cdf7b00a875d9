// What capacity does to a selection. Internal to gating/.
#ifndef MOE_GATING_ROUTER_CAPACITY_H_
#define MOE_GATING_ROUTER_CAPACITY_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "gating/gate.h"
#include "gating/router_config.h"
#include "kernels/base/workspace.h"

namespace moe {

// kInvalidArgument if a micro-batch has tokens, but not config.micro_batch_tokens of them.
absl::Status CheckMicroBatchLengths(const RouterConfig& config, const Batch& batch);

// Rows an expert gets per micro-batch when its input is padded, else 0; from the configuration
// alone, so that a rank without tokens agrees with the others.
int64_t PaddedRows(const RouterConfig& config, const GateTraits& traits);

// Marks and unweights the slots that are over capacity, and counts them in *dropped_slots, which
// with the selection and `dropped` [slots] is memory of the stream's device; `groups` and `host`
// are of the host. On a CUDA device, where a gate's Reweigh does nothing, enqueues.
absl::Status ApplyCapacity(const RouterConfig& config, const Gate& gate,
                           const GateSelection& selection, const TokenGroups& groups,
                           absl::Span<uint8_t> dropped, int64_t* dropped_slots, Workspace& host,
                           Workspace& workspace, Stream& stream);

}  // namespace moe

#endif  // MOE_GATING_ROUTER_CAPACITY_H_
