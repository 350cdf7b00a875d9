#include "moe/cli/launch/restarts.h"

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <limits>
#include <utility>

#include <nlohmann/json.hpp>

#include "moe/cli/base/exit_code.h"
#include "moe/io/bounded_json.h"
#include "moe/io/file.h"
#include "moe/io/file_system.h"

namespace moe::launch {
namespace {

using cli::ExitCode;

constexpr absl::Duration kLongestPause = absl::Minutes(5);
constexpr int kMostBarren = 2;

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

std::string NotePathIn(const std::string& folder) {
  return (std::filesystem::path(folder) / "requeue.json").string();
}

}  // namespace

int CodeOfRun(int launcher, Engine engine, const std::optional<cli::RunStatus>& status) {
  const bool begun = status.has_value();
  if (begun && status->state != cli::RunState::kRunning) return status->exit_code;
  if (engine != Engine::kHydra && engine != Engine::kTorchrun) return launcher;
  // Before it begins, a run that ends by itself ends with one code on all ranks.
  const bool of_signal = engine == Engine::kHydra &&
                         (launcher == SIGABRT || launcher == SIGKILL || launcher == SIGSEGV);
  return begun || of_signal ? static_cast<int>(ExitCode::kPeer) : launcher;
}

Restarts::Verdict Restarts::After(const Attempt& attempt) {
  Meaning meaning = MeaningOf(attempt.code);
  if (attempt.code == static_cast<int>(ExitCode::kStopped)) meaning.again = options_.after_stop;
  const bool first = std::exchange(first_, false);
  const bool progressed = attempt.newest > newest_;
  newest_ = std::max(newest_, attempt.newest);
  if (progressed) {
    count_ = std::max<int>(0, count_ - static_cast<int>(attempt.ran / absl::Hours(1)));
    note_.barren = 0;
  } else if (!first) {
    ++note_.barren;
  }
  if (options_.nine_is_loss && attempt.code == static_cast<int>(ExitCode::kRendezvous)) {
    meaning = kLost;
  }
  if (!meaning.again) return {.reason = meaning.reason};
  if (attempt.code == static_cast<int>(ExitCode::kMemory)) {
    const bool again = std::exchange(note_.lacked_memory, true);
    if (again) return {.reason = "out of memory a second time"};
  }
  if (note_.barren >= kMostBarren) {
    return {.reason = "two restarts in a row left no newer checkpoint"};
  }
  if (count_ >= options_.most) return {.reason = "no restart is left of --max-restarts"};
  absl::Duration pause = options_.first_pause;
  for (int i = 0; i < count_ && pause < kLongestPause; ++i) pause *= 2;
  ++count_;
  return {.again = true, .pause = std::min(pause, kLongestPause), .reason = meaning.reason};
}

RequeueNote ReadRequeueNote(const std::string& folder, absl::string_view slurm_job,
                            int64_t newest) {
  SmallFile file;
  if (RealFileSystem().ReadSmall(NotePathIn(folder), file)) return {};
  const auto note = ParseBoundedJson("requeue.json", file.text);
  if (!note.ok() || !note->is_object()) return {};
  const auto member = [&](const char* key) {
    return note->value(key, nlohmann::json());
  };
  if (member("job") != nlohmann::json(slurm_job)) return {};
  RequeueNote read = {.lacked_memory = member("lacked_memory") == nlohmann::json(true)};
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  if (IntegerWithin(member("newest"), -1, kMost) == newest) {
    read.barren = static_cast<int>(IntegerWithin(member("barren"), 0, kMostBarren).value_or(0));
  }
  return read;
}

absl::Status WriteRequeueNote(const std::string& folder, absl::string_view slurm_job,
                              int64_t newest, const RequeueNote& note) {
  const nlohmann::ordered_json written = {{"job", slurm_job},
                                          {"newest", newest},
                                          {"barren", note.barren},
                                          {"lacked_memory", note.lacked_memory}};
  return WriteText(NotePathIn(folder), written.dump() + "\n");
}

}  // namespace moe::launch
