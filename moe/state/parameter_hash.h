// What all ranks hold together: its size, and whether copies are equal.
#ifndef MOE_MOE_STATE_PARAMETER_HASH_H_
#define MOE_MOE_STATE_PARAMETER_HASH_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/run/context.h"
#include "moe/state/parameter.h"

namespace moe {

// Whether this rank counts the parameter, all of its parts(): in an expert block one rank does.
bool SpeaksFor(const Parameter& parameter, const Context& context);

// kDataLoss, naming a parameter and two ranks, unless all ranks that hold the same parameter hold
// the same bits of it (Parameter::replica). Collective over the world, blocks the host; the same
// status on every rank. Cost: a hash of them all, an all-reduce of 16 bytes a parameter.
absl::Status CheckReplicas(const ParameterStore& store, const Context& context,
                           const Site& site = {});

// Replaces `counts` by their sums over the ranks that together hold a model once: a block of
// experts of every stage. Collective, blocks the host.
absl::Status SumOverModel(absl::Span<int64_t> counts, const Context& context, const Site& site);

// Elements of all experts and of the replicated parameters once. Collective, blocks the host.
absl::StatusOr<int64_t> CountParameters(const ParameterStore& store, const Context& context,
                                        const Site& site = {});

}  // namespace moe

#endif  // MOE_MOE_STATE_PARAMETER_HASH_H_
