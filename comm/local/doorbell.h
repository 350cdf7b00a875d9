// Waiting for another thread: a short spin, then sleep.
#ifndef MOE_COMM_LOCAL_DOORBELL_H_
#define MOE_COMM_LOCAL_DOORBELL_H_

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

#include <absl/functional/function_ref.h>

namespace moe {

// A counter that threads ring and wait on. To wait for a condition: read count(), test the
// condition, then wait for a change of the count read; whoever makes the condition true rings
// after. Rings between the read and the wait are seen, so none is lost.
class alignas(64) Doorbell {
 public:
  using Clock = std::chrono::steady_clock;

  uint32_t count() const { return count_.load(std::memory_order_acquire); }

  // Everything before it is visible to whoever sees the new count. A system call only when
  // somebody sleeps, which wakes `most` of them.
  void Ring(int most = INT_MAX);

  // Rings only if somebody sleeps, and writes nothing else. Enough where those who are awake look
  // at the condition itself, and what made it true was a sequentially consistent store.
  void RingSleepers(int most = INT_MAX) {
    if (most != 0 && sleepers_.load(std::memory_order_seq_cst) != 0) Ring(most);
  }

  // Sleeps until count() != seen or done(), which is tested once the sleeper is known to ringers;
  // sequentially consistent loads. False when `deadline` has passed first.
  bool Sleep(uint32_t seen, Clock::time_point deadline, absl::FunctionRef<bool()> done);

 private:
  std::atomic<uint32_t> count_{0};  // the futex word
  std::atomic<uint32_t> sleepers_{0};
};

// One turn of a loop that waits for another core: leaves the execution units to others.
void Relax();

// What one thread does before it sleeps. A peer that runs on another core comes within
// microseconds, and spinning saves the wake-up; a peer that waits for this very core comes sooner
// if the core is offered. Neither pays always: recent waits decide.
class SpinBudget {
 public:
  // Turns to spin for. Every 16th wait tries the full length again.
  int Next() { return ++waits_ % 16 == 0 ? kLongest : spins_; }
  void Report(bool was_enough) {
    spins_ = was_enough ? kLongest : spins_ / 4 < kShortest ? kShortest : spins_ / 4;
  }

  // Whether to offer the core at `now_ns`.
  bool MayOffer(int64_t now_ns) const { return now_ns >= next_offer_ns_; }
  // The core came back: whether to offer it again. Beside other programs it takes a whole time
  // slice, as long as a hundred wake-ups, and offers may take a 64th of the time.
  bool ReportOffer(int64_t offered_ns, int64_t back_ns) {
    const int64_t took_ns = back_ns - offered_ns;
    if (took_ns < kLongOfferNs) return true;
    next_offer_ns_ = back_ns + 64 * took_ns;
    return false;
  }

 private:
  static constexpr int kLongest = 600;  // about 20 us
  static constexpr int kShortest = 8;
  static constexpr int64_t kLongOfferNs = 100'000;
  int spins_ = kLongest;
  uint32_t waits_ = 0;
  int64_t next_offer_ns_ = 0;
};

}  // namespace moe

#endif  // MOE_COMM_LOCAL_DOORBELL_H_
