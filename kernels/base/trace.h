// The timeline of one rank: what ran when, on which of its streams.
#ifndef MOE_KERNELS_BASE_TRACE_H_
#define MOE_KERNELS_BASE_TRACE_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/types/span.h>

namespace moe {

// Nanoseconds of CLOCK_MONOTONIC, which the processes of a host share.
int64_t MonotonicNs();

// One event on one lane. Numbers that do not apply are -1.
struct TraceEvent {
  const char* name = "";      // a string literal
  const char* category = "";  // a string literal
  int64_t begin_ns = 0;       // MonotonicNs; written by the stream, as end_ns is
  int64_t end_ns = 0;
  int64_t bytes = -1;       // that left this rank
  int64_t bytes_self = -1;  // that stayed on this rank
  int64_t step = -1;
  int32_t lane = 0;
  int32_t layer = -1;
  int32_t chunk = -1;   // chunk of an overlapped exchange
  int32_t bucket = -1;  // bucket of an all-reduce
  int32_t call = -1;    // counts within the step, or the calls of a benchmark
};

// Events of a rank for which programs reserve memory: 10 MB, of which only the used part is
// touched.
inline constexpr int64_t kTraceEvents = int64_t{1} << 17;

// Reserves memory for `capacity` events at once; events beyond it are counted and left out. A
// recorder starts switched off. The rank's host thread opens events, in the order in which work is
// enqueued; the stream that runs the work writes the two times. So no lock is needed, and events
// may be read once the streams are idle.
class TraceRecorder {
 public:
  explicit TraceRecorder(int64_t capacity) { events_.reserve(static_cast<size_t>(capacity)); }
  TraceRecorder(const TraceRecorder&) = delete;
  TraceRecorder& operator=(const TraceRecorder&) = delete;

  // Lanes are numbered from 0. LaneOf finds the lane by `stream`.
  void AddLane(std::string name, const void* stream) {
    lanes_.push_back({std::move(name), stream});
  }
  int lanes() const { return static_cast<int>(lanes_.size()); }
  const std::string& lane_name(int lane) const { return lanes_[static_cast<size_t>(lane)].name; }
  // Lane 0 for a stream without a lane.
  int LaneOf(const void* stream) const;

  void Switch(bool on) { on_ = on; }
  bool on() const { return on_; }

  // The next event, at an address that does not change; nullptr when switched off or full.
  TraceEvent* Open() {
    if (!on_) return nullptr;
    if (events_.size() == events_.capacity()) {
      ++left_out_;
      return nullptr;
    }
    return &events_.emplace_back();
  }

  absl::Span<const TraceEvent> events() const { return events_; }
  int64_t left_out() const { return left_out_; }

 private:
  struct Lane {
    std::string name;
    const void* stream;
  };

  std::vector<Lane> lanes_;
  std::vector<TraceEvent> events_;  // never grows past what the constructor reserved
  int64_t left_out_ = 0;
  bool on_ = false;
};

}  // namespace moe

#endif  // MOE_KERNELS_BASE_TRACE_H_
