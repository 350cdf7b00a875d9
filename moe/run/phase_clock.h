// Measures a rank's time: seconds by phase and, with a recorder, a time line.
#ifndef MOE_MOE_RUN_PHASE_CLOCK_H_
#define MOE_MOE_RUN_PHASE_CLOCK_H_

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
  kAttention,  // with its norms and projections
  kDense,      // dense feed-forward layers, their norms and those of MoE layers, embedding
  kOutput,     // output layer and loss
  kAllReduce,
  kOptimizer,
  kPipeline,  // waits for rows of other stages
  kCount,     // number of phases with reported seconds
  kNone,      // work in no phase, or in several: on the time line alone
  kMeeting,
  kCopy,  // the ExchangeParts inside kDispatch and kCombine
};
const char* NameOf(Phase phase);

// Describes work for Timed (moe/run/context.h).
struct Work {
  Phase phase = Phase::kNone;
  const char* name = "";  // on the time line; a string literal
  int32_t chunk = -1;
  int32_t bucket = -1;
  int64_t bytes = -1;  // bytes that leave this rank, if known beforehand
  // If not, the counter that is updated while the work is enqueued.
  const ExchangeBytes* moved = nullptr;
  const Communicator* group = nullptr;  // or the group whose bytes_sent grow meanwhile
};

// A rank's seconds in the phases dispatch and combine, divided into three.
struct ExchangeSeconds {
  double copy = 0;    // bytes move, and all ranks are present
  double gather = 0;  // rows are put into another order, scaled, and summed at home
  double wait = 0;    // for ranks that enter an exchange later, or have more to move in it
};

// Seconds since `start_ns`, a time of MonotonicNs.
inline double SecondsSince(int64_t start_ns) {
  return static_cast<double>(MonotonicNs() - start_ns) * 1e-9;
}

// Seconds per phase of one rank. Phases on several streams may overlap, so the sum can exceed the
// wall time. On each stream a phase does not lie inside itself.
class PhaseClock final : public ExchangeClock {
 public:
  // now() reads the time for work on the CPU, in nanoseconds.
  explicit PhaseClock(int64_t (*now)() = MonotonicNs) : now_(now) {}

  // Starts recording; nullptr stops it. `recorder` must outlive the streams' work.
  void set_recorder(TraceRecorder* recorder) { recorder_ = recorder; }
  TraceRecorder* recorder() const { return recorder_; }

  // Opens `work` on the time line of recorder(), which must exist; nullptr when it is full.
  TraceEvent* Open(const Work& work, const Site& site, const Stream& stream);
  // Enqueue the start and the end of a phase around the work enqueued between the two calls.
  // `event`: from Open, or nullptr. A CUDA stream must live as long as the clock is used.
  absl::Status Start(Phase phase, TraceEvent* event, Stream& stream);
  absl::Status Stop(Phase phase, TraceEvent* event, Stream& stream);

  // Called by dispatchers inside the phases dispatch and combine. No effect before KeepMeetings;
  // from then on the time of every meeting is recorded, until Reset.
  absl::Status Start(ExchangePart part, const Communicator& group, Stream& exchange) override;
  absl::Status Stop(ExchangePart part, const Communicator& group, Stream& exchange) override;
  void KeepMeetings() { keeps_meetings_ = true; }

  // Waits for CUDA streams and adds their times to the phases and the time line. Start calls it
  // when kMostIntervals are pending, for a program that never reads times.
  static constexpr size_t kMostIntervals = 8192;
  absl::Status Collect();
  // Call with the CPU's streams idle, and after Collect.
  double seconds(Phase phase) const;
  // Divides this rank's seconds since Reset; call Reset next. The ranks of `group`, those that
  // exchange, compare the time that each spent in every meeting until it had its rows, by its own
  // clock. The last rank to arrive does not wait: the shortest time is copy on all ranks, and the
  // rest of a rank's time in the meeting is its wait. Collects. Collective: one all-reduce of an
  // int64 per meeting. Blocks.
  absl::StatusOr<ExchangeSeconds> SplitExchanges(Communicator& group, Stream& stream,
                                                 const Site& site = {});
  // Collects, then clears all times.
  absl::Status Reset();

 private:
  static constexpr size_t kTimed = static_cast<size_t>(Phase::kCopy) + 1;

  // What one stream has timed: written by its tasks alone.
  struct OnStream {
    const Stream* stream;
    std::unique_ptr<StreamStamps> stamps;  // of a CUDA stream
    std::array<double, kTimed> seconds = {};
    std::array<int64_t, kTimed> started_ns = {};
  };
  // On a CUDA stream, where events tell the times later.
  struct Interval {
    Phase phase;
    TraceEvent* event;
    OnStream* on;
    bool open = true;
    int64_t begin_ns = 0, end_ns = 0;
  };

  void Add(Phase phase, int64_t nanoseconds, OnStream& on);
  absl::StatusOr<OnStream*> OnStreamOf(Stream& stream);

  int64_t (*const now_)();
  std::deque<OnStream> streams_;  // they stay where they are
  // Nanoseconds of each meeting since Reset, in order: how long this rank was in it, and how much
  // of that it waited for peers to end.
  std::vector<int64_t> meetings_ns_, lingered_ns_;
  bool keeps_meetings_ = false;
  std::deque<Interval>
      intervals_;  // not yet collected; between two Collects they stay where they are
  TraceRecorder* recorder_ = nullptr;
};

}  // namespace moe

#endif  // MOE_MOE_RUN_PHASE_CLOCK_H_
