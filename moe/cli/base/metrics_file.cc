#include "moe/cli/base/metrics_file.h"

#include <filesystem>
#include <map>
#include <optional>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/terminal.h"
#include "moe/io/file.h"

namespace moe::cli {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

double Milliseconds(const lm::StepMetrics& metrics, Phase phase) {
  return metrics.phase_seconds[static_cast<int>(phase)] * 1e3;
}

// Step of a line of metrics, counted from 1.
std::optional<int64_t> StepOfLine(const Json& line) {
  const auto at = line.is_object() ? line.find("step") : line.end();
  if (at == line.end() || !at->is_number_unsigned()) return std::nullopt;
  const auto step = at->get<int64_t>();  // negative for what is above every int64
  return step >= 1 ? std::optional(step) : std::nullopt;
}

}  // namespace

std::string HexOf(float value) {
  return absl::StrFormat("%a", static_cast<double>(value));
}

std::string HashText(uint64_t hash) {
  return absl::StrFormat("%016x", hash);
}

std::string StartLine(const Facts& provenance, const World& world, const Settings& settings) {
  Json line = Json::object();  // converting a null breaks it if memory runs out
  line["schema"] = "moe.train/1";
  Json& facts = line["provenance"] = Json::object();
  for (const auto& [key, value] : provenance) facts[key] = value;
  line["ranks"] = world.ranks;
  line["backend"] = NameOf(world.backend);
  line["line"] =
      absl::StrCat("moe train", FlagsOf(settings, [](const Setting& s) { return s.flag_only; }));
  Json& values = line["settings"] = Json::object();
  for (const Setting& setting : settings.table()) {
    if (setting.flag_only || settings.empty(setting.name)) continue;
    const std::vector<std::string>& texts = settings.value(setting.name).texts;
    Json& value = values[setting.name];
    if (setting.kind == Kind::kPaths) {
      value = texts;
    } else {
      value = texts.front();
    }
  }
  return line.dump(-1, ' ', false, Json::error_handler_t::replace);  // a path may be no UTF-8
}

std::string StepLine(const lm::StepMetrics& metrics) {
  Json line = Json::object();  // converting a null breaks it if memory runs out
  line["step"] = metrics.step;
  line["loss"] = metrics.loss;
  line["loss_hex"] = HexOf(metrics.loss);
  line["val_loss"] = nullptr;
  line["val_loss_hex"] = nullptr;
  if (metrics.has_validation) {
    line["val_loss"] = metrics.validation_loss;
    line["val_loss_hex"] = HexOf(metrics.validation_loss);
  }
  line["lr"] = metrics.learning_rate;
  line["grad_norm"] = metrics.grad_norm;
  line["loss_scale"] = nullptr;
  if (metrics.loss_scale > 0) line["loss_scale"] = metrics.loss_scale;
  line["skipped"] = metrics.skipped;
  line["grid_loss"] = metrics.grid_loss;
  line["tokens_per_s"] = metrics.tokens_per_second;
  line["step_ms"] = metrics.step_seconds * 1e3;
  line["a2a_ms"] = Milliseconds(metrics, Phase::kDispatch) + Milliseconds(metrics, Phase::kCombine);
  line["expert_ms"] = Milliseconds(metrics, Phase::kExpert);
  line["all_reduce_ms"] = Milliseconds(metrics, Phase::kAllReduce);
  line["attention_ms"] = Milliseconds(metrics, Phase::kAttention);
  line["output_ms"] = Milliseconds(metrics, Phase::kOutput);
  line["optimizer_ms"] = Milliseconds(metrics, Phase::kOptimizer);
  line["layer_ms"] = Milliseconds(metrics, Phase::kGate) + Milliseconds(metrics, Phase::kPlan) +
                     Milliseconds(metrics, Phase::kDense);
  line["pipeline_ms"] = Milliseconds(metrics, Phase::kPipeline);
  line["drop_fraction"] = metrics.drop_fraction;
  line["max_vio"] = metrics.max_violation;
  line["dead_experts"] = metrics.dead_experts;
  line["aux_loss"] = metrics.aux_loss;
  line["router_entropy"] = metrics.router_entropy;
  line["peak_bytes"] = metrics.peak_bytes;
  line["expert_load"] = metrics.expert_load;
  return line.dump();
}

std::string FinalLine(const lm::TrainReport& report) {
  Json line = Json::object();  // converting a null breaks it if memory runs out
  line["steps"] = report.steps;
  line["first_step"] = report.first_step;
  line["saved_step"] = nullptr;
  if (report.saved_step >= 0) line["saved_step"] = report.saved_step;
  line["checkpoint_failures"] = report.checkpoint_failures;
  line["tokens"] = report.tokens;
  line["seconds"] = report.seconds;
  line["val_loss_before"] = report.validation_loss_before;
  line["val_loss_before_hex"] = HexOf(report.validation_loss_before);
  line["val_loss"] = report.validation_loss_after;
  line["val_loss_hex"] = HexOf(report.validation_loss_after);
  line["weights_xxh3"] = HashText(report.weights_xxh3);
  Json& phases = line["phase_seconds"] = Json::object();
  for (int p = 0; p < static_cast<int>(Phase::kCount); ++p) {
    phases[NameOf(static_cast<Phase>(p))] = report.phase_seconds[p];
  }
  Json& exchange = line["exchange_seconds"] = Json::object();
  exchange["copy"] = report.exchange_seconds.copy;
  exchange["gather"] = report.exchange_seconds.gather;
  exchange["wait"] = report.exchange_seconds.wait;
  line["expert_load"] = report.expert_load;
  line["dropped_slots"] = report.dropped_slots;
  line["total_slots"] = report.total_slots;
  line["skipped_steps"] = report.skipped_steps;
  line["grid_loss"] = report.grid_loss;
  line["grid_loss_tensor"] = nullptr;
  if (report.grid_loss > kNamedGridLoss) line["grid_loss_tensor"] = report.grid_loss_tensor;
  line["grid_loss_step"] = report.grid_loss_step;
  line["grid_unit_log2"] = nullptr;
  if (report.grid_unit_log2.has_value()) line["grid_unit_log2"] = *report.grid_unit_log2;
  line["bf16_order"] = nullptr;
  if (report.bfloat16_order.has_value()) {
    line["bf16_order"] = NameOf(*report.bfloat16_order, kBFloat16OrderWords);
  }
  Json& exchanged = line["exchange_bytes"] = Json::object();
  exchanged["self"] = report.exchange_bytes.self;
  exchanged["same_node"] = report.exchange_bytes.same_node;
  exchanged["cross_node"] = report.exchange_bytes.cross_node;
  line["all_reduce_bytes"] = report.all_reduce_bytes;
  line["pipeline_bytes"] = report.pipeline_bytes;
  line["tensor_bytes"] = report.tensor_bytes;
  line["state_bytes"] = report.state_bytes;
  line["state_bytes_formula"] = report.state_bytes_formula;
  line["parameters_total"] = report.parameters_total;
  line["parameters_active"] = report.parameters_active;
  return line.dump();
}

std::string MetricsFile::PathIn(const std::string& folder) {
  return (fs::path(folder) / "metrics.jsonl").string();
}

absl::StatusOr<std::unique_ptr<MetricsFile>> MetricsFile::Create(const std::string& folder,
                                                                 EarlierRun earlier) {
  std::vector<std::string> made;
  MOE_RETURN_IF_ERROR(MakeFolder("--out", folder, made));
  std::error_code ignored;
  const fs::file_status there = fs::status(PathIn(folder), ignored);
  if (fs::exists(there) && !fs::is_regular_file(there)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--out is '", folder, "', where '", PathIn(folder),
                     "' is a folder, device or pipe, expected a file, or nothing there"));
  }
  MOE_ASSIGN_OR_RETURN(auto file, LineFile::Create(PathIn(folder), std::move(made)));
  if (file->replaces() && earlier == EarlierRun::kRefused) {
    return absl::InvalidArgumentError(
        absl::StrCat("--out is '", folder, "', which holds an earlier run, expected a new folder: ",
                     "give another one, or remove '", file->path(), "'"));
  }
  return std::unique_ptr<MetricsFile>(new MetricsFile(std::move(file)));
}

absl::StatusOr<MetricsFile::EarlierLines> MetricsFile::LinesBefore(int64_t step) const {
  EarlierLines earlier;
  if (!file_->replaces()) return earlier;
  MOE_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path()));
  std::map<int64_t, absl::string_view> steps;
  int64_t number = 0, first_unknown = 0, unknown = 0, doubled = 0;
  for (const absl::string_view line : absl::StrSplit(file.text(), '\n')) {
    ++number;
    if (line.empty()) continue;
    const Json object = Json::parse(line.begin(), line.end(), nullptr, false);
    if (const std::optional<int64_t> of = StepOfLine(object)) {
      if (*of >= step) continue;  // the run takes this step again
      doubled += steps.insert_or_assign(*of, line).second ? 0 : 1;
    } else if (object.is_object() && object.contains("schema")) {
      absl::StrAppend(&earlier.text, line, "\n");
    } else if (!object.is_object() || !object.contains("weights_xxh3")) {  // the last line of a run
      if (unknown++ == 0) first_unknown = number;
    }
  }
  for (const auto& [each, line] : steps) absl::StrAppend(&earlier.text, line, "\n");
  std::vector<std::string> damage;
  if (unknown > 0) {
    damage.push_back(absl::StrCat(Counted(unknown, "line"),
                                  " of no run left out, the first is line ", first_unknown));
  }
  int64_t expected = steps.empty() ? step : steps.begin()->first, missing = 0, first_missing = 0;
  steps.emplace(step, "");
  for (const auto& [each, line] : steps) {
    if (each > expected && missing == 0) first_missing = expected;
    missing += each - expected;
    expected = each + 1;
  }
  if (missing > 0) {
    damage.push_back(
        absl::StrCat(Counted(missing, "step"), " missing, the first is step ", first_missing));
  }
  if (doubled > 0) {
    damage.push_back(
        absl::StrCat(Counted(doubled, "line"), " of a step that has a later one left out"));
  }
  if (!damage.empty()) {
    earlier.damage = absl::StrCat("'", path(), "' is damaged before step ", step, ": ",
                                  absl::StrJoin(damage, "; "));
  }
  return earlier;
}

absl::Status MetricsFile::Append(absl::string_view line) {
  return file_->Append(absl::StrCat(line, "\n"));
}

}  // namespace moe::cli
