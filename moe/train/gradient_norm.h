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

// The same on every rank.
struct GradientNorm {
  double value = 0;        // L2; infinite where a gradient is not finite
  int64_t non_finite = 0;  // partials that are NaN, infinite or off the exact grid (0 in fast)
  // The largest |partial|, of losses that are not scaled; infinite where one is no number (0 in
  // fast).
  float largest = 0;
  // What the exact grid took of the tensor that it took most of, relative to the tensor's norm: at
  // most 1, and sqrt(n) / 2 units for n partials that were rounded, as if their errors were
  // independent (0 in fast).
  double grid_loss = 0;
  std::string grid_loss_tensor;  // its name where that is above kNamedGridLoss

  bool finite() const { return std::isfinite(value); }
  // Gradients are not finite for the exact grid alone: one of a larger unit would hold them.
  bool off_grid() const { return non_finite > 0 && std::isfinite(largest); }
  bool grid_loss_is_named() const { return grid_loss > kNamedGridLoss; }
  // What makes the norm of gradients `most` where it is more, else 1. kInvalidArgument unless
  // most >= 0, kDataLoss unless finite.
  absl::StatusOr<double> ClipFactor(double most) const;
};

// What a rank has of a parameter's gradient.
struct GradientSquares {
  const Parameter* parameter;
  const int64_t* sum;  // of units' squares (kernels/exact_sum/square_sum.h), of the rank's own part
  GridTally tally;     // of the rank's own partials; in fast nothing
};

// The norm of the gradients of all ranks; GradientNorm::largest is the tallies'. `gradients`: of
// every trainable parameter of this rank, in an order that is the same on all ranks that hold it;
// memory of the host. unit: of the exact grid, in which sums' elements are squared; 0: there is
// none. Collective over the world and over the lane of gradients, on which nothing else may be
// under way; blocks the host.
absl::StatusOr<GradientNorm> NormOverRanks(absl::Span<const GradientSquares> gradients, double unit,
                                           const Context& context, const Site& site);

}  // namespace moe

#endif  // MOE_MOE_TRAIN_GRADIENT_NORM_H_
