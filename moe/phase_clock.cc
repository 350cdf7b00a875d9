#include "moe/phase_clock.h"

#include <algorithm>
#include <utility>

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

absl::StatusOr<StreamStamps*> PhaseClock::StampsOf(Stream& stream) {
  for (const Stamped& stamped : stamped_) {
    if (stamped.stream == &stream) return stamped.stamps.get();
  }
  MOE_ASSIGN_OR_RETURN(auto stamps, MakeStreamStamps(stream));
  stamped_.push_back({&stream, std::move(stamps)});
  return stamped_.back().stamps.get();
}

absl::Status PhaseClock::Collect() {
  for (const Stamped& stamped : stamped_) MOE_RETURN_IF_ERROR(stamped.stamps->Collect());
  for (const Interval& interval : intervals_) {
    if (interval.open) continue;
    Add(static_cast<int>(interval.phase), interval.end_ns - interval.begin_ns);
    if (interval.event == nullptr) continue;
    interval.event->begin_ns = interval.begin_ns;
    interval.event->end_ns = interval.end_ns;
  }
  // No mark is outstanding, so that what is open may move.
  std::erase_if(intervals_, [](const Interval& interval) { return !interval.open; });
  return absl::OkStatus();
}

absl::Status PhaseClock::Reset() {
  MOE_RETURN_IF_ERROR(Collect());
  seconds_ = {};
  return absl::OkStatus();
}

// The tasks hold two words, which a task stores without memory of its own.
absl::Status PhaseClock::Start(Phase phase, TraceEvent* event, Stream& stream) {
  if (event == nullptr && phase >= Phase::kCount) return absl::OkStatus();
  if (IsCuda(stream)) {
    if (intervals_.size() >= kMostIntervals) MOE_RETURN_IF_ERROR(Collect());
    MOE_ASSIGN_OR_RETURN(StreamStamps* const stamps, StampsOf(stream));
    return stamps->Mark(&intervals_.emplace_back(Interval{phase, event}).begin_ns);
  }
  if (event != nullptr) {
    return stream.Enqueue([event] {
      event->begin_ns = MonotonicNs();
      return absl::OkStatus();
    });
  }
  return stream.Enqueue([this, phase] {
    started_ns_[static_cast<size_t>(phase)] = MonotonicNs();
    return absl::OkStatus();
  });
}

absl::Status PhaseClock::Stop(Phase phase, TraceEvent* event, Stream& stream) {
  if (event == nullptr && phase >= Phase::kCount) return absl::OkStatus();
  if (IsCuda(stream)) {
    const auto started = std::find_if(intervals_.rbegin(), intervals_.rend(), [&](const auto& i) {
      return i.open && i.phase == phase && i.event == event;
    });
    MOE_CHECK(started != intervals_.rend());
    started->open = false;
    MOE_ASSIGN_OR_RETURN(StreamStamps* const stamps, StampsOf(stream));
    return stamps->Mark(&started->end_ns);
  }
  if (event != nullptr) {
    return stream.Enqueue([this, event] {
      event->end_ns = MonotonicNs();
      Add(event->kind, event->end_ns - event->begin_ns);
      return absl::OkStatus();
    });
  }
  return stream.Enqueue([this, phase] {
    const auto p = static_cast<int>(phase);
    Add(p, MonotonicNs() - started_ns_[p]);
    return absl::OkStatus();
  });
}

}  // namespace moe
