#include "moe/bench/tables.h"

#include <charconv>
#include <cmath>
#include <limits>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_replace.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"

namespace moe::bench {
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

std::string JsonRow(const std::vector<std::string>& names, absl::Span<const Cell> cells) {
  Json object = Json::object();
  for (size_t i = 0; i < names.size(); ++i) object[names[i]] = JsonOf(cells[i]);
  // Texts may come from a system: bytes that are not UTF-8 are replaced, not thrown at.
  return object.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string CsvText(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  return absl::StrCat("\"", absl::StrReplaceAll(text, {{"\"", "\"\""}}), "\"");
}

std::string MarkdownText(const std::string& text) {
  return absl::StrReplaceAll(text, {{"|", "\\|"}, {"\n", " "}});
}

}  // namespace

Cell::Cell(double value) {
  if (std::isfinite(value)) value_ = value;
}

double Cell::number() const {
  if (const auto* i = std::get_if<int64_t>(&value_)) return static_cast<double>(*i);
  if (const auto* u = std::get_if<uint64_t>(&value_)) return static_cast<double>(*u);
  if (const auto* d = std::get_if<double>(&value_)) return *d;
  return std::numeric_limits<double>::quiet_NaN();
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
  if (name == "csv") return TableForm::kCsv;
  if (name == "json") return TableForm::kJson;
  if (name == "jsonl") return TableForm::kJsonLines;
  if (name == "md") return TableForm::kMarkdown;
  return std::nullopt;
}

std::string TableWriter::Begin() const {
  switch (form_) {
    case TableForm::kCsv: {
      const auto quoted = [](std::string* out, const std::string& name) {
        *out += CsvText(name);
      };
      return absl::StrCat(absl::StrJoin(names_, ",", quoted), "\n");
    }
    case TableForm::kJson:
      return "[";
    case TableForm::kMarkdown: {
      std::string rule = "|";
      for (size_t i = 0; i < names_.size(); ++i) rule += "---|";
      return absl::StrCat("| ", absl::StrJoin(names_, " | "), " |\n", rule, "\n");
    }
    case TableForm::kJsonLines:
      break;
  }
  return "";
}

std::string TableWriter::Row(absl::Span<const Cell> cells) {
  MOE_CHECK(cells.size() == names_.size());
  const bool first = first_;
  first_ = false;
  switch (form_) {
    case TableForm::kCsv: {
      const auto quoted = [](std::string* out, const Cell& cell) {
        *out += CsvText(cell.text());
      };
      return absl::StrCat(absl::StrJoin(cells, ",", quoted), "\n");
    }
    case TableForm::kJson:
      return absl::StrCat(first ? "\n" : ",\n", JsonRow(names_, cells));
    case TableForm::kJsonLines:
      return absl::StrCat(JsonRow(names_, cells), "\n");
    case TableForm::kMarkdown:
      break;
  }
  const auto escaped = [](std::string* out, const Cell& cell) {
    *out += MarkdownText(cell.text());
  };
  return absl::StrCat("| ", absl::StrJoin(cells, " | ", escaped), " |\n");
}

std::string TableWriter::End() const {
  return form_ == TableForm::kJson ? "\n]\n" : "";
}

std::string WriteTable(TableForm form, const std::vector<std::string>& names,
                       absl::Span<const std::vector<Cell>> rows) {
  TableWriter writer(form, names);
  std::string text = writer.Begin();
  for (const std::vector<Cell>& row : rows) text += writer.Row(row);
  return text + writer.End();
}

}  // namespace moe::bench
