#include "moe/bench/fields.h"

#include <variant>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/string_view.h>
#include <absl/strings/strip.h>

namespace moe::bench {
namespace {

// Where a row has no key of its own for a name, the next line with that name is tried.
struct ShortName {
  const char* name;
  const char* key;
};
constexpr ShortName kShortNames[] = {
    {"size", "size_bytes"},
    {"time", "time_us"},
    {"i_min", "time_us_min"},
    {"i_max", "time_us_max"},
    {"p50", "time_us_p50"},
    {"p50", "time_us"},  // is the median where there is no mean
    {"i_p99", "time_us_p99"},
    {"p99", "time_us_p99"},
    {"i_cv", "time_us_cv_pct"},
    {"cv", "time_us_cv_pct"},
    {"algbw", "algbw_gbytes_per_s"},
    {"busbw", "busbw_gbytes_per_s"},
    {"wrong", "nwrong"},
    {"wait", "wait_pct"},
    {"slow", "slow_rank"},
    {"memcpy", "memcpy_pct"},
};

bool IsNumber(absl::string_view key) {
  for (const char* text :
       {"schema", "op", "algorithm", "backend", "transport", "routing", "router", "product", "pass",
        "kernel", "phase", "dispatch", "dtype", "status", "error"}) {
    if (key == text) return false;
  }
  return true;
}

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

std::optional<double> NumberOf(const Fields& row, absl::string_view name) {
  for (const ShortName& s : kShortNames) {
    if (name != s.name) continue;
    if (const Cell* const cell = Find(row, s.key); cell != nullptr) return cell->number();
  }
  const Cell* const cell = IsNumber(name) ? Find(row, name) : nullptr;
  return cell == nullptr ? std::nullopt : std::optional<double>(cell->number());
}

std::vector<std::string> NumberNamesOf(const Fields& row) {
  std::vector<std::string> names;
  for (const ShortName& s : kShortNames) {
    if (!names.empty() && names.back() == s.name) continue;
    if (NumberOf(row, s.name).has_value()) names.emplace_back(s.name);
  }
  for (const auto& [key, value] : row) {
    if (IsNumber(key)) names.push_back(key);
  }
  return names;
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
