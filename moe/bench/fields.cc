#include "moe/bench/fields.h"

#include <variant>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/string_view.h>
#include <absl/strings/strip.h>

namespace moe::bench {
namespace {

std::string Padded(absl::string_view text, int width) {
  return width < 0 ? absl::StrFormat("%-*s", -width, text) : absl::StrFormat("%*s", width, text);
}

std::string TextOf(const Cell& cell, int decimals) {
  const double* const real = std::get_if<double>(&cell.value());
  return real == nullptr ? cell.text() : absl::StrFormat("%.*f", decimals, *real);
}

// Ends without blanks: lines are compared and pasted.
std::string Line(absl::string_view start, absl::Span<const Column> columns, auto text_of) {
  std::string line(start);
  for (const Column& column : columns) {
    absl::StrAppend(&line, " ", Padded(text_of(column), column.width));
  }
  line.resize(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

}  // namespace

std::vector<std::string> KeysOf(const Fields& row) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : row) keys.push_back(key);
  return keys;
}

std::vector<Cell> CellsOf(const Fields& row) {
  std::vector<Cell> cells;
  for (const auto& [key, value] : row) cells.push_back(value);
  return cells;
}

const Cell* Find(const Fields& row, absl::string_view key) {
  for (const auto& [name, value] : row) {
    if (name == key) return &value;
  }
  return nullptr;
}

void AddTimes(const Statistics& time_us, int64_t iterations, Fields& row) {
  row.insert(row.end(), {{"iters", iterations},
                         {"time_us", time_us.p50},
                         {"time_us_min", time_us.min},
                         {"time_us_max", time_us.max},
                         {"time_us_p99", time_us.p99},
                         {"time_us_cv_pct", time_us.cv_pct}});
}

void AddVerdict(int64_t wrong, const char* problem, Fields& row) {
  row.insert(row.end(), {{"nwrong", wrong < 0 ? Cell() : Cell(wrong)},
                         {"status", wrong > 0 ? "wrong" : "ok"},
                         {"error", wrong > 0 ? Cell(problem) : Cell()}});
}

std::string TableHead(absl::Span<const Column> columns) {
  return Line("#", columns, [](const Column& c) { return std::string(c.head); }) +
         Line("#", columns, [](const Column& c) { return std::string(c.unit); });
}

std::string TableLine(absl::Span<const Column> columns, const Fields& row) {
  return Line(" ", columns, [&](const Column& c) {
    const Cell* const cell = Find(row, c.key);
    return cell == nullptr ? std::string() : TextOf(*cell, c.decimals);
  });
}

}  // namespace moe::bench
