#include "moe/phase_clock.h"

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
    case Phase::kNone:
      return "none";
    case Phase::kCount:
      break;
  }
  return "?";
}

void PhaseClock::Add(int phase, int64_t nanoseconds) {
  if (phase < static_cast<int>(Phase::kCount)) {
    seconds_[phase] += static_cast<double>(nanoseconds) * 1e-9;
  }
}

TraceEvent* PhaseClock::Open(const Work& work, const CommPhase& place, const Stream& stream) {
  TraceEvent* const event = recorder_->Open();
  if (event == nullptr) return nullptr;
  event->name = work.name;
  event->category = NameOf(work.phase);
  event->lane = recorder_->LaneOf(&stream);
  event->step = place.step;
  event->layer = place.layer;
  event->chunk = work.chunk;
  event->bucket = work.bucket;
  event->bytes = work.bytes;
  event->kind = static_cast<int32_t>(work.phase);
  return event;
}

// The tasks hold two words, which a task stores without memory of its own.
absl::Status PhaseClock::Start(Phase phase, TraceEvent* event, Stream& stream) {
  if (event != nullptr) {
    return stream.Enqueue([event] {
      event->begin_ns = MonotonicNs();
      return absl::OkStatus();
    });
  }
  if (phase >= Phase::kCount) return absl::OkStatus();
  return stream.Enqueue([this, phase] {
    started_ns_[static_cast<size_t>(phase)] = MonotonicNs();
    return absl::OkStatus();
  });
}

absl::Status PhaseClock::Stop(Phase phase, TraceEvent* event, Stream& stream) {
  if (event != nullptr) {
    return stream.Enqueue([this, event] {
      event->end_ns = MonotonicNs();
      Add(event->kind, event->end_ns - event->begin_ns);
      return absl::OkStatus();
    });
  }
  if (phase >= Phase::kCount) return absl::OkStatus();
  return stream.Enqueue([this, phase] {
    const auto p = static_cast<int>(phase);
    Add(p, MonotonicNs() - started_ns_[p]);
    return absl::OkStatus();
  });
}

}  // namespace moe
