// The parts of a report, one per kind of input.
#ifndef MOE_MOE_REPORT_SECTIONS_H_
#define MOE_MOE_REPORT_SECTIONS_H_

#include <string>

#include <absl/types/span.h>

#include "moe/report/compare.h"
#include "moe/report/rows.h"

namespace moe::report {

struct Section {
  std::string id;  // letters, digits, '-'
  std::string heading;
  std::string body;  // HTML
  bool empty() const { return body.empty(); }
};

// Each takes all runs and shows those of its kind; without any it is empty.
//   bench   per operation: bandwidth over size with the limit of memcpy; imbalance against
//           bandwidth
//   sweep   capacity factor against drops and loss; speed against loss; time of a step by phase
//   train   loss; drops; balance; time of a step by phase; expert load over steps
// and a table of all rows (of train: a row per run).
Section BenchSection(absl::Span<const Run> runs);
Section SweepSection(absl::Span<const Run> runs);
Section TrainSection(absl::Span<const Run> runs);

// Differences of two runs: the largest as intervals, all as a table.
Section CompareSection(const Comparison& comparison);

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_SECTIONS_H_
