// The row of a result: keys with their values, from which every form and table is made.
#ifndef MOE_MOE_BENCH_FIELDS_H_
#define MOE_MOE_BENCH_FIELDS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/bench/statistics.h"
#include "moe/bench/tables.h"

namespace moe::bench {

// In the order of the forms; rows of one benchmark have the same keys.
using Fields = std::vector<std::pair<std::string, Cell>>;

std::vector<std::string> KeysOf(const Fields& row);
std::vector<Cell> CellsOf(const Fields& row);
// nullptr if there is no such key.
const Cell* Find(const Fields& row, absl::string_view key);
// A number by key or short name (time, p50, p99, cv, algbw, busbw, wrong, wait, memcpy ...), of
// those that the row has. NaN where it is unknown; nullopt for texts and other names.
std::optional<double> NumberOf(const Fields& row, absl::string_view name);
// Names that NumberOf knows in such a row.
std::vector<std::string> NumberNamesOf(const Fields& row);

// What every benchmark of a layer's parts says of its calls: iters, time_us (the median),
// time_us_min, time_us_max, time_us_p99, time_us_cv_pct.
void AddTimes(const Statistics& time_us, int64_t iterations, Fields& row);
// Ends a row: nwrong (-1: nothing was checked, null), status, error (`problem` where some are
// wrong).
void AddVerdict(int64_t wrong, const char* problem, Fields& row);

// A column of the table that people read.
struct Column {
  const char* key;
  const char* head;
  const char* unit;
  int width;         // negative: to the left
  int decimals = 0;  // of numbers that are not whole
};

// Two lines, names and units, then a line a row; what is unknown is left blank.
std::string TableHead(absl::Span<const Column> columns);
std::string TableLine(absl::Span<const Column> columns, const Fields& row);

}  // namespace moe::bench

#endif  // MOE_MOE_BENCH_FIELDS_H_
