// Ctrl-C, met by a thread of its own.
#ifndef MOE_MOE_CLI_SWEEP_INTERRUPT_H_
#define MOE_MOE_CLI_SWEEP_INTERRUPT_H_

#include <atomic>
#include <csignal>
#include <functional>
#include <thread>

namespace moe::cli {

// While it lives, SIGINT and SIGTERM call `say` on another thread and then end the process as they
// do without it (a shell sees 130 and 143). Make it on the main thread before others start: they
// inherit that both signals are held back.
class InterruptWatch {
 public:
  explicit InterruptWatch(std::function<void()> say);
  ~InterruptWatch();
  InterruptWatch(const InterruptWatch&) = delete;
  InterruptWatch& operator=(const InterruptWatch&) = delete;

 private:
  void Wait();

  const std::function<void()> say_;
  sigset_t signals_ = {}, before_ = {};
  std::atomic<bool> over_ = false;
  std::thread thread_;  // last: starts after the state above exists
};

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_SWEEP_INTERRUPT_H_
