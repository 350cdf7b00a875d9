#include "moe/cli/base/metrics_file.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_split.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/io/file.h"

namespace moe::cli {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

double Milliseconds(const lm::StepMetrics& metrics, Phase phase) {
  return metrics.phase_seconds[static_cast<int>(phase)] * 1e3;
}

// Creates the folder and those above it; `made` gets the ones that were not there, innermost first.
absl::Status MakeFolder(const std::string& folder, std::vector<std::string>& made) {
  std::error_code error;
  const fs::file_status status = fs::status(folder, error);
  if (fs::is_directory(status)) return absl::OkStatus();
  if (fs::exists(status)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--out is '", folder, "', which is a file, expected a folder"));
  }
  fs::path missing = fs::path(folder).lexically_normal();
  if (!missing.has_filename()) missing = missing.parent_path();  // "run/"
  for (; !missing.empty() && !fs::exists(missing, error); missing = missing.parent_path()) {
    made.push_back(missing.string());
  }
  fs::create_directories(folder, error);
  if (error) return IoError("make the folder", folder, error.value());
  return absl::OkStatus();
}

}  // namespace

std::string HexOf(float value) {
  return absl::StrFormat("%a", static_cast<double>(value));
}

std::string HashText(uint64_t hash) {
  return absl::StrFormat("%016x", hash);
}

std::string StartLine(const Facts& provenance, const World& world, const Settings& settings) {
  Json line = Json::object();  // null that becomes one is broken if memory lacks
  line["schema"] = "moe.train/1";
  Json& facts = line["provenance"] = Json::object();
  for (const auto& [key, value] : provenance) facts[key] = value;
  line["ranks"] = world.ranks;
  line["backend"] = NameOf(world.backend);
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
  Json line = Json::object();  // null that becomes one is broken if memory lacks
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
  line["tokens_per_s"] = metrics.tokens_per_second;
  line["step_ms"] = metrics.step_seconds * 1e3;
  line["a2a_ms"] = Milliseconds(metrics, Phase::kDispatch) + Milliseconds(metrics, Phase::kCombine);
  line["expert_ms"] = Milliseconds(metrics, Phase::kExpert);
  line["all_reduce_ms"] = Milliseconds(metrics, Phase::kAllReduce);
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
  Json line = Json::object();  // null that becomes one is broken if memory lacks
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
  Json& exchanged = line["exchange_bytes"] = Json::object();
  exchanged["self"] = report.exchange_bytes.self;
  exchanged["same_node"] = report.exchange_bytes.same_node;
  exchanged["cross_node"] = report.exchange_bytes.cross_node;
  line["all_reduce_bytes"] = report.all_reduce_bytes;
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
                                                                 Earlier earlier) {
  std::vector<std::string> made;
  MOE_RETURN_IF_ERROR(MakeFolder(folder, made));
  MOE_ASSIGN_OR_RETURN(auto file, LineFile::Create(PathIn(folder), std::move(made)));
  if (file->replaces() && earlier == Earlier::kRefused) {
    return absl::InvalidArgumentError(
        absl::StrCat("--out is '", folder, "', which holds an earlier run, expected a new folder: ",
                     "give another one, or remove '", file->path(), "'"));
  }
  return std::unique_ptr<MetricsFile>(new MetricsFile(std::move(file)));
}

absl::StatusOr<std::string> MetricsFile::LinesBefore(int64_t step) const {
  if (!file_->replaces()) return "";
  MOE_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path()));
  std::string lines;
  for (const absl::string_view line : absl::StrSplit(file.text(), '\n', absl::SkipEmpty())) {
    const Json object = Json::parse(line.begin(), line.end(), nullptr, false);
    const auto at = object.is_object() ? object.find("step") : object.end();
    const bool before = at != object.end() && at->is_number_integer() && at->get<int64_t>() < step;
    if (before || (object.is_object() && object.contains("schema"))) {
      absl::StrAppend(&lines, line, "\n");
    }
  }
  return lines;
}

absl::Status MetricsFile::Append(absl::string_view line) {
  return file_->Append(absl::StrCat(line, "\n"));
}

}  // namespace moe::cli
