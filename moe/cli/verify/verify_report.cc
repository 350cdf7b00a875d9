#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>
#include <fmt/format.h>

#include "moe/cli/base/choices.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/verify/verify_options.h"

namespace moe::cli {
namespace {

using bench::Cell;
using verify::Against;
using verify::CaseReport;
using verify::TensorReport;

constexpr char kTableRow[] = "{:<13} {:<50} {:<16} {:<11} {:<28} {:>10} {:>9} {:>9}  {:<34} {}\n";

std::string CapacityText(const std::optional<double>& capacity) {
  return capacity.has_value() ? absl::StrCat(*capacity) : "none";
}

const char* AgainstText(Against against) {
  return against == Against::kReference ? "float64" : "one rank";
}

std::string LayoutText(const verify::Layout& l) {
  return fmt::format("{} ep {} {} {} overlap {} cf {}", Counted(l.ranks, "rank"), l.expert_parallel,
                     moe::NameOf(l.transport), NameOf(l.dispatch, kDispatches), l.overlap,
                     CapacityText(l.capacity));
}

std::string FirstText(const TensorReport& t) {
  if (t.differing == 0) return "-";
  return t.ok() ? Describe(t.first)
                : fmt::format("{}: {:.9g}, expected {:.9g}", Describe(t.first), t.got, t.expected);
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

// The machine-readable forms have a row for every tensor of every case.
bench::Fields FieldsOf(const CaseReport& report, const TensorReport& t, const std::string& router) {
  const verify::Layout& l = report.what.layout;
  const auto if_differs = [&](Cell cell) {
    return t.differing == 0 ? Cell() : std::move(cell);
  };
  const auto if_known = [](int64_t index) {
    return index < 0 ? Cell() : Cell(index);
  };
  const char* const verdict = !report.skipped.empty() ? "skipped" : t.ok() ? "ok" : "FAILED";
  return {{"router", router},
          {"ranks", int64_t{l.ranks}},
          {"ep", int64_t{l.expert_parallel}},
          {"transport", moe::NameOf(l.transport)},
          {"dispatch", NameOf(l.dispatch, kDispatches)},
          {"overlap", int64_t{l.overlap}},
          {"capacity", l.capacity.has_value() ? Cell(*l.capacity) : Cell()},
          {"numerics", NameOf(report.what.numerics, kNumericsModes)},
          {"against", AgainstText(report.against)},
          {"tensor", t.tensor},
          {"measure", NameOf(t.measure)},
          {"elements", t.elements},
          {"differing", t.differing},
          {"wrong", t.wrong},
          {"max_ulp", t.max_ulp},
          {"max_relative_error", t.max_relative_error},
          {"max_of_bound", t.max_of_bound},
          {"first", if_differs(Describe(t.first))},
          {"token", if_known(t.first.token)},
          {"column", if_known(t.first.column)},
          {"expert", if_known(t.first.expert)},
          {"got", if_differs(t.got)},
          {"expected", if_differs(t.expected)},
          {"allowed", if_differs(t.allowed)},
          {"verdict", verdict},
          {"reason", report.skipped}};
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

std::string GateText(const verify::Problem& problem) {
  const MoeLayerConfig& layer = problem.spec.layer;
  const RouterConfig& r = layer.router;
  std::string text = fmt::format(
      "{:<13} E={} K={} H={} F={} cf={} {}, {} tokens in {} micro-batches, data seed {}\n", r.gate,
      r.num_experts, r.top_k, r.hidden_size, layer.ffn_hidden_size, CapacityText(r.capacity_factor),
      moe::NameOf(problem.spec.dtype), problem.tokens(), problem.spec.micro_batch_tokens.size(),
      problem.data_seed);
  if (!problem.redrawn.empty()) {
    text += fmt::format("{:<13} drawn again: {}\n", "", problem.redrawn);
  }
  return text;
}

}  // namespace

VerifyWriter::VerifyWriter(const std::string& form, const VerifyOptions& options,
                           const std::vector<verify::Problem>& problems, std::FILE* out)
    : options_(options), problems_(problems), out_(out) {
  if (const auto machine_form = bench::TableFormOf(form)) {
    rows_.emplace(*machine_form, bench::KeysOf(FieldsOf({}, {}, "")));
  }
}

std::string VerifyWriter::Head() const {
  if (rows_.has_value()) return rows_->Begin();
  std::string text;
  for (const verify::Problem& problem : problems_) text += GateText(problem);
  if (options_.quiet) return text + "\n";
  return text + "\n" +
         fmt::format(kTableRow, "router", "layout", "numerics", "against", "tensor", "max ulp",
                     "max rel", "of bound", "first", "verdict");
}

std::string VerifyWriter::TableRows(const CaseReport& report) const {
  const std::string& router = options_.problems[report.what.problem].layer.router.gate;
  const std::string layout = LayoutText(report.what.layout);
  const auto row = [&](const TensorReport& t, const std::string& verdict) {
    return fmt::format(kTableRow, router, layout, NameOf(report.what.numerics, kNumericsModes),
                       AgainstText(report.against), t.tensor, t.max_ulp,
                       fmt::format("{:.2g}", t.max_relative_error),
                       fmt::format("{:.2g}", t.max_of_bound), FirstText(t), verdict);
  };
  if (!report.skipped.empty()) {  // the summary counts them
    return options_.verbose ? row({.tensor = "-"}, absl::StrCat("skipped: ", report.skipped)) : "";
  }
  if (report.ok() && !options_.verbose) {
    return options_.quiet ? "" : row(Merged(report.tensors), Painted("ok", Color::kGreen, out_));
  }
  std::string text;
  for (const TensorReport& t : TensorsOf(report)) {
    if (t.ok() && !options_.verbose) continue;
    text +=
        row(t, t.ok() ? Painted("ok", Color::kGreen, out_) : Painted("FAILED", Color::kRed, out_));
  }
  return text;
}

std::string VerifyWriter::Rows(const CaseReport& report) {
  if (!rows_.has_value()) return TableRows(report);
  const std::string& router = options_.problems[report.what.problem].layer.router.gate;
  std::string text;
  for (const TensorReport& t : TensorsOf(report)) {
    text += rows_->Row(bench::CellsOf(FieldsOf(report, t, router)));
  }
  return text;
}

std::string VerifyWriter::Tail() const {
  return rows_.has_value() ? rows_->End() : "";
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
  std::string text =
      fmt::format("\nverified {} against float64 and {} against one rank in {:.1f} s: {} failed",
                  Counted(totals.references, "one-rank product"), Counted(totals.layouts, "layout"),
                  seconds, totals.failed);
  if (totals.skipped > 0) {
    text += fmt::format(", {} skipped ({})", totals.skipped, totals.skip_reason);
  }
  if (options.fault != verify::Fault::kNone) {
    text += totals.failed > 0 ? "; the planted fault was found" : "; THE PLANTED FAULT WAS MISSED";
  }
  return text + "\n";
}

}  // namespace moe::cli
