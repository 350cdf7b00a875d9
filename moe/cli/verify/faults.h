// Faults that `moe verify --inject` plants, to show that it finds them. All of them wrap the
// product from outside: a gate around a gate, a batch or a sum rewritten between two calls, a
// setting that one layout has and the others have not.
#ifndef MOE_MOE_CLI_VERIFY_FAULTS_H_
#define MOE_MOE_CLI_VERIFY_FAULTS_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/layer/moe_layer.h"

namespace moe::verify {

enum class Fault : uint8_t {
  kNone,
  kGradientScaleByEp,  // expert gradients divided by EP
  kRankLocalBalance,   // balance loss over all tokens of a rank instead of the token group
  kShuffledFloatSum,   // gradients of rounds added in float32, in an order that ranks change
  kUnstableTie,        // takes the higher id of two experts with equal scores
  kStaleCount,         // the expert bias moves by the previous step's counts
  kBiasedWeights,      // combine weights from s + b instead of s
  kGroupMaskZero,      // masked experts count as 0 instead of -infinity
  kTreeOrder,          // tensor-parallel sums are trees over the ranks, not over the leaves
  kLostMicroBatch,     // several ranks train on a micro-batch less in every step
};

struct FaultInfo {
  Fault fault;
  const char* name;       // as in --inject
  const char* router;     // a gate in whose results it shows
  bool of_model = false;  // shows in a model, otherwise in one layer
};
absl::Span<const FaultInfo> Faults();

// kInvalidArgument if the fault cannot show in this layer: no expert bias, no groups, no ties.
absl::Status CheckFault(const MoeLayerConfig& config, Fault fault);

// The configuration with the gate wrapped, for faults that are in a gate (registers the wrapper on
// the first call); for other faults the configuration as it is.
absl::StatusOr<MoeLayerConfig> WithFault(const MoeLayerConfig& config, Fault fault);

}  // namespace moe::verify

#endif  // MOE_MOE_CLI_VERIFY_FAULTS_H_
