#include "moe/cli/sweep_interrupt.h"

#include <utility>

#include <pthread.h>
#include <unistd.h>

#include "kernels/base/caught.h"

namespace moe::cli {

InterruptWatch::InterruptWatch(std::function<void()> say) : say_(std::move(say)) {
  sigemptyset(&signals_);
  // A launcher that is interrupted ends its processes by SIGTERM. A shell has its background jobs
  // ignore SIGINT: so it stays.
  struct sigaction now = {};
  sigaction(SIGINT, nullptr, &now);
  if (now.sa_handler != SIG_IGN) sigaddset(&signals_, SIGINT);
  sigaddset(&signals_, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals_, &before_);
  thread_ = std::thread([this] { Wait(); });
}

InterruptWatch::~InterruptWatch() {
  over_ = true;
  pthread_kill(thread_.native_handle(), SIGTERM);  // wakes the wait
  thread_.join();
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void InterruptWatch::Wait() {
  int signal = 0;
  if (sigwait(&signals_, &signal) != 0 || over_) return;
  Caught([this] {
    say_();
    return absl::OkStatus();
  }).IgnoreError();
  struct sigaction plain = {};
  plain.sa_handler = SIG_DFL;
  sigaction(signal, &plain, nullptr);
  pthread_sigmask(SIG_UNBLOCK, &signals_, nullptr);
  ::kill(::getpid(), signal);
  while (true) ::pause();
}

}  // namespace moe::cli
