// Waiting for another thread: a short spin, then sleep.
#ifndef MOE_COMM_LOCAL_DOORBELL_H_
#define MOE_COMM_LOCAL_DOORBELL_H_

#include <atomic>
#include <chrono>
#include <cstdint>

namespace moe {

// A counter that threads ring and wait on. To wait for a condition: read count(), test the
// condition, then WaitChange(the count read); whoever makes the condition true rings afterwards.
// Rings between the read and the wait are seen, so none is lost.
class alignas(64) Doorbell {
 public:
  using Clock = std::chrono::steady_clock;

  uint32_t count() const { return count_.load(std::memory_order_acquire); }

  // Everything before it is visible to whoever sees the new count. A system call only when
  // somebody sleeps.
  void Ring();

  // True once count() != seen; false when `deadline` has passed first. Looks `spins` times before
  // it sleeps: ranks that outnumber the cores must not spin.
  bool WaitChange(uint32_t seen, int spins, Clock::time_point deadline);

 private:
  std::atomic<uint32_t> count_{0};  // the futex word
  std::atomic<uint32_t> sleepers_{0};
};

}  // namespace moe

#endif  // MOE_COMM_LOCAL_DOORBELL_H_
