// One order of all parameters of a model, whatever rank holds them.
#ifndef MOE_MOE_CANONICAL_INDEX_H_
#define MOE_MOE_CANONICAL_INDEX_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/context.h"
#include "moe/parameter.h"

namespace moe {

// The parameters of all ranks of an expert-parallel group, sorted by name. The gradient norm walks
// this order, so it does not depend on the layout.
class CanonicalIndex {
 public:
  // Collective over the context's expert-parallel group, blocks the host.
  static absl::StatusOr<CanonicalIndex> Create(const ParameterStore& store, const Context& context);

  int64_t size() const { return static_cast<int64_t>(names_.size()); }
  const std::string& name(int64_t position) const { return names_[position]; }
  // Position of a local parameter in the canonical order.
  int64_t position(const Parameter& parameter) const { return position_[parameter.index()]; }
  // Whether this rank speaks for the parameter: each has one speaker in the group.
  bool speaks_for(const Parameter& parameter) const {
    return first_rank_ || parameter.spec().group == ParameterGroup::kExpert;
  }

 private:
  CanonicalIndex() = default;
  std::vector<std::string> names_;
  std::vector<int64_t> position_;
  bool first_rank_ = false;
};

// A float32 state of a parameter, in memory of its device; empty: it has none.
using StateOf = absl::FunctionRef<absl::Span<const float>(const Parameter&)>;

// Sum of HashUnits over the canonical tensors of all ranks: equal states give an equal hash at any
// layout. Collective over the expert-parallel group, blocks the host.
absl::StatusOr<uint64_t> HashState(const ParameterStore& store, const CanonicalIndex& index,
                                   const Context& context, StateOf state);
// … of the masters.
absl::StatusOr<uint64_t> HashWeights(const ParameterStore& store, const CanonicalIndex& index,
                                     const Context& context);

// kDataLoss, naming a parameter and two ranks, unless all ranks that hold the same parameter hold
// the same bits of its float32 master. Collective over the world, blocks the host; the same status
// on every rank. Cost: a hash of every master, an all-reduce of 16 bytes a parameter.
absl::Status CheckReplicas(const ParameterStore& store, const CanonicalIndex& index,
                           const Context& context);

// Elements of all experts and of the replicated parameters once. Collective, blocks the host.
absl::StatusOr<int64_t> CountParameters(const ParameterStore& store, const CanonicalIndex& index,
                                        const Context& context);

}  // namespace moe

#endif  // MOE_MOE_CANONICAL_INDEX_H_
