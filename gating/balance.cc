#include "gating/balance.h"

#include "kernels/base/status_macros.h"

namespace moe {

absl::StatusOr<double> EntropySum(const RouterScores& scores, Workspace& workspace,
                                  ThreadPool& threads) {
  const WorkspaceScope scope(workspace);
  double sum = 0;
  MOE_RETURN_IF_ERROR(AddEntropy(scores, &sum, workspace, *MakeInlineStream(&threads)));
  return sum;
}

}  // namespace moe
