// A module of a model: what a trainer needs of it, whatever its type.
#ifndef MOE_MOE_STATE_MODULE_H_
#define MOE_MOE_STATE_MODULE_H_

#include <cstdint>
#include <vector>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "moe/state/canonical_tensor.h"

namespace moe {

// State that steps move beside the parameters, and with which a run resumes.
struct ModuleState {
  CanonicalTensor tensor;
  std::vector<double>* values;  // [rows * cols] of the last step; empty before the first
};

class ModuleBase {
 public:
  virtual ~ModuleBase() = default;
  virtual std::vector<ModuleState> states() { return {}; }
  // Integers of a step whose sums over all ranks EndStep is given: as many on every rank.
  virtual int64_t count_size() const = 0;
  // Overwrites counts [count_size()] with this rank's of the step so far, for which it waits.
  virtual absl::Status TakeCounts(absl::Span<int64_t> counts) = 0;
  // Before gradients are summed: kFailedPrecondition names a pass that is missing.
  virtual absl::Status CheckPasses() const { return absl::OkStatus(); }
  // Ends an optimiser step, never an evaluation. counts [count_size()] are the sums.
  virtual absl::Status EndStep(absl::Span<const int64_t> counts) = 0;
};

}  // namespace moe

#endif  // MOE_MOE_STATE_MODULE_H_
