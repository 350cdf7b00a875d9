// The losses of one router call: the router's own and the gate's. Internal to gating/.
#ifndef MOE_GATING_ROUTER_LOSSES_H_
#define MOE_GATING_ROUTER_LOSSES_H_

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "gating/gate.h"
#include "gating/router_config.h"
#include "kernels/base/stream.h"
#include "kernels/base/workspace.h"

namespace moe {

enum class Gradient : bool { kNotWanted, kWanted };

// Losses on the stream's device, once it has passed them. Both empty: no losses are asked for.
struct EnqueuedLosses {
  absl::Span<const double> aux_and_z;  // [2]
  MatrixView<const float> d_logits;    // [T, logit_sets * E]; empty: also if not wanted
};

// Sums over micro-batches; before capacity has touched the selection. Logits and selection live on
// stream.device(), batch, groups and expert_share (see RouterInputs) in host memory. Enqueues;
// `workspace` has memory of the device and is in use until the stream has passed, `host_workspace`
// (which may be the same on a CPU) until this returns. Gates with losses of their own run on CPUs.
absl::StatusOr<EnqueuedLosses> EnqueueLosses(const RouterConfig& config, const Gate& gate,
                                             const GateInput& input, const GateSelection& selection,
                                             absl::Span<const double> expert_share,
                                             Gradient gradient, Workspace& host_workspace,
                                             Workspace& workspace, Stream& stream);

}  // namespace moe

#endif  // MOE_GATING_ROUTER_LOSSES_H_
