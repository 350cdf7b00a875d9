// Which state of a parameter each of the ranks that hold it keeps, and how many bytes that takes.
#ifndef MOE_MOE_ZERO_STATE_PLACEMENT_H_
#define MOE_MOE_ZERO_STATE_PLACEMENT_H_

#include <cstdint>

#include "kernels/base/choice.h"
#include "kernels/base/dtype.h"
#include "moe/run/context.h"

namespace moe {

// What the ranks that hold the same parameters share out (Rajbhandari et al., "ZeRO" (SC '20),
// arXiv:1910.02054). A step has the same bits in layout-invariant numerics; in fast numerics the
// order of a sum depends on it.
enum class ZeroStage : uint8_t {
  kNone,       // every rank keeps all of it
  kOptimizer,  // masters and moments: sums of gradients are scattered, weights gathered
  kGradients,  // ... and the sums, which travel after every round
  kWeights,    // ... and what layers read, which is gathered for each module (weight_source.h)
};
inline constexpr Choice<ZeroStage> kZeroWords[] = {{"0", ZeroStage::kNone},
                                                   {"1", ZeroStage::kOptimizer},
                                                   {"2", ZeroStage::kGradients},
                                                   {"3", ZeroStage::kWeights}};

enum class Holding : uint8_t {
  kWhole,  // every rank that holds the parameter keeps all of it
  kPart,   // each of them keeps its own part alone
};

struct StatePlacement {
  Holding weights = Holding::kWhole;    // what layers read; in parts only where all else is
  Holding sums = Holding::kWhole;       // sums of gradients
  Holding optimizer = Holding::kWhole;  // moments and masters
};

// The one reader of a stage: below it everything asks the placement.
StatePlacement PlacementOf(ZeroStage zero);

// Bytes of an element's summed gradient: float32, on the exact grid int64.
inline int64_t SumBytesOfElement(Numerics numerics) {
  return numerics == Numerics::kLayoutInvariant ? 8 : 4;
}

// Bytes that each of `ranks` ranks keeps, in the mean, of an element of parameters that they all
// hold: what layers read, the sum of its gradients, its moments, its master where that is not what
// layers read. Buffers of rounds and of gathered weights come on top. docs/zero.md
double BytesOfElement(const StatePlacement& placement, DType compute, Numerics numerics, int ranks);

}  // namespace moe

#endif  // MOE_MOE_ZERO_STATE_PLACEMENT_H_
