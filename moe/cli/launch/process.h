// Programs that this one starts.
#ifndef MOE_MOE_CLI_LAUNCH_PROCESS_H_
#define MOE_MOE_CLI_LAUNCH_PROCESS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/string_view.h>
#include <absl/time/clock.h>
#include <absl/time/time.h>
#include <absl/types/span.h>
#include <sys/types.h>

namespace moe::launch {

// A process with a group of its own and nothing on its standard input. It receives SIGTERM when
// this process dies. Its destructor kills the group unless it has ended, and waits for at most 1 s.
class Process {
 public:
  // The longest wait for a killed process, which may be in a system call that does not return.
  static constexpr absl::Duration kLongestKill = absl::Seconds(1);

  enum class Output : uint8_t { kShared, kNone };

  Process() = default;
  // Starts `argv`, whose first word is looked up in PATH. A program that cannot be started ends
  // with exit code 127.
  static Process Start(absl::Span<const std::string> argv, Output output);
  ~Process();
  Process(Process&& other) noexcept : id_(std::exchange(other.id_, 0)) {}
  Process& operator=(Process&& other) noexcept {
    std::swap(id_, other.id_);
    return *this;
  }

  bool started() const { return id_ > 0; }
  pid_t id() const { return id_; }
  // Its exit code, 128 + N after signal N, once it has ended; no longer started() then. 127 for a
  // process that is not started().
  std::optional<int> Ended();
  // The same, waiting for it; nullopt at the deadline.
  std::optional<int> WaitUntil(absl::Time deadline);
  void Signal(int signal) const;
  void KillGroup() const;

 private:
  explicit Process(pid_t id) : id_(id) {}

  pid_t id_ = 0;
};

// Processes that `ancestor` started, directly or not, as /proc shows them; without zombies.
std::vector<pid_t> DescendantsOf(pid_t ancestor);
// Those that have the variable in their environment: for the variable of a launcher the ranks on
// this host, with what they started. Without those of other users.
std::vector<pid_t> DescendantsWith(absl::string_view variable, pid_t ancestor);

// Whether the process has a handler for the signal.
bool Catches(pid_t process, int signal);

}  // namespace moe::launch

#endif  // MOE_MOE_CLI_LAUNCH_PROCESS_H_
