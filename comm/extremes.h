// The least and the largest of a number over ranks: how they find out whether they agree.
#ifndef MOE_COMM_EXTREMES_H_
#define MOE_COMM_EXTREMES_H_

#include <cstdint>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "kernels/base/stream.h"

namespace moe {

struct Extremes {
  int64_t least = 0;
  int64_t most = 0;
  bool same() const { return least == most; }
};

// Extremes of values[i] over the ranks of `world`, for every i. Values may be any int64 and are in
// memory of the host. Collective, blocks the host; one all-reduce of 16 bytes a value. Errors:
// those of AllReduce.
absl::StatusOr<std::vector<Extremes>> ExtremesOverRanks(absl::Span<const int64_t> values,
                                                        Communicator& world, Stream& stream,
                                                        const Site& site = {});

}  // namespace moe

#endif  // MOE_COMM_EXTREMES_H_
