#include "moe/sweep/sweep_row.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <absl/strings/str_cat.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/io/bounded_json.h"

namespace moe::sweep {
namespace {

using bench::Cell;
using Json = nlohmann::json;

constexpr char kSchema[] = "moe.sweep/1";

// What may stand in a column.
enum class Kind : uint8_t { kText, kNumber, kNumberOrNone };

struct Column {
  const char* key;
  Kind kind;
};

constexpr Column kColumns[] = {{"schema", Kind::kText},         {"measure", Kind::kText},
                               {"experts", Kind::kNumber},      {"topk", Kind::kNumber},
                               {"cf", Kind::kNumberOrNone},     {"ep", Kind::kNumber},
                               {"dp", Kind::kNumber},           {"ranks", Kind::kNumber},
                               {"overlap", Kind::kNumber},      {"hidden", Kind::kNumber},
                               {"ffn", Kind::kNumber},          {"tok_per_rank", Kind::kNumber},
                               {"dtype", Kind::kText},          {"router", Kind::kText},
                               {"routing", Kind::kText},        {"dispatch", Kind::kText},
                               {"backend", Kind::kText},        {"threads", Kind::kNumber},
                               {"seed", Kind::kNumber},         {"repetitions", Kind::kNumber},
                               {"params_total", Kind::kNumber}, {"params_active", Kind::kNumber},
                               {"tok_s", Kind::kNumber},        {"tok_s_sd", Kind::kNumber},
                               {"step_ms", Kind::kNumber},      {"a2a_ms", Kind::kNumber},
                               {"ar_ms", Kind::kNumber},        {"expert_ms", Kind::kNumber},
                               {"drop_init", Kind::kNumber},    {"drop_end", Kind::kNumber},
                               {"max_vio", Kind::kNumber},      {"dead", Kind::kNumber},
                               {"val_loss", Kind::kNumber},     {"val_loss_sd", Kind::kNumber},
                               {"peak_mib", Kind::kNumber},     {"status", Kind::kText},
                               {"error", Kind::kText},          {"settings", Kind::kText},
                               {"text_xxh3", Kind::kText}};

Cell TextOrNothing(const std::string& text) {
  return text.empty() ? Cell() : Cell(text);
}

// Nothing for what could not be found out, such as the data-parallel size where EP is wrong.
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

SweepRow RowOf(const Point& p, const Summary& summary, Cell status, Cell error) {
  const Figures& f = summary.mean;
  const bool divides = p.ep > 0 && p.ranks % p.ep == 0;
  return SweepRow({kSchema,
                   p.measure,
                   p.experts,
                   p.topk,
                   p.capacity_factor > 0 ? Cell(p.capacity_factor) : Cell("none"),
                   CountOrNothing(p.ep),
                   CountOrNothing(divides ? p.ranks / p.ep : 0),
                   p.ranks,
                   p.overlap,
                   p.hidden,
                   p.ffn,
                   CountOrNothing(p.tokens_per_rank),
                   p.dtype,
                   p.router,
                   TextOrNothing(p.routing),
                   p.dispatch,
                   p.backend,
                   p.threads,
                   p.seed,
                   p.repetitions,
                   NumberCell(f.params_total),
                   NumberCell(f.params_active),
                   f.tokens_per_s,
                   summary.tokens_per_s_sd,
                   f.step_ms,
                   f.a2a_ms,
                   f.all_reduce_ms,
                   f.expert_ms,
                   f.drop_initial_pct,
                   f.drop_final_pct,
                   f.max_violation,
                   NumberCell(f.dead_experts),
                   f.validation_loss,
                   summary.validation_loss_sd,
                   f.peak_bytes / 0x1p20,
                   std::move(status),
                   std::move(error),
                   p.settings,
                   TextOrNothing(p.text_xxh3)});
}

absl::StatusOr<Cell> CellOf(const Json& value, const Column& column) {
  if (value.is_null()) return Cell();
  const bool may_be_number = column.kind != Kind::kText;
  if (may_be_number && value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    return number >> 63 != 0 ? Cell(number) : Cell(static_cast<int64_t>(number));
  }
  if (may_be_number && value.is_number()) return Cell(value.get<double>());
  const bool none = column.kind == Kind::kNumberOrNone && value == "none";
  if (value.is_string() && (column.kind == Kind::kText || none)) {
    return Cell(value.get<std::string>());
  }
  return absl::DataLossError(absl::StrCat(column.key, " is ", Shown(value.dump(-1, ' ', true), 40),
                                          ", expected a ", may_be_number ? "number" : "string"));
}

}  // namespace

SweepRow::SweepRow(std::vector<Cell> cells) : cells_(std::move(cells)) {
  MOE_CHECK(cells_.size() == std::size(kColumns));
}

const Cell& SweepRow::at(absl::string_view key) const {
  const auto* const column = std::find_if(std::begin(kColumns), std::end(kColumns),
                                          [&](const Column& c) { return c.key == key; });
  MOE_CHECK(column != std::end(kColumns));
  return cells_[column - std::begin(kColumns)];
}

const std::vector<std::string>& SweepKeys() {
  static const std::vector<std::string> keys = [] {
    std::vector<std::string> names;
    for (const Column& column : kColumns) names.emplace_back(column.key);
    return names;
  }();
  return keys;
}

SweepRow MeasuredRow(const Point& point, const Summary& summary) {
  return RowOf(point, summary, "ok", Cell());
}

SweepRow ErrorRow(const Point& point, absl::string_view error) {
  return RowOf(point, Summary(), "error", Cell(std::string(error)));
}

std::string IdentityOf(const SweepRow& row) {
  return absl::StrCat(row.text("measure"), " ", row.text("settings"), " ", row.text("backend"), " ",
                      row.text("text_xxh3"));
}

absl::StatusOr<SweepRow> ParseSweepRow(absl::string_view line) {
  MOE_ASSIGN_OR_RETURN(const Json object, ParseBoundedJson("row", line));
  if (!object.is_object() || object.value("schema", Json()) != kSchema) {
    return absl::DataLossError(absl::StrCat("no row of a sweep, expected an object with schema \"",
                                            kSchema, "\", as moe sweep -J writes"));
  }
  std::vector<Cell> cells;
  for (const Column& column : kColumns) {
    MOE_ASSIGN_OR_RETURN(Cell cell, CellOf(object.value(column.key, Json()), column));
    cells.push_back(std::move(cell));
  }
  SweepRow row(std::move(cells));
  const std::string status = row.text("status");
  if (status == "ok" || status == "error") return row;
  return absl::DataLossError(
      absl::StrCat("status is '", Shown(status, 40), "', expected ok or error"));
}

std::string JsonLine(const SweepRow& row) {
  return bench::TableWriter(bench::TableForm::kJsonLines, SweepKeys()).Row(row.cells());
}

}  // namespace moe::sweep
