// Rows of typed cells as CSV, JSON, JSON lines or Markdown.
#ifndef MOE_MOE_BENCH_TABLES_H_
#define MOE_MOE_BENCH_TABLES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <absl/strings/string_view.h>
#include <absl/types/span.h>

namespace moe::bench {

// Nothing, a number or a text. A double that is not finite becomes nothing: JSON has no NaN.
class Cell {
 public:
  Cell() = default;
  Cell(int64_t value) : value_(value) {}                   // NOLINT: cells are written as lists
  Cell(uint64_t value) : value_(value) {}                  // NOLINT
  Cell(double value);                                      // NOLINT
  Cell(const char* value) : value_(std::string(value)) {}  // NOLINT
  Cell(std::string value) : value_(std::move(value)) {}    // NOLINT
  // GCC 12's variant, copied with a text for which there is no memory, destroys what never was.
  Cell(const Cell& other) : value_(Copy(other.value_)) {}
  Cell(Cell&& other) noexcept = default;
  Cell& operator=(Cell other) noexcept {
    value_ = std::move(other.value_);
    return *this;
  }

  using Value = std::variant<std::monostate, int64_t, uint64_t, double, std::string>;
  const Value& value() const { return value_; }
  // NaN for nothing and for texts.
  double number() const;
  // As in CSV before quoting: "" for nothing; doubles in the fewest digits that read back equal.
  std::string text() const;

 private:
  static Value Copy(const Value& value) {
    const auto* const text = std::get_if<std::string>(&value);
    return text == nullptr ? value : Value(std::in_place_type<std::string>, *text);
  }

  Value value_;
};

enum class TableForm : uint8_t { kCsv, kJson, kJsonLines, kMarkdown };
// "csv", "json", "jsonl", "md".
std::optional<TableForm> TableFormOf(absl::string_view name);

// Writes a table piece by piece: Begin() + Row() for each + End() is the document, so that rows can
// be shown as they are measured.
//   csv    a line of names, then RFC 4180 lines (ended by '\n')
//   json   one array with an object per row
//   jsonl  an object per line
//   md     GitHub's tables, '|' escaped
class TableWriter {
 public:
  TableWriter(TableForm form, std::vector<std::string> names)
      : form_(form), names_(std::move(names)) {}

  std::string Begin() const;
  // One cell per name.
  std::string Row(absl::Span<const Cell> cells);
  std::string End() const;

 private:
  const TableForm form_;
  const std::vector<std::string> names_;
  bool first_ = true;
};

// The whole document.
std::string WriteTable(TableForm form, const std::vector<std::string>& names,
                       absl::Span<const std::vector<Cell>> rows);

}  // namespace moe::bench

#endif  // MOE_MOE_BENCH_TABLES_H_
