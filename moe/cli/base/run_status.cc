#include "moe/cli/base/run_status.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <filesystem>
#include <limits>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <pwd.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "kernels/base/caught.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/base/exit_code.h"
#include "moe/cli/base/live_file.h"
#include "moe/cli/base/program.h"
#include "moe/io/bounded_json.h"
#include "moe/io/file_system.h"

namespace moe::cli {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr char kSchema[] = "moe.status/1";
constexpr char kTimeForm[] = "%Y-%m-%dT%H:%M:%SZ";
constexpr int64_t kMostSteps = std::numeric_limits<int64_t>::max();
constexpr int64_t kMostRanks = std::numeric_limits<int>::max();
constexpr int64_t kMostExitCode = 255;
constexpr double kMostReal = 1e15;  // ms or tokens/s; sums of such numbers fit an int64_t

void Set(const char* key, const std::optional<double>& value, Json& line) {
  line[key] = nullptr;
  if (value.has_value()) line[key] = *value;
}

// Members of an object, each of which must be there.
class Members {
 public:
  explicit Members(const Json& object) : object_(object) {}

  void Get(const char* key, std::string& value) {
    const auto member = object_.find(key);
    if (member == object_.end() || !member->is_string()) return Lacks(key);
    value = member->get<std::string>();
  }
  // An integer in [least, most].
  template <typename Int>
  void Get(const char* key, int64_t least, int64_t most, Int& value) {
    const auto member = object_.find(key);
    if (member == object_.end() || !member->is_number_integer()) return Lacks(key);
    const bool too_large = member->is_number_unsigned() &&
                           member->get<uint64_t>() > std::numeric_limits<int64_t>::max();
    const int64_t number = too_large ? 0 : member->get<int64_t>();
    if (too_large || number < least || number > most) return Lacks(key);
    value = static_cast<Int>(number);
  }
  // A number in [0, kMostReal].
  void Get(const char* key, double& value) {
    const auto member = object_.find(key);
    if (member == object_.end() || !member->is_number()) return Lacks(key);
    const auto number = member->get<double>();
    if (!(number >= 0 && number <= kMostReal)) return Lacks(key);
    value = number;
  }
  void GetOrNull(const char* key, std::optional<double>& value) {
    const auto member = object_.find(key);
    if (member == object_.end() || !(member->is_null() || member->is_number())) return Lacks(key);
    if (!member->is_null()) value = member->get<double>();
  }
  void Lacks(const char* key) {
    if (missing_.empty()) missing_ = key;
  }
  // The first that is missing, of another type or out of range; empty: none.
  const std::string& missing() const { return missing_; }

 private:
  const Json& object_;
  std::string missing_;
};

std::vector<std::string> EachOnce(const std::vector<std::string>& folders) {
  std::vector<std::string> once;
  for (const std::string& folder : folders) {
    if (folder.empty()) continue;
    std::error_code ignored;
    std::string path = fs::weakly_canonical(fs::absolute(folder, ignored), ignored).string();
    if (std::find(once.begin(), once.end(), path) == once.end()) once.push_back(std::move(path));
  }
  return once;
}

RunState StateOf(const absl::Status& status) {
  if (status.ok()) return RunState::kComplete;
  return ExitCodeOf(status) == ExitCode::kStopped ? RunState::kStopped : RunState::kFailed;
}

}  // namespace

std::string StatusText(const RunStatus& status) {
  Json line = Json::object();  // converting a null breaks it if memory runs out
  line["schema"] = kSchema;
  line["state"] = NameOf(status.state, kRunStateWords);
  line["exit_code"] = nullptr;
  if (status.state != RunState::kRunning) line["exit_code"] = status.exit_code;
  line["error"] = status.error;
  line["step"] = status.step;
  line["first_step"] = status.first_step;
  line["steps"] = status.steps;
  Set("loss", status.loss, line);
  Set("val_loss", status.val_loss, line);
  line["tokens_per_s"] = status.tokens_per_s;
  line["step_ms"] = status.step_ms;
  line["updated"] = absl::FormatTime(kTimeForm, status.updated, absl::UTCTimeZone());
  line["user"] = status.user;
  line["ranks"] = status.ranks;
  line["hosts"] = status.hosts;
  line["backend"] = status.backend;
  line["save"] = status.save;
  line["command"] = status.command;
  line["version"] = status.version;
  line["commit"] = status.commit;
  line["process"] = Json::parse(LockText(status.process));
  return line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

absl::StatusOr<RunStatus> ParseStatus(absl::string_view text) {
  const auto parsed = ParseBoundedJson(kStatusName, text);
  if (absl::IsResourceExhausted(parsed.status())) return parsed.status();
  if (!parsed.ok() || !parsed->is_object()) return absl::DataLossError("is no JSON object");
  const Json line = *parsed;
  RunStatus status;
  Members members(line);
  std::string schema, state, updated;
  members.Get("schema", schema);
  if (members.missing().empty() && schema != kSchema) {
    return absl::DataLossError(absl::StrCat("has schema '", schema, "', expected ", kSchema));
  }
  members.Get("state", state);
  if (const auto known = ValueOf(state, kRunStateWords)) {
    status.state = *known;
  } else {
    members.Lacks("state");
  }
  if (status.state != RunState::kRunning)
    members.Get("exit_code", 0, kMostExitCode, status.exit_code);
  members.Get("error", status.error);
  members.Get("step", 0, kMostSteps, status.step);
  members.Get("first_step", 0, kMostSteps, status.first_step);
  members.Get("steps", 0, kMostSteps, status.steps);
  members.GetOrNull("loss", status.loss);
  members.GetOrNull("val_loss", status.val_loss);
  members.Get("tokens_per_s", status.tokens_per_s);
  members.Get("step_ms", status.step_ms);
  members.Get("updated", updated);
  if (!absl::ParseTime(kTimeForm, updated, &status.updated, nullptr) ||
      status.updated == absl::InfiniteFuture() || status.updated == absl::InfinitePast()) {
    members.Lacks("updated");
  }
  members.Get("user", status.user);
  members.Get("ranks", 1, kMostRanks, status.ranks);
  members.Get("hosts", 1, kMostRanks, status.hosts);
  members.Get("backend", status.backend);
  members.Get("save", status.save);
  members.Get("command", status.command);
  members.Get("version", status.version);
  members.Get("commit", status.commit);
  const auto process = line.find("process");
  const auto holder = ParseLock(
      process == line.end() ? "" : process->dump(-1, ' ', false, Json::error_handler_t::replace));
  if (absl::IsResourceExhausted(holder.status())) return holder.status();
  if (holder.ok()) {
    status.process = *holder;
  } else {
    members.Lacks("process");
  }
  if (!members.missing().empty()) {
    return absl::DataLossError(absl::StrCat("has no '", members.missing(), "' of a run"));
  }
  return status;
}

std::string StatusPathIn(absl::string_view folder) {
  return (fs::path(std::string(folder)) / kStatusName).string();
}

std::string UserName() {
  std::array<char, 4096> room = {};
  passwd entry = {};
  passwd* found = nullptr;
  if (::getpwuid_r(::geteuid(), &entry, room.data(), room.size(), &found) == 0 &&
      found != nullptr) {
    return found->pw_name;
  }
  return absl::StrCat(::geteuid());
}

struct StatusFile::Writer {
  Writer(std::vector<std::string> given_folders, std::string given_run, FileSystem& given_files)
      : folders(std::move(given_folders)), run(std::move(given_run)), files(given_files) {}

  void Serve();
  void WriteAll(const RunStatus& status, bool owns);
  std::error_code Write(const std::string& path, RunStatus status, bool owns);

  const std::vector<std::string> folders;  // absolute, each once
  const std::string run;                   // of this process
  FileSystem& files;
  bool cleaned = false, warned = false;  // of the thread alone
  std::mutex mu;
  std::condition_variable changed;
  std::optional<RunStatus> next;  // guarded by mu, as is all below
  bool next_owns = false;         // whether `next` is of the process of rank 0
  bool started = false, writing = false, stop = false;
};

// What another process has ended stays, and one that is not of rank 0 only ends a run.
std::error_code StatusFile::Writer::Write(const std::string& path, RunStatus status, bool owns) {
  SmallFile file;
  const bool is_there = !files.ReadSmall(path, file);
  auto written = ParseStatus(is_there ? file.text : "");
  const bool ended = written.ok() && written->state != RunState::kRunning;
  if (owns) {
    if (ended && written->process.run == status.process.run) return {};
  } else {
    if (!written.ok() || ended) return {};
    written->state = status.state;
    written->exit_code = status.exit_code;
    written->error = std::move(status.error);
    written->updated = status.updated;
    status = *std::move(written);
  }
  return ReplaceLiveFile(path, run, StatusText(status), files);
}

void StatusFile::Writer::WriteAll(const RunStatus& status, bool owns) {
  for (const std::string& folder : folders) {
    const std::string path = StatusPathIn(folder);
    if (owns && !cleaned) RemoveUnfinished(path, files);
    const std::error_code error = Write(path, status, owns);
    if (!error || warned) continue;
    warned = true;
    PrintWarnings("train", {absl::StrCat(StatusOf(error, "write", path).message(),
                                         ": moe status does not see this run")});
  }
  cleaned = true;
}

void StatusFile::Writer::Serve() {
  std::unique_lock lock(mu);
  while (true) {
    changed.wait(lock, [this] { return next.has_value() || stop; });
    if (!next.has_value()) return;
    const RunStatus status = *std::move(next);
    next.reset();
    const bool owns = next_owns;
    writing = true;
    lock.unlock();
    Caught([&] {
      WriteAll(status, owns);
      return absl::OkStatus();
    }).IgnoreError();
    lock.lock();
    writing = false;
    changed.notify_all();
  }
}

StatusFile::StatusFile(RunStatus start, const std::vector<std::string>& folders, FileSystem& files)
    : writer_(std::make_shared<Writer>(EachOnce(folders), start.process.run, files)),
      now_(std::move(start)) {}

StatusFile::~StatusFile() {
  if (!ended_) Await();
  const std::lock_guard lock(writer_->mu);
  writer_->stop = true;
  writer_->changed.notify_all();
}

void StatusFile::Begin(int64_t first_step, int hosts, int rank) {
  const std::lock_guard lock(mu_);
  begun_ = true;
  if (rank != 0 || ended_) return;
  owns_ = true;
  now_.step = now_.first_step = first_step;
  now_.hosts = hosts;
  Post();
}

void StatusFile::Show(const lm::StepMetrics& metrics) {
  const std::lock_guard lock(mu_);
  if (!owns_ || ended_) return;
  now_.step = metrics.step;
  now_.loss = metrics.loss;
  if (metrics.has_validation) now_.val_loss = metrics.validation_loss;
  now_.tokens_per_s = metrics.tokens_per_second;
  now_.step_ms = metrics.step_seconds * 1e3;
  if (absl::Now() - now_.updated >= kInterval) Post();
}

void StatusFile::End(const absl::Status& status) {
  {
    const std::lock_guard lock(mu_);
    if (!begun_ || ended_) return;
    ended_ = true;
    now_.state = StateOf(status);
    now_.exit_code = static_cast<int>(ExitCodeOf(status));
    now_.error = std::string(status.message());
    Post();
  }
  Await();
}

void StatusFile::Post() {
  now_.updated = absl::Now();
  const std::lock_guard lock(writer_->mu);
  writer_->next = now_;
  writer_->next_owns = owns_;
  writer_->changed.notify_all();
  if (writer_->started) return;
  const absl::Status started = Caught([this] {
    std::thread([writer = writer_] { writer->Serve(); }).detach();
    return absl::OkStatus();
  });
  writer_->started = started.ok();  // else the next call tries again
  if (!started.ok()) writer_->next.reset();
}

void StatusFile::Await() noexcept {
  std::unique_lock lock(writer_->mu);
  writer_->changed.wait_for(lock, absl::ToChronoNanoseconds(kLongestEnd),
                            [this] { return !writer_->next.has_value() && !writer_->writing; });
}

}  // namespace moe::cli
