#include "moe/cli/report/rows.h"

#include <algorithm>
#include <cmath>

#include <absl/strings/str_cat.h>

#include "moe/cli/measure/bench_row.h"
#include "moe/cli/measure/layer_bench.h"
#include "moe/cli/measure/sweep_row.h"
#include "moe/cli/measure/tables.h"
#include "moe/cli/report/format.h"

namespace moe::report {

const char* NameOf(RunKind kind) {
  constexpr const char* kNames[] = {"bench", "sweep", "train", "plan"};
  return kNames[static_cast<int>(kind)];
}

double BenchRow::size() const {
  return std::isfinite(size_bytes) ? size_bytes : 0;
}

std::string BenchRow::size_text() const {
  return std::isfinite(size_bytes) ? BytesText(size_bytes) : "";
}

std::string BenchRow::threads_text() const {
  return std::isfinite(threads) ? Plural(threads, "thread") : "";
}

std::string BenchRow::seed_text() const {
  return seed.empty() ? "" : absl::StrCat("seed ", seed);
}

std::string BenchRow::pair() const {
  if (!std::isfinite(source) || !std::isfinite(destination)) return "";
  return absl::StrCat(CountText(source), " to ", CountText(destination));
}

double BenchRow::imbalance() const {
  return std::fmax(sent_imbalance, received_imbalance);
}

std::string SweepRow::capacity_text() const {
  return std::isinf(capacity_factor) ? "dropless" : NumberText(capacity_factor);
}

std::vector<double> SteadyValues(const Run& run, double TrainStep::*value) {
  std::vector<double> values;
  for (size_t i = run.steps.size() > 1 ? 1 : 0; i < run.steps.size(); ++i) {
    if (std::isfinite(run.steps[i].*value)) values.push_back(run.steps[i].*value);
  }
  return values;
}

double SteadyMean(const Run& run, double TrainStep::*value) {
  return measure::MeanSdOf(SteadyValues(run, value)).mean;
}

namespace {

absl::Span<const Column<BenchRow>> NamedBenchColumns() {
  using R = BenchRow;
  static constexpr Column<R> kColumns[] = {
      {"op", "", "op", &R::op},
      {"algorithm", "", "algorithm", &R::algorithm},
      {"pass", "", "pass", &R::pass},
      {"phase", "", "phase", &R::phase},
      {"", "", "pair", &R::pair},
      {"backend", "", "backend", &R::backend},
      {"transport", "", "", &R::transport},
      {"ranks", "ranks", "ranks", &R::ranks, 0},
      {"hosts", "", "", &R::hosts},
      {"threads", "", "", &R::threads},
      {"source", "", "", &R::source},
      {"destination", "", "", &R::destination},
      {"routing", "", "routing", &R::routing},
      {"dtype", "", "dtype", &R::dtype},
      {"size_bytes", "size", "size", &R::size_bytes, 3, &R::size_text},
      {"time_us", "time", "time (us)", &R::time_us, 4},
      {"time_us_p99", "p99", "p99 (us)", &R::time_us_p99, 4},
      {"time_us_cv_pct", "cv", "cv (%)", &R::cv_pct, 2},
      {"algbw_gbytes_per_s", "algbw", "algbw (GB/s)", &R::algbw},
      {"busbw_gbytes_per_s", "busbw", "busbw (GB/s)", &R::busbw},
      {"memcpy_gbytes_per_s", "", "memcpy (GB/s)", &R::memcpy},
      {"memcpy_pct", "memcpy", "", &R::memcpy_pct},
      {"gflops_per_s", "gflops", "GFLOP/s", &R::gflops},
      {"imb_tx", "imb_tx", "", &R::sent_imbalance},
      {"imb_rx", "imb_rx", "", &R::received_imbalance},
      {"", "", "imbalance", &R::imbalance},
      {"nwrong", "wrong", "wrong", &R::wrong, 0},
      {"status", "", "", &R::status},
      {"error", "", "", &R::error},
      {"settings", "", "", &R::settings}};
  return kColumns;
}

absl::Span<const Column<SweepRow>> NamedSweepColumns() {
  using R = SweepRow;
  static constexpr Column<R> kColumns[] = {
      {"measure", "", "", &R::measure},
      {"experts", "experts", "experts", &R::experts, 0},
      {"topk", "topk", "top-k", &R::top_k, 0},
      {"", "cf", "capacity factor", &R::capacity_factor, 3, &R::capacity_text},
      {"ep", "ep", "ep", &R::ep, 0},
      {"dp", "dp", "dp", &R::dp, 0},
      {"ranks", "", "", &R::ranks},
      {"tok_per_rank", "", "tokens/rank", &R::tokens_per_rank, 0},
      {"hidden", "", "hidden", &R::hidden, 0},
      {"ffn", "", "ffn", &R::ffn, 0},
      {"overlap", "", "overlap", &R::overlap, 0},
      {"dtype", "", "dtype", &R::dtype},
      {"router", "", "router", &R::router},
      {"routing", "", "routing", &R::routing},
      {"dispatch", "", "dispatch", &R::dispatch},
      {"backend", "", "", &R::backend},
      {"tok_s", "tok_s", "tokens/s", &R::tokens_per_s, 0},
      {"tok_s_sd", "", "± sd", &R::tokens_per_s_sd, 0},
      {"val_loss", "val_loss", "validation loss", &R::validation_loss, 4, nullptr, kAnyReal},
      {"val_loss_sd", "", "± sd of loss", &R::validation_loss_sd, 2},
      {"drop_init", "drop_init", "drops, start (%)", &R::drop_initial_pct, 3, nullptr, 0, 100},
      {"drop_end", "drop_end", "drops, end (%)", &R::drop_final_pct, 3, nullptr, 0, 100},
      {"dead", "dead", "dead experts", &R::dead_experts, 0},
      {"step_ms", "step_ms", "step (ms)", &R::step_ms},
      {"a2a_ms", "a2a_ms", "all-to-all (ms)", &R::a2a_ms},
      {"expert_ms", "", "experts (ms)", &R::expert_ms},
      {"attention_ms", "", "attention (ms)", &R::attention_ms},
      {"output_ms", "", "output layer (ms)", &R::output_ms},
      {"ar_ms", "", "all-reduce (ms)", &R::all_reduce_ms},
      {"optimizer_ms", "", "optimiser (ms)", &R::optimizer_ms},
      {"peak_mib", "peak_mib", "peak (MiB)", &R::peak_mib},
      {"params_total", "", "parameters", &R::params_total, 0},
      {"params_active", "", "active", &R::params_active, 0},
      {"flops_per_token", "flops_per_token", "FLOPs/token", &R::flops_per_token},
      {"tokens", "", "tokens", &R::tokens, 0},
      {"status", "", "", &R::status},
      {"error", "", "", &R::error},
      {"settings", "", "", &R::settings},
      {"text_xxh3", "", "", &R::text_hash}};
  return kColumns;
}

// Fields with a heading but without a column of their own are inserted before the column `before`.
template <typename Row>
std::vector<Column<Row>> WithOthers(absl::Span<const Column<Row>> named, absl::string_view before,
                                    absl::Span<const measure::Fields> rows) {
  std::vector<Column<Row>> all;
  size_t others = 0;
  const auto add = [&](const measure::Field& field) {
    const bool known = std::any_of(all.begin(), all.end(),
                                   [&](const auto& column) { return field.key == column.key; });
    if (field.heading == nullptr || known) return;
    all.push_back({field.key.c_str(), measure::NameOf(field), field.heading, Other{others++}});
  };
  for (const Column<Row>& column : named) {
    if (column.key == before) {
      for (const measure::Fields& row : rows) std::for_each(row.begin(), row.end(), add);
    }
    all.push_back(column);
  }
  return all;
}

}  // namespace

template <>
absl::Span<const Column<BenchRow>> ColumnsOf() {
  static const std::vector<measure::Fields> rows = {measure::BenchFields({}),
                                                    measure::LayerFields({}, {})};
  static const auto columns = WithOthers(NamedBenchColumns(), "nwrong", rows);
  return columns;
}

template <>
absl::Span<const Column<SweepRow>> ColumnsOf() {
  static const measure::Fields row = sweep::SweepFields({}, {}, "ok", {});
  static const auto columns = WithOthers(NamedSweepColumns(), "dead", {&row, 1});
  return columns;
}

template <>
absl::Span<const Column<PlanRow>> ColumnsOf() {
  using R = PlanRow;
  static constexpr Column<R> kColumns[] = {
      {"pp", "", "PP", &R::pp, 0},
      {"tp", "", "TP", &R::tp, 0},
      {"ep", "", "EP", &R::ep, 0},
      {"etp", "", "ETP", &R::etp, 0},
      {"dp", "", "DP", &R::dp, 0},
      {"vp", "", "chunks", &R::chunks, 0},
      {"schedule", "", "schedule", &R::schedule},
      {"zero", "", "ZeRO", &R::zero, 0},
      {"recompute", "", "recompute", &R::recompute},
      {"micro_batch_size", "", "micro-batch", &R::micro_batch_size, 0},
      {"micro_batches", "", "micro-batches", &R::micro_batches, 0},
      {"step_ms", "", "step, predicted (ms)", &R::step_ms},
      {"measured_ms", "", "measured (ms)", &R::measured_ms},
      {"used_bytes", "", "memory, predicted (bytes)", &R::used_bytes, 0},
      {"measured_bytes", "", "measured (bytes)", &R::measured_bytes, 0},
      {"total_bytes", "", "with room to grow (bytes)", &R::total_bytes, 0},
      {"status", "", "", &R::status},
      {"reason", "", "", &R::error}};
  return kColumns;
}

}  // namespace moe::report
