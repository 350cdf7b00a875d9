// A module of a model: its passes, and what a trainer needs of it.
#ifndef MOE_MOE_STATE_MODULE_H_
#define MOE_MOE_STATE_MODULE_H_

#include <cstdint>
#include <vector>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/tensor_view.h"
#include "moe/run/pass.h"
#include "moe/state/canonical_tensor.h"
#include "moe/state/parameter.h"

namespace moe {

// State that steps move beside the parameters, and with which a run resumes.
struct ModuleState {
  CanonicalTensor tensor;
  std::vector<double>* values;  // [rows * cols] of the last step; empty before the first
};

// y = f(x): a layer, or a part of a model, x and y [rows, H] of the module's width. What Backward
// needs is kept in the pass's stash, which holds at most one Forward of a module.
template <typename T>
class Module {
 public:
  virtual ~Module() = default;
  // In forward order.
  virtual absl::Span<Parameter* const> parameters() const = 0;
  virtual absl::Status Forward(const Pass& pass, MatrixView<const T> x, MatrixView<T> y) = 0;
  // dx is overwritten. `ready` is called once for every trained parameter, in the same order on all
  // ranks, when its gradient of this pass is complete.
  virtual absl::Status Backward(const Pass& pass, MatrixView<const T> dy, MatrixView<T> dx,
                                GradientReady ready) = 0;
};

// What a trainer needs of a module whose steps it ends, whatever its type.
class TrainedModule {
 public:
  virtual ~TrainedModule() = default;
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
