// --fail-if over the figures of a report.
#ifndef MOE_MOE_REPORT_CHECKS_H_
#define MOE_MOE_REPORT_CHECKS_H_

#include <map>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/bench/fail_if.h"
#include "moe/report/compare.h"
#include "moe/report/rows.h"

namespace moe::report {

// Figures that a bound can be put on, by column. Columns without a value are not there.
struct CheckRow {
  std::string name;
  std::map<std::string, double> values;
  std::map<std::string, double> base;  // of what the row is compared with
};

// A row per bench row and sweep row that did not fail, and per train run. With a comparison, of the
// first two runs: none of the first, of the second means over repetitions with the first's as their
// base, and a row per difference. docs/report.md lists the columns of each.
std::vector<CheckRow> CheckRows(absl::Span<const Run> runs, const Comparison* comparison);

// Names of the rows for which the expression (moe/bench/fail_if.h) holds. A column that no row has
// is kInvalidArgument, and so is a base if no runs are compared: a bound that nothing can fail is
// no bound.
absl::StatusOr<std::vector<std::string>> RowsThatFail(
    absl::string_view expression, absl::Span<const CheckRow> rows,
    bench::FailIf::Base base = bench::FailIf::Base::kAbsent);

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_CHECKS_H_
