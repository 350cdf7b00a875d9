// The losses of one router call: the router's own and the gate's. Internal to gating/.
#ifndef MOE_GATING_ROUTER_LOSSES_H_
#define MOE_GATING_ROUTER_LOSSES_H_

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "gating/gate.h"
#include "gating/router_config.h"
#include "gating/router_stats.h"
#include "kernels/base/stream.h"
#include "kernels/base/workspace.h"

namespace moe {

enum class Gradient : bool { kNotWanted, kWanted };

// Adds sums over micro-batches to the losses of `measures`; before capacity has touched the
// selection. Returns their gradient, [T, logit_sets * E]; empty: not wanted, or no losses. Logits,
// selection and measures live on stream.device(), batch, groups and expert_share (see RouterInputs)
// in host memory. Enqueues; `workspace` has memory of the device and is in use until the stream has
// passed, `host_workspace` (which may be the same on a CPU) until this returns. Gates with losses
// of their own run on CPUs.
absl::StatusOr<MatrixView<const float>> EnqueueLosses(
    const RouterConfig& config, const Gate& gate, const GateInput& input,
    const GateSelection& selection, absl::Span<const double> expert_share, Gradient gradient,
    RouterMeasures* measures, Workspace& host_workspace, Workspace& workspace, Stream& stream);

}  // namespace moe

#endif  // MOE_GATING_ROUTER_LOSSES_H_
