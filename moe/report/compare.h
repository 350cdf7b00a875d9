// Two runs, figure by figure, with the noise of each difference.
#ifndef MOE_MOE_REPORT_COMPARE_H_
#define MOE_MOE_REPORT_COMPARE_H_

#include <cmath>
#include <string>
#include <vector>

#include <absl/status/statusor.h>

#include "moe/report/bar_chart.h"
#include "moe/report/rows.h"
#include "moe/report/sample.h"

namespace moe::report {

struct Difference {
  std::string what;    // the rows that are compared: "alltoall · 1 MiB"; empty: the whole run
  std::string metric;  // with unit: "busbw (GB/s)"
  std::string key;     // "busbw": for --fail-if
  double a = kNone, b = kNone;
  double change_pct = kNone;  // 100 (b - a) / |a|; kNone when a is 0
  double noise_pct = kNone;   // half-width of its 95 % interval; kNone: unknown
  Verdict verdict = Verdict::kUnknownNoise;

  // By how many percent b is worse than a; 0 unless that is beyond noise.
  double worse_pct() const { return verdict == Verdict::kWorse ? std::abs(change_pct) : 0; }
};

struct Comparison {
  std::string a, b;  // names of the runs
  RunKind kind = RunKind::kTrain;
  std::vector<Difference> differences;
  int only_in_a = 0, only_in_b = 0;  // groups of rows without a counterpart
  bool same_weights = false;         // two train runs that ended with the same bits
};

// Rows that agree in everything but their results are repetitions, and are compared as a group:
//   bench  op, algorithm, backend, transport, ranks, hosts, routing, shape, pass, phase, pair,
//          threads, seed, dtype, size in bytes or rows
//   sweep  settings, measure, backend, text_xxh3, and the columns that settings have of their own
//   train  the whole run; speeds over its steps
// Of bench the figure is busbw, algbw of one rank, GFLOP/s of products, else time.
// Failed rows are left out. kInvalidArgument for runs of two kinds, and when nothing has a
// counterpart.
absl::StatusOr<Comparison> Compare(const Run& a, const Run& b);

// Repetitions in b, and those in a that they are compared with, which may be none.
template <typename Row>
struct Repetitions {
  std::string what;
  std::vector<const Row*> rows, base;
};
std::vector<Repetitions<BenchRow>> BenchRepetitions(const Run& a, const Run& b);
std::vector<Repetitions<SweepRow>> SweepRepetitions(const Run& a, const Run& b);

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_COMPARE_H_
