#include "moe/context.h"

#include "kernels/base/status_macros.h"

namespace moe {

const char* NameOf(Phase phase) {
  switch (phase) {
    case Phase::kGate:
      return "gate";
    case Phase::kPlan:
      return "plan";
    case Phase::kDispatch:
      return "dispatch";
    case Phase::kExpert:
      return "expert";
    case Phase::kCombine:
      return "combine";
    case Phase::kDense:
      return "dense";
    case Phase::kAllReduce:
      return "all-reduce";
    case Phase::kOptimizer:
      return "optimiser";
    case Phase::kCount:
      break;
  }
  return "?";
}

absl::Status PhaseClock::Start(Phase phase, Stream& stream) {
  return stream.Enqueue([this, phase] {
    started_[static_cast<size_t>(phase)] = Clock::now();
    return absl::OkStatus();
  });
}

absl::Status PhaseClock::Stop(Phase phase, Stream& stream) {
  return stream.Enqueue([this, phase] {
    const std::chrono::duration<double> took = Clock::now() - started_[static_cast<size_t>(phase)];
    seconds_[static_cast<size_t>(phase)] += took.count();
    return absl::OkStatus();
  });
}

absl::Status JoinStreams(Stream& later, Stream& earlier) {
  if (&later == &earlier) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(const Event done, earlier.Record());
  return later.WaitFor(done);
}

}  // namespace moe
