// The tables of collectives that people read, and that nccl-tests' parsers read.
#ifndef MOE_MOE_BENCH_BENCH_TABLE_H_
#define MOE_MOE_BENCH_BENCH_TABLE_H_

#include <cstdint>
#include <string>

#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "moe/bench/bench_row.h"

namespace moe::bench {

// The first nine columns have nccl-tests' widths; then, of the samples, min, max, p99 and cv, and
// the imbalances, wait, slowest rank and share of memcpy (moe bench --help has the formulas).
std::string BenchHead();
std::string BenchLine(const BenchRow& row);

// nccl-tests' thirteen columns: a call is out of place or in place, and the other half says N/A.
std::string NcclHead();
std::string NcclLine(const BenchRow& row);

// After the last row: what nccl-tests prints there and, of the largest row of `rows`, the algorithm
// and bytes by distance.
std::string BenchFoot(absl::Span<const BenchRow> rows);
// nccl-tests' two lines of it alone.
std::string NcclFoot(absl::Span<const BenchRow> rows);

// nccl-tests' name of a type: "float", "bfloat16".
const char* NcclTypeName(DType type);

}  // namespace moe::bench

#endif  // MOE_MOE_BENCH_BENCH_TABLE_H_
