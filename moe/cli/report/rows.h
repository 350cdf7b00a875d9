// Results of bench, sweep and train as typed rows, read from untrusted files. docs/report.md lists
// the keys.
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

using measure::kNone;  // for a number that a row lacks
// The lower bound of a number that may be negative.
inline constexpr double kAnyReal = -std::numeric_limits<double>::infinity();

// A row of `moe bench`. Numbers are kNone if the benchmark has no such figure.
struct BenchRow {
  std::string op, algorithm, backend, transport, routing, dtype, status, error;
  std::string shape;        // for a layer: "E 8 H 64 F 128"
  std::string pass, phase;  // for a layer: "forward", "expert"; the phase "all" is the whole pass
  std::string seed;         // for drawn routings
  std::string settings;     // given flags that no other key holds
  double ranks = kNone, hosts = kNone;
  double size_bytes = kNone;
  double time_us = kNone, time_us_p99 = kNone, cv_pct = kNone;
  double algbw = kNone, busbw = kNone, memcpy = kNone;  // 1e9 bytes per second
  double memcpy_pct = kNone;                            // algbw over memcpy
  double sent_imbalance = kNone, received_imbalance = kNone;
  double wrong = kNone;
  double threads = kNone;                      // per rank
  double source = kNone, destination = kNone;  // ranks of a pair
  double gflops = kNone;                       // a layer's experts, per second
  std::vector<double> others;                  // values that no chart uses, in the order of columns

  double size() const;  // bytes; 0 without any
  std::string size_text() const;
  // The larger imbalance of sent and received bytes: the most loaded rank over the mean.
  double imbalance() const;
  std::string threads_text() const;  // "4 threads", or empty
  std::string seed_text() const;     // "seed 1", or empty
  // "0 to 1"; empty unless the row is between two ranks.
  std::string pair() const;
  bool failed() const { return !status.empty() && status != "ok"; }
};

// A row of `moe sweep`.
struct SweepRow {
  // Flags of all settings that change results; empty for rows of other programs.
  std::string settings;
  std::string text_hash, measure, backend, dtype, router, routing, dispatch;
  double experts = kNone, top_k = kNone;
  double capacity_factor = kNone;  // infinity: dropless
  double ep = kNone, dp = kNone, ranks = kNone, tokens_per_rank = kNone;
  double hidden = kNone, ffn = kNone, overlap = kNone;
  double params_total = kNone, params_active = kNone;
  double tokens_per_s = kNone, tokens_per_s_sd = kNone;
  double flops_per_token = kNone, tokens = kNone;
  double step_ms = kNone, a2a_ms = kNone, all_reduce_ms = kNone, expert_ms = kNone;
  double attention_ms = kNone, output_ms = kNone, optimizer_ms = kNone;
  double drop_initial_pct = kNone, drop_final_pct = kNone;
  double dead_experts = kNone, validation_loss = kNone, validation_loss_sd = kNone;
  double peak_mib = kNone;
  std::string status, error;
  std::vector<double> others;  // values that no chart uses, in the order of columns

  std::string capacity_text() const;                           // "1.25", "dropless"
  double compute() const { return flops_per_token * tokens; }  // FLOPs of the training
  bool failed() const { return !status.empty() && status != "ok"; }
};

// One line of `moe train`'s metrics.jsonl. expert_load: [layer][expert] slots, flattened.
struct TrainStep {
  double step = 0, loss = kNone, validation_loss = kNone;
  double tokens_per_s = kNone, step_ms = kNone, a2a_ms = kNone, expert_ms = kNone;
  double all_reduce_ms = kNone, attention_ms = kNone, output_ms = kNone, optimizer_ms = kNone;
  double drop_fraction = kNone, max_violation = kNone;
  double dead_experts = kNone, peak_bytes = kNone;
  double learning_rate = kNone, gradient_norm = kNone;
  std::vector<float> expert_load;
};

// A layout of `moe plan`; measured if it was run (--check).
struct PlanRow {
  double pp = kNone, tp = kNone, ep = kNone, etp = kNone, dp = kNone, chunks = kNone, zero = kNone;
  double micro_batch_size = kNone, micro_batches = kNone;
  double step_ms = kNone, measured_ms = kNone;
  double used_bytes = kNone, measured_bytes = kNone, total_bytes = kNone;  // of a rank
  std::string schedule, recompute, status, error;
  std::vector<double> others;  // none

  bool failed() const { return status == "too big"; }
};

// The last line of `moe train`'s metrics.jsonl.
struct TrainTotals {
  double steps = kNone, tokens = kNone, seconds = kNone;
  double validation_loss_before = kNone, validation_loss = kNone;
  std::string weights_hash;
};

enum class RunKind : uint8_t { kBench, kSweep, kTrain, kPlan };
const char* NameOf(RunKind kind);  // "bench", "sweep", "train", "plan"

// A fact about the origin of results, mostly the same in all rows of a file.
struct Origin {
  const char* key;
  std::string first, last;  // smallest and largest text: for dates the earliest and the latest
};

// One input.
struct Run {
  std::string name;  // short, different from those of other inputs
  std::string path;  // as given
  RunKind kind = RunKind::kTrain;
  std::string line;            // "moe train --data FILE ...", from its settings; empty: unknown
  std::vector<Origin> origin;  // facts from the file
  std::vector<BenchRow> bench;
  std::vector<SweepRow> sweep;
  std::vector<PlanRow> plan;
  std::vector<TrainStep> steps;
  std::optional<TrainTotals> totals;    // absent: the run did not end
  int num_layers = 0, num_experts = 0;  // shape of expert_load; 0: no layer has experts
};

// A column of a kind of row, for the reader, the table and --fail-if of a report.
struct Other {
  size_t index = 0;  // index in a row's `others`
};
template <typename Row>
struct Column {
  const char* key;      // in files; "": computed from other columns
  const char* bound;    // its name in --fail-if; "": it cannot be bounded
  const char* heading;  // heading in the table, with its unit; "": not in the table
  std::variant<double Row::*, std::string Row::*, double (Row::*)() const,
               std::string (Row::*)() const, Other>
      value;
  int digits = 3;                              // significant digits in the table; 0: a count
  std::string (Row::*text)() const = nullptr;  // shown in the table instead of the number
  double low = 0, high = std::numeric_limits<double>::infinity();  // range that the reader accepts
};

// kNone for a column of texts.
template <typename Row>
double NumberOf(const Column<Row>& column, const Row& row) {
  if (const auto* member = std::get_if<0>(&column.value)) return row.*(*member);
  if (const auto* figure = std::get_if<2>(&column.value)) return (row.*(*figure))();
  const auto* other = std::get_if<Other>(&column.value);
  return other != nullptr && other->index < row.others.size() ? row.others[other->index] : kNone;
}
// nullopt for a column of numbers.
template <typename Row>
std::optional<std::string> TextOf(const Column<Row>& column, const Row& row) {
  if (const auto* member = std::get_if<1>(&column.value)) return row.*(*member);
  if (const auto* text = std::get_if<3>(&column.value)) return (row.*(*text))();
  return std::nullopt;
}

// Columns of bench, sweep and plan, in the order of the table: those that this library reads by
// name, and each field of their rows that has a heading (moe/cli/measure/tables.h).
template <typename Row>
absl::Span<const Column<Row>> ColumnsOf();
template <>
absl::Span<const Column<BenchRow>> ColumnsOf();
template <>
absl::Span<const Column<SweepRow>> ColumnsOf();
template <>
absl::Span<const Column<PlanRow>> ColumnsOf();

// Finite values of a figure, over the steps that count for speed: the very first step includes the
// cost of memory and code that later ones reuse, and is left out if there are others.
std::vector<double> SteadyValues(const Run& run, double TrainStep::*value);
// Their mean.
double SteadyMean(const Run& run, double TrainStep::*value);

// `document` is one JSON list of rows, one row, or a row on each line; the keys identify the
// command. Keys that the report does not use are ignored; null is the same as an absent key.
// kDataLoss "<file>: <reason> (line L, column C)" for malformed JSON, a row of an unknown command
// or of another one than earlier rows, a key of the wrong type, numbers out of range, steps out of
// order, expert loads that change shape, no rows at all, and more than 256 MiB.
absl::StatusOr<Run> ParseRun(absl::string_view file, absl::string_view document);

// The file at `path`, or metrics.jsonl in the folder at `path`. Errors of MappedFile::Open (moe/io/
// file.h) and of ParseRun.
absl::StatusOr<Run> ReadRun(const std::string& path);

// Short names that differ: as many last components of each path as needed, without ".json",
// ".jsonl" and "metrics.jsonl". Equal paths get a number.
std::vector<std::string> ShortNames(absl::Span<const std::string> paths);

}  // namespace moe::report

#endif  // MOE_MOE_CLI_REPORT_ROWS_H_
