// Gathers what layers read of sharded buckets, once each rank has written its own part.
#ifndef MOE_MOE_ZERO_WEIGHT_GATHER_H_
#define MOE_MOE_ZERO_WEIGHT_GATHER_H_

#include <cstddef>
#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "comm/mesh/group_map.h"
#include "kernels/base/stream.h"
#include "moe/run/context.h"
#include "moe/zero/optimizer_state.h"
#include "moe/zero/shard_cut.h"

namespace moe {

// Gathers run on the stream and the lane on which the gradients of the buckets were scattered: on
// all ranks a step's gathers come after its scatters.
class WeightGather {
 public:
  // Borrows all three.
  WeightGather(absl::Span<const ParameterBucket> buckets, const Context& context, Stream& stream)
      : buckets_(buckets), context_(context), stream_(stream) {}
  // Gathers in flight end first.
  ~WeightGather();

  // Sends to every rank that holds bucket b the parts of `block` of the other ranks, as the compute
  // stream has left them by now. Enqueued; collective over the holders, at `site` under a name of
  // its own.
  absl::Status Start(size_t b, const BucketBlock& block, const Site& site);
  // Makes the compute stream wait for what was started.
  absl::Status Finish();

  // Bytes that this rank has sent so far; holders: canonical.
  int64_t bytes_sent(MeshGroup holders) const { return bytes_sent_[holders]; }

 private:
  const absl::Span<const ParameterBucket> buckets_;
  const Context context_;
  Stream& stream_;
  bool in_flight_ = false;  // gathers were started that Finish has not joined
  GroupMap<int64_t> bytes_sent_;
};

}  // namespace moe

#endif  // MOE_MOE_ZERO_WEIGHT_GATHER_H_
