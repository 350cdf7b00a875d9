#include "moe/cli/sweep_output.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/bench/tables.h"
#include "moe/cli/layer_settings.h"
#include "moe/cli/program.h"
#include "moe/sweep/sweep_table.h"

namespace moe::cli {
namespace {

// -o and -oe have one column more than the file: whether a point is on the front is known at the
// end alone.
std::string FormText(bench::TableForm form, const std::vector<sweep::SweepRow>& rows) {
  std::vector<std::string> keys = sweep::SweepKeys();
  keys.insert(std::find(keys.begin(), keys.end(), "status"), "pareto");
  const auto at = std::find(keys.begin(), keys.end(), "pareto") - keys.begin();
  const std::vector<bool> marks = sweep::ParetoMarks(rows);
  std::vector<std::vector<bench::Cell>> cells;
  for (size_t i = 0; i < rows.size(); ++i) {
    std::vector<bench::Cell> row = rows[i].cells();
    row.insert(row.begin() + at, marks[i] ? bench::Cell("*") : bench::Cell());
    cells.push_back(std::move(row));
  }
  return bench::WriteTable(form, keys, cells);
}

std::string TextIn(const std::string& form, const std::vector<sweep::SweepRow>& rows) {
  const auto table_form = bench::TableFormOf(form);
  return table_form.has_value() ? FormText(*table_form, rows) : sweep::SweepTable(rows);
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

std::string SweepOutput::Adopt(const std::vector<std::string>& identities) {
  if (!file_.has_value()) return "";
  std::map<std::string, size_t> point_of;
  for (size_t i = 0; i < identities.size(); ++i) point_of.emplace(identities[i], i);
  const std::lock_guard<std::mutex> lock(mu_);
  int64_t others = 0;
  int64_t first_other = 0;
  for (const sweep::ResultFile::Line& line : file_->lines()) {
    const auto at = point_of.find(sweep::IdentityOf(line.row));
    if (at != point_of.end()) {
      const bool again = line.row.failed() && settings_.on("retry");
      rows_[at->second] = again ? std::nullopt : std::optional(line.row);  // the last one counts
      continue;
    }
    if (others++ == 0) first_other = line.number;
  }
  if (others == 0) return "";
  return absl::StrCat(path_, ": ", others, " of ", file_->lines().size(),
                      " rows are of other settings and left alone, the first in line ",
                      first_other);
}

bool SweepOutput::has(size_t index) const {
  const std::lock_guard<std::mutex> lock(mu_);
  return rows_[index].has_value();
}

size_t SweepOutput::count() const {
  const std::lock_guard<std::mutex> lock(mu_);
  return static_cast<size_t>(
      std::count_if(rows_.begin(), rows_.end(), [](const auto& row) { return row.has_value(); }));
}

size_t SweepOutput::errors() const {
  const std::lock_guard<std::mutex> lock(mu_);
  return static_cast<size_t>(std::count_if(rows_.begin(), rows_.end(), [](const auto& row) {
    return row.has_value() && row->failed();
  }));
}

std::string SweepOutput::first_error() const {
  const std::lock_guard<std::mutex> lock(mu_);
  for (const auto& row : rows_) {
    if (row.has_value() && row->failed()) return row->text("error");
  }
  return "";
}

absl::Status SweepOutput::Add(size_t index, sweep::SweepRow row) {
  const std::lock_guard<std::mutex> lock(mu_);
  if (file_.has_value()) {
    MOE_RETURN_IF_ERROR(WriteError("--out", path_, file_->Append(row)));
  }
  rows_[index] = std::move(row);
  return absl::OkStatus();
}

absl::Status SweepOutput::Print() const {
  std::vector<sweep::SweepRow> rows;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    for (const auto& row : rows_) {
      if (row.has_value()) rows.push_back(*row);
    }
  }
  if (!settings_.empty("output-stderr")) {
    const std::string text = TextIn(settings_.text("output-stderr"), rows);
    std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(stderr);
  }
  return cli::Print(TextIn(settings_.text("output"), rows));
}

}  // namespace moe::cli
