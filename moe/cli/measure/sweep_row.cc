#include "moe/cli/measure/sweep_row.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <set>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/io/bounded_json.h"

namespace moe::sweep {

namespace {

double PhaseMs(const lm::StepMetrics& metrics, Phase phase) {
  return metrics.phase_seconds[static_cast<int>(phase)] * 1e3;
}

// Mean of `value` over steps [begin, end).
template <typename Value>
double Mean(absl::Span<const lm::StepMetrics> steps, Value value) {
  double sum = 0;
  for (const lm::StepMetrics& step : steps) sum += value(step);
  return sum / static_cast<double>(steps.size());
}

using measure::Cell;
using Json = nlohmann::json;

constexpr char kSchema[] = "moe.sweep/1";

// An empty cell for what could not be determined.
Cell CountOrNothing(int64_t value) {
  return value == 0 ? Cell() : Cell(value);
}

// Whole numbers as such: parameters and dead experts are means over repetitions.
Cell NumberCell(double value) {
  if (std::abs(value) < 1e15 && value == std::floor(value)) {
    return Cell(static_cast<int64_t>(value));
  }
  return Cell(value);
}

// `model`: the field in an empty row.
absl::StatusOr<Cell> CellOf(const Json& value, const measure::Field& model) {
  if (value.is_null()) return Cell();
  const bool is_factor = model.key == "cf";
  const bool may_be_number = is_factor || !model.value.is_text();
  if (may_be_number && value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    return number >> 63 != 0 ? Cell(number) : Cell(static_cast<int64_t>(number));
  }
  if (may_be_number && value.is_number()) return Cell(value.get<double>());
  const bool none = is_factor && value == "none";
  if (value.is_string() && (!may_be_number || none)) return Cell(value.get<std::string>());
  return absl::DataLossError(absl::StrCat(model.key, " is ", Shown(value.dump(-1, ' ', true), 40),
                                          ", expected a ", may_be_number ? "number" : "string"));
}

constexpr char kNone[] = "-";
// Most bytes of an error in a table; the error may come from a file.
constexpr int64_t kMostErrorBytes = 400;

// "1.23M": three digits and a power of 1000.
std::string ShortCount(double value) {
  if (!std::isfinite(value)) return kNone;
  const char* const units[] = {"", "k", "M", "G", "T"};
  size_t unit = 0;
  while (value >= 999.5 && unit + 1 < std::size(units)) {
    value /= 1000;
    ++unit;
  }
  const int decimals = unit == 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return absl::StrFormat("%.*f%s", decimals, value, units[unit]);
}

std::string Fixed(double value, int decimals) {
  return std::isfinite(value) ? absl::StrFormat("%.*f", decimals, value) : kNone;
}

std::string Count(double value) {
  if (!std::isfinite(value)) return kNone;
  return absl::StrFormat("%.*f", value == std::floor(value) ? 0 : 1, value);
}

// "3.1 (12)": milliseconds and the share of the step.
std::string PartOf(double ms, double step_ms) {
  if (!std::isfinite(ms)) return kNone;
  return absl::StrFormat("%.2f (%.0f)", ms, step_ms > 0 ? 100 * ms / step_ms : 0.0);
}

std::string OrNone(const std::string& text) {
  return text.empty() ? kNone : Shown(text, kMostErrorBytes);
}

std::string Speed(const SweepRow& row, bool on_front) {
  const double mean = row.number("tok_s");
  if (!std::isfinite(mean)) return kNone;
  const double sd = row.number("tok_s_sd");
  return absl::StrCat(Fixed(mean, 0), std::isfinite(sd) ? " ± " + Fixed(sd, 0) : "",
                      on_front ? " *" : "  ");
}

std::string Drops(const SweepRow& row) {
  const double end = row.number("drop_end");
  if (!std::isfinite(end)) return kNone;
  if (row.text("measure") == "layer") return Fixed(end, 2);
  return absl::StrCat(Fixed(row.number("drop_init"), 2), "→", Fixed(end, 2));
}

using Line = std::vector<std::string>;

// The columns that the table always has, with the row's texts.
std::vector<std::pair<const char*, std::string>> ColumnsOf(const SweepRow& row, bool on_front) {
  const double step_ms = row.number("step_ms");
  const double total = row.number("params_total");
  return {
      {"experts", OrNone(row.text("experts"))},
      {"topk", OrNone(row.text("topk"))},
      {"cf", OrNone(row.text("cf"))},
      {"ep", OrNone(row.text("ep"))},
      {"dp", OrNone(row.text("dp"))},
      {"tok/rank", OrNone(row.text("tok_per_rank"))},
      {"params tot/act",
       std::isfinite(total)
           ? absl::StrCat(ShortCount(total), "/", ShortCount(row.number("params_active")))
           : kNone},
      {"tok/s ± sd", Speed(row, on_front)},
      {"step ms", Fixed(step_ms, 2)},
      {"a2a ms(%)", PartOf(row.number("a2a_ms"), step_ms)},
      {"ar ms(%)", PartOf(row.number("ar_ms"), step_ms)},
      {"expert ms", Fixed(row.number("expert_ms"), 2)},
      {"drop% init→end", Drops(row)},
      {"MaxVio", Fixed(row.number("max_vio"), 2)},
      {"dead", Count(row.number("dead"))},
      {"val loss", Fixed(row.number("val_loss"), 4)},
      {"peak MiB", Fixed(row.number("peak_mib"), 0)},
      {"status", row.failed() ? absl::StrCat("error: ", Shown(row.text("error"), kMostErrorBytes))
                              : row.text("status")}};
}

// Columns on a terminal: UTF-8's continuation bytes take none.
size_t Width(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string Layout(const std::vector<Line>& lines) {
  std::vector<size_t> widths(lines.front().size(), 0);
  for (const Line& line : lines) {
    for (size_t c = 0; c < line.size(); ++c) widths[c] = std::max(widths[c], Width(line[c]));
  }
  std::string out;
  for (const Line& line : lines) {
    for (size_t c = 0; c < line.size(); ++c) {
      const bool last = c + 1 == line.size();  // the status: from the left, no blanks behind it
      if (!last) out.append(widths[c] - Width(line[c]), ' ');
      absl::StrAppend(&out, line[c], last ? "\n" : " | ");
    }
  }
  return out;
}

}  // namespace

Summary Summarize(absl::Span<const Figures> repetitions) {
  const auto over = [&](double Figures::*figure) {
    std::vector<double> values;
    for (const Figures& f : repetitions) values.push_back(f.*figure);
    return MeanSdOf(values);
  };
  Summary summary;
  for (double Figures::*figure :
       {&Figures::params_total, &Figures::params_active, &Figures::tokens_per_s, &Figures::step_ms,
        &Figures::a2a_ms, &Figures::all_reduce_ms, &Figures::expert_ms, &Figures::attention_ms,
        &Figures::output_ms, &Figures::optimizer_ms, &Figures::layer_ms, &Figures::pipeline_ms,
        &Figures::drop_initial_pct, &Figures::drop_final_pct, &Figures::max_violation,
        &Figures::dead_experts, &Figures::validation_loss}) {
    summary.mean.*figure = over(figure).mean;
  }
  for (const Figures& f : repetitions) {
    summary.mean.peak_bytes = std::fmax(summary.mean.peak_bytes, f.peak_bytes);  // NaN: the other
  }
  if (!repetitions.empty()) summary.mean.bfloat16_order = repetitions.front().bfloat16_order;
  summary.tokens_per_s_sd = over(&Figures::tokens_per_s).sd;
  summary.validation_loss_sd = over(&Figures::validation_loss).sd;
  return summary;
}

Figures TrainFigures::Finish(const lm::TrainReport& report) const {
  Figures figures = {.params_total = static_cast<double>(report.parameters_total),
                     .params_active = static_cast<double>(report.parameters_active),
                     .validation_loss = report.validation_loss_after,
                     .bfloat16_order = report.bfloat16_order};
  if (steps_.empty()) return figures;
  const auto all = absl::MakeConstSpan(steps_);
  const auto steady = all.size() > 1 ? all.subspan(1) : all;
  double tokens = 0, seconds = 0;
  for (const lm::StepMetrics& step : steady) {
    tokens += step.tokens_per_second * step.step_seconds;
    seconds += step.step_seconds;
  }
  figures.tokens_per_s = tokens / seconds;
  figures.step_ms = seconds / static_cast<double>(steady.size()) * 1e3;
  figures.a2a_ms = Mean(steady, [](const lm::StepMetrics& m) {
    return PhaseMs(m, Phase::kDispatch) + PhaseMs(m, Phase::kCombine);
  });
  const auto phase_ms = [&](Phase phase) {
    return Mean(steady, [&](const lm::StepMetrics& m) { return PhaseMs(m, phase); });
  };
  figures.all_reduce_ms = phase_ms(Phase::kAllReduce);
  figures.expert_ms = phase_ms(Phase::kExpert);
  figures.attention_ms = phase_ms(Phase::kAttention);
  figures.output_ms = phase_ms(Phase::kOutput);
  figures.optimizer_ms = phase_ms(Phase::kOptimizer);
  figures.layer_ms = phase_ms(Phase::kGate) + phase_ms(Phase::kPlan) + phase_ms(Phase::kDense);
  figures.pipeline_ms = phase_ms(Phase::kPipeline);
  const auto last = all.last(std::max<size_t>(1, all.size() / 10));
  figures.drop_initial_pct = 100 * all.front().drop_fraction;
  figures.drop_final_pct =
      100 * Mean(last, [](const lm::StepMetrics& m) { return m.drop_fraction; });
  figures.max_violation = Mean(last, [](const lm::StepMetrics& m) { return m.max_violation; });
  figures.dead_experts =
      Mean(last, [](const lm::StepMetrics& m) { return static_cast<double>(m.dead_experts); });
  for (const lm::StepMetrics& step : steps_) {
    figures.peak_bytes = std::fmax(figures.peak_bytes, static_cast<double>(step.peak_bytes));
  }
  return figures;
}

Figures LayerFigures(const measure::LayerResult& result) {
  // Mean over ranks, as in training: the slowest rank differs by phase, and the sum of the slowest
  // would be more than the step.
  const auto ms = [&](const char* phase) {
    double sum = 0;
    for (const measure::LayerRow& row : result.rows) {
      if (row.phase != phase) continue;
      for (const measure::LayerRow& whole : result.rows) {
        if (whole.phase != "all" || whole.pass != row.pass) continue;
        sum += row.share_pct / 100 * whole.time_us.p50 * 1e-3;
      }
    }
    return sum;
  };
  const measure::LayerFigures& measured = result.figures;
  return {.tokens_per_s = measured.tokens_per_s,
          .step_ms = measured.step_us.p50 * 1e-3,
          .a2a_ms = ms("dispatch") + ms("combine"),
          .expert_ms = ms("expert"),
          .drop_initial_pct = 100 * measured.drop_fraction,
          .drop_final_pct = 100 * measured.drop_fraction,
          .max_violation = measured.max_vio,
          .dead_experts = static_cast<double>(measured.dead_experts),
          .peak_bytes = static_cast<double>(measured.peak_bytes),
          .bfloat16_order = result.bfloat16_order};
}

const Cell& SweepRow::at(absl::string_view key) const {
  const Cell* const cell = measure::Find(fields, key);
  MOE_CHECK(cell != nullptr);
  return *cell;
}

measure::Fields SweepFields(const Point& p, const Summary& summary, const char* status,
                            measure::Cell error) {
  const Figures& f = summary.mean;
  // Ranks that hold every expert once; tensor ranks are some of EP.
  const int64_t holders = p.ep * std::max<int64_t>(1, p.etp) * p.pp;
  const bool divides = holders > 0 && p.ranks % holders == 0;
  measure::Fields row = {
      {"schema", kSchema},
      {"measure", p.measure},
      {"experts", p.experts},
      {"topk", p.topk},
      {"cf", p.capacity_factor > 0 ? Cell(p.capacity_factor) : Cell("none")},
      {"ep", CountOrNothing(p.ep)},
      {"dp", CountOrNothing(divides ? p.ranks / holders : 0)},
      {"tp", CountOrNothing(p.tp), "tp"},
      {"etp", CountOrNothing(p.etp), "etp"},
      {"pp", CountOrNothing(p.pp), "pp"},
      {"ranks", p.ranks},
      {"overlap", p.overlap},
      {"hidden", p.hidden},
      {"ffn", p.ffn},
      {"tok_per_rank", CountOrNothing(p.tokens_per_rank)},
      {"dtype", p.dtype},
      {"router", p.router},
      {"routing", Cell::TextIf(!p.routing.empty(), p.routing)},
      {"dispatch", p.dispatch},
      {"backend", p.backend},
      {"threads", p.threads},
      {"seed", p.seed},
      {"repetitions", p.repetitions},
      {"params_total", NumberCell(f.params_total)},
      {"params_active", NumberCell(f.params_active)},
      {"flops_per_token", p.flops_per_token > 0 ? NumberCell(p.flops_per_token) : Cell()},
      {"tokens", CountOrNothing(p.tokens)},
      {"tok_s", f.tokens_per_s},
      {"tok_s_sd", summary.tokens_per_s_sd},
      {"step_ms", f.step_ms},
      {"a2a_ms", f.a2a_ms},
      {"ar_ms", f.all_reduce_ms},
      {"expert_ms", f.expert_ms},
      {"attention_ms", f.attention_ms},
      {"output_ms", f.output_ms},
      {"optimizer_ms", f.optimizer_ms},
      {"layer_ms", f.layer_ms},
      {"pipeline_ms", f.pipeline_ms},
      {"drop_init", f.drop_initial_pct},
      {"drop_end", f.drop_final_pct},
      {"max_vio", f.max_violation, "MaxVio"},
      {"dead", NumberCell(f.dead_experts)},
      {"val_loss", f.validation_loss},
      {"val_loss_sd", summary.validation_loss_sd},
      {"peak_mib", f.peak_bytes / 0x1p20},
      {"status", status},
      {"error", std::move(error)},
      {"settings", p.settings},
      {"text_xxh3", Cell::TextIf(!p.text_xxh3.empty(), p.text_xxh3)}};
  for (const char* key : measure::kOriginKeys) {
    if (absl::string_view(key) == "host")
      row.push_back(measure::OriginField("build", p.provenance));
    row.push_back(measure::OriginField(key, p.provenance));
  }
  row.push_back({"bf16_order", measure::BFloat16OrderCell(f.bfloat16_order)});
  return row;
}

SweepRow MeasuredRow(const Point& point, const Summary& summary) {
  return {SweepFields(point, summary, "ok", {})};
}

SweepRow ErrorRow(const Point& point, absl::string_view error) {
  return {SweepFields(point, {}, "error", std::string(error))};
}

SweepRow PredictedRow(const Point& point, const Figures& figures) {
  return {SweepFields(point, {.mean = figures}, "predicted", {})};
}

std::string IdentityOf(const SweepRow& row) {
  return absl::StrCat(row.text("measure"), " ", row.text("settings"), " ", row.text("backend"), " ",
                      row.text("text_xxh3"));
}

std::string BuildOf(const SweepRow& row) {
  if (row.text("version").empty()) return "an unknown build";
  return absl::StrCat("moe ", row.text("version"), ", commit ", row.text("commit"), ", ",
                      row.text("build"));
}

absl::StatusOr<SweepRow> ParseSweepRow(absl::string_view line) {
  MOE_ASSIGN_OR_RETURN(const Json object, ParseBoundedJson("row", line));
  if (!object.is_object() || object.value("schema", Json()) != kSchema) {
    return absl::DataLossError(absl::StrCat("no row of a sweep, expected an object with schema \"",
                                            kSchema, "\", as moe sweep -J writes"));
  }
  static const measure::Fields model = SweepFields({}, {}, "ok", Cell::TextIf(false, ""));
  SweepRow row = {model};
  for (measure::Field& field : row.fields) {
    MOE_ASSIGN_OR_RETURN(field.value, CellOf(object.value(field.key, Json()), field));
  }
  const std::string status = row.text("status");
  if (status == "ok" || status == "error") return row;
  return absl::DataLossError(
      absl::StrCat("status is '", Shown(status, 40), "', expected ok or error"));
}

std::string JsonLine(const SweepRow& row) {
  return measure::TableWriter(measure::TableForm::kJsonLines, measure::KeysOf(row.fields))
      .Row(row.fields);
}

std::vector<bool> ParetoMarks(absl::Span<const SweepRow> rows) {
  std::vector<bool> marks(rows.size(), false);
  std::vector<std::pair<measure::Sample, measure::Sample>> points;
  std::vector<size_t> row_of;
  for (size_t i = 0; i < rows.size(); ++i) {
    const SweepRow& row = rows[i];
    if (row.failed() || row.predicted()) continue;
    points.emplace_back(row.text("measure") == "layer"
                            ? measure::Sample{.mean = row.number("drop_end")}
                            : measure::SampleOf(row.number("val_loss"), row.number("val_loss_sd")),
                        measure::SampleOf(row.number("tok_s"), row.number("tok_s_sd")));
    row_of.push_back(i);
  }
  for (const int i :
       measure::ParetoFront(points, measure::Better::kLower, measure::Better::kHigher)) {
    marks[row_of[i]] = true;
  }
  return marks;
}

std::string SweepTable(absl::Span<const SweepRow> rows) {
  if (rows.empty()) return "";
  std::vector<const char*> varied;
  for (const char* key : {"ranks", "pp", "tp", "etp", "overlap", "hidden", "ffn", "dtype", "router",
                          "routing", "dispatch"}) {
    std::set<std::string> values;
    for (const SweepRow& row : rows) values.insert(row.text(key));
    if (values.size() > 1) varied.push_back(key);
  }
  std::vector<Line> lines = {Line(varied.begin(), varied.end())};
  const std::vector<bool> marks = ParetoMarks(rows);
  for (size_t i = 0; i < rows.size(); ++i) {
    Line& line = lines.emplace_back();
    for (const char* key : varied) line.push_back(OrNone(rows[i].text(key)));
    for (auto& [head, text] : ColumnsOf(rows[i], marks[i])) {
      if (i == 0) lines.front().emplace_back(head);
      lines[i + 1].push_back(std::move(text));
    }
  }
  return Layout(lines);
}

}  // namespace moe::sweep
