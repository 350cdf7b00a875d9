// Gathers what layers read of sharded buckets from the parts of their ranks.
#ifndef MOE_MOE_ZERO_WEIGHT_GATHER_H_
#define MOE_MOE_ZERO_WEIGHT_GATHER_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "comm/mesh/group_map.h"
#include "kernels/base/stream.h"
#include "moe/run/context.h"
#include "moe/zero/shard_cut.h"

namespace moe {

// Gathers of the lane kGradients come, on its stream, after the scatters of the same step on all
// ranks. Those of the lane kWeights have a stream of their own.
class WeightGather {
 public:
  // Borrows all.
  WeightGather(absl::Span<const ParameterBucket> buckets, const Context& context, MeshLane lane,
               Stream& stream)
      : buckets_(buckets), context_(context), lane_(lane), stream_(stream) {}
  // Gathers in flight end first.
  ~WeightGather();

  // A range of a bucket's bytes that travels at once.
  struct Call {
    size_t bucket = 0;
    absl::Span<const uint8_t> own;  // this rank's part of the range, also where it is one of `all`
    absl::Span<uint8_t> all;        // overwritten by the parts of all ranks
    absl::Span<const int64_t> part_bytes;  // of each rank that holds the bucket
  };
  // Sends to every rank that holds the bucket the parts of the others, as the compute stream has
  // left them by now. Enqueued; collective over the holders, at `site` under a name of its own.
  absl::Status Start(const Call& call, const Site& site);
  // Makes the compute stream wait for what was started.
  absl::Status Finish();

  // Bytes that this rank has sent so far; holders: canonical.
  int64_t bytes_sent(MeshGroup holders) const { return bytes_sent_[holders]; }

 private:
  const absl::Span<const ParameterBucket> buckets_;
  const Context context_;
  const MeshLane lane_;
  Stream& stream_;
  // Gathers were started that Finish has not joined.
  std::optional<SpareMultiprocessors::Use> in_flight_;
  GroupMap<int64_t> bytes_sent_;
};

}  // namespace moe

#endif  // MOE_MOE_ZERO_WEIGHT_GATHER_H_
