#include "moe/cli/verify_report.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_replace.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace moe::cli {
namespace {

using Json = nlohmann::ordered_json;
using verify::Against;
using verify::CaseReport;
using verify::TensorReport;

constexpr char kTableRow[] = "{:<13} {:<48} {:<16} {:<11} {:<28} {:>10} {:>9} {:>9}  {:<34} {}\n";

std::string CapacityText(const verify::Layout& layout) {
  return layout.capacity.has_value() ? absl::StrCat(*layout.capacity) : std::string("none");
}

const char* NumericsText(Numerics numerics) {
  return numerics == Numerics::kFast ? "fast" : "layout-invariant";
}

const char* AgainstText(Against against) {
  return against == Against::kReference ? "float64" : "one rank";
}

std::string LayoutText(const verify::Layout& l) {
  return fmt::format("{} ranks ep {} {} {} overlap {} cf {}", l.ranks, l.expert_parallel,
                     moe::NameOf(l.transport), verify::NameOf(l.dispatch), l.overlap,
                     CapacityText(l));
}

std::string FirstText(const TensorReport& t) {
  if (t.differing == 0) return "-";
  return t.ok() ? Describe(t.first)
                : fmt::format("{}: {:.6g}, expected {:.6g}", Describe(t.first), t.got, t.expected);
}

// One tensor, or all of a case that holds, in one.
TensorReport Merged(const std::vector<TensorReport>& tensors) {
  TensorReport all;
  all.tensor = fmt::format("all {}", tensors.size());
  for (const TensorReport& t : tensors) {
    if (all.differing == 0 && t.differing > 0) {
      all.first = t.first;
      all.got = t.got;
      all.expected = t.expected;
    }
    all.differing += t.differing;
    all.wrong += t.wrong;
    all.max_ulp = std::max(all.max_ulp, t.max_ulp);
    all.max_relative_error = std::max(all.max_relative_error, t.max_relative_error);
    all.max_of_bound = std::max(all.max_of_bound, t.max_of_bound);
  }
  return all;
}

// One tensor of one case as name and value, for the machine-readable forms.
Json RowOf(const CaseReport& report, const TensorReport& t, const std::string& router) {
  const verify::Layout& l = report.what.layout;
  Json row;
  row["router"] = router;
  row["ranks"] = l.ranks;
  row["ep"] = l.expert_parallel;
  row["transport"] = moe::NameOf(l.transport);
  row["dispatch"] = verify::NameOf(l.dispatch);
  row["overlap"] = l.overlap;
  row["capacity"] = l.capacity.has_value() ? Json(*l.capacity) : Json(nullptr);
  row["numerics"] = NumericsText(report.what.numerics);
  row["against"] = AgainstText(report.against);
  row["tensor"] = t.tensor;
  row["measure"] = NameOf(t.measure);
  row["elements"] = t.elements;
  row["differing"] = t.differing;
  row["wrong"] = t.wrong;
  row["max_ulp"] = t.max_ulp;
  row["max_relative_error"] = t.max_relative_error;
  row["max_of_bound"] = t.max_of_bound;
  row["first"] = t.differing == 0 ? Json(nullptr) : Json(Describe(t.first));
  row["token"] = t.first.token < 0 ? Json(nullptr) : Json(t.first.token);
  row["column"] = t.first.column < 0 ? Json(nullptr) : Json(t.first.column);
  row["expert"] = t.first.expert < 0 ? Json(nullptr) : Json(t.first.expert);
  row["got"] = t.differing == 0 ? Json(nullptr) : Json(t.got);
  row["expected"] = t.differing == 0 ? Json(nullptr) : Json(t.expected);
  row["allowed"] = t.differing == 0 ? Json(nullptr) : Json(t.allowed);
  row["verdict"] = !report.skipped.empty() ? "skipped" : t.ok() ? "ok" : "FAILED";
  row["reason"] = report.skipped;
  return row;
}

// The rows of one case: its tensors, replicas that differ, or why it was skipped.
std::vector<TensorReport> TensorsOf(const CaseReport& report) {
  std::vector<TensorReport> tensors = report.tensors;
  if (!report.skipped.empty()) tensors.push_back({.tensor = "-"});
  if (report.torn_replicas > 0) {
    tensors.push_back(
        {.tensor = "replicas", .differing = report.torn_replicas, .wrong = report.torn_replicas});
  }
  return tensors;
}

std::string CsvCell(const Json& value) {
  std::string text = value.is_string() ? value.get<std::string>()
                     : value.is_null() ? std::string()
                                       : value.dump();
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  return absl::StrCat("\"", absl::StrReplaceAll(text, {{"\"", "\"\""}}), "\"");
}

std::vector<std::string> Keys() {
  std::vector<std::string> keys;
  const Json row = RowOf({}, {}, "");
  for (auto it = row.begin(); it != row.end(); ++it) keys.push_back(it.key());
  return keys;
}

std::string GateText(const verify::Problem& problem) {
  const MoeLayerConfig& layer = problem.spec.layer;
  const RouterConfig& r = layer.router;
  const std::string capacity =
      r.capacity_factor.has_value() ? absl::StrCat(*r.capacity_factor) : std::string("none");
  std::string text = fmt::format(
      "{:<13} E={} K={} H={} F={} cf={} {}, {} tokens in {} micro-batches, data seed {}\n", r.gate,
      r.num_experts, r.top_k, r.hidden_size, layer.ffn_hidden_size, capacity,
      moe::NameOf(problem.spec.dtype), problem.tokens(), problem.spec.micro_batch_tokens.size(),
      problem.data_seed);
  if (!problem.redrawn.empty()) {
    text += fmt::format("{:<13} drawn again: {}\n", "", problem.redrawn);
  }
  return text;
}

}  // namespace

std::string VerifyWriter::Head() const {
  if (form_ == "table") {
    std::string text;
    for (const verify::Problem& problem : problems_) text += GateText(problem);
    if (options_.quiet) return text + "\n";
    return text + "\n" +
           fmt::format(kTableRow, "router", "layout", "numerics", "against", "tensor", "max ulp",
                       "max rel", "of bound", "first", "verdict");
  }
  if (form_ == "csv") return absl::StrJoin(Keys(), ",") + "\n";
  if (form_ == "json") return "[";
  if (form_ != "md") return "";
  const std::vector<std::string> keys = Keys();
  return absl::StrCat("| ", absl::StrJoin(keys, " | "), " |\n|",
                      absl::StrJoin(std::vector<std::string>(keys.size(), "---"), "|"), "|\n");
}

std::string VerifyWriter::TableRows(const CaseReport& report) const {
  const std::string& router = options_.problems[report.what.problem].layer.router.gate;
  const std::string layout = LayoutText(report.what.layout);
  const auto row = [&](const TensorReport& t, const std::string& verdict) {
    return fmt::format(kTableRow, router, layout, NumericsText(report.what.numerics),
                       AgainstText(report.against), t.tensor, t.max_ulp,
                       fmt::format("{:.2g}", t.max_relative_error),
                       fmt::format("{:.2g}", t.max_of_bound), FirstText(t), verdict);
  };
  if (!report.skipped.empty()) {
    return options_.quiet ? "" : row({.tensor = "-"}, absl::StrCat("skipped: ", report.skipped));
  }
  if (report.ok() && !options_.verbose) {
    return options_.quiet ? "" : row(Merged(report.tensors), "ok");
  }
  std::string text;
  for (const TensorReport& t : TensorsOf(report)) {
    if (t.ok() && !options_.verbose) continue;
    text += row(t, t.ok() ? "ok" : "FAILED");
  }
  return text;
}

std::string VerifyWriter::Rows(const CaseReport& report) {
  if (form_ == "table") return TableRows(report);
  const std::string& router = options_.problems[report.what.problem].layer.router.gate;
  std::string text;
  for (const TensorReport& t : TensorsOf(report)) {
    const Json row = RowOf(report, t, router);
    if (form_ == "jsonl") {
      absl::StrAppend(&text, row.dump(), "\n");
    } else if (form_ == "json") {
      absl::StrAppend(&text, rows_ == 0 ? "\n" : ",\n", row.dump());
    } else {
      std::vector<std::string> cells;
      for (const auto& value : row) cells.push_back(CsvCell(value));
      absl::StrAppend(&text,
                      form_ == "csv" ? absl::StrJoin(cells, ",")
                                     : absl::StrCat("| ", absl::StrJoin(cells, " | "), " |"),
                      "\n");
    }
    ++rows_;
  }
  return text;
}

std::string VerifyWriter::Tail() const {
  return form_ == "json" ? "\n]\n" : "";
}

void VerifyTotals::Add(const CaseReport& report) {
  if (!report.skipped.empty()) {
    ++skipped;
    skip_reason = report.skipped;
    return;
  }
  ++(report.against == Against::kReference ? references : layouts);
  failed += report.ok() ? 0 : 1;
}

std::string SummaryText(const VerifyTotals& totals, const VerifyOptions& options, double seconds) {
  std::string text = fmt::format(
      "\nverified {} one-rank products against float64 and {} layouts against one rank in {:.1f} "
      "s: "
      "{} failed",
      totals.references, totals.layouts, seconds, totals.failed);
  if (totals.skipped > 0) {
    text += fmt::format(", {} skipped ({})", totals.skipped, totals.skip_reason);
  }
  if (options.fault != verify::Fault::kNone) {
    text += totals.failed > 0 ? "; the planted fault was found" : "; THE PLANTED FAULT WAS MISSED";
  }
  return text + "\n";
}

}  // namespace moe::cli
