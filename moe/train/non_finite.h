// Names what made a step's numbers not finite, for the message with which the run ends.
#ifndef MOE_MOE_TRAIN_NON_FINITE_H_
#define MOE_MOE_TRAIN_NON_FINITE_H_

#include <cstdint>
#include <string>

#include <absl/status/statusor.h>

#include "comm/communicator.h"
#include "kernels/base/stream.h"
#include "moe/state/parameter.h"

namespace moe {

// What a rank knows of the first number that was not finite.
struct NonFiniteReport {
  int64_t order;     // FirstNonFinite::kNone: nothing
  std::string text;  // of the rank's own
};

// The report with the smallest order, the same on every rank; of equal ones the first rank's.
// Collective over the world, blocks the host.
absl::StatusOr<NonFiniteReport> FirstOverRanks(NonFiniteReport mine, Communicator& world,
                                               Stream& stream, const Site& site);

// `status`, of a forward that met a value that is not finite; with the first weight of this rank
// that is not finite, if one is. Weights in memory of the host; with ZeRO-3 none.
absl::Status WithWeight(const absl::Status& status, const ParameterStore& store,
                        const Context& context);

}  // namespace moe

#endif  // MOE_MOE_TRAIN_NON_FINITE_H_
