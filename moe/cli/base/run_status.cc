#include "moe/cli/base/run_status.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <type_traits>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <pwd.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/exit_code.h"
#include "moe/cli/base/program.h"
#include "moe/io/file_system.h"

namespace moe::cli {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr char kSchema[] = "moe.status/1";
constexpr char kTimeForm[] = "%Y-%m-%dT%H:%M:%SZ";

void Set(const char* key, const std::optional<double>& value, Json& line) {
  line[key] = nullptr;
  if (value.has_value()) line[key] = *value;
}

// Members of an object, each of which must be there.
class Members {
 public:
  explicit Members(const Json& object) : object_(object) {}

  template <typename V>
  void Get(const char* key, V& value) {
    const auto member = object_.find(key);
    if (member == object_.end() || !Is<V>(*member)) return Lacks(key);
    value = member->template get<V>();
  }
  void GetOrNull(const char* key, std::optional<double>& value) {
    const auto member = object_.find(key);
    if (member == object_.end() || !(member->is_null() || member->is_number())) return Lacks(key);
    if (!member->is_null()) value = member->get<double>();
  }
  void Lacks(const char* key) {
    if (missing_.empty()) missing_ = key;
  }
  // The first that is missing, or of another type; empty: none.
  const std::string& missing() const { return missing_; }

 private:
  template <typename V>
  static bool Is(const Json& member) {
    if constexpr (std::is_same_v<V, std::string>) return member.is_string();
    if constexpr (std::is_floating_point_v<V>) return member.is_number();
    return member.is_number_integer();
  }

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

// Writes beside the path and renames, so that a reader sees the whole of one text. Not flushed: the
// status of a host that has lost its power is of no use.
std::error_code Replace(const std::string& path, absl::string_view text) {
  FileSystem& files = RealFileSystem();
  const std::string temporary = absl::StrCat(path, ".", ::getpid());
  int file = -1;
  std::error_code error = files.Create(temporary, file);
  if (error.value() == EEXIST) {  // left by a process of this number that was killed
    (void)files.Unlink(temporary);
    error = files.Create(temporary, file);
  }
  if (error) return error;
  error = WriteAll(file, {reinterpret_cast<const uint8_t*>(text.data()), text.size()}, files);
  const std::error_code closed = files.Close(file);
  if (!error) error = closed;
  if (!error) error = files.Rename(temporary, path);
  if (error) (void)files.Unlink(temporary);
  return error;
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
  const Json line = Json::parse(text.begin(), text.end(), nullptr, false);
  if (!line.is_object()) return absl::DataLossError("is no JSON object");
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
  if (status.state != RunState::kRunning) members.Get("exit_code", status.exit_code);
  members.Get("error", status.error);
  members.Get("step", status.step);
  members.Get("first_step", status.first_step);
  members.Get("steps", status.steps);
  members.GetOrNull("loss", status.loss);
  members.GetOrNull("val_loss", status.val_loss);
  members.Get("tokens_per_s", status.tokens_per_s);
  members.Get("step_ms", status.step_ms);
  members.Get("updated", updated);
  if (!absl::ParseTime(kTimeForm, updated, &status.updated, nullptr)) members.Lacks("updated");
  members.Get("user", status.user);
  members.Get("ranks", status.ranks);
  members.Get("hosts", status.hosts);
  members.Get("backend", status.backend);
  members.Get("save", status.save);
  members.Get("command", status.command);
  members.Get("version", status.version);
  members.Get("commit", status.commit);
  const auto process = line.find("process");
  const auto holder = ParseLock(
      process == line.end() ? "" : process->dump(-1, ' ', false, Json::error_handler_t::replace));
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

StatusFile::StatusFile(RunStatus start, const std::vector<std::string>& folders)
    : folders_(EachOnce(folders)), now_(std::move(start)) {}

void StatusFile::Begin(int64_t first_step, int hosts, int rank) {
  const std::lock_guard lock(mu_);
  begun_ = true;
  if (rank != 0) return;
  owns_ = true;
  now_.step = now_.first_step = first_step;
  now_.hosts = hosts;
  Write();
}

void StatusFile::Show(const lm::StepMetrics& metrics) {
  const std::lock_guard lock(mu_);
  now_.step = metrics.step;
  now_.loss = metrics.loss;
  if (metrics.has_validation) now_.val_loss = metrics.validation_loss;
  now_.tokens_per_s = metrics.tokens_per_second;
  now_.step_ms = metrics.step_seconds * 1e3;
  if (absl::Now() - now_.updated >= kInterval) Write();
}

void StatusFile::End(const absl::Status& status) {
  const std::lock_guard lock(mu_);
  if (!begun_ || ended_) return;
  ended_ = true;
  RunStatus end = now_;
  if (!owns_) {  // what rank 0 has written last
    SmallFile file;
    if (folders_.empty() || RealFileSystem().ReadSmall(StatusPathIn(folders_[0]), file)) return;
    const auto written = ParseStatus(file.text);
    if (!written.ok() || written->state != RunState::kRunning) return;
    end = *written;
  }
  end.state = StateOf(status);
  end.exit_code = static_cast<int>(ExitCodeOf(status));
  end.error = std::string(status.message());
  now_ = std::move(end);
  Write();
}

void StatusFile::Write() {
  now_.updated = absl::Now();
  const std::string text = StatusText(now_);
  for (const std::string& folder : folders_) {
    const std::string path = StatusPathIn(folder);
    const std::error_code error = Replace(path, text);
    if (!error || warned_) continue;
    warned_ = true;
    PrintWarnings("train", {absl::StrCat(StatusOf(error, "write", path).message(),
                                         ": moe status does not see this run")});
  }
}

}  // namespace moe::cli
