#include "moe/cli/launch/restarts.h"

#include <algorithm>

#include "moe/cli/base/exit_code.h"

namespace moe::launch {
namespace {

using cli::ExitCode;

constexpr absl::Duration kLongestPause = absl::Minutes(5);

// What an exit code says, and whether the same command may end otherwise.
struct Meaning {
  bool again;
  const char* reason;
};

constexpr Meaning kLost = {true, "a rank, a host or the launcher was lost"};

Meaning MeaningOf(int code) {
  switch (static_cast<ExitCode>(code)) {
    case ExitCode::kOk:
      return {false, "complete"};
    case ExitCode::kCheckFailed:
      return {false, "a check failed, or the launcher refused"};
    case ExitCode::kUsage:
      return {false, "flags or paths are wrong"};
    case ExitCode::kBadInput:
      return {false, "an input file is malformed"};
    case ExitCode::kIo:
      return {true, "storage failed"};
    case ExitCode::kMemory:
      return {true, "out of memory"};
    case ExitCode::kNumerics:
      return {false, "a number is not finite"};
    case ExitCode::kRendezvous:
      return {false, "the ranks did not find each other"};
    case ExitCode::kBackend:
      return {false, "this build or machine cannot run it"};
    case ExitCode::kStopped:
      return {false, "stopped on request"};
    default:
      // Shells and launchers: a program that is not there, or cannot be run.
      if (code == 126 || code == 127) return {false, "the program could not be started"};
      return kLost;
  }
}

}  // namespace

Restarts::Verdict Restarts::After(const Attempt& attempt) {
  Meaning meaning = MeaningOf(attempt.code);
  if (attempt.code == static_cast<int>(ExitCode::kStopped)) meaning.again = options_.after_stop;
  const bool first = attempts_++ == 0;
  const bool progressed = attempt.newest > newest_;
  newest_ = std::max(newest_, attempt.newest);
  if (progressed) {
    count_ = std::max<int>(0, count_ - static_cast<int>(attempt.ran / absl::Hours(1)));
    barren_ = 0;
  } else if (!first) {
    ++barren_;
  }
  if (options_.nine_is_loss && attempt.code == static_cast<int>(ExitCode::kRendezvous)) {
    meaning = kLost;
  }
  if (!meaning.again) return {.reason = meaning.reason};
  if (attempt.code == static_cast<int>(ExitCode::kMemory)) {
    if (lacked_memory_) return {.reason = "out of memory a second time"};
    lacked_memory_ = true;
  }
  if (barren_ >= 2) return {.reason = "two restarts in a row left no newer checkpoint"};
  if (count_ >= options_.most) return {.reason = "no restart is left of --max-restarts"};
  absl::Duration pause = options_.first_pause;
  for (int i = 0; i < count_ && pause < kLongestPause; ++i) pause *= 2;
  ++count_;
  return {.again = true, .pause = std::min(pause, kLongestPause), .reason = meaning.reason};
}

}  // namespace moe::launch
