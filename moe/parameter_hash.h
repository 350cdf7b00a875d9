// What all ranks hold together: hashes of it, its size, and whether copies are equal.
#ifndef MOE_MOE_PARAMETER_HASH_H_
#define MOE_MOE_PARAMETER_HASH_H_

#include <cstdint>

#include <absl/functional/function_ref.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/context.h"
#include "moe/parameter.h"

namespace moe {

// Whether this rank speaks for the parameter: each has one speaker in an expert-parallel group.
bool SpeaksFor(const Parameter& parameter, const Context& context);

// A float32 state of a parameter, in memory of its device; empty: it has none.
using StateOf = absl::FunctionRef<absl::Span<const float>(const Parameter&)>;

// Sum of HashUnits over the canonical tensors of all ranks: equal states give an equal hash at any
// layout. Collective over the expert-parallel group, blocks the host.
absl::StatusOr<uint64_t> HashState(const ParameterStore& store, const Context& context,
                                   StateOf state);
// … of the masters: a frozen matrix of 16 bits has none, and is left out.
absl::StatusOr<uint64_t> HashWeights(const ParameterStore& store, const Context& context);

// kDataLoss, naming a parameter and two ranks, unless all ranks that hold the same parameter hold
// the same bits of its float32 master or, where it has none, of its values. Collective over the
// world, blocks the host; the same status on every rank. Cost: a hash of every master, an
// all-reduce of 16 bytes a parameter.
absl::Status CheckReplicas(const ParameterStore& store, const Context& context);

// Elements of all experts and of the replicated parameters once. Collective, blocks the host.
absl::StatusOr<int64_t> CountParameters(const ParameterStore& store, const Context& context);

}  // namespace moe

#endif  // MOE_MOE_PARAMETER_HASH_H_
