#include "moe/zero/state_placement.h"

namespace moe {

StatePlacement PlacementOf(ZeroStage zero) {
  const auto part_from = [zero](ZeroStage first) {
    return zero >= first ? Holding::kPart : Holding::kWhole;
  };
  return {.weights = part_from(ZeroStage::kWeights),
          .sums = part_from(ZeroStage::kGradients),
          .optimizer = part_from(ZeroStage::kOptimizer)};
}

double BytesOfElement(const StatePlacement& placement, DType compute, Numerics numerics,
                      int ranks) {
  const auto kept = [ranks](double bytes, Holding holding) {
    return holding == Holding::kPart ? bytes / ranks : bytes;
  };
  const double optimizer = compute == DType::kFloat32 ? 8 : 12;
  return kept(static_cast<double>(SizeOf(compute)), placement.weights) +
         kept(static_cast<double>(SumBytesOfElement(numerics)), placement.sums) +
         kept(optimizer, placement.optimizer);
}

}  // namespace moe
