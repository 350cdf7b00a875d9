// The rows of a sweep: what is measured at a point, its row, and the table that people read.
#ifndef MOE_MOE_CLI_MEASURE_SWEEP_ROW_H_
#define MOE_MOE_CLI_MEASURE_SWEEP_ROW_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/cli/measure/layer_bench.h"
#include "moe/cli/measure/statistics.h"
#include "moe/cli/measure/tables.h"
#include "moe/lm/training_loop.h"

namespace moe::sweep {

using measure::kNone;
using measure::MeanSd;
using measure::MeanSdOf;

// Figures of one repetition. kNone: the mode has no such figure.
struct Figures {
  double params_total = kNone, params_active = kNone;
  double tokens_per_s = kNone;  // over all ranks
  double step_ms = kNone;       // layer: forward + backward
  double a2a_ms = kNone;        // dispatch + combine
  double all_reduce_ms = kNone;
  double expert_ms = kNone;
  double attention_ms = kNone, output_ms = kNone;  // output: output layer and loss
  double optimizer_ms = kNone;
  double layer_ms = kNone;     // gates, plans, dense networks, norms, embedding
  double pipeline_ms = kNone;  // waits for rows of other stages
  double drop_initial_pct = kNone, drop_final_pct = kNone;  // percent of slots
  double max_violation = kNone;                             // maximum over the layers
  double dead_experts = kNone;                              // over all layers
  double validation_loss = kNone;                           // nats
  double peak_bytes = kNone;                                // maximum over the ranks
  std::optional<BFloat16Order> bfloat16_order = {};         // the same in all repetitions
};

// Means over repetitions; the peak is the largest.
struct Summary {
  Figures mean;
  double tokens_per_s_sd = kNone;
  double validation_loss_sd = kNone;
};
Summary Summarize(absl::Span<const Figures> repetitions);

// The figures of a training run, from its steps:
//   speed, times   over the steps after the first, which pays for memory and code that later ones
//                  reuse; tokens / seconds, and means
//   drops          of the first step, at the initial weights; and the mean over the last tenth of
//                  the steps (at least one), as are MaxVio and dead experts
class TrainFigures {
 public:
  void Add(const lm::StepMetrics& metrics) { steps_.push_back(metrics); }
  // Called after the last step.
  Figures Finish(const lm::TrainReport& report) const;

 private:
  std::vector<lm::StepMetrics> steps_;
};

// The figures of a layer's calls: step and phases are medians of the slowest rank, forward and
// backward added. Nothing is trained between the calls, so drops are the same at the start and the
// end.
Figures LayerFigures(const measure::LayerResult& result);

// Settings and provenance of a measured point. Zero and empty: the mode has no such setting.
struct Point {
  std::string measure;    // "layer", "train"
  std::string settings;   // flags of every setting that changes results: who the point is
  std::string backend;    // "local", "mpi"
  std::string text_xxh3;  // text that is trained on; empty in layer mode
  int64_t experts = 0, topk = 0;
  double capacity_factor = 0;  // 0: dropless
  int64_t ep = 0, etp = 0, tp = 0, pp = 0, ranks = 0;
  int64_t overlap = 0, hidden = 0, ffn = 0, tokens_per_rank = 0;
  double flops_per_token = 0;  // of training
  int64_t tokens = 0;          // trained on
  std::string dtype, router, routing, dispatch;
  int64_t threads = 0;
  uint64_t seed = 0;  // seed of the first repetition
  int64_t repetitions = 0;
  std::vector<std::pair<std::string, std::string>> provenance;  // moe/cli/base/provenance.h
};

// A row as in a file.
struct SweepRow {
  measure::Fields fields;  // those of SweepFields

  double number(absl::string_view key) const { return at(key).number(); }
  std::string text(absl::string_view key) const { return at(key).text(); }
  bool failed() const { return text("status") == "error"; }
  bool predicted() const { return text("status") == "predicted"; }

 private:
  const measure::Cell& at(absl::string_view key) const;
};

// The JSON object, CSV line and Markdown row of a point. cf: a number or "none"; drops in percent;
// status: "ok", "error"; "predicted": nothing of it was measured.
measure::Fields SweepFields(const Point& point, const Summary& summary, const char* status,
                            measure::Cell error);

SweepRow MeasuredRow(const Point& point, const Summary& summary);
SweepRow ErrorRow(const Point& point, absl::string_view error);
SweepRow PredictedRow(const Point& point, const Figures& figures);

// Identity of a row's point: measure, settings, backend and text. Rows of one point have equal
// texts.
std::string IdentityOf(const SweepRow& row);

// The build that made the row: "moe 1.2.3, commit 0123456789ab, optimised, compiler 12.2.0". Rows
// from before these keys: "an unknown build".
std::string BuildOf(const SweepRow& row);

// One line of a file, without its end. Keys that no field has are ignored, absent ones are null.
// kDataLoss "<reason>" for a line that is no row of this schema.
absl::StatusOr<SweepRow> ParseSweepRow(absl::string_view line);
// One object on one line, with its end.
std::string JsonLine(const SweepRow& row);

// For each row whether no other beats it by more than the noise (measure::ParetoFront). Rows of
// training compare lower validation loss and more tokens per second; rows of layers fewer drops and
// more tokens per second. Rows that failed or are predicted are not compared.
std::vector<bool> ParetoMarks(absl::Span<const SweepRow> rows);

// Every row on a line, '*' after the speed of the Pareto points:
//
//   experts | topk | cf | ep | dp | tok/rank | params tot/act | tok/s ± sd | step ms | a2a ms(%) |
//   ar ms(%) | expert ms | drop% init→end | MaxVio | dead | val loss | peak MiB | status
//
// In front of them a column for each of ranks, pp, tp, etp, overlap, hidden, ffn, dtype, router,
// routing and dispatch whose values differ between rows. '-': no such figure. Empty for no rows.
std::string SweepTable(absl::Span<const SweepRow> rows);

}  // namespace moe::sweep

#endif  // MOE_MOE_CLI_MEASURE_SWEEP_ROW_H_
