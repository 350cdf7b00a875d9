// Comparison of two runs, figure by figure, with the noise of each difference; and --fail-if over
// figures.
#ifndef MOE_MOE_CLI_REPORT_COMPARE_H_
#define MOE_MOE_CLI_REPORT_COMPARE_H_

#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/cli/measure/fail_if.h"
#include "moe/cli/measure/statistics.h"
#include "moe/cli/report/page.h"
#include "moe/cli/report/rows.h"

namespace moe::report {

using measure::Better;
using measure::NoiseOfDifference;
using measure::Sample;
using measure::SampleOf;
using measure::SampleOfSeries;
using measure::StudentT975;

enum class Verdict : uint8_t { kBetter, kWorse, kWithinNoise, kUnknownNoise, kEqual };

// "better", "worse", "within noise", "noise unknown", "equal".
const char* NameOf(Verdict verdict);

struct Difference {
  std::string what;    // the compared rows: "alltoall · 1 MiB"; empty: the whole run
  std::string metric;  // with unit: "busbw (GB/s)"
  std::string key;     // "busbw": for --fail-if
  double a = kNone, b = kNone;
  double change_pct = kNone;  // 100 (b - a) / |a|; kNone when a is 0
  double noise_pct = kNone;   // half-width of its 95 % interval; kNone: unknown
  Verdict verdict = Verdict::kUnknownNoise;

  // By how many percent b is worse than a; 0 unless that exceeds the noise.
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
// For bench the figure is busbw, algbw for one rank, GFLOP/s of products, else time. Failed rows
// are left out. kInvalidArgument for runs of different kinds, and if nothing has a counterpart.
absl::StatusOr<Comparison> Compare(const Run& a, const Run& b);

// Differences of two runs: the largest ones as intervals, all of them as a table.
Section CompareSection(const Comparison& comparison);

// Repetitions in b, and those in a that they are compared with, which may be empty.
template <typename Row>
struct Repetitions {
  std::string what;
  std::vector<const Row*> rows, base;
};
std::vector<Repetitions<BenchRow>> BenchRepetitions(const Run& a, const Run& b);
std::vector<Repetitions<SweepRow>> SweepRepetitions(const Run& a, const Run& b);

// The figures to which a bound applies, by column. Columns without a value are absent.
struct CheckRow {
  std::string name;
  std::map<std::string, double> values;
  std::map<std::string, double> base;  // figures of the rows that it is compared with
};

// A row for each bench and sweep row that did not fail, and for each train run. With a comparison,
// of the first two runs: none for the first; for the second the means over repetitions, with the
// first's as their base, and a row for each difference. docs/report.md lists the columns of each.
std::vector<CheckRow> CheckRows(absl::Span<const Run> runs, const Comparison* comparison);

// Names of the rows for which the expression (moe/cli/measure/fail_if.h) holds. A column that no
// row has is kInvalidArgument, and so is a base if no runs are compared: such a bound could never
// fail.
absl::StatusOr<std::vector<std::string>> RowsThatFail(
    absl::string_view expression, absl::Span<const CheckRow> rows,
    measure::FailIf::Base base = measure::FailIf::Base::kAbsent);

}  // namespace moe::report

#endif  // MOE_MOE_CLI_REPORT_COMPARE_H_
