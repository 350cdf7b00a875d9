#include "moe/cli/sweep/sweep_output.h"

#include <algorithm>
#include <map>
#include <utility>

#include <absl/strings/str_cat.h>
#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include "kernels/base/caught.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/base/program.h"
#include "moe/cli/measure/tables.h"
#include "moe/io/bounded_json.h"

namespace moe::cli {

namespace {

// -o and -oe have one column more than the file: whether a point is on the front is only known at
// the end.
measure::Fields Marked(measure::Fields row, bool on_front) {
  const auto status =
      std::find_if(row.begin(), row.end(), [](const auto& field) { return field.key == "status"; });
  row.insert(status, {"pareto", on_front ? measure::Cell("*") : measure::Cell()});
  return row;
}

std::string TextIn(const std::string& form, const std::vector<sweep::SweepRow>& rows) {
  const auto table_form = measure::TableFormOf(form);
  if (!table_form.has_value()) return sweep::SweepTable(rows);
  const std::vector<bool> marks = sweep::ParetoMarks(rows);
  std::vector<measure::Fields> marked;
  for (size_t i = 0; i < rows.size(); ++i) marked.push_back(Marked(rows[i].fields, marks[i]));
  const auto keys = measure::KeysOf(Marked(sweep::SweepFields({}, {}, "ok", {}), false));
  return measure::WriteTable(*table_form, keys, marked);
}

// "[ 7/36] E=16 k=2 cf=1.25 eta 00:12:40": point 7 of 36 runs. Without an eta: "eta --:--:--". If
// that is longer than `columns`, the eta precedes the label, which is truncated.
std::string ProgressText(int64_t number, int64_t points, const std::string& label,
                         std::optional<double> eta_seconds, size_t columns) {
  const std::string place =
      fmt::format("[{:>{}}/{}]", number, std::to_string(points).size(), points);
  const std::string eta =
      absl::StrCat("eta ", eta_seconds.has_value() ? ClockText(*eta_seconds) : "--:--:--");
  const std::string line = absl::StrCat(place, " ", label, " ", eta);
  if (line.size() <= columns) return line;
  return absl::StrCat(place, " ", eta, " ", label).substr(0, columns);
}

}  // namespace

absl::Status SweepOutput::Open() {
  const std::string out = settings_.text("out");
  const std::string resume = settings_.text("resume");
  if (settings_.on("retry") && resume.empty()) {
    return WrongFlag("--retry", "true", "--resume FILE with it");
  }
  path_ = resume.empty() ? out : resume;
  if (path_.empty()) return absl::OkStatus();
  if (!resume.empty() && !out.empty() && out != resume) {
    return WrongFlag("--out", out,
                     absl::StrCat("none, or the '", resume, "' of --resume, which is appended to"));
  }
  const char* const flag = resume.empty() ? "--out" : "--resume";
  auto file =
      resume.empty() ? sweep::ResultFile::Create(path_) : sweep::ResultFile::Continue(path_);
  if (absl::IsAlreadyExists(file.status())) {
    return WrongFlag("--out", absl::StrCat("'", path_, "'"),
                     absl::StrCat("a new file, since it holds something: --resume ",
                                  ShellQuote(path_), " goes on with it"));
  }
  if (!file.ok() && resume.empty()) return WriteError(flag, path_, file.status());
  MOE_RETURN_IF_ERROR(InputError(flag, file.status()));
  file_.emplace(*std::move(file));
  return absl::OkStatus();
}

absl::StatusOr<std::string> SweepOutput::Adopt(const std::vector<std::string>& identities,
                                               const std::string& build) {
  if (!file_.has_value()) return std::string();
  std::map<std::string, size_t> point_of;
  for (size_t i = 0; i < identities.size(); ++i) point_of.emplace(identities[i], i);
  const std::lock_guard<std::mutex> lock(mu_);
  int64_t others = 0;
  int64_t first_other = 0;
  for (const sweep::ResultFile::Line& line : file_->lines()) {
    if (const std::string other = sweep::BuildOf(line.row); other != build) {
      return WrongFlag("--resume", absl::StrCat("'", path_, "'"),
                       absl::StrCat("rows of this build, ", build, "; line ", line.number,
                                    " is of ", Shown(other, 200)));
    }
    const auto at = point_of.find(sweep::IdentityOf(line.row));
    if (at != point_of.end()) {
      const bool again = line.row.failed() && settings_.on("retry");
      // the last row of a point counts
      rows_[at->second] = again ? std::nullopt : std::optional(line.row);
      continue;
    }
    if (others++ == 0) first_other = line.number;
  }
  if (others == 0) return std::string();
  return absl::StrCat(path_, ": ", others, " of ", file_->lines().size(), " rows ",
                      others == 1 ? "is" : "are",
                      " of other settings and left alone, the first in line ", first_other);
}

bool SweepOutput::has(size_t index) const {
  const std::lock_guard<std::mutex> lock(mu_);
  return rows_[index].has_value();
}

std::vector<sweep::SweepRow> SweepOutput::rows() const {
  const std::lock_guard<std::mutex> lock(mu_);
  std::vector<sweep::SweepRow> rows;
  for (const auto& row : rows_) {
    if (row.has_value()) rows.push_back(*row);
  }
  return rows;
}

absl::Status SweepOutput::Add(size_t index, sweep::SweepRow row) {
  const std::lock_guard<std::mutex> lock(mu_);
  if (file_.has_value()) {
    MOE_RETURN_IF_ERROR(WriteError("--out", path_, file_->Append(row)));
  }
  rows_[index] = std::move(row);
  return absl::OkStatus();
}

void SweepOutput::Keep(size_t index, sweep::SweepRow row) {
  const std::lock_guard<std::mutex> lock(mu_);
  rows_[index] = std::move(row);
}

std::optional<sweep::SweepRow> SweepOutput::row(size_t index) const {
  const std::lock_guard<std::mutex> lock(mu_);
  return rows_[index];
}

absl::Status SweepOutput::Print() const {
  const std::vector<sweep::SweepRow> rows = this->rows();
  if (!settings_.empty("output-stderr")) {
    PrintAside(TextIn(settings_.text("output-stderr"), rows));
  }
  return cli::Print(TextIn(settings_.text("output"), rows));
}

void SweepProgress::Show(const std::string& suffix) {
  std::optional<double> eta;
  if (finished_ > 0) {
    eta = seconds_ / static_cast<double>(finished_) *
          static_cast<double>(std::max<int64_t>(1, options_.to_run - finished_));
  }
  const Terminal& terminal = line_.terminal();
  line_.Show(ProgressText(number_, options_.points, label_ + suffix, eta,
                          terminal.present ? terminal.columns - 1 : std::string::npos));
}

void SweepProgress::Start(int64_t number, const std::string& label) {
  number_ = number;
  label_ = label;
  if (!options_.quiet) Show("");
}

void SweepProgress::Step(int64_t done, int64_t total) {
  if (!options_.quiet && line_.terminal().present) Show(fmt::format(" step {}/{}", done, total));
}

void SweepProgress::Finish(double seconds) {
  seconds_ += seconds;
  ++finished_;
}

void SweepProgress::Error(int64_t number, const std::string& label, const std::string& error) {
  if (options_.quiet) return;
  line_.End();
  Say(out_, "[{:>{}}/{}] {} error: {}\n", number, std::to_string(options_.points).size(),
      options_.points, label, Shown(error, 400));
  std::fflush(out_);
}

InterruptWatch::InterruptWatch(std::function<void()> say) : say_(std::move(say)) {
  sigemptyset(&signals_);
  // A launcher that is interrupted ends its processes by SIGTERM. A shell makes its background jobs
  // ignore SIGINT, and that is respected.
  struct sigaction now = {};
  sigaction(SIGINT, nullptr, &now);
  if (now.sa_handler != SIG_IGN) sigaddset(&signals_, SIGINT);
  sigaddset(&signals_, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals_, &before_);
  thread_ = std::thread([this] { Wait(); });
}

InterruptWatch::~InterruptWatch() {
  over_ = true;
  pthread_kill(thread_.native_handle(), SIGTERM);  // ends the wait
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
