// The deadline of one wait: how long it may go without progress.
#ifndef MOE_COMM_PATIENCE_H_
#define MOE_COMM_PATIENCE_H_

#include <algorithm>
#include <chrono>

#include <absl/time/time.h>

namespace moe {

using SteadyTime = std::chrono::steady_clock::time_point;

// `wait` from now; for waits that are short, or part of one that has Patience.
inline SteadyTime SteadyIn(absl::Duration wait) {
  return std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(wait);
}

// Counts from its construction, or from the last progress, by the steady clock: nobody who sets the
// machine's clock ends a run. Whoever waits looks at least every step(). A longer gap means that
// the process itself stood still (it was stopped, or its machine was), and its peers perhaps as
// well: what they did meanwhile is not yet known, and the deadline starts again.
class Patience {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Patience(absl::Duration longest, Clock::time_point now = Clock::now())
      : longest_(longest), begun_(now), looked_(now) {}

  // A fraction of the deadline, so that a failure is seen little later than that.
  absl::Duration step() const {
    return std::clamp(longest_ / 16, absl::Microseconds(50), absl::Seconds(1));
  }

  // Whether the deadline has passed. `progressed`: something came since the last look.
  bool IsOver(bool progressed, Clock::time_point now = Clock::now()) {
    const bool stood_still =
        absl::FromChrono(now - looked_) > std::max(longest_ / 2, kShortestStop);
    looked_ = now;
    if (progressed || stood_still) begun_ = now;
    return waited() > longest_;
  }

  // A moment to wait for at most before the next look.
  Clock::time_point NextLook() const { return Clock::now() + absl::ToChronoNanoseconds(step()); }

  // Without progress, at the last look.
  absl::Duration waited() const { return absl::FromChrono(looked_ - begun_); }

 private:
  // A thread of a busy machine waits this long for a core: no reason to start again.
  static constexpr absl::Duration kShortestStop = absl::Milliseconds(500);

  const absl::Duration longest_;
  Clock::time_point begun_;   // or when it last progressed
  Clock::time_point looked_;  // when IsOver was last asked
};

}  // namespace moe

#endif  // MOE_COMM_PATIENCE_H_
