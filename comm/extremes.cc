#include "comm/extremes.h"

#include "kernels/base/status_macros.h"

namespace moe {

absl::StatusOr<std::vector<Extremes>> ExtremesOverRanks(absl::Span<const int64_t> values,
                                                        Communicator& world, Stream& stream,
                                                        const Site& site) {
  // ~ turns the order round, and has a value for every int64.
  std::vector<int64_t> most(values.begin(), values.end());
  for (const int64_t value : values) most.push_back(~value);
  MOE_RETURN_IF_ERROR(world.AllReduce<int64_t>(absl::MakeSpan(most), ReduceOp::kMax, stream, site));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  std::vector<Extremes> extremes(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    extremes[i] = {.least = ~most[values.size() + i], .most = most[i]};
  }
  return extremes;
}

}  // namespace moe
