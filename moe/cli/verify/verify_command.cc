// moe verify: any layout against one rank, and one rank against float64.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/time/clock.h>
#include <fmt/format.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/agreed_ranks.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/measure/layer_bench.h"
#include "moe/cli/measure/tables.h"
#include "moe/cli/verify/verify_options.h"
#include "moe/run/context.h"

namespace moe::cli {
namespace {

constexpr char kCommand[] = "verify";

using measure::Cell;
using verify::Against;
using verify::CaseReport;
using verify::TensorReport;

constexpr char kTableRow[] = "{:<13} {:<{}} {:<16} {:<11} {:<28} {:>10} {:>9} {:>9}  {:<34} {}\n";

const char* AgainstText(Against against) {
  return against == Against::kReference ? "float64" : "one rank";
}

std::string FirstText(const TensorReport& t) {
  if (t.differing == 0) return "-";
  return t.ok() ? Describe(t.first)
                : fmt::format("{}: {:.9g}, expected {:.9g}", Describe(t.first), t.got, t.expected);
}

// All tensors of a case that holds, in one report.
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
measure::Fields FieldsOf(const CaseReport& report, const TensorReport& t, const std::string& router,
                         bool of_model) {
  const auto if_differs = [&](Cell cell) {
    return t.differing == 0 ? Cell() : std::move(cell);
  };
  const auto if_known = [](int64_t index) {
    return index < 0 ? Cell() : Cell(index);
  };
  const char* const verdict = !report.skipped.empty() ? "skipped" : t.ok() ? "ok" : "FAILED";
  measure::Fields fields = {{"router", router}};
  for (const verify::Axis& axis : verify::Axes()) {
    if (of_model || !axis.of_model) fields.push_back({axis.name, axis.cell(report.what.layout)});
  }
  measure::Fields rest = {{"numerics", NameOf(report.what.numerics, kNumericsWords)},
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
                          {"reason", report.skipped},
                          {"bf16_order", measure::BFloat16OrderCell(report.bfloat16_order)}};
  fields.insert(fields.end(), rest.begin(), rest.end());
  if (of_model) {
    fields.push_back({"step", if_known(t.first.step)});
    fields.push_back({"layer", if_known(t.first.layer)});
  }
  return fields;
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
      r.num_experts, r.top_k, r.hidden_size, layer.ffn_hidden_size,
      verify::CapacityText(r.capacity_factor), moe::NameOf(problem.spec.dtype), problem.tokens(),
      problem.spec.micro_batch_tokens.size(), problem.data_seed);
  if (problem.spec.model.has_value()) {
    const lm::TrainConfig& model = *problem.spec.model;
    text +=
        fmt::format("{:<13} {} layers, {} heads of {}, sequences of {}, {} leaves, {} steps\n", "",
                    model.model.num_layers, model.model.num_attention_heads, model.model.head_dim(),
                    model.sequence_length, model.trainer.session.tensor_leaves, model.steps);
  }
  if (!problem.redrawn.empty()) {
    text += fmt::format("{:<13} drawn again: {}\n", "", problem.redrawn);
  }
  return text;
}

// Writes reports as they arrive in one form: "table", "csv", "json", "jsonl" or "md". The table
// leaves skipped cases to the summary, unless -v asks for all.
class VerifyWriter {
 public:
  VerifyWriter(const std::string& form, const VerifyOptions& options,
               const std::vector<verify::Problem>& problems, std::FILE* out);

  // All return text to print; it may be empty.
  std::string Head() const {
    if (rows_.has_value()) return rows_->Begin();
    std::string text;
    for (const verify::Problem& problem : problems_) text += GateText(problem);
    if (options_.quiet) return text + "\n";
    return text + "\n" +
           fmt::format(kTableRow, "router", "layout", width_, "numerics", "against", "tensor",
                       "max ulp", "max rel", "of bound", "first", "verdict");
  }

  std::string Rows(const CaseReport& report) {
    if (!rows_.has_value()) return TableRows(report);
    const std::string& router = options_.problems[report.what.problem].layer.router.gate;
    std::string text;
    for (const TensorReport& t : TensorsOf(report)) {
      text += rows_->Row(FieldsOf(report, t, router, options_.of_model));
    }
    return text;
  }

  std::string Tail() const { return rows_.has_value() ? rows_->End() : ""; }

 private:
  std::string TableRows(const CaseReport& report) const {
    const std::string& router = options_.problems[report.what.problem].layer.router.gate;
    const std::string layout = Describe(report.what.layout);
    const auto row = [&](const TensorReport& t, const std::string& verdict) {
      return fmt::format(kTableRow, router, layout, width_,
                         NameOf(report.what.numerics, kNumericsWords), AgainstText(report.against),
                         t.tensor, t.max_ulp, fmt::format("{:.2g}", t.max_relative_error),
                         fmt::format("{:.2g}", t.max_of_bound), FirstText(t), verdict);
    };
    if (!report.skipped.empty()) {  // the summary counts them
      return options_.verbose ? row({.tensor = "-"}, absl::StrCat("skipped: ", report.skipped))
                              : "";
    }
    if (report.ok() && !options_.verbose) {
      return options_.quiet ? "" : row(Merged(report.tensors), Painted("ok", Color::kGreen, out_));
    }
    std::string text;
    for (const TensorReport& t : TensorsOf(report)) {
      if (t.ok() && !options_.verbose) continue;
      text += row(
          t, t.ok() ? Painted("ok", Color::kGreen, out_) : Painted("FAILED", Color::kRed, out_));
    }
    return text;
  }

  const VerifyOptions& options_;
  const std::vector<verify::Problem>& problems_;
  std::FILE* const out_;                      // where the text will be printed, for its colours
  size_t width_ = 0;                          // of the longest layout
  std::optional<measure::TableWriter> rows_;  // empty: the table for people
};

VerifyWriter::VerifyWriter(const std::string& form, const VerifyOptions& options,
                           const std::vector<verify::Problem>& problems, std::FILE* out)
    : options_(options), problems_(problems), out_(out) {
  for (const verify::Case& each : options.cases) {
    width_ = std::max(width_, Describe(each.layout).size());
  }
  if (const auto machine_form = measure::TableFormOf(form)) {
    rows_.emplace(*machine_form, measure::KeysOf(FieldsOf({}, {}, "", options.of_model)));
  }
}

// Result of a verification.
struct VerifyTotals {
  int64_t layouts = 0, references = 0, failed = 0, skipped = 0;
  std::string skip_reason;

  void Add(const CaseReport& report) {
    if (!report.skipped.empty()) {
      ++skipped;
      skip_reason = report.skipped;
      return;
    }
    ++(report.against == Against::kReference ? references : layouts);
    failed += report.ok() ? 0 : 1;
  }
};
std::string SummaryText(const VerifyTotals& totals, const VerifyOptions& options, double seconds) {
  std::string text = "\nverified ";
  if (!options.of_model) {
    text += Counted(totals.references, "one-rank product") + " against float64 and ";
  }
  text += fmt::format("{} against one rank in {:.1f} s: {} failed",
                      Counted(totals.layouts, "layout"), seconds, totals.failed);
  if (totals.skipped > 0) {
    text += fmt::format(", {} skipped ({})", totals.skipped, totals.skip_reason);
  }
  if (options.fault != verify::Fault::kNone) {
    text += totals.failed > 0 ? "; the planted fault was found" : "; THE PLANTED FAULT WAS MISSED";
  }
  return text + "\n";
}

absl::Status PrintTo(std::FILE* file, const std::string& text) {
  if (file == stdout) return Print(text);
  std::fputs(text.c_str(), file);
  return absl::OkStatus();
}

// Called on all processes of a launch, of which rank 0 prints; `run` is for ranks that are threads,
// `world` as for verify::Verify.
absl::StatusOr<ExitCode> Verify(const VerifyOptions& options, const RunOptions& run,
                                Communicator* world) {
  const absl::Time start = absl::Now();
  verify::VerifyPlan plan = {.cases = options.cases,
                             .fault = options.fault,
                             .device = options.device,
                             .bfloat16_order = options.bfloat16_order,
                             .run = run};
  for (const verify::ProblemSpec& spec : options.problems) {
    absl::StatusOr<verify::Problem> problem =
        options.of_model ? verify::MakeModelProblem(spec) : verify::MakeProblem(spec);
    if (absl::IsFailedPrecondition(problem.status())) {
      return absl::InvalidArgumentError(
          absl::StrCat("--router ", spec.layer.router.gate, ": ", problem.status().message()));
    }
    MOE_RETURN_IF_ERROR(problem.status());
    plan.problems.push_back(*std::move(problem));
  }
  if (world != nullptr && world->rank() != 0) {
    MOE_RETURN_IF_ERROR(verify::Verify(plan, world, [](const verify::CaseReport&) {}));
    return ExitCode::kOk;
  }
  std::vector<std::pair<VerifyWriter, std::FILE*>> writers;
  writers.emplace_back(VerifyWriter(options.output, options, plan.problems, stdout), stdout);
  if (!options.output_stderr.empty()) {
    writers.emplace_back(VerifyWriter(options.output_stderr, options, plan.problems, stderr),
                         stderr);
  }
  for (auto& [writer, file] : writers) MOE_RETURN_IF_ERROR(PrintTo(file, writer.Head()));

  VerifyTotals totals;
  absl::Status printed;
  const auto on_report = [&](const verify::CaseReport& report) {
    totals.Add(report);
    for (auto& [writer, file] : writers) {
      const absl::Status status = PrintTo(file, writer.Rows(report));
      if (printed.ok()) printed = status;
    }
  };
  MOE_RETURN_IF_ERROR(verify::Verify(plan, world, on_report));
  MOE_RETURN_IF_ERROR(printed);
  for (auto& [writer, file] : writers) MOE_RETURN_IF_ERROR(PrintTo(file, writer.Tail()));
  const std::string summary =
      SummaryText(totals, options, absl::ToDoubleSeconds(absl::Now() - start));
  MOE_RETURN_IF_ERROR(PrintTo(options.output == "table" ? stdout : stderr, summary));
  return totals.failed > 0 ? ExitCode::kCheckFailed : ExitCode::kOk;
}

absl::Status Run(const Invocation& invocation, ExitCode& code) {
  std::vector<std::string> warnings;
  MOE_ASSIGN_OR_RETURN(const Settings settings,
                       LoadVerifySettings(invocation.args, invocation.environment, warnings));
  if (settings.on("help")) return PrintOnce(invocation, HelpText(VerifyHelp()));
  if (settings.on("print-config")) return PrintOnce(invocation, PrintSettings(settings));
  if (settings.is("inject", "help")) {
    return PrintOnce(invocation, absl::StrJoin(FaultNames(), "\n") + "\n");
  }
  MOE_ASSIGN_OR_RETURN(const Launch launch, PlanVerifyLaunch(settings, invocation.environment));
  MOE_ASSIGN_OR_RETURN(const VerifyOptions options, MakeVerifyOptions(settings, launch));
  const auto verify = [&](Communicator* world) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(code,
                         Verify(options, RankOptions({}, CommTimeout(settings), kCommand), world));
    return absl::OkStatus();
  };
  return RunLaunch(kCommand, settings, launch, warnings, [&]() -> absl::Status {
    if (!launch.plan.processes()) return verify(nullptr);
    return RunAgreedRanks({.launch = launch, .settings = settings, .command = kCommand},
                          [&](std::unique_ptr<Communicator> world) -> absl::Status {
                            return OrAbort(*world, verify(world.get()));
                          });
  });
}

}  // namespace

ExitCode VerifyCommand(const Invocation& invocation) {
  ExitCode code = ExitCode::kOk;
  const absl::Status status = Run(invocation, code);
  return status.ok() ? code : EndCommand(invocation, kCommand, status);
}

}  // namespace moe::cli
