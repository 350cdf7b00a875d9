#include "comm/local/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace moe {
namespace {

// A condition variable would need a mutex that every woken rank takes in turn; the futex compares
// the counter itself.
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
static_assert(std::atomic<uint32_t>::is_always_lock_free);

void SleepOn(std::atomic<uint32_t>& word, uint32_t seen, Doorbell::Clock::time_point deadline) {
  // steady_clock is CLOCK_MONOTONIC, which is what FUTEX_WAIT_BITSET's absolute deadline means.
  const auto ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.time_since_epoch()).count();
  const timespec at{.tv_sec = static_cast<time_t>(ns / 1'000'000'000),
                    .tv_nsec = static_cast<long>(ns % 1'000'000'000)};
  (void)syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, seen, &at, nullptr,
                FUTEX_BITSET_MATCH_ANY);
}

}  // namespace

void Relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Ring and Sleep are a Dekker pair: one writes count_ then reads sleepers_, the other writes
// sleepers_ then reads count_ (inside the kernel). Both need sequential consistency.
void Doorbell::Ring(int most) {
  count_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  (void)syscall(SYS_futex, &count_, FUTEX_WAKE_PRIVATE, most, nullptr, nullptr, 0);
}

bool Doorbell::Sleep(uint32_t seen, Clock::time_point deadline, absl::FunctionRef<bool()> done) {
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  bool is_over = false;
  while (!is_over && Clock::now() < deadline) {
    is_over = count_.load(std::memory_order_seq_cst) != seen || done();
    if (!is_over) SleepOn(count_, seen, deadline);
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
  return is_over;
}

}  // namespace moe
