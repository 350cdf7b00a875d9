#include "moe/checkpoint/stop_signal.h"

#include <array>
#include <atomic>
#include <cstddef>

#include <signal.h>

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr std::array<int, 4> kSignals = {SIGTERM, SIGHUP, SIGUSR1, SIGINT};

std::atomic<bool> exists = false;
std::atomic<int> received_signal = 0;  // lock-free: a handler writes it
static_assert(std::atomic<int>::is_always_lock_free);
struct sigaction before[kSignals.size()];

// All but `kept`.
void Restore(int kept) {
  for (size_t i = 0; i < kSignals.size(); ++i) {
    if (kSignals[i] != kept) sigaction(kSignals[i], &before[i], nullptr);
  }
}

void Handle(int signal) {
  if (signal == SIGUSR1) {
    int none = 0;
    received_signal.compare_exchange_strong(none, signal);
  } else {
    received_signal.store(signal);
    Restore(SIGUSR1);  // the next one is not ours
  }
}

}  // namespace

StopSignal::StopSignal() {
  MOE_CHECK(!exists.exchange(true));
  received_signal.store(0);
  struct sigaction action = {};
  action.sa_handler = Handle;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (const int signal : kSignals) sigaddset(&action.sa_mask, signal);
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &before[i]);
    const bool ignored = before[i].sa_handler == SIG_IGN;  // by nohup, or a shell
    if (!ignored) sigaction(kSignals[i], &action, nullptr);
  }
}

StopSignal::~StopSignal() {
  Restore(0);
  exists.store(false);
}

int StopSignal::received() const {
  return received_signal.load();
}

}  // namespace moe
