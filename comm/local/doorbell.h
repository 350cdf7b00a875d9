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
