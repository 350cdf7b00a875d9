// Which state of a parameter each of the ranks that hold it keeps, and how many bytes that takes.
#ifndef MOE_MOE_ZERO_STATE_PLACEMENT_H_
#define MOE_MOE_ZERO_STATE_PLACEMENT_H_

#include <cstdint>
#include <string>

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

// Where a rank keeps the moments, and the masters that layers do not read.
enum class StateTier : uint8_t {
  kDevice,  // memory of the device that computes
  kFile,    // a scratch file, with two buffers in memory (moe/zero/offload.h)
};

struct StateFileOptions {
  std::string folder = {};                 // an existing one, with room for the state
  int64_t page_bytes = int64_t{64} << 20;  // of state that is read and written at once
};

// What leaves the memory of the device that computes. A step has the same bits in any case.
enum class OffloadTo : uint8_t {
  kNone,  // nothing
  kHost,  // optimiser state, to memory of the host
  kFile,  // optimiser state, to a file
};
inline constexpr Choice<OffloadTo> kOffloadWords[] = {{"none", OffloadTo::kNone},
                                                      {"optimizer", OffloadTo::kHost},
                                                      {"optimizer:file", OffloadTo::kFile}};

struct Offload {
  OffloadTo optimizer = OffloadTo::kNone;
  StateFileOptions file = {};  // for kFile
};

enum class Holding : uint8_t {
  kWhole,  // every rank that holds the parameter keeps all of it
  kPart,   // each of them keeps its own part alone
};

struct StatePlacement {
  Holding weights = Holding::kWhole;    // what layers read; in parts only where all else is
  Holding sums = Holding::kWhole;       // sums of gradients
  Holding optimizer = Holding::kWhole;  // moments and masters
  StateTier tier = StateTier::kDevice;  // tier of the part that is kept of moments and masters
};

// The one reader of a stage and of what is offloaded: below it everything asks the placement. The
// host's memory is taken as the device's own (Trainer::Create).
StatePlacement PlacementOf(ZeroStage zero, OffloadTo optimizer = OffloadTo::kNone);
// The placement of what both ends of a pipeline hold (MeshGroup::kEnds): its weights and sums are
// whole, since the two stages use them at other times and would wait for each other in every round.
StatePlacement OfEnds(StatePlacement placement);

// Bytes of an element's summed gradient: float32, on the exact grid int64.
inline int64_t SumBytesOfElement(Numerics numerics) {
  return numerics == Numerics::kLayoutInvariant ? 8 : 4;
}

// Moments of an element, and its master where that is not what layers read: bytes.
inline int64_t OptimizerBytesOfElement(DType compute) {
  return compute == DType::kFloat32 ? 8 : 12;
}

// Bytes of memory that each of `ranks` ranks keeps, in the mean, of an element of parameters that
// they all hold: what layers read, the sum of its gradients, and OptimizerBytesOfElement unless
// that is in a file. Buffers of rounds, gathered weights and pages come on top. docs/zero.md
double BytesOfElement(const StatePlacement& placement, DType compute, Numerics numerics, int ranks);

}  // namespace moe

#endif  // MOE_MOE_ZERO_STATE_PLACEMENT_H_
