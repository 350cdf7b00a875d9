#include "moe/zero/state_placement.h"

namespace moe {

StatePlacement PlacementOf(ZeroStage zero, OffloadTo optimizer) {
  const auto part_from = [zero](ZeroStage first) {
    return zero >= first ? Holding::kPart : Holding::kWhole;
  };
  return {.weights = part_from(ZeroStage::kWeights),
          .sums = part_from(ZeroStage::kGradients),
          .optimizer = part_from(ZeroStage::kOptimizer),
          .tier = optimizer == OffloadTo::kFile ? StateTier::kFile : StateTier::kDevice};
}

StatePlacement OfEnds(StatePlacement placement) {
  placement.weights = placement.sums = Holding::kWhole;
  return placement;
}

double BytesOfElement(const StatePlacement& placement, DType compute, Numerics numerics,
                      int ranks) {
  const auto kept = [ranks](double bytes, Holding holding) {
    return holding == Holding::kPart ? bytes / ranks : bytes;
  };
  const bool in_file = placement.tier == StateTier::kFile;
  const double optimizer = in_file ? 0 : static_cast<double>(OptimizerBytesOfElement(compute));
  return kept(static_cast<double>(SizeOf(compute)), placement.weights) +
         kept(static_cast<double>(SumBytesOfElement(numerics)), placement.sums) +
         kept(optimizer, placement.optimizer);
}

}  // namespace moe
