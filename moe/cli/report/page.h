// The page: one self-contained HTML file; its sections and tables.
#ifndef MOE_MOE_CLI_REPORT_PAGE_H_
#define MOE_MOE_CLI_REPORT_PAGE_H_

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/cli/report/charts.h"
#include "moe/cli/report/rows.h"

namespace moe::report {

// The class of the last cell, the status, of a failed row.
inline constexpr char kFailed[] = "worse";

// The text of a cell and its sort key.
struct TableCell {
  std::string text;
  double number = 0;
  bool is_number = false;  // NaN: sorted last, either way
  std::string css_class;   // defined by this program

  static TableCell Text(std::string text) { return {.text = std::move(text)}; }
  // NumberText.
  static TableCell Number(double value, int digits = 3);
  static TableCell Count(double value);  // CountText
  // A number shown as `text`.
  static TableCell Number(double value, std::string text) {
    return {.text = std::move(text), .number = value, .is_number = true};
  }
};

struct Table {
  std::string title;
  std::vector<std::string> names;  // column headings, with units
  std::vector<std::vector<TableCell>> rows;
};

// A row and its run; a section shows the rows of all runs.
template <typename Row>
struct NamedRow {
  const Run* run = nullptr;
  const Row* row = nullptr;
};

// The table's cell of a column.
template <typename Row>
TableCell CellOf(const Column<Row>& column, const Row& row) {
  if (const auto text = TextOf(column, row); text.has_value()) return TableCell::Text(*text);
  const double number = NumberOf(column, row);
  if (column.text != nullptr) return TableCell::Number(number, (row.*column.text)());
  return column.digits == 0 ? TableCell::Count(number) : TableCell::Number(number, column.digits);
}

// The run, the columns that have a heading, and the status.
template <typename Row>
Table TableOf(std::string title, absl::Span<const NamedRow<Row>> rows) {
  Table table = {.title = std::move(title), .names = {"run"}, .rows = {}};
  for (const Column<Row>& c : ColumnsOf<Row>()) {
    if (c.heading[0] != 0) table.names.emplace_back(c.heading);
  }
  table.names.emplace_back("status");
  for (const auto& [run, row] : rows) {
    auto& cells = table.rows.emplace_back();
    cells.push_back(TableCell::Text(run->name));
    for (const Column<Row>& c : ColumnsOf<Row>()) {
      if (c.heading[0] != 0) cells.push_back(CellOf(c, *row));
    }
    cells.push_back(
        TableCell::Text(row->error.empty() ? row->status : row->status + ": " + row->error));
    if (row->failed()) cells.back().css_class = kFailed;
  }
  return table;
}

// A figure that contains the table. Empty columns are left out; columns with one value in all of
// several rows, apart from failed rows without it, are stated once above it.
std::string Render(const Table& table);

struct Section {
  std::string id;  // letters, digits, '-'
  std::string heading;
  std::string body;  // HTML
  bool empty() const { return body.empty(); }
};

// Each section shows the rows of its kind of all runs; it is empty without any.
//   bench   per operation: bandwidth over size with the limit of memcpy; imbalance against
//           bandwidth
//   sweep   capacity factor against drops and loss; speed against loss; time of a step by phase
//   plan    predicted over measured step time and memory, with lines of 25 % more and less
//   train   loss; drops; balance; time of a step by phase; expert load over steps
// and a table of all rows (for train: a row for each run).
Section BenchSection(absl::Span<const Run> runs);
Section SweepSection(absl::Span<const Run> runs);
Section PlanSection(absl::Span<const Run> runs);
Section TrainSection(absl::Span<const Run> runs);

// A map for each run and setting, for its largest size: GB/s from every rank to every other. Empty
// without such rows.
std::string PairMaps(absl::Span<const Run> runs);

// A bar for each run, setting and pass; the last part is the time of the whole pass beyond its
// phases. Empty without such rows.
std::string LayerPhases(absl::Span<const Run> runs);

inline constexpr size_t kMaxLoadColumns = 60;
inline constexpr size_t kMaxLoadRows = 64;
inline constexpr size_t kMaxLoadLayers = 4;

// Load of the experts of one MoE layer relative to their mean, per step: 1 is even, 0 dead. More
// than kMaxLoadColumns steps are averaged in stretches, more than kMaxLoadRows experts in groups of
// neighbours.
HeatMap ExpertLoadMap(const Run& run, int layer);

// The layers to show: the kMaxLoadLayers whose load over all steps is least even, in the order of
// the model.
std::vector<int> LayersToShow(const Run& run);

// Empty sections are left out. The same arguments give the same bytes. The page loads nothing, and
// its Content-Security-Policy only allows its own script, by hash: even a text that escaping missed
// would not run.
std::string Page(absl::string_view title, absl::Span<const Run> runs,
                 absl::Span<const Section> sections);

}  // namespace moe::report

#endif  // MOE_MOE_CLI_REPORT_PAGE_H_
