#include "moe/sweep/sweep_table.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "moe/io/bounded_json.h"
#include "moe/report/pareto.h"

namespace moe::sweep {
namespace {

constexpr char kNone[] = "-";
// Of an error in a table, which may come from a file.
constexpr int64_t kMostErrorBytes = 400;

// "1.23M": three digits and a power of 1000.
std::string ShortCount(double value) {
  if (!std::isfinite(value)) return kNone;
  const char* const units[] = {"", "k", "M", "G", "T"};
  size_t unit = 0;
  while (value >= 999.5 && unit + 1 < std::size(units)) {
    value /= 1000;
    ++unit;
  }
  const int decimals = unit == 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return absl::StrFormat("%.*f%s", decimals, value, units[unit]);
}

std::string Fixed(double value, int decimals) {
  return std::isfinite(value) ? absl::StrFormat("%.*f", decimals, value) : kNone;
}

std::string Count(double value) {
  if (!std::isfinite(value)) return kNone;
  return absl::StrFormat(value == std::floor(value) ? "%.0f" : "%.1f", value);
}

// "3.1 (12)": milliseconds and the share of the step.
std::string PartOf(double ms, double step_ms) {
  if (!std::isfinite(ms)) return kNone;
  return absl::StrFormat("%.2f (%.0f)", ms, step_ms > 0 ? 100 * ms / step_ms : 0.0);
}

std::string OrNone(const std::string& text) {
  return text.empty() ? kNone : Shown(text, kMostErrorBytes);
}

std::string Speed(const SweepRow& row, bool on_front) {
  const double mean = row.number("tok_s");
  if (!std::isfinite(mean)) return kNone;
  return absl::StrCat(Fixed(mean, 0), " ± ", Fixed(row.number("tok_s_sd"), 0),
                      on_front ? " *" : "  ");
}

std::string Drops(const SweepRow& row) {
  const double end = row.number("drop_end");
  if (!std::isfinite(end)) return kNone;
  if (row.text("measure") == "layer") return Fixed(end, 2);
  return absl::StrCat(Fixed(row.number("drop_init"), 2), "→", Fixed(end, 2));
}

using Line = std::vector<std::string>;

const Line& Heads() {
  static const Line heads = {
      "experts",        "topk",       "cf",      "ep",        "dp",       "tok/rank",
      "params tot/act", "tok/s ± sd", "step ms", "a2a ms(%)", "ar ms(%)", "expert ms",
      "drop% init→end", "MaxVio",     "dead",    "val loss",  "peak MiB", "status"};
  return heads;
}

Line LineOf(const SweepRow& row, bool on_front) {
  const double step_ms = row.number("step_ms");
  const double total = row.number("params_total");
  return {OrNone(row.text("experts")),
          OrNone(row.text("topk")),
          OrNone(row.text("cf")),
          OrNone(row.text("ep")),
          OrNone(row.text("dp")),
          OrNone(row.text("tok_per_rank")),
          std::isfinite(total)
              ? absl::StrCat(ShortCount(total), "/", ShortCount(row.number("params_active")))
              : kNone,
          Speed(row, on_front),
          Fixed(step_ms, 2),
          PartOf(row.number("a2a_ms"), step_ms),
          PartOf(row.number("ar_ms"), step_ms),
          Fixed(row.number("expert_ms"), 2),
          Drops(row),
          Fixed(row.number("max_vio"), 2),
          Count(row.number("dead")),
          Fixed(row.number("val_loss"), 4),
          Fixed(row.number("peak_mib"), 0),
          row.failed() ? absl::StrCat("error: ", Shown(row.text("error"), kMostErrorBytes)) : "ok"};
}

// Columns on a terminal: UTF-8's continuation bytes take none.
size_t Width(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string Layout(const std::vector<Line>& lines) {
  std::vector<size_t> widths(lines.front().size(), 0);
  for (const Line& line : lines) {
    for (size_t c = 0; c < line.size(); ++c) widths[c] = std::max(widths[c], Width(line[c]));
  }
  std::string out;
  for (const Line& line : lines) {
    for (size_t c = 0; c < line.size(); ++c) {
      const bool last = c + 1 == line.size();  // the status: from the left, no blanks behind it
      if (!last) out.append(widths[c] - Width(line[c]), ' ');
      absl::StrAppend(&out, line[c], last ? "\n" : " | ");
    }
  }
  return out;
}

}  // namespace

std::vector<bool> ParetoMarks(absl::Span<const SweepRow> rows) {
  std::vector<bool> marks(rows.size(), false);
  std::vector<std::pair<double, double>> points;
  std::vector<size_t> row_of;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].failed()) continue;
    const bool layer = rows[i].text("measure") == "layer";
    points.emplace_back(rows[i].number(layer ? "drop_end" : "val_loss"), rows[i].number("tok_s"));
    row_of.push_back(i);
  }
  for (const int i : report::ParetoFront(points, report::Better::kLower, report::Better::kHigher)) {
    marks[row_of[i]] = true;
  }
  return marks;
}

std::string SweepTable(absl::Span<const SweepRow> rows) {
  if (rows.empty()) return "";
  std::vector<const char*> varied;
  for (const char* key :
       {"ranks", "overlap", "hidden", "ffn", "dtype", "router", "routing", "dispatch"}) {
    std::set<std::string> values;
    for (const SweepRow& row : rows) values.insert(row.text(key));
    if (values.size() > 1) varied.push_back(key);
  }
  Line heads(varied.begin(), varied.end());
  heads.insert(heads.end(), Heads().begin(), Heads().end());
  std::vector<Line> lines = {std::move(heads)};
  const std::vector<bool> marks = ParetoMarks(rows);
  for (size_t i = 0; i < rows.size(); ++i) {
    Line& line = lines.emplace_back();
    for (const char* key : varied) line.push_back(OrNone(rows[i].text(key)));
    const Line figures = LineOf(rows[i], marks[i]);
    line.insert(line.end(), figures.begin(), figures.end());
  }
  return Layout(lines);
}

}  // namespace moe::sweep
