// A row of a sweep: a point, what was measured there, or why nothing was.
#ifndef MOE_MOE_SWEEP_SWEEP_ROW_H_
#define MOE_MOE_SWEEP_SWEEP_ROW_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "moe/bench/tables.h"
#include "moe/sweep/figures.h"

namespace moe::sweep {

// Where and how a point is measured. Zero and empty: the mode has no such setting.
struct Point {
  std::string measure;    // "layer", "train"
  std::string settings;   // flags of every setting that changes results: who the point is
  std::string backend;    // "local", "mpi"
  std::string text_xxh3;  // of the text that is trained on; empty in layer mode
  int64_t experts = 0, topk = 0;
  double capacity_factor = 0;  // 0: dropless
  int64_t ep = 0, ranks = 0;   // data-parallel size: ranks / ep
  int64_t overlap = 0, hidden = 0, ffn = 0, tokens_per_rank = 0;
  std::string dtype, router, routing, dispatch;
  int64_t threads = 0;
  uint64_t seed = 0;  // of the first repetition
  int64_t repetitions = 0;
};

// A row as it stands in a file: cells by key.
class SweepRow {
 public:
  SweepRow() = default;
  explicit SweepRow(std::vector<bench::Cell> cells);

  // In the order of SweepKeys().
  const std::vector<bench::Cell>& cells() const { return cells_; }
  const bench::Cell& at(absl::string_view key) const;
  double number(absl::string_view key) const { return at(key).number(); }
  std::string text(absl::string_view key) const { return at(key).text(); }
  bool failed() const { return text("status") != "ok"; }

 private:
  std::vector<bench::Cell> cells_;
};

// Keys of the JSON object, CSV line and Markdown row, in this order:
//   schema, measure, experts, topk, cf (a number or "none"), ep, dp, ranks, overlap, hidden, ffn,
//   tok_per_rank, dtype, router, routing, dispatch, backend, threads, seed, repetitions,
//   params_total, params_active, tok_s, tok_s_sd, step_ms, a2a_ms, ar_ms, expert_ms, drop_init,
//   drop_end (percent), max_vio, dead, val_loss, val_loss_sd, peak_mib, status ("ok", "error"),
//   error, settings, text_xxh3
const std::vector<std::string>& SweepKeys();

SweepRow MeasuredRow(const Point& point, const Summary& summary);
SweepRow ErrorRow(const Point& point, absl::string_view error);

// Rows with equal texts are of the same point: measure, settings, backend and text.
std::string IdentityOf(const SweepRow& row);

// One line of a file, without its end. Keys that are not of SweepKeys() are passed over, absent
// ones are null. kDataLoss "<reason>" for what is no row of this schema.
absl::StatusOr<SweepRow> ParseSweepRow(absl::string_view line);
// One object on one line, with its end.
std::string JsonLine(const SweepRow& row);

}  // namespace moe::sweep

#endif  // MOE_MOE_SWEEP_SWEEP_ROW_H_
