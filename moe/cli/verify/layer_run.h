// Runs a problem's layer in one layout.
#ifndef MOE_MOE_CLI_VERIFY_LAYER_RUN_H_
#define MOE_MOE_CLI_VERIFY_LAYER_RUN_H_

#include <memory>
#include <vector>

#include <absl/status/statusor.h>

#include "comm/communicator.h"
#include "moe/cli/verify/faults.h"
#include "moe/cli/verify/layout.h"
#include "moe/cli/verify/problem.h"
#include "moe/context.h"

namespace moe::verify {

// Everything the layer computes, by Problem::tensors.
struct LayerResult {
  std::vector<std::vector<float>> tensors;
  // Elements of which two ranks hold different bits, although they must be copies.
  int64_t torn_replicas = 0;
};

// Forward and backward of every micro-batch, gradients summed by GradientReducer, as a trainer
// does. Rank r of R takes micro-batches [M r / R, M (r + 1) / R), one a round; every rank runs
// ceil(M / R) rounds. On CUDA it computes on device r modulo their number. Collective over `world`;
// rank 0's result is whole, the others' empty.
absl::StatusOr<LayerResult> RunLayer(const Problem& problem, const Layout& layout,
                                     Numerics numerics, Fault fault, DeviceKind kind,
                                     std::unique_ptr<Communicator> world);

}  // namespace moe::verify

#endif  // MOE_MOE_CLI_VERIFY_LAYER_RUN_H_
