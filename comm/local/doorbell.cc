#include "comm/local/doorbell.h"

#include <climits>
#include <thread>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace moe {
namespace {

// A condition variable would need a mutex that every woken rank takes in turn; the futex compares
// the counter itself.
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
static_assert(std::atomic<uint32_t>::is_always_lock_free);

void Sleep(std::atomic<uint32_t>& word, uint32_t seen, Doorbell::Clock::time_point deadline) {
  // steady_clock is CLOCK_MONOTONIC, which is what FUTEX_WAIT_BITSET's absolute deadline means.
  const auto ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.time_since_epoch()).count();
  const timespec at{.tv_sec = static_cast<time_t>(ns / 1'000'000'000),
                    .tv_nsec = static_cast<long>(ns % 1'000'000'000)};
  (void)syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, seen, &at, nullptr,
                FUTEX_BITSET_MATCH_ANY);
}

void Relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// Ring and SleepChange are a Dekker pair: one writes count_ then reads sleepers_, the other writes
// sleepers_ then reads count_ (inside the kernel). Both need sequential consistency.
void Doorbell::Ring() {
  count_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  (void)syscall(SYS_futex, &count_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

bool Doorbell::SpinChange(uint32_t seen, int spins) const {
  for (int i = 0; i < spins; ++i) {
    if (count() != seen) return true;
    Relax();
  }
  return false;
}

bool Doorbell::YieldChange(uint32_t seen) const {
  constexpr int kYields = 4;
  for (int i = 0; i < kYields; ++i) {
    std::this_thread::yield();
    if (count() != seen) return true;
  }
  return false;
}

bool Doorbell::SleepChange(uint32_t seen, Clock::time_point deadline) {
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (count_.load(std::memory_order_seq_cst) == seen && Clock::now() < deadline) {
    Sleep(count_, seen, deadline);
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
  return count() != seen;
}

}  // namespace moe
