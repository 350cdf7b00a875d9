// The norm of a step's gradients, and what the exact grid took of them.
#ifndef MOE_MOE_TRAIN_GRADIENT_NORM_H_
#define MOE_MOE_TRAIN_GRADIENT_NORM_H_

#include <cmath>
#include <cstdint>
#include <string>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/exact_sum/grid_tally.h"
#include "moe/run/context.h"
#include "moe/state/parameter.h"

namespace moe {

// A loss to the exact grid above this is named.
constexpr double kNamedGridLoss = 1e-6;

// Values are the same on every rank.
struct GradientNorm {
  double value = 0;        // L2; infinite where a gradient is not finite
  int64_t non_finite = 0;  // partials that are NaN, infinite or off the exact grid (0 in fast)
  // Largest |partial|, as with a loss that is not scaled; infinite where one is NaN or infinite (0
  // in fast).
  float largest = 0;
  // Largest grid loss of a tensor: what the exact grid took, relative to the tensor's norm. At most
  // 1; sqrt(n) / 2 units for n rounded partials, as if their errors were independent (0 in fast).
  double grid_loss = 0;
  std::string grid_loss_tensor;  // tensor of grid_loss, where that is above kNamedGridLoss

  bool finite() const { return std::isfinite(value); }
  // Whether the exact grid alone makes gradients not finite: one with a larger unit would hold
  // them.
  bool off_grid() const { return non_finite > 0 && std::isfinite(largest); }
  bool grid_loss_is_named() const { return grid_loss > kNamedGridLoss; }
  // Factor that scales gradients whose norm is above `most` to that norm; 1 for others.
  // kInvalidArgument unless most >= 0, kDataLoss unless the norm is finite.
  absl::StatusOr<double> ClipFactor(double most) const;
};

// A rank's share of a parameter's gradient.
struct GradientSquares {
  const Parameter* parameter;
  // Sums of units' squares (kernels/exact_sum/square_sum.h) over the rank's own part.
  const int64_t* sum;
  GridTally tally;  // tally of the rank's own partials; empty in fast
};

// Norm of the gradients of all ranks; GradientNorm::largest comes from the tallies. `gradients`:
// one entry for every trainable parameter of this rank, in an order that is the same on all ranks
// that hold it; memory of the host. unit: unit of the exact grid, in which elements of the sums are
// squared; 0 without a grid. Collective over the world and over the lane of gradients, on which
// nothing else may be under way; blocks the host.
absl::StatusOr<GradientNorm> NormOverRanks(absl::Span<const GradientSquares> gradients, double unit,
                                           const Context& context, const Site& site);

}  // namespace moe

#endif  // MOE_MOE_TRAIN_GRADIENT_NORM_H_
