// Where a rank's time goes: seconds by phase and, with a recorder, a time line.
#ifndef MOE_MOE_PHASE_CLOCK_H_
#define MOE_MOE_PHASE_CLOCK_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "comm/communicator.h"
#include "dispatch/dispatcher.h"
#include "kernels/base/stream.h"
#include "kernels/base/stream_stamps.h"
#include "kernels/base/trace.h"

namespace moe {

enum class Phase : uint8_t {
  kGate,
  kPlan,
  kDispatch,
  kExpert,
  kCombine,
  kDense,  // attention, norms, embedding, output layer, loss
  kAllReduce,
  kOptimizer,
  kCount,
  kNone,  // work that is in no phase, or holds several: on the time line alone
};
const char* NameOf(Phase phase);

// A piece of work, for Timed (moe/context.h).
struct Work {
  Phase phase = Phase::kNone;
  const char* name = "";  // on the time line; a string literal
  int32_t chunk = -1;
  int32_t bucket = -1;
  int64_t bytes = -1;                    // that leave this rank, where they are known before
  const ExchangeBytes* moved = nullptr;  // or what counts them while the work is enqueued
};

// Seconds per phase of one rank. Phases on two streams may overlap, so the sum can exceed the
// wall time. Each phase is timed by one stream at a time.
class PhaseClock {
 public:
  // Also records what follows. nullptr: no longer. `recorder` must outlive the streams' work.
  void set_recorder(TraceRecorder* recorder) { recorder_ = recorder; }
  TraceRecorder* recorder() const { return recorder_; }

  // Opens `work` on the time line of recorder(), which must be there: nullptr when it takes no
  // more. `place`: layer and step.
  TraceEvent* Open(const Work& work, const CommPhase& place, const Stream& stream);
  // Enqueues the start and the end of a phase around whatever is enqueued between the two calls.
  // `event`: from Open, or nullptr. A CUDA stream must live as long as the clock is used.
  absl::Status Start(Phase phase, TraceEvent* event, Stream& stream);
  absl::Status Stop(Phase phase, TraceEvent* event, Stream& stream);

  // Takes the times of CUDA streams, which it waits for, into the phases and the time line. Start
  // does so when kMostIntervals have come together, for a program that never asks for them.
  static constexpr size_t kMostIntervals = 8192;
  absl::Status Collect();
  // Call with the CPU's streams idle, and after Collect.
  double seconds(Phase phase) const { return seconds_[static_cast<size_t>(phase)]; }
  // Collects, then begins anew.
  absl::Status Reset();

 private:
  // On a CUDA stream, where events tell the times later.
  struct Interval {
    Phase phase;
    TraceEvent* event;
    bool open = true;
    int64_t begin_ns = 0, end_ns = 0;
  };
  struct Stamped {
    const Stream* stream;
    std::unique_ptr<StreamStamps> stamps;
  };

  void Add(int phase, int64_t nanoseconds);
  absl::StatusOr<StreamStamps*> StampsOf(Stream& stream);

  std::array<double, static_cast<size_t>(Phase::kCount)> seconds_ = {};
  std::array<int64_t, static_cast<size_t>(Phase::kCount)> started_ns_ = {};
  std::deque<Interval>
      intervals_;  // not yet collected; between two Collects they stay where they are
  std::vector<Stamped> stamped_;
  TraceRecorder* recorder_ = nullptr;
};

}  // namespace moe

#endif  // MOE_MOE_PHASE_CLOCK_H_
