// The sum of one parameter's partial gradients over the micro-batches of a step.
#ifndef MOE_KERNELS_EXACT_SUM_GRAD_ACCUMULATOR_H_
#define MOE_KERNELS_EXACT_SUM_GRAD_ACCUMULATOR_H_

#include <cstdint>
#include <utility>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/stream.h"
#include "kernels/base/workspace.h"
#include "kernels/exact_sum/exact_sum.h"

namespace moe {

// A view of one parameter's range of a gradient bucket: float32 (`fast` numerics) or int64 on an
// exact grid (`layout-invariant`). Copyable; the bucket owns the memory, which is that of the
// streams' device, including `tally`.
//
// `empty`, owned by the bucket as well but in host memory: while it is true, the next partial
// overwrites the sum, which therefore need not be cleared, and sets it to false. Without it, all
// partials are added.
class GradAccumulator {
 public:
  GradAccumulator() = default;
  // Float32: partials are added in the order they come.
  explicit GradAccumulator(absl::Span<float> sum, bool* empty = nullptr)
      : float_sum_(sum), empty_(empty) {}
  // Exact: partials are rounded to the grid once and added as integers. Their tally is added to
  // `tally`, which other parameters may share.
  GradAccumulator(absl::Span<int64_t> sum, const ExactGrid& grid, GridTally* tally,
                  bool* empty = nullptr)
      : exact_sum_(sum), grid_(grid), tally_(tally), empty_(empty) {}

  bool exact() const { return tally_ != nullptr; }
  // For operations that write the sums themselves: they call NextWrite once for each partial that
  // they enqueue, in that order.
  Write NextWrite() const {
    return empty_ != nullptr && std::exchange(*empty_, false) ? Write::kOverwrite : Write::kAdd;
  }
  absl::Span<float> float_sum() const { return float_sum_; }
  absl::Span<int64_t> exact_sum() const { return exact_sum_; }
  const ExactGrid& grid() const { return grid_; }
  GridTally* tally() const { return tally_; }
  int64_t size() const {
    return static_cast<int64_t>(exact() ? exact_sum_.size() : float_sum_.size());
  }

  // Adds one partial. `compute(out, write)` writes (kOverwrite) or adds to (kAdd) all of the
  // parameter's elements in `out`. It is called once; for exact sums `out` is scratch from
  // `workspace`, memory of the stream's device, which later work in the stream may use again once
  // the call returns. On the CPU the stream must run inline. One call is one partial of the
  // numerics contract: in exact accumulation call it once per micro-batch (an expert: once per
  // segment).
  absl::Status Add(absl::FunctionRef<absl::Status(absl::Span<float> out, Write write)> compute,
                   Workspace& workspace, Stream& stream) const {
    if (!exact()) return compute(float_sum_, NextWrite());
    WorkspaceScope scope(workspace);
    MOE_ASSIGN_OR_RETURN(const absl::Span<float> partial, workspace.Array<float>(size()));
    MOE_RETURN_IF_ERROR(compute(partial, Write::kOverwrite));
    return ExactAccumulate(grid_, partial, exact_sum_, NextWrite(), tally_, stream);
  }

 private:
  absl::Span<float> float_sum_;
  absl::Span<int64_t> exact_sum_;
  ExactGrid grid_;
  GridTally* tally_ = nullptr;
  bool* empty_ = nullptr;
};

}  // namespace moe

#endif  // MOE_KERNELS_EXACT_SUM_GRAD_ACCUMULATOR_H_
