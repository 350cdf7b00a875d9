// moe ckpt: lists, checks, compares, removes and exports checkpoints.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <fmt/format.h>

#include "kernels/base/dtype.h"
#include "kernels/base/machine_limits.h"
#include "kernels/base/printable.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "moe/checkpoint/reader.h"
#include "moe/checkpoint/retention.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/base/stored_run.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/ckpt/ckpt.h"
#include "moe/cli/measure/tables.h"
#include "moe/hf/model_rule.h"
#include "moe/io/file.h"
#include "moe/lm/evaluation.h"

namespace moe::cli {
namespace {

namespace fs = std::filesystem;
using measure::Fields;

constexpr char kHead[] =
    R"(usage: moe ckpt ls DIR [-o FORM]
       moe ckpt verify STEP|DIR [--threads N] [-o FORM]
       moe ckpt diff STEP|DIR STEP|DIR [-o FORM]
       moe ckpt prune DIR [--keep N] [--keep-every N] [--dry-run] [-o FORM]
       moe ckpt export STEP|DIR --format FAMILY --out DIR [--dtype f32|bf16|f16]

Checkpoints of training runs (docs/checkpoint.md). DIR is the folder of the step folders, or the
folder above it, in which it is called checkpoints; STEP is one step folder. diff and export take
the newest readable checkpoint of a DIR; diff says which.

  moe ckpt ls run
  moe ckpt verify run/checkpoints/step-00000120
  moe ckpt diff before/step-00000120 after/step-00000120 -o json
  moe ckpt prune run --keep 2 --keep-every 1000
  moe ckpt export run --format mixtral --out model --dtype bf16
)";

constexpr char kTail[] = R"(
Columns of ls, verify, prune: step, created, tensors, boxes, files, bytes, status (ok | damaged; of
prune kept | removed), error. diff: tensor, state, elements, different (in any bit), max_ulps
(representable numbers between two elements, plus one), max_abs, only (A | B: the other has none
like it); what is equal has no row.

prune looks at the run of the newest readable checkpoint. The newest --keep readable ones of it
stay, steps that --keep-every divides, and every damaged one that is newer than the oldest of these.
What is not provably of that run stays, with a warning: folders that hold anything but a checkpoint,
that have no manifest, or one of another step or run; links and files.

export writes what AutoModelForCausalLM.from_pretrained of Hugging Face's transformers loads:
config.json, generation_config.json and safetensors of at most 5 GB. Which runs are of which family:
docs/checkpoint.md. The other way: moe train --init-from DIR.

Exit codes: 0 ok, 1 diff found a difference, 2 usage or a path that is not there, 3 a damaged
checkpoint, 4 a read or write failed, 5 out of memory.
)";

Table CkptSettings() {
  Table t;
  t.Group("Flags");
  t.Add("--keep N", {Kind::kInteger, "3"}, "prune: newest checkpoints that stay").FlagOnly();
  t.Add("--keep-every N", {Kind::kInteger, "0"},
        "prune: steps that are a multiple of N stay, too; 0: none")
      .FlagOnly();
  t.Add("--dry-run", Kind::kSwitch, "prune: says what would go, removes nothing").FlagOnly();
  t.Add("--threads N", Kind::kInteger, "verify: that hash; default: the cores")
      .FlagOnly()
      .Most(kMostThreads);
  t.Add("--format NAME", {Kind::kWord, "", hf::ModelTypes()},
        "export: the family of models that is written")
      .FlagOnly();
  t.Add("--out DIR", Kind::kText, "export: an empty folder, or one that is not there").FlagOnly();
  t.Add("--dtype TYPE", {Kind::kWord, "f32", WordsOf(kStorageTypeWords)},
        "export: of the weights, rounded once from their float32 masters")
      .FlagOnly();
  AddFormSettings(t);
  AddHelpSettings(t);
  return t;
}

std::vector<Operands::Word> Actions() {
  return {{"ls", "checkpoints of a run, oldest first"},
          {"verify", "every hash of one checkpoint, or of all of a run"},
          {"diff", "what differs between two checkpoints, or two runs' newest, in ulps"},
          {"prune", "removes all but the newest checkpoints"},
          {"export", "a checkpoint, or a run's newest, as a model of Hugging Face's transformers"}};
}

constexpr measure::Column kStepColumns[] = {
    {"step", "step", "", 10},      {"created", "created", "(UTC)", 20},
    {"tensors", "tensors", "", 8}, {"boxes", "boxes", "", 9},
    {"files", "files", "", 6},     {"bytes", "bytes", "(B)", 15},
    {"status", "status", "", -8},  {"error", "error", "", -5}};
constexpr measure::Column kDiffColumns[] = {
    {"tensor", "tensor", "", -48},    {"state", "state", "", -7},
    {"elements", "elements", "", 12}, {"different", "different", "", 12},
    {"max_ulps", "max ulps", "", 12}, {"max_abs", "max abs", "", 12},
    {"only", "only in", "", -7}};

absl::Status PrintRows(const Settings& settings, absl::Span<const measure::Column> columns,
                       const std::vector<Fields>& rows) {
  const auto text = [&](const std::string& form) {
    std::vector<std::string> names;
    for (const measure::Column& column : columns) names.emplace_back(column.key);
    if (const auto table_form = measure::TableFormOf(form)) {
      return measure::WriteTable(*table_form, names, rows);
    }
    std::string table = measure::TableHead(columns);
    for (Fields row : rows) {
      for (measure::Field& field : row) {  // different units for small and large sizes
        const auto* const real = std::get_if<double>(&field.value.value());
        if (real != nullptr) field.value = fmt::format("{:.6g}", *real);
      }
      table += measure::TableLine(columns, row, 0);
    }
    return table;
  };
  MOE_RETURN_IF_ERROR(Print(text(settings.text("output"))));
  if (!settings.empty("output-stderr")) {
    Say(stderr, "{}", text(settings.text("output-stderr")));
  }
  return absl::OkStatus();
}

// The parent of the step folders of DIR, and its steps.
struct Steps {
  std::string folder;
  std::vector<int64_t> steps;

  std::string PathOf(int64_t step) const { return absl::StrCat(folder, "/", StepFolderName(step)); }
};

absl::StatusOr<Steps> StepsIn(const std::string& dir) {
  MOE_ASSIGN_OR_RETURN(const bool is_folder, IsFolder(dir));
  if (!is_folder) {
    return absl::NotFoundError(absl::StrCat("DIR is '", dir, "', expected a folder that is there"));
  }
  Steps found = {.folder = dir};
  MOE_ASSIGN_OR_RETURN(found.steps, ListSteps(dir));
  const std::string below = absl::StrCat(dir, "/checkpoints");
  MOE_ASSIGN_OR_RETURN(const bool has_below, IsFolder(below));
  if (!found.steps.empty() || !has_below) return found;
  found.folder = below;
  MOE_ASSIGN_OR_RETURN(found.steps, ListSteps(below));
  return found;
}

// A row of ls, verify and prune. `verdict` replaces "ok".
Fields StepRow(int64_t step, const CheckpointManifest* manifest, const absl::Status& status,
               const char* verdict) {
  Fields row = {{"step", step}};
  if (manifest == nullptr) {
    for (const char* key : {"created", "tensors", "boxes", "files", "bytes"}) {
      row.push_back({key, measure::Cell()});
    }
  } else {
    int64_t bytes = 0;
    for (const ManifestFile& file : manifest->files) bytes += file.bytes;
    row.push_back({"created", manifest->created});
    row.push_back({"tensors", static_cast<int64_t>(manifest->tensors.size())});
    row.push_back({"boxes", static_cast<int64_t>(manifest->boxes.size())});
    row.push_back({"files", static_cast<int64_t>(manifest->files.size())});
    row.push_back({"bytes", bytes});
  }
  row.push_back({"status", status.ok() ? verdict : "damaged"});
  row.push_back(
      {"error", status.ok() ? measure::Cell() : measure::Cell(std::string(status.message()))});
  return row;
}

// Whether a status reports a damaged checkpoint rather than one that could not be read.
bool Damaged(const absl::Status& status) {
  return absl::IsDataLoss(status) || absl::IsNotFound(status);
}

absl::StatusOr<CheckpointReader> OpenStep(const std::string& path) {
  auto reader = CheckpointReader::Open(path);
  MOE_RETURN_IF_ERROR(InputError("STEP", reader.status()));
  return reader;
}

// The step folder of STEP|DIR: for a run its newest readable one, with a warning for each newer
// one.
absl::StatusOr<std::string> StepOfRun(const std::string& path) {
  auto found = FindStored(path);
  MOE_RETURN_IF_ERROR(InputError("STEP", found.status()));
  PrintWarnings("ckpt", found->warnings);
  return std::move(found->path);
}

struct ReadableStep {
  int64_t step;
  std::string run;
};

// A row for every step, reading only manifests; `readable` receives the steps that are not damaged.
absl::StatusOr<std::vector<Fields>> RowsOf(const Steps& found, const char* verdict,
                                           std::vector<ReadableStep>& readable) {
  std::vector<Fields> rows;
  for (const int64_t step : found.steps) {
    const auto reader = CheckpointReader::Open(found.PathOf(step));
    // A run that saves here may remove old checkpoints at the same time.
    std::error_code ignored;
    if (!reader.ok() && !fs::exists(fs::symlink_status(found.PathOf(step), ignored))) continue;
    if (!reader.ok() && !Damaged(reader.status())) return InputError("DIR", reader.status());
    if (reader.ok()) readable.push_back({step, RunOf(reader->manifest().sections)});
    rows.push_back(
        StepRow(step, reader.ok() ? &reader->manifest() : nullptr, reader.status(), verdict));
  }
  return rows;
}

absl::Status List(const Settings& settings, const std::string& dir) {
  MOE_ASSIGN_OR_RETURN(const Steps found, StepsIn(dir));
  std::vector<ReadableStep> readable;
  MOE_ASSIGN_OR_RETURN(const std::vector<Fields> rows, RowsOf(found, "ok", readable));
  return PrintRows(settings, kStepColumns, rows);
}

// Compares hashes of boxes, then of states, whose units only the model defines: for checkpoints of
// moe train.
absl::Status VerifyAll(CheckpointReader& reader, int threads) {
  MOE_RETURN_IF_ERROR(reader.Verify(threads));
  const auto tensors = lm::StoredTensors(reader.manifest());
  if (absl::IsResourceExhausted(tensors.status())) return tensors.status();
  return tensors.ok() ? reader.VerifyStates(*tensors, threads) : absl::OkStatus();
}

absl::Status Verify(const Settings& settings, const std::string& path) {
  const int threads = settings.empty("threads") ? UsableCpus() : settings.integer("threads");
  if (threads < 1) return WrongFlag("--threads", absl::StrCat(threads), "at least 1");
  // A step folder without its manifest is still recognised by its name.
  std::vector<std::string> paths = {path};
  if (!fs::exists(absl::StrCat(path, "/", kManifestName)) &&
      !StepOf(fs::path(path).lexically_normal().filename().string()).has_value()) {
    MOE_ASSIGN_OR_RETURN(const Steps found, StepsIn(path));
    paths.clear();
    for (const int64_t step : found.steps) paths.push_back(found.PathOf(step));
    if (paths.empty()) {
      return absl::NotFoundError(absl::StrCat("DIR is '", path, "', which has no checkpoint"));
    }
  }
  std::vector<Fields> rows;
  absl::Status first;
  for (const std::string& one : paths) {
    std::error_code ignored;
    if (!fs::exists(one, ignored)) {
      return absl::NotFoundError(
          absl::StrCat("STEP is '", one, "', expected a folder that is there"));
    }
    auto reader = CheckpointReader::Open(one);
    const absl::Status status = reader.ok() ? VerifyAll(*reader, threads) : reader.status();
    if (!status.ok() && !Damaged(status)) return InputError("STEP", status);
    const int64_t step = reader.ok() ? reader->manifest().step
                                     : StepOf(fs::path(one).filename().string()).value_or(0);
    rows.push_back(StepRow(step, reader.ok() ? &reader->manifest() : nullptr, status, "ok"));
    if (first.ok()) first = status;
  }
  MOE_RETURN_IF_ERROR(PrintRows(settings, kStepColumns, rows));
  if (first.ok()) return first;
  return WithExitCode(absl::DataLossError(first.message()), ExitCode::kBadInput);
}

absl::Status Compare(const Settings& settings, const std::string& path_a,
                     const std::string& path_b) {
  MOE_ASSIGN_OR_RETURN(const std::string step_a, StepOfRun(path_a));
  MOE_ASSIGN_OR_RETURN(const std::string step_b, StepOfRun(path_b));
  MOE_ASSIGN_OR_RETURN(CheckpointReader a, OpenStep(step_a));
  MOE_ASSIGN_OR_RETURN(CheckpointReader b, OpenStep(step_b));
  if (step_a != path_a || step_b != path_b) {
    Say(stderr, "A is {}, B is {}\n", Printable(step_a), Printable(step_b));
  }
  const auto differences = ckpt::Diff(a, b);
  MOE_RETURN_IF_ERROR(InputError("STEP", differences.status()));
  int64_t different = 0;
  std::vector<Fields> rows;
  for (const ckpt::StateDifference& one : *differences) {
    if (one.different == 0 && one.only.empty()) continue;
    ++different;
    rows.push_back({{"tensor", one.tensor},
                    {"state", one.state},
                    {"elements", one.elements},
                    {"different", one.different},
                    {"max_ulps", one.max_ulps},
                    {"max_abs", one.max_abs},
                    {"only", one.only.empty() ? measure::Cell() : measure::Cell(one.only)}});
  }
  MOE_RETURN_IF_ERROR(PrintRows(settings, kDiffColumns, rows));
  if (different == 0) return absl::OkStatus();
  return CheckFailed(absl::StrCat(WithCommas(different), " of ",
                                  Counted(static_cast<int64_t>(differences->size()), "state"),
                                  " of tensors differ"));
}

absl::Status Prune(const Settings& settings, const std::string& dir) {
  const int keep = settings.integer("keep"), every = settings.integer("keep-every");
  if (keep < 1) return WrongFlag("--keep", absl::StrCat(keep), "at least 1");
  if (every < 0) return WrongFlag("--keep-every", absl::StrCat(every), "0 or more");
  MOE_ASSIGN_OR_RETURN(const Steps found, StepsIn(dir));
  std::vector<ReadableStep> readable;
  MOE_ASSIGN_OR_RETURN(std::vector<Fields> rows, RowsOf(found, "kept", readable));
  if (readable.empty()) return PrintRows(settings, kStepColumns, rows);
  const RetentionPlan plan = PlanRetention(
      found.folder, found.steps,
      {.keep = keep, .keep_every = every, .run = readable.back().run, .damaged_steps = {}});
  for (Fields& row : rows) {
    const auto step = static_cast<int64_t>(measure::Find(row, "step")->number());
    if (!std::binary_search(plan.removed.begin(), plan.removed.end(), step)) continue;
    if (!settings.on("dry-run")) {
      MOE_RETURN_IF_ERROR(WriteError("DIR", found.folder, RemoveStep(found.folder, step)));
    }
    for (measure::Field& field : row) {
      if (field.key == std::string("status")) field.value = "removed";
    }
  }
  std::vector<std::string> warnings;
  if (!plan.not_counted.empty()) {
    warnings.push_back(absl::StrCat("not counted among the checkpoints that stay: ",
                                    absl::StrJoin(plan.not_counted, "; ")));
  }
  if (!plan.left_alone.empty()) {
    warnings.push_back(
        absl::StrCat("not removed, since not of this run: ", absl::StrJoin(plan.left_alone, "; ")));
  }
  PrintWarnings("ckpt", warnings);
  return PrintRows(settings, kStepColumns, rows);
}

absl::Status Export(const Settings& settings, const std::string& path) {
  for (const char* const flag : {"format", "out"}) {
    if (settings.empty(flag)) {
      return absl::InvalidArgumentError(absl::StrCat("moe ckpt export needs --", flag));
    }
  }
  MOE_ASSIGN_OR_RETURN(const std::string step, StepOfRun(path));
  MOE_ASSIGN_OR_RETURN(CheckpointReader reader, OpenStep(step));
  const auto warnings = ckpt::Export(reader, {.format = settings.text("format"),
                                              .folder = settings.text("out"),
                                              .type = settings.choice("dtype", kStorageTypeWords)});
  MOE_RETURN_IF_ERROR(NamingTheOneBefore(warnings.status(), step));
  PrintWarnings("ckpt", *warnings);
  return absl::OkStatus();
}

// Refuses flags of other actions.
absl::Status CheckFlags(const Settings& settings, const std::string& action) {
  const std::pair<const char*, const char*> reads[] = {
      {"keep", "prune"},    {"keep-every", "prune"}, {"dry-run", "prune"}, {"threads", "verify"},
      {"format", "export"}, {"out", "export"},       {"dtype", "export"}};
  for (const auto& [flag, reader] : reads) {
    if (settings.given(flag) && action != reader) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", flag, " is of moe ckpt ", reader, ", not of ", action));
    }
  }
  return absl::OkStatus();
}

absl::Status Run(const Invocation& invocation) {
  Settings settings(CkptSettings());
  const auto [flags, operands] = SplitOperands(invocation.args, settings);
  MOE_RETURN_IF_ERROR(LoadFlags(flags, settings));
  if (settings.on("help")) return Print(HelpText(CkptHelp()));
  if (settings.on("print-config")) return Print(PrintSettings(settings));
  std::vector<std::string> names;
  for (const Operands::Word& word : Actions()) names.push_back(word.name);
  const std::string expected = absl::StrCat("expected moe ckpt ", absl::StrJoin(names, "|"));
  if (operands.empty()) return absl::InvalidArgumentError(absl::StrCat("no action, ", expected));
  const std::string& action = operands[0];
  if (std::find(names.begin(), names.end(), action) == names.end()) {
    return absl::InvalidArgumentError(absl::StrCat("unknown action '", action, "', ", expected,
                                                   DidYouMean(action, names, "", "")));
  }
  MOE_RETURN_IF_ERROR(CheckFlags(settings, action));
  const size_t paths = action == "diff" ? 2 : 1;
  if (operands.size() != paths + 1) {
    return absl::InvalidArgumentError(absl::StrCat("moe ckpt ", action, " is given ",
                                                   Counted(operands.size() - 1, "path"),
                                                   ", expected ", paths));
  }
  if (action == "ls") return List(settings, operands[1]);
  if (action == "verify") return Verify(settings, operands[1]);
  if (action == "diff") return Compare(settings, operands[1], operands[2]);
  if (action == "export") return Export(settings, operands[1]);
  return Prune(settings, operands[1]);
}

}  // namespace

CommandHelp CkptHelp() {
  return {.head = kHead,
          .operands = Operands{.heading = "Actions", .words = Actions(), .paths = true},
          .settings = CkptSettings().rows(),
          .tail = kTail};
}

ExitCode CkptCommand(const Invocation& invocation) {
  if (!invocation.first()) return ExitCode::kOk;
  return EndCommand(invocation, "ckpt", Run(invocation));
}

}  // namespace moe::cli
