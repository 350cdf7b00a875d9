#include "moe/zero/weight_gather.h"

#include "kernels/base/caught.h"
#include "kernels/base/status_macros.h"
#include "moe/run/phase_clock.h"

namespace moe {

WeightGather::~WeightGather() {
  if (!in_flight_.has_value()) return;
  context_.mesh->Abort(
      Caught([] { return absl::AbortedError("weights of a step were given up"); }));
  stream_.Synchronize().IgnoreError();
}

absl::Status WeightGather::Start(const Call& call, const Site& site) {
  const ParameterBucket& bucket = buckets_[call.bucket];
  Communicator& group = context_.mesh->group(bucket.holders, lane_);
  in_flight_.emplace(context_.gemm.spare);
  MOE_ASSIGN_OR_RETURN(const Event written, context_.compute->Record());
  MOE_RETURN_IF_ERROR(stream_.WaitFor(written));
  const int64_t bytes = std::ssize(call.own) * (group.size() - 1);
  bytes_sent_[bucket.holders] += bytes;
  const bool of_experts = HoldExperts(bucket.holders);
  // Scatters and gathers of gradients' stream are one phase; a phase has one stream at a time.
  const Work work = {.phase = lane_ == MeshLane::kGradients ? Phase::kAllReduce : Phase::kNone,
                     .name = of_experts ? "gather experts" : "gather weights",
                     .bucket = static_cast<int32_t>(call.bucket),
                     .bytes = bytes};
  const Site at = site.Named("weights");
  return Timed(context_, at, work, stream_, [&] {
    return group.AllGatherV<uint8_t>(call.own, call.all, call.part_bytes, stream_, at);
  });
}

absl::Status WeightGather::Finish() {
  MOE_RETURN_IF_ERROR(JoinStreams(*context_.compute, stream_));
  in_flight_.reset();
  return absl::OkStatus();
}

}  // namespace moe
