// Waiting for another thread: a short spin, then sleep.
#ifndef MOE_COMM_LOCAL_DOORBELL_H_
#define MOE_COMM_LOCAL_DOORBELL_H_

#include <atomic>
#include <chrono>
#include <cstdint>

namespace moe {

// A counter that threads ring and wait on. To wait for a condition: read count(), test the
// condition, then wait for a change of the count read; whoever makes the condition true rings after.
// Rings between the read and the wait are seen, so none is lost.
class alignas(64) Doorbell {
 public:
  using Clock = std::chrono::steady_clock;

  uint32_t count() const { return count_.load(std::memory_order_acquire); }

  // Everything before it is visible to whoever sees the new count. A system call only when
  // somebody sleeps.
  void Ring();

  // Looks `spins` times; true when count() != seen was among them.
  bool SpinChange(uint32_t seen, int spins) const;

  // Offers the core to others a few times; the same result. A peer that waits for this very core
  // comes sooner than by a sleep and a wake-up.
  bool YieldChange(uint32_t seen) const;

  // Sleeps. True once count() != seen; false when `deadline` has passed first.
  bool SleepChange(uint32_t seen, Clock::time_point deadline);

 private:
  std::atomic<uint32_t> count_{0};  // the futex word
  std::atomic<uint32_t> sleepers_{0};
};

// How long one thread spins before it sleeps. A peer that runs on another core comes within
// microseconds and spinning saves the wake-up; a peer that waits for this very core comes only once
// this thread sleeps. Which of them holds changes with the load, so recent waits decide, and every
// 16th wait tries the full length again.
class SpinBudget {
 public:
  int Next() { return ++waits_ % 16 == 0 ? kLongest : spins_; }
  void Report(bool was_enough) {
    spins_ = was_enough ? kLongest : spins_ / 4 < kShortest ? kShortest : spins_ / 4;
  }

 private:
  static constexpr int kLongest = 600;  // about 20 us
  static constexpr int kShortest = 8;
  int spins_ = kLongest;
  uint32_t waits_ = 0;
};

}  // namespace moe

#endif  // MOE_COMM_LOCAL_DOORBELL_H_
