// What bench, sweep and train leave behind, as rows with types. docs/report.md lists the keys.
// Read from files that nobody vouches for.
#ifndef MOE_MOE_CLI_REPORT_ROWS_H_
#define MOE_MOE_CLI_REPORT_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/cli/measure/statistics.h"

namespace moe::report {

using measure::kNone;  // of a number that a row does not have
// The least of a number that may be below 0.
inline constexpr double kAnyReal = -std::numeric_limits<double>::infinity();

// Of `moe bench`. Numbers are kNone where the benchmark has no such figure.
struct BenchRow {
  std::string op, algorithm, backend, transport, routing, dtype, status, error;
  std::string shape;        // of kernels and layers: "E 8 H 64 F 128"
  std::string pass, phase;  // of a layer: "forward", "expert"; the phase "all" is the whole pass
  std::string seed;         // of drawn routings
  std::string settings;     // flags that were given and that no other key tells
  double ranks = kNone, hosts = kNone;
  double size_bytes = kNone;
  double time_us = kNone, time_us_p99 = kNone, cv_pct = kNone;
  double algbw = kNone, busbw = kNone, memcpy = kNone;  // 1e9 bytes per second
  double sent_imbalance = kNone, received_imbalance = kNone;
  double wrong = kNone;
  double threads = kNone;                                    // of each rank
  double peak_pct = kNone, memcpy_pct = kNone;               // of that limit
  double source = kNone, destination = kNone;                // ranks of a pair
  double rows = kNone, gflops = kNone, peak_gflops = kNone;  // of products; per second
  std::vector<double> others;                                // that no chart needs, as columns say

  // Bytes; of what has none, rows; 0 of neither.
  double size() const;
  std::string size_text() const;
  // What the row says, a median over calls, before what follows from its other medians.
  double share_of_copy_pct() const;
  double share_of_peak_pct() const;
  // The larger of both: what the most loaded rank has, over the mean.
  double imbalance() const;
  std::string threads_text() const;  // "4 threads", or empty
  std::string seed_text() const;     // "seed 1", or empty
  // "0 to 1"; empty of what is not between two ranks.
  std::string pair() const;
  bool failed() const { return !status.empty() && status != "ok"; }
};

// Of `moe sweep`.
struct SweepRow {
  // Flags of all that changes results; empty of rows that other programs wrote.
  std::string settings;
  std::string text_hash, measure, backend, dtype, router, routing, dispatch;
  double experts = kNone, top_k = kNone;
  double capacity_factor = kNone;  // infinity: dropless
  double ep = kNone, dp = kNone, ranks = kNone, tokens_per_rank = kNone;
  double hidden = kNone, ffn = kNone, overlap = kNone;
  double params_total = kNone, params_active = kNone;
  double tokens_per_s = kNone, tokens_per_s_sd = kNone;
  double step_ms = kNone, a2a_ms = kNone, all_reduce_ms = kNone, expert_ms = kNone;
  double drop_initial_pct = kNone, drop_final_pct = kNone;
  double dead_experts = kNone, validation_loss = kNone, validation_loss_sd = kNone;
  double peak_mib = kNone;
  std::string status, error;
  std::vector<double> others;  // that no chart needs, as columns say

  std::string capacity_text() const;  // "1.25", "dropless"
  bool failed() const { return !status.empty() && status != "ok"; }
};

// One line of `moe train`'s metrics.jsonl. expert_load: [layer][expert] slots, flattened.
struct TrainStep {
  double step = 0, loss = kNone, validation_loss = kNone;
  double tokens_per_s = kNone, step_ms = kNone, a2a_ms = kNone, expert_ms = kNone;
  double all_reduce_ms = kNone, drop_fraction = kNone, max_violation = kNone;
  double dead_experts = kNone, peak_bytes = kNone;
  double learning_rate = kNone, gradient_norm = kNone;
  std::vector<float> expert_load;
};

// Its last line.
struct TrainTotals {
  double steps = kNone, tokens = kNone, seconds = kNone;
  double validation_loss_before = kNone, validation_loss = kNone;
  std::string weights_hash;
};

enum class RunKind : uint8_t { kBench, kSweep, kTrain };
const char* NameOf(RunKind kind);  // "bench", "sweep", "train"

// A fact of where results come from, which the rows of a file mostly agree in.
struct Origin {
  const char* key;
  std::string first, last;  // as texts are ordered: of dates the earliest and the latest
};

// One input.
struct Run {
  std::string name;  // short, different from those of other inputs
  std::string path;  // as given
  RunKind kind = RunKind::kTrain;
  std::vector<Origin> origin;  // what the file says of it
  std::vector<BenchRow> bench;
  std::vector<SweepRow> sweep;
  std::vector<TrainStep> steps;
  std::optional<TrainTotals> totals;    // absent: the run did not end
  int num_layers = 0, num_experts = 0;  // of expert_load; 0: no layer has experts
};

// A column of a kind of row: what the reader, the table and --fail-if of a report make of it.
struct Other {
  size_t index = 0;  // among a row's `others`
};
template <typename Row>
struct Column {
  const char* key;      // in files; "": it follows from others
  const char* bound;    // its name in --fail-if; "": no bound can be put on it
  const char* heading;  // of the table, with its unit; "": the table does not have it
  std::variant<double Row::*, std::string Row::*, double (Row::*)() const,
               std::string (Row::*)() const, Other>
      value;
  int digits = 3;                              // of numbers in the table; 0: they are counts
  std::string (Row::*text)() const = nullptr;  // in the table instead of the number
  double low = 0, high = std::numeric_limits<double>::infinity();  // the reader refuses others
};

// kNone of texts.
template <typename Row>
double NumberOf(const Column<Row>& column, const Row& row) {
  if (const auto* member = std::get_if<0>(&column.value)) return row.*(*member);
  if (const auto* figure = std::get_if<2>(&column.value)) return (row.*(*figure))();
  const auto* other = std::get_if<Other>(&column.value);
  return other != nullptr && other->index < row.others.size() ? row.others[other->index] : kNone;
}
// Of texts.
template <typename Row>
std::optional<std::string> TextOf(const Column<Row>& column, const Row& row) {
  if (const auto* member = std::get_if<1>(&column.value)) return row.*(*member);
  if (const auto* text = std::get_if<3>(&column.value)) return (row.*(*text))();
  return std::nullopt;
}

// Of bench and sweep, in the order of the table: what this library reads by name, and each field of
// their rows that has a heading (moe/cli/measure/tables.h).
template <typename Row>
absl::Span<const Column<Row>> ColumnsOf();
template <>
absl::Span<const Column<BenchRow>> ColumnsOf();
template <>
absl::Span<const Column<SweepRow>> ColumnsOf();

// Of a figure, over the steps that count for speed, without values that are not finite: the very
// first step pays for memory and code that later ones reuse, and is left out if there are others.
std::vector<double> SteadyValues(const Run& run, double TrainStep::*value);
// Their mean.
double SteadyMean(const Run& run, double TrainStep::*value);

// `document` is one JSON list of rows, one row, or a row a line; keys say of which command they
// are. Keys that the report has no use for are ignored; null is a key that is not there. kDataLoss
// "<file>: <reason> (line L, column C)" for malformed JSON, a row of no known command or of another
// one than the rows before, a key of the wrong type, numbers out of their range, steps not in
// order, expert loads that change shape, no rows at all, and more than 256 MiB.
absl::StatusOr<Run> ParseRun(absl::string_view file, absl::string_view document);

// The file at `path`, or metrics.jsonl in the folder at `path`. Errors of MappedFile::Open (moe/io/
// file.h) and of ParseRun.
absl::StatusOr<Run> ReadRun(const std::string& path);

// Short names that differ: as many last parts of each path as that takes, without ".json", ".jsonl"
// and "metrics.jsonl". Paths that are equal get a number.
std::vector<std::string> ShortNames(absl::Span<const std::string> paths);

}  // namespace moe::report

#endif  // MOE_MOE_CLI_REPORT_ROWS_H_
