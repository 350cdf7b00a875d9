// The losses of one router call: the router's own and the gate's. Internal to gating/.
#ifndef MOE_GATING_ROUTER_LOSSES_H_
#define MOE_GATING_ROUTER_LOSSES_H_

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "gating/gate.h"
#include "gating/router_config.h"
#include "kernels/base/workspace.h"

namespace moe {

struct RouterLosses {
  double aux = 0;
  double z = 0;
  MatrixView<const float> d_logits;  // [T, logit_sets * E]; empty = no losses, or not wanted
};

enum class Gradient : bool { kNotWanted, kWanted };

// Sums over micro-batches; before capacity has touched the selection. expert_share: see
// RouterInputs. All in `workspace`; host loops.
absl::StatusOr<RouterLosses> ComputeLosses(const RouterConfig& config, const Gate& gate,
                                           const GateInput& input, const GateSelection& selection,
                                           absl::Span<const double> expert_share, Gradient gradient,
                                           Workspace& workspace);

}  // namespace moe

#endif  // MOE_GATING_ROUTER_LOSSES_H_
