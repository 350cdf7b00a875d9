// Entropy of a router's probabilities, read by the host.
#ifndef MOE_GATING_BALANCE_H_
#define MOE_GATING_BALANCE_H_

#include <absl/status/statusor.h>

#include "kernels/base/parallel.h"
#include "kernels/base/workspace.h"
#include "kernels/router_loss/router_loss.h"

namespace moe {

// AddEntropy of scores in host memory, from 0.
absl::StatusOr<double> EntropySum(const RouterScores& scores, Workspace& workspace,
                                  ThreadPool& threads);

}  // namespace moe

#endif  // MOE_GATING_BALANCE_H_
