#include "moe/zero/weight_gather.h"

#include <numeric>

#include "kernels/base/caught.h"
#include "kernels/base/status_macros.h"
#include "moe/run/phase_clock.h"

namespace moe {

WeightGather::~WeightGather() {
  if (!in_flight_) return;
  context_.mesh->Abort(
      Caught([] { return absl::AbortedError("weights of a step were given up"); }));
  stream_.Synchronize().IgnoreError();
}

absl::Status WeightGather::Start(size_t b, const BucketBlock& block, const Site& site) {
  const ParameterBucket& bucket = buckets_[b];
  Communicator& group = context_.mesh->group(bucket.holders, MeshLane::kGradients);
  in_flight_ = true;
  MOE_ASSIGN_OR_RETURN(const Event written, context_.compute->Record());
  MOE_RETURN_IF_ERROR(stream_.WaitFor(written));
  const auto mine = block.part_bytes.begin() + group.rank();
  const auto own = block.bytes.subspan(std::accumulate(block.part_bytes.begin(), mine, size_t{0}),
                                       static_cast<size_t>(*mine));
  const int64_t bytes = *mine * (group.size() - 1);
  bytes_sent_[bucket.holders] += bytes;
  const bool of_experts = bucket.holders == MeshGroup::kExpertData;
  const Work work = {.phase = Phase::kAllReduce,
                     .name = of_experts ? "gather experts" : "gather weights",
                     .bucket = static_cast<int32_t>(b),
                     .bytes = bytes};
  const Site at = site.Named("weights");
  return Timed(context_, at, work, stream_, [&] {
    return group.AllGatherV<uint8_t>(own, block.bytes, block.part_bytes, stream_, at);
  });
}

absl::Status WeightGather::Finish() {
  MOE_RETURN_IF_ERROR(JoinStreams(*context_.compute, stream_));
  in_flight_ = false;
  return absl::OkStatus();
}

}  // namespace moe
