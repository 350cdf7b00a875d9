#include "moe/checkpoint/run_lock.h"

#include <array>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <fstream>
#include <limits>
#include <mutex>
#include <optional>
#include <random>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <absl/time/clock.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "comm/hosts.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/io/bounded_json.h"

namespace moe {
namespace {

// Time for a disk to answer when the lock is released.
constexpr absl::Duration kGiveUpTime = absl::Seconds(1);

using LockJson = nlohmann::ordered_json;

std::string Named(const LockHolder& holder) {
  return absl::StrCat("process ", holder.pid, " on host ", holder.host, " since ", holder.since);
}

std::string PidNamespace() {
  std::array<char, 64> text = {};
  const ssize_t size = ::readlink("/proc/self/ns/pid", text.data(), text.size() - 1);
  return size < 0 ? "" : text.data();
}

// Reads state and start time of a process from /proc/<pid>/stat; false if that fails. The program's
// name, in parentheses, may contain any character.
bool LookUp(int64_t pid, char& state, int64_t& start) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string line;
  if (!std::getline(file, line)) return false;
  constexpr size_t kState = 0, kStart = 19;  // fields after the name
  const size_t name_end = line.rfind(") ");
  if (name_end == line.npos) return false;
  const std::vector<std::string> fields = absl::StrSplit(line.substr(name_end + 2), ' ');
  if (fields.size() <= kStart || fields[kState].size() != 1) return false;
  state = fields[kState][0];
  return absl::SimpleAtoi(fields[kStart], &start);
}

}  // namespace

LockHolder ThisRun() {
  std::random_device random;
  const uint64_t run = (uint64_t{random()} << 32) | random();
  LockHolder me = {
      .run = absl::StrCat(absl::Hex(run, absl::kZeroPad16)),
      .host = HostName(),
      .host_id = static_cast<int64_t>(HostId()),
      .pid_namespace = PidNamespace(),
      .pid = ::getpid(),
      .since = absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone())};
  char state = 0;
  (void)LookUp(me.pid, state, me.process_start);
  return me;
}

std::string LockText(const LockHolder& holder) {
  LockJson line = LockJson::object();
  line["run"] = holder.run;
  line["host"] = holder.host;
  line["pid"] = holder.pid;
  line["since"] = holder.since;
  line["host_id"] = holder.host_id;
  line["pid_namespace"] = holder.pid_namespace;
  line["process_start"] = holder.process_start;
  return line.dump(-1, ' ', false, LockJson::error_handler_t::replace) + "\n";
}

absl::StatusOr<LockHolder> ParseLock(const std::string& text) {
  using Integers = std::numeric_limits<int64_t>;
  const auto line = ParseBoundedJson(kLockName, text);
  if (absl::IsResourceExhausted(line.status())) return line.status();
  bool whole = line.ok() && line->is_object();
  const auto member = [&](const char* key) {
    const auto found = whole ? line->find(key) : nlohmann::json::const_iterator();
    whole = whole && found != line->end();
    return found;
  };
  const auto get = [&](const char* key, std::string& value) {
    const auto found = member(key);
    whole = whole && found->is_string();
    if (whole) value = found->get<std::string>();
  };
  const auto get_within = [&](const char* key, int64_t least, int64_t most, int64_t& value) {
    const auto found = member(key);
    const auto number = whole ? IntegerWithin(*found, least, most) : std::nullopt;
    whole = number.has_value();
    if (whole) value = *number;
  };
  LockHolder holder;
  get("run", holder.run);
  get("host", holder.host);
  get_within("pid", 0, std::numeric_limits<pid_t>::max(), holder.pid);
  get("since", holder.since);
  get_within("host_id", Integers::min(), Integers::max(), holder.host_id);
  get("pid_namespace", holder.pid_namespace);
  get_within("process_start", 0, Integers::max(), holder.process_start);
  if (!whole) return absl::DataLossError("no lock of a run");
  return holder;
}

Sign SignOf(const LockHolder& holder) {
  const std::string here = PidNamespace();
  if (holder.host_id != static_cast<int64_t>(HostId()) || holder.pid_namespace != here ||
      here.empty() || holder.pid <= 0 || holder.pid > std::numeric_limits<pid_t>::max()) {
    return Sign::kNone;
  }
  if (::kill(static_cast<pid_t>(holder.pid), 0) != 0 && errno == ESRCH) return Sign::kEnded;
  char state = 0;
  int64_t start = 0;
  if (!LookUp(holder.pid, state, start)) return Sign::kNone;  // perhaps a process of another user
  // A process that has ended is still listed until its parent has waited for it.
  const bool ended = start != holder.process_start || state == 'Z' || state == 'X';
  return ended ? Sign::kEnded : Sign::kRuns;
}

struct RunLock::Beats {
  std::mutex mu;
  std::condition_variable ended;
  // The open lock file, last, and those before it was recreated, which a touch may still use.
  // Guarded by mu, as is `end`.
  std::vector<int> files;
  bool end = false;

  // Touches the lock until `end`; `lock` is released during a touch, which may hang.
  absl::Status Touch(absl::Duration beat, FileSystem& all) {
    std::unique_lock lock(mu);
    while (!ended.wait_for(lock, absl::ToChronoNanoseconds(beat), [this] { return end; })) {
      const int file = files.back();
      lock.unlock();
      (void)all.Touch(file);  // CheckHeld finds out whether the lock is still this run's
      lock.lock();
    }
    return absl::OkStatus();
  }
};

RunLock::RunLock(std::string folder, absl::Duration beat, FileSystem& files)
    : path_(absl::StrCat(folder, "/", kLockName)),
      beat_(beat),
      files_(files),
      me_(ThisRun()),
      beats_(std::make_shared<Beats>()) {}

RunLock::~RunLock() {
  if (!held_) return;
  {
    const std::lock_guard lock(beats_->mu);
    beats_->end = true;
  }
  beats_->ended.notify_all();
  beating_.reset();
  const auto give_up = [path = path_, text = LockText(me_), beats = beats_](FileSystem& files) {
    SmallFile now;
    const bool mine = !files.ReadSmall(path, now) && now.text == text;
    if (mine) (void)files.Unlink(path);
    const std::lock_guard lock(beats->mu);
    for (const int file : beats->files) (void)files.Close(file);
    return absl::OkStatus();
  };
  FileWork::Run({.who = path_, .deadline = kGiveUpTime, .files = &files_}, give_up).IgnoreError();
}

// The file stays open for touches.
std::error_code RunLock::Make(FileSystem& files) {
  int file = -1;
  if (const std::error_code error = CreateText(path_, LockText(me_), files, file)) return error;
  const std::lock_guard lock(beats_->mu);
  beats_->files.push_back(file);
  return {};
}

absl::StatusOr<bool> RunLock::TryTake(FileSystem& files) {
  for (;;) {
    const std::error_code error = Make(files);
    if (!error) break;
    if (error.value() != EEXIST) return StatusOf(error, "make", path_);
    MOE_ASSIGN_OR_RETURN(const bool gone, JudgeHolder(files));
    if (!gone) return false;
  }
  held_ = true;
  const auto touch = [beats = beats_, beat = beat_](FileSystem& noted) {
    return beats->Touch(beat, noted);
  };
  MOE_ASSIGN_OR_RETURN(beating_, FileWork::Start({.who = path_, .files = &files_}, touch));
  return true;
}

// Returns true if the name of the lock is free.
absl::StatusOr<bool> RunLock::JudgeHolder(FileSystem& files) {
  SmallFile now;
  if (const std::error_code error = files.ReadSmall(path_, now)) {
    if (error.value() == ENOENT) return true;
    return StatusOf(error, "read", path_);
  }
  const absl::StatusOr<LockHolder> holder = ParseLock(now.text);
  const std::string who = holder.ok() ? Named(*holder) : "a process that it does not name";
  const Sign sign = holder.ok() ? SignOf(*holder) : Sign::kNone;
  const bool first = absl::Now() < watched_since_;
  const bool touched = !first && (now.text != seen_.text || now.modified_ns != seen_.modified_ns);
  if (sign == Sign::kRuns || touched) {
    return absl::InvalidArgumentError(absl::StrCat("'", path_, "' is held by ", who,
                                                   ", which still runs, expected a folder ",
                                                   "of its own for every run"));
  }
  std::string reason = "has ended";
  if (sign == Sign::kNone) {
    const absl::Duration stale = kStaleBeats * beat_;
    reason = absl::StrCat("has not touched it for ", absl::FormatDuration(stale));
    if (first) {
      seen_ = now;
      watched_since_ = absl::Now();
      Log(LogLevel::kWarning, absl::StrCat("'", path_, "' is held by ", who, ": waiting ",
                                           absl::FormatDuration(stale), " for a sign of it"));
    }
    if (absl::Now() - watched_since_ < stale) return false;
  }
  // Another run may have come to the same conclusion first.
  SmallFile again;
  if (files.ReadSmall(path_, again) || again.text != now.text) return true;
  const std::error_code removed = files.Unlink(path_);
  if (removed && removed.value() != ENOENT) return StatusOf(removed, "remove", path_);
  Log(LogLevel::kWarning,
      absl::StrCat("'", path_, "' is taken over from ", who, ", which ", reason));
  return true;
}

absl::Status RunLock::CheckHeld(FileSystem& files) {
  SmallFile now;
  std::error_code error = files.ReadSmall(path_, now);
  if (error.value() == ENOENT) {
    Log(LogLevel::kWarning,
        absl::StrCat("'", path_,
                     "' is gone and made anew: was the folder emptied, or a mount lost?"));
    error = Make(files);
    if (!error) return absl::OkStatus();
    if (error.value() == EEXIST) error = files.ReadSmall(path_, now);
  }
  if (error) return StatusOf(error, "read", path_);
  if (now.text == LockText(me_)) return absl::OkStatus();
  const absl::StatusOr<LockHolder> holder = ParseLock(now.text);
  return absl::UnavailableError(
      absl::StrCat("'", path_, "' was taken by ", holder.ok() ? Named(*holder) : "another run",
                   ": expected this run's, process ", me_.pid, " on host ", me_.host));
}

}  // namespace moe
