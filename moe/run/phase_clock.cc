#include "moe/run/phase_clock.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "kernels/base/status_macros.h"

namespace moe {

const char* NameOf(Phase phase) {
  constexpr const char* kNames[] = {"gate",      "plan",  "dispatch", "expert",     "combine",
                                    "attention", "dense", "output",   "all-reduce", "optimiser",
                                    "pipeline",  "?",     "none"};
  return phase <= Phase::kNone ? kNames[static_cast<size_t>(phase)] : "?";
}

namespace {

// For what collectives say of themselves: those that do run on the host, which a CUDA stream's
// caller waits for.
template <typename Task>
absl::Status InOrder(Stream& stream, Task task) {
  return IsCuda(stream) ? task() : stream.Enqueue(task);
}

}  // namespace

double PhaseClock::seconds(Phase phase) const {
  double sum = 0;
  for (const OnStream& on : streams_) sum += on.seconds[static_cast<size_t>(phase)];
  return sum;
}

void PhaseClock::Add(Phase phase, int64_t nanoseconds, OnStream& on) {
  if (phase == Phase::kMeeting) meetings_ns_.push_back(nanoseconds);
  if (phase != Phase::kNone) {
    on.seconds[static_cast<size_t>(phase)] += static_cast<double>(nanoseconds) * 1e-9;
  }
}

TraceEvent* PhaseClock::Open(const Work& work, const Site& site, const Stream& stream) {
  TraceEvent* const event = recorder_->Open();
  if (event == nullptr) return nullptr;
  event->name = work.name;
  event->category = NameOf(work.phase);
  event->lane = recorder_->LaneOf(&stream);
  event->step = site.step;
  event->layer = site.layer;
  event->call = site.round;
  event->chunk = work.chunk;
  event->bucket = work.bucket;
  event->bytes = work.bytes;
  return event;
}

absl::StatusOr<PhaseClock::OnStream*> PhaseClock::OnStreamOf(Stream& stream) {
  for (OnStream& on : streams_) {
    if (on.stream == &stream) return &on;
  }
  std::unique_ptr<StreamStamps> stamps;
  if (IsCuda(stream)) {
    MOE_ASSIGN_OR_RETURN(stamps, MakeStreamStamps(stream));
  }
  return &streams_.emplace_back(OnStream{&stream, std::move(stamps)});
}

absl::Status PhaseClock::Collect() {
  for (const OnStream& on : streams_) {
    if (on.stamps != nullptr) MOE_RETURN_IF_ERROR(on.stamps->Collect());
  }
  for (const Interval& interval : intervals_) {
    if (interval.open) continue;
    Add(interval.phase, interval.end_ns - interval.begin_ns, *interval.on);
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
  for (OnStream& on : streams_) on.seconds = {};
  meetings_ns_.clear();
  lingered_ns_.clear();
  return absl::OkStatus();
}

absl::Status PhaseClock::Start(ExchangePart part, const Communicator& group, Stream& exchange) {
  if (!keeps_meetings_) return absl::OkStatus();
  if (part == ExchangePart::kCopy) return Start(Phase::kCopy, nullptr, exchange);
  MOE_RETURN_IF_ERROR(InOrder(exchange, [this, &group] {
    lingered_ns_.push_back(-group.lingered_ns());
    return absl::OkStatus();
  }));
  return Start(Phase::kMeeting, nullptr, exchange);
}

absl::Status PhaseClock::Stop(ExchangePart part, const Communicator& group, Stream& exchange) {
  if (!keeps_meetings_) return absl::OkStatus();
  if (part == ExchangePart::kCopy) return Stop(Phase::kCopy, nullptr, exchange);
  MOE_RETURN_IF_ERROR(Stop(Phase::kMeeting, nullptr, exchange));
  return InOrder(exchange, [this, &group] {
    lingered_ns_.back() += group.lingered_ns();
    return absl::OkStatus();
  });
}

absl::StatusOr<ExchangeSeconds> PhaseClock::SplitExchanges(Communicator& group, Stream& stream,
                                                           const Site& site) {
  MOE_RETURN_IF_ERROR(Collect());
  const int64_t met_ns = std::accumulate(meetings_ns_.begin(), meetings_ns_.end(), int64_t{0});
  // The shortest time of a meeting is the largest of these.
  std::transform(lingered_ns_.begin(), lingered_ns_.end(), meetings_ns_.begin(),
                 meetings_ns_.begin(), std::minus<>());
  MOE_RETURN_IF_ERROR(
      group.AllReduce<int64_t>(absl::MakeSpan(meetings_ns_), ReduceOp::kMax, stream, site));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  const int64_t shortest_ns =
      -std::accumulate(meetings_ns_.begin(), meetings_ns_.end(), int64_t{0});
  ExchangeSeconds split = {.copy = seconds(Phase::kCopy) + static_cast<double>(shortest_ns) * 1e-9,
                           .wait = static_cast<double>(met_ns - shortest_ns) * 1e-9};
  split.gather = seconds(Phase::kDispatch) + seconds(Phase::kCombine) - split.copy - split.wait;
  return split;
}

absl::Status PhaseClock::Start(Phase phase, TraceEvent* event, Stream& stream) {
  if (event == nullptr && phase == Phase::kNone) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(OnStream* const on, OnStreamOf(stream));
  if (on->stamps != nullptr) {
    if (intervals_.size() >= kMostIntervals) MOE_RETURN_IF_ERROR(Collect());
    return on->stamps->Mark(&intervals_.emplace_back(Interval{phase, event, on}).begin_ns);
  }
  if (event != nullptr) {
    return stream.Enqueue([this, event] {
      event->begin_ns = now_();
      return absl::OkStatus();
    });
  }
  return stream.Enqueue([this, phase, on] {
    on->started_ns[static_cast<size_t>(phase)] = now_();
    return absl::OkStatus();
  });
}

absl::Status PhaseClock::Stop(Phase phase, TraceEvent* event, Stream& stream) {
  if (event == nullptr && phase == Phase::kNone) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(OnStream* const on, OnStreamOf(stream));
  if (on->stamps != nullptr) {
    const auto started = std::find_if(intervals_.rbegin(), intervals_.rend(), [&](const auto& i) {
      return i.open && i.phase == phase && i.event == event;
    });
    MOE_CHECK(started != intervals_.rend());
    started->open = false;
    return on->stamps->Mark(&started->end_ns);
  }
  if (event != nullptr) {
    return stream.Enqueue([this, phase, event, on] {
      event->end_ns = now_();
      Add(phase, event->end_ns - event->begin_ns, *on);
      return absl::OkStatus();
    });
  }
  return stream.Enqueue([this, phase, on] {
    Add(phase, now_() - on->started_ns[static_cast<size_t>(phase)], *on);
    return absl::OkStatus();
  });
}

}  // namespace moe
