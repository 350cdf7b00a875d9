#include "kernels/exact_sum/grad_accumulator.h"

namespace moe {

absl::Status GradAccumulator::Add(
    absl::FunctionRef<absl::Status(absl::Span<float> out, Write write)> compute,
    Workspace& workspace, Stream& stream) const {
  if (!exact()) return compute(float_sum_, NextWrite());
  WorkspaceScope scope(workspace);
  MOE_ASSIGN_OR_RETURN(const absl::Span<float> partial, workspace.Array<float>(size()));
  MOE_RETURN_IF_ERROR(compute(partial, Write::kOverwrite));
  return ExactAccumulate(grid_, partial, exact_sum_, NextWrite(), non_finite_, stream);
}

}  // namespace moe
