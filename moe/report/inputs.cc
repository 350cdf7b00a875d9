#include "moe/report/inputs.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <utility>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>
#include <absl/strings/strip.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/io/bounded_json.h"
#include "moe/io/file.h"
#include "moe/report/format.h"
#include "moe/report/row_reader.h"

namespace moe::report {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxBytes = int64_t{256} << 20;
constexpr JsonLimits kLimits = {.max_bytes = kMaxBytes, .max_values = int64_t{1} << 23};

// Hands each object to AddRow as it ends, so that what is wrong with a row is reported at its
// place: objects alone, or the elements of one list.
class RowEvents : public JsonEvents {
 public:
  explicit RowEvents(Run& run) : run_(run) {}

  absl::Status BeginObject() override { return Begin(Json::object()); }
  absl::Status BeginList() override {
    if (!in_list_ && open_.empty()) {
      in_list_ = true;
      return absl::OkStatus();
    }
    return Begin(Json::array());
  }
  absl::Status Key(std::string name) override {
    if (open_.back()->contains(name)) {
      return absl::DataLossError(absl::StrCat("key '", Shown(name), "' stands there twice"));
    }
    key_ = std::move(name);
    return absl::OkStatus();
  }
  absl::Status Scalar(Json value) override {
    if (open_.empty()) return AddRow(value, run_);
    Put(std::move(value));
    return absl::OkStatus();
  }
  absl::Status End() override {
    if (open_.empty()) return absl::OkStatus();  // of the list of rows
    open_.pop_back();
    return open_.empty() ? AddRow(row_, run_) : absl::OkStatus();
  }

 private:
  absl::Status Begin(Json value) {
    if (open_.empty()) {
      row_ = std::move(value);
      open_.push_back(&row_);
    } else {
      open_.push_back(Put(std::move(value)));
    }
    return absl::OkStatus();
  }
  // Where the value now is; it stays there while it is open.
  Json* Put(Json value) {
    Json& parent = *open_.back();
    if (!parent.is_array()) return &(parent[key_] = std::move(value));
    parent.push_back(std::move(value));
    return &parent.back();
  }

  Run& run_;
  bool in_list_ = false;
  Json row_;
  std::vector<Json*> open_;
  std::string key_;
};

absl::Status ReadDocument(absl::string_view file, absl::string_view document, Run& run) {
  RowEvents events(run);
  return ReadJsonEvents(file, document, kLimits, events);
}

// Places in one line are on line 1: names the line of the file instead.
absl::Status AtLine(int64_t line, const absl::Status& status) {
  constexpr absl::string_view kFirst = "(line 1, ";
  const absl::string_view message = status.message();
  const size_t at = message.rfind(kFirst);
  if (at == message.npos) return status;
  return absl::Status(status.code(), absl::StrCat(message.substr(0, at), "(line ", line, ", ",
                                                  message.substr(at + kFirst.size())));
}

absl::Status ReadLines(absl::string_view file, absl::string_view document, Run& run) {
  int64_t number = 0;
  for (const absl::string_view line : absl::StrSplit(document, '\n')) {
    ++number;
    if (absl::StripAsciiWhitespace(line).empty()) continue;
    const absl::Status status = ReadDocument(file, line, run);
    if (!status.ok()) return AtLine(number, status);
  }
  return absl::OkStatus();
}

// A row a line: the first line that is not blank is a whole object, and more follows.
bool IsLines(absl::string_view document) {
  document = absl::StripAsciiWhitespace(document);
  const size_t end = document.find('\n');
  if (end == document.npos || document.front() != '{') return false;
  return absl::StripTrailingAsciiWhitespace(document.substr(0, end)).back() == '}';
}

}  // namespace

const char* NameOf(RunKind kind) {
  constexpr const char* kNames[] = {"bench", "sweep", "train"};
  return kNames[static_cast<int>(kind)];
}

double BenchRow::size() const {
  if (std::isfinite(size_bytes)) return size_bytes;
  return std::isfinite(rows) ? rows : 0;
}

std::string BenchRow::threads_text() const {
  return std::isfinite(threads) ? absl::StrCat(CountText(threads), " threads") : "";
}

std::string BenchRow::seed_text() const {
  return seed.empty() ? "" : absl::StrCat("seed ", seed);
}

std::string BenchRow::pair() const {
  if (!std::isfinite(source) || !std::isfinite(destination)) return "";
  return absl::StrCat(CountText(source), " to ", CountText(destination));
}

double BenchRow::imbalance() const {
  return std::fmax(sent_imbalance, received_imbalance);
}

size_t FirstSteadyStep(const Run& run) {
  return run.steps.size() > 1 ? 1 : 0;
}

absl::StatusOr<Run> ParseRun(absl::string_view file, absl::string_view document) {
  if (static_cast<int64_t>(document.size()) > kMaxBytes) {
    return absl::DataLossError(
        absl::StrCat(file, ": ", document.size(), " bytes, expected at most ", kMaxBytes));
  }
  Run run;
  run.path = std::string(file);
  run.name = run.path;
  if (absl::StripAsciiWhitespace(document).empty()) {
    return absl::DataLossError(absl::StrCat(file, ": holds no rows (line 1)"));
  }
  MOE_RETURN_IF_ERROR(IsLines(document) ? ReadLines(file, document, run)
                                        : ReadDocument(file, document, run));
  if (run.bench.empty() && run.sweep.empty() && run.steps.empty()) {
    return absl::DataLossError(absl::StrCat(
        file, run.totals.has_value() ? ": holds no steps (line 1)" : ": holds no rows (line 1)"));
  }
  return run;
}

absl::StatusOr<Run> ReadRun(const std::string& path) {
  std::error_code ignored;
  const bool folder = std::filesystem::is_directory(path, ignored);
  const std::string file = folder ? (std::filesystem::path(path) / "metrics.jsonl").string() : path;
  MOE_ASSIGN_OR_RETURN(const MappedFile mapped, MappedFile::Open(file));
  const auto bytes = mapped.bytes();
  MOE_ASSIGN_OR_RETURN(
      Run run,
      ParseRun(file, absl::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size())));
  run.path = path;
  return run;
}

std::vector<std::string> ShortNames(absl::Span<const std::string> paths) {
  std::vector<std::vector<std::string>> parts;  // of each path, without what says nothing
  size_t longest = 1;
  for (const std::string& path : paths) {
    std::vector<std::string> p = absl::StrSplit(path, '/', absl::SkipEmpty());
    if (p.size() > 1 && p.back() == "metrics.jsonl") p.pop_back();
    if (p.empty()) p.push_back(path);
    for (const char* suffix : {".jsonl", ".json"}) {
      if (p.back().size() > absl::string_view(suffix).size()) {
        p.back() = std::string(absl::StripSuffix(p.back(), suffix));
      }
    }
    longest = std::max(longest, p.size());
    parts.push_back(std::move(p));
  }
  std::vector<std::string> names;
  for (size_t length = 1; length <= longest; ++length) {
    names.clear();
    std::map<std::string, int> uses;
    for (const auto& p : parts) {
      names.push_back(
          absl::StrJoin(p.end() - static_cast<int64_t>(std::min(length, p.size())), p.end(), "/"));
      ++uses[names.back()];
    }
    if (uses.size() == names.size()) return names;
  }
  std::map<std::string, int> seen;
  for (std::string& name : names) {
    if (const int count = ++seen[name]; count > 1) absl::StrAppend(&name, " (", count, ")");
  }
  return names;
}

}  // namespace moe::report
