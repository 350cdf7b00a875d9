// The table of a sweep that people read.
#ifndef MOE_MOE_SWEEP_SWEEP_TABLE_H_
#define MOE_MOE_SWEEP_SWEEP_TABLE_H_

#include <string>
#include <vector>

#include <absl/types/span.h>

#include "moe/sweep/sweep_row.h"

namespace moe::sweep {

// For each row whether no other row beats it: of training, lower validation loss and more tokens
// per second; of layers, fewer drops and more tokens per second. Rows that failed are not compared.
// O(n log n).
std::vector<bool> ParetoMarks(absl::Span<const SweepRow> rows);

// Every row on a line, '*' after the speed of the Pareto points:
//
//   experts | topk | cf | ep | dp | tok/rank | params tot/act | tok/s ± sd | step ms | a2a ms(%) |
//   ar ms(%) | expert ms | drop% init→end | MaxVio | dead | val loss | peak MiB | status
//
// In front of them a column for each of ranks, overlap, hidden, ffn, dtype, router, routing and
// dispatch whose values differ between rows. '-': no such figure. Empty for no rows.
std::string SweepTable(absl::Span<const SweepRow> rows);

}  // namespace moe::sweep

#endif  // MOE_MOE_SWEEP_SWEEP_TABLE_H_
