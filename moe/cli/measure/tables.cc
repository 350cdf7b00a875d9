#include "moe/cli/measure/tables.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_replace.h>

#include <nlohmann/json.hpp>

#include "kernels/base/choice.h"
#include "kernels/base/printable.h"
#include "kernels/base/status_macros.h"

namespace moe::measure {

namespace {

using Json = nlohmann::ordered_json;

Json JsonOf(const Cell& cell) {
  return std::visit(
      [](const auto& value) -> Json {
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::monostate>) {
          return nullptr;
        } else {
          return value;
        }
      },
      cell.value());
}

std::string JsonRow(const Fields& row) {
  Json object = Json::object();
  for (const Field& field : row) object[field.key] = JsonOf(field.value);
  // Texts may come from a system: bytes that are not UTF-8 are replaced, not thrown at.
  return object.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string CsvLine(const std::vector<std::string>& texts) {
  const auto quoted = [](std::string* out, const std::string& raw) {
    const std::string text = Printable(raw);
    const bool plain = text.find_first_of(",\"\r\n") == std::string::npos;
    *out += plain ? text : absl::StrCat("\"", absl::StrReplaceAll(text, {{"\"", "\"\""}}), "\"");
  };
  return absl::StrCat(absl::StrJoin(texts, ",", quoted), "\n");
}

std::string MarkdownLine(const std::vector<std::string>& texts) {
  const auto escaped = [](std::string* out, const std::string& raw) {
    *out += absl::StrReplaceAll(Printable(raw), {{"|", "\\|"}, {"\n", " "}});
  };
  return absl::StrCat("| ", absl::StrJoin(texts, " | ", escaped), " |\n");
}

// If a row has no key for the first line of a name, the next line with that name is tried.
struct ShortName {
  const char* name;
  const char* key;
};
constexpr ShortName kShortNames[] = {
    {"size", "size_bytes"},
    {"time", "time_us"},
    {"i_min", "time_us_min"},
    {"i_max", "time_us_max"},
    {"i_p50", "time_us_p50"},
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

constexpr absl::string_view kNoiseKey = "time_us_cv_pct";

std::string Padded(absl::string_view text, int width) {
  return width < 0 ? absl::StrFormat("%-*s", -width, text) : absl::StrFormat("%*s", width, text);
}

std::string TextOf(const Cell& cell, int decimals) {
  const double* const real = std::get_if<double>(&cell.value());
  if (real != nullptr) return absl::StrFormat("%.*f", decimals, *real);
  // A row is a line.
  return absl::StrReplaceAll(Printable(cell.text()), {{"\n", " "}, {"\t", " "}});
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

Cell::Cell(double value) {
  if (std::isfinite(value)) value_ = value;
}

double Cell::number() const {
  if (const auto* i = std::get_if<int64_t>(&value_)) return static_cast<double>(*i);
  if (const auto* u = std::get_if<uint64_t>(&value_)) return static_cast<double>(*u);
  if (const auto* d = std::get_if<double>(&value_)) return *d;
  return kNone;
}

std::string Cell::text() const {
  if (const auto* s = std::get_if<std::string>(&value_)) return *s;
  if (const auto* i = std::get_if<int64_t>(&value_)) return absl::StrCat(*i);
  if (const auto* u = std::get_if<uint64_t>(&value_)) return absl::StrCat(*u);
  if (const auto* d = std::get_if<double>(&value_)) {
    char digits[32];
    const auto end = std::to_chars(std::begin(digits), std::end(digits), *d);
    return std::string(digits, end.ptr);
  }
  return "";
}

std::optional<TableForm> TableFormOf(absl::string_view name) {
  static constexpr Choice<TableForm> kForms[] = {{"csv", TableForm::kCsv},
                                                 {"json", TableForm::kJson},
                                                 {"jsonl", TableForm::kJsonLines},
                                                 {"md", TableForm::kMarkdown}};
  return ValueOf(name, kForms);
}

std::string TableWriter::Begin() const {
  if (form_ == TableForm::kCsv) return CsvLine(keys_);
  if (form_ == TableForm::kJson) return "[";
  if (form_ == TableForm::kJsonLines) return "";
  std::string rule = "|";
  for (size_t i = 0; i < keys_.size(); ++i) rule += "---|";
  return absl::StrCat(MarkdownLine(keys_), rule, "\n");
}

std::string TableWriter::Row(const Fields& row) {
  MOE_CHECK(row.size() == keys_.size());
  const bool first = std::exchange(first_, false);
  std::vector<std::string> texts;
  for (const Field& field : row) texts.push_back(field.value.text());
  if (form_ == TableForm::kCsv) return CsvLine(texts);
  if (form_ == TableForm::kMarkdown) return MarkdownLine(texts);
  const std::string object = JsonRow(row);
  if (form_ == TableForm::kJsonLines) return object + "\n";
  return absl::StrCat(first ? "\n" : ",\n", object);
}

std::string TableWriter::End() const {
  return form_ == TableForm::kJson ? "\n]\n" : "";
}

std::string WriteTable(TableForm form, const std::vector<std::string>& keys,
                       absl::Span<const Fields> rows) {
  TableWriter writer(form, keys);
  std::string text = writer.Begin();
  for (const Fields& row : rows) text += writer.Row(row);
  return text + writer.End();
}

std::vector<std::string> KeysOf(const Fields& row) {
  std::vector<std::string> keys;
  for (const Field& field : row) keys.push_back(field.key);
  return keys;
}

const Cell* Find(const Fields& row, absl::string_view key) {
  for (const Field& field : row) {
    if (field.key == key) return &field.value;
  }
  return nullptr;
}

std::optional<double> NumberOf(const Fields& row, absl::string_view name) {
  for (const ShortName& s : kShortNames) {
    if (name != s.name) continue;
    if (const Cell* const cell = Find(row, s.key); cell != nullptr) return cell->number();
  }
  const Cell* const cell = Find(row, name);
  if (cell == nullptr || cell->is_text()) return std::nullopt;
  return cell->number();
}

const char* NameOf(const Field& field) {
  for (const ShortName& s : kShortNames) {
    if (field.key == s.key) return s.name;
  }
  return field.key.c_str();
}

std::vector<std::string> NumberNamesOf(const Fields& row) {
  std::vector<std::string> names;
  for (const ShortName& s : kShortNames) {
    if (!names.empty() && names.back() == s.name) continue;
    if (NumberOf(row, s.name).has_value()) names.emplace_back(s.name);
  }
  for (const Field& field : row) {
    if (!field.value.is_text()) names.push_back(field.key);
  }
  return names;
}

void AddTimes(const Statistics& time_us, int64_t iterations, Fields& row) {
  row.insert(row.end(), {{"iters", iterations},
                         {"time_us", time_us.p50},
                         {"time_us_min", time_us.min},
                         {"time_us_max", time_us.max},
                         {"time_us_p99", time_us.p99},
                         {std::string(kNoiseKey), time_us.cv_pct}});
}

void AddVerdict(int64_t wrong, const char* problem, Fields& row) {
  row.insert(row.end(), {{"nwrong", wrong < 0 ? Cell() : Cell(wrong)},
                         {"status", wrong > 0 ? "wrong" : "ok"},
                         {"error", Cell::TextIf(wrong > 0, problem)}});
}

Field OriginField(const char* key, const Facts& facts) {
  const auto fact =
      std::find_if(facts.begin(), facts.end(), [&](const auto& f) { return f.first == key; });
  const bool known = fact != facts.end();
  return {key, Cell::TextIf(known, known ? fact->second : "")};
}

void AddOrigin(const Facts& facts, Fields& row) {
  for (const char* key : kOriginKeys) row.push_back(OriginField(key, facts));
}

std::string TableHead(absl::Span<const Column> columns) {
  return Line("#", columns, [](const Column& c) { return std::string(c.head); }) +
         Line("#", columns, [](const Column& c) { return std::string(c.unit); });
}

std::string TableLine(absl::Span<const Column> columns, const Fields& row, double max_noise_pct) {
  return Line(" ", columns, [&](const Column& c) {
    const Cell* const cell = Find(row, c.key);
    if (cell == nullptr) return std::string();
    std::string text = TextOf(*cell, c.decimals);
    if (c.key == kNoiseKey) text += NoiseMark(cell->number(), max_noise_pct);
    return text;
  });
}

char NoiseMark(double cv_pct, double max_noise_pct) {
  return cv_pct > max_noise_pct ? '*' : ' ';
}

std::string NoiseFoot(absl::Span<const double> cvs_pct, double max_noise_pct) {
  const auto marked = std::count_if(cvs_pct.begin(), cvs_pct.end(),
                                    [&](double cv) { return NoiseMark(cv, max_noise_pct) != ' '; });
  if (marked == 0) return "";
  return absl::StrFormat(
      "# %-20s : %d of %d row%s, i_cv%% above %g (*): more time (-T) or an idle machine helps\n",
      "Not converged", marked, cvs_pct.size(), cvs_pct.size() == 1 ? "" : "s", max_noise_pct);
}

}  // namespace moe::measure
