// Rows of keys and typed cells, and every form and table that is made of them.
#ifndef MOE_MOE_CLI_MEASURE_TABLES_H_
#define MOE_MOE_CLI_MEASURE_TABLES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/cli/measure/statistics.h"

namespace moe::measure {

// A number or a text, or nothing in the place of one. A double that is not finite becomes nothing:
// JSON has no NaN.
class Cell {
 public:
  Cell() = default;
  Cell(int64_t value) : value_(value) {}                 // NOLINT: cells are written as lists
  Cell(uint64_t value) : value_(value) {}                // NOLINT
  Cell(double value);                                    // NOLINT
  Cell(const char* value) : Cell(std::string(value)) {}  // NOLINT
  Cell(std::string value) : value_(std::move(value)), is_text_(true) {}  // NOLINT
  // The text, or nothing in its place.
  static Cell TextIf(bool there, std::string value) {
    Cell cell(std::move(value));
    if (!there) cell.value_ = {};
    return cell;
  }
  // GCC 12's variant, copied with a text for which memory is lacking, destroys what was never
  // built.
  Cell(const Cell& other) : value_(Copy(other.value_)), is_text_(other.is_text_) {}
  Cell(Cell&& other) noexcept = default;
  Cell& operator=(Cell other) noexcept {
    value_ = std::move(other.value_);
    is_text_ = other.is_text_;
    return *this;
  }

  using Value = std::variant<std::monostate, int64_t, uint64_t, double, std::string>;
  const Value& value() const { return value_; }
  // Also true of a cell without its text.
  bool is_text() const { return is_text_; }
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
  bool is_text_ = false;
};

enum class TableForm : uint8_t { kCsv, kJson, kJsonLines, kMarkdown };
// "csv", "json", "jsonl", "md".
std::optional<TableForm> TableFormOf(absl::string_view name);

// Fields are in the order of the forms; rows of one benchmark have the same keys.
struct Field {
  std::string key;
  Cell value;
  // Heading of its column in the table of a report, with the unit, for numbers whose name the
  // report does not list; nullptr: none.
  const char* heading = nullptr;
};
using Fields = std::vector<Field>;

std::vector<std::string> KeysOf(const Fields& row);

// Writes a table piece by piece: Begin() + Row() for each + End() is the document, so that rows can
// be shown as they are measured.
//   csv    a line of keys, then RFC 4180 lines (ended by '\n')
//   json   one array with an object per row
//   jsonl  an object per line
//   md     GitHub's tables, '|' escaped
// Control characters of texts are Printable (kernels/base/printable.h), in JSON as JSON has them.
class TableWriter {
 public:
  TableWriter(TableForm form, std::vector<std::string> keys)
      : form_(form), keys_(std::move(keys)) {}

  std::string Begin() const;
  // A field per key, in their order.
  std::string Row(const Fields& row);
  std::string End() const;

 private:
  const TableForm form_;
  const std::vector<std::string> keys_;
  bool first_ = true;
};

// The whole document.
std::string WriteTable(TableForm form, const std::vector<std::string>& keys,
                       absl::Span<const Fields> rows);

// nullptr if there is no such key.
const Cell* Find(const Fields& row, absl::string_view key);
// A number by key or short name (time, p50, p99, cv, algbw, busbw, wrong, wait, memcpy ...), of
// those that the row has. NaN where it is unknown; nullopt for texts and other names.
std::optional<double> NumberOf(const Fields& row, absl::string_view name);
// The short name of a field, or its key.
const char* NameOf(const Field& field);
// Names that NumberOf accepts in such a row.
std::vector<std::string> NumberNamesOf(const Fields& row);

// Adds what every benchmark of a layer's parts reports of its calls: iters, time_us (the median),
// time_us_min, time_us_max, time_us_p99, time_us_cv_pct.
void AddTimes(const Statistics& time_us, int64_t iterations, Fields& row);
// Ends a row: nwrong (-1: nothing was checked, null), status, error (`problem` if some are wrong).
void AddVerdict(int64_t wrong, const char* problem, Fields& row);

// Adds the origin of a row, from the facts of Provenance (moe/cli/base/provenance.h): version,
// commit, host, cpu, gpu, date; null if unknown.
using Facts = std::vector<std::pair<std::string, std::string>>;
inline constexpr const char* kOriginKeys[] = {"version", "commit", "host", "cpu", "gpu", "date"};
void AddOrigin(const Facts& facts, Fields& row);
// One field of the origin.
Field OriginField(const char* key, const Facts& facts);

// A column of the table that people read.
struct Column {
  const char* key;
  const char* head;
  const char* unit;
  int width;         // negative: to the left
  int decimals = 0;  // for numbers that are not whole
};

// Mark behind an i_cv%: '*' if it is above --max-noise, so that calls ended before they agreed.
char NoiseMark(double cv_pct, double max_noise_pct);
// What the mark means, if any of `cvs_pct` has it.
std::string NoiseFoot(absl::Span<const double> cvs_pct, double max_noise_pct);

// Two lines, names and units, then a line for each row; an unknown value is blank.
std::string TableHead(absl::Span<const Column> columns);
std::string TableLine(absl::Span<const Column> columns, const Fields& row, double max_noise_pct);

}  // namespace moe::measure

#endif  // MOE_MOE_CLI_MEASURE_TABLES_H_
