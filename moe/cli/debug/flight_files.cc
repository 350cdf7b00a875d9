// Reads dumps of flight recorders (comm/watch/process_watch.h).
#include <algorithm>
#include <filesystem>
#include <limits>
#include <optional>
#include <system_error>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/cli/debug/flight.h"
#include "moe/io/bounded_json.h"
#include "moe/io/file.h"

namespace moe::flight {
namespace {

using Json = nlohmann::json;

constexpr int kMostRanks = 1 << 20;
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
// A line is one object; that of a group has a number for each member.
constexpr JsonLimits kLineLimits = {
    .max_bytes = int64_t{8} << 20, .max_values = kMostRanks + 32, .max_depth = 3};

// Values of one line. Fetch of what is absent is `absent`; of another type, or out of range, the
// line is malformed.
class Line {
 public:
  explicit Line(Json value) : value_(std::move(value)) {}

  bool has(const char* key) const { return value_.is_object() && value_.contains(key); }
  const Json& operator[](const char* key) const { return value_[key]; }
  bool ok() const { return ok_; }

  int64_t Number(const char* key, int64_t least, int64_t most, int64_t absent) {
    if (!has(key)) return absent;
    const std::optional<int64_t> number = IntegerWithin(value_[key], least, most);
    ok_ = ok_ && number.has_value();
    return number.value_or(absent);
  }
  std::string Text(const char* key) {
    if (!has(key)) return "";
    ok_ = ok_ && value_[key].is_string();
    return ok_ ? value_[key].get<std::string>() : "";
  }

 private:
  Json value_;
  bool ok_ = true;
};

std::optional<std::vector<int>> MembersOf(const Json& list, int ranks) {
  if (!list.is_array()) return std::nullopt;
  std::vector<int> members;
  for (const Json& each : list) {
    const std::optional<int64_t> rank = IntegerWithin(each, 0, ranks - 1);
    if (!rank.has_value()) return std::nullopt;
    members.push_back(static_cast<int>(*rank));
  }
  return members;
}

std::string PlaceOf(Line& line) {
  std::string place = line.Text("at");
  const int64_t layer = line.Number("layer", 0, kMost, -1),
                step = line.Number("step", 0, kMost, -1);
  if (layer >= 0) absl::StrAppend(&place, ", layer ", layer);
  if (step >= 0) absl::StrAppend(&place, ", step ", step);
  return place;
}

// The first line; `to_day_ns` is what turns times of the dump into times of day.
bool ReadHead(Line& line, Dump& dump, int64_t& to_day_ns) {
  if (!line.has("flight") || !line.has("rank") || !line.has("ranks")) return false;
  line.Number("flight", 1, 1, 1);
  dump.ranks = static_cast<int>(line.Number("ranks", 1, kMostRanks, 1));
  dump.rank = static_cast<int>(line.Number("rank", 0, dump.ranks - 1, 0));
  dump.host = line.Text("host");
  dump.reason = line.Text("reason");
  dump.at = PlaceOf(line);
  dump.began_ns = line.Number("began_unix_ns", 0, kMost, 0);
  dump.written_ns = line.Number("unix_ns", 0, kMost, 0);
  to_day_ns = dump.written_ns - line.Number("monotonic_ns", 0, kMost, 0);
  return line.ok();
}

bool ReadCall(Line& line, const Dump& dump, int64_t to_day_ns, Call& call) {
  call.group = line.Text("group");
  call.sequence = line.Number("sequence", 0, kMost, -1);
  call.operation = line.Text("operation");
  call.site = line.Text("site");
  call.layer = line.Number("layer", 0, kMost, -1);
  call.step = line.Number("step", 0, kMost, -1);
  call.bytes_in = line.Number("bytes_in", 0, kMost, 0);
  call.bytes_out = line.Number("bytes_out", 0, kMost, 0);
  call.type = line.Text("type");
  call.counts_hash = line.Text("counts_hash");
  call.state = line.Text("state");
  const auto time = [&](const char* key) {
    const int64_t at = line.Number(key, 1, kMost / 2, 0);
    return at == 0 ? 0 : at + to_day_ns;
  };
  call.entered_ns = time("entered_ns");
  call.started_ns = time("started_ns");
  call.ended_ns = time("ended_ns");
  return line.ok() && call.sequence >= 0 && !call.operation.empty() &&
         dump.groups.contains(call.group);
}

// Every process of a run begins before one of them writes: the ranks meet first.
void KeepNewestRun(std::vector<Dump>& dumps) {
  const auto earlier = [](const Dump& a, const Dump& b) {
    return a.written_ns < b.written_ns;
  };
  const auto newest = std::max_element(dumps.begin(), dumps.end(), earlier);
  std::erase_if(dumps, [ranks = newest->ranks, began_ns = newest->began_ns](const Dump& dump) {
    return dump.ranks != ranks || dump.written_ns < began_ns;
  });
}

}  // namespace

absl::StatusOr<Dump> ParseDump(const std::string& file, absl::string_view text) {
  Dump dump;
  int64_t to_day_ns = 0, number = 0;
  for (const absl::string_view one : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::string at = absl::StrCat(file, ", line ", ++number);
    MOE_ASSIGN_OR_RETURN(Json value, ParseBoundedJson(at, one, kLineLimits));
    Line line(std::move(value));
    const auto malformed = [&](absl::string_view expected) {
      return absl::DataLossError(absl::StrCat(at, ": ", Shown(one), ", expected ", expected));
    };
    if (number == 1) {
      if (!ReadHead(line, dump, to_day_ns))
        return malformed("the head of a flight recorder's dump");
    } else if (line.has("members")) {
      auto members = MembersOf(line["members"], dump.ranks);
      if (!members.has_value()) return malformed("ranks of a group");
      dump.groups[line.Text("group")] = *std::move(members);
    } else {
      Call call;
      if (!ReadCall(line, dump, to_day_ns, call)) return malformed("a call of a group before it");
      dump.calls.push_back(std::move(call));
    }
  }
  if (number == 0) return absl::DataLossError(absl::StrCat(file, ": empty, expected a dump"));
  return dump;
}

absl::StatusOr<std::vector<Dump>> ReadDumps(const std::string& folder) {
  MOE_ASSIGN_OR_RETURN(const bool is_folder, IsFolder(folder));
  if (!is_folder) {
    return absl::NotFoundError(absl::StrCat("'", folder, "', expected a folder that is there"));
  }
  std::vector<std::string> paths;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (absl::StartsWith(name, "flight.rank") && absl::EndsWith(name, ".jsonl")) {
      paths.push_back(entry.path().string());
    }
  }
  if (error) return FileError("list", folder, error.value(), FileFault::kRead);
  if (paths.empty()) {
    return absl::NotFoundError(
        absl::StrCat("'", folder, "' holds no flight.rank<R>.jsonl, expected those of a run"));
  }
  std::vector<Dump> dumps;
  for (const std::string& path : paths) {
    MOE_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
    MOE_ASSIGN_OR_RETURN(Dump dump, ParseDump(path, file.text()));
    dumps.push_back(std::move(dump));
  }
  KeepNewestRun(dumps);
  std::sort(dumps.begin(), dumps.end(),
            [](const Dump& a, const Dump& b) { return a.rank < b.rank; });
  for (size_t i = 1; i < dumps.size(); ++i) {
    if (dumps[i].rank != dumps[i - 1].rank) continue;
    return absl::DataLossError(
        absl::StrCat(folder, ": two dumps of rank ", dumps[i].rank, ", expected those of one run"));
  }
  return dumps;
}

}  // namespace moe::flight
