#include "moe/cli/base/stored_run.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/checkpoint/training_state.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/weight_offload.h"
#include "moe/io/file.h"
#include "moe/lm/run_settings.h"

namespace moe::cli {
namespace {

namespace fs = std::filesystem;
constexpr char kCheckpointFlag[] = "--checkpoint";

bool IsStep(const std::string& path) {
  std::error_code ignored;
  return fs::exists(absl::StrCat(path, "/", kManifestName), ignored) ||
         StepOf(fs::path(path).lexically_normal().filename().string()).has_value();
}

absl::StatusOr<StoredRun> Open(const std::string& path) {
  std::error_code ignored;
  if (fs::exists(absl::StrCat(path, "/config.json"), ignored)) {
    MOE_ASSIGN_OR_RETURN(hf::HfModel opened, hf::HfModel::Open(path));
    const auto model = std::make_shared<const hf::HfModel>(std::move(opened));
    const auto load = [model](ParameterStore& parameters, const Context& context) {
      return model->Load(parameters, context);
    };
    StoredRun run = {.path = path,
                     .public_model = model,
                     .weights = lm::ModelWeights{.use = StoreUse::kInference, .load = load},
                     .warnings = model->warnings()};
    run.config.model = model->config();
    return run;
  }
  MOE_ASSIGN_OR_RETURN(FoundCheckpoint found, FindStored(path));
  auto reader = CheckpointReader::Open(found.path);
  if (absl::IsNotFound(reader.status())) return absl::DataLossError(reader.status().message());
  MOE_RETURN_IF_ERROR(reader.status());
  // Every rank that is a thread has a reader of its own.
  const auto load = [path = found.path](ParameterStore& parameters,
                                        const Context& context) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(CheckpointReader mine, CheckpointReader::Open(path));
    return TrainingState(parameters, context).Restore(mine, 0, {.name = "weights"});
  };
  StoredRun run = {.path = std::move(found.path),
                   .weights = lm::ModelWeights{.step = reader->manifest().step, .load = load},
                   .warnings = std::move(found.warnings)};
  const std::string version = lm::VersionDifference(reader->manifest().sections);
  if (!version.empty()) {
    run.warnings.push_back(
        absl::StrCat(run.path, ": ", version, ": the last bits of results are not as in training"));
  }
  auto config = lm::StoredConfig(reader->manifest().sections);
  if (!config.ok()) {
    return absl::DataLossError(absl::StrCat(run.path, ": ", config.status().message()));
  }
  run.config = *std::move(config);
  run.of_text = lm::TrainedOnText(reader->manifest().sections);
  return run;
}

}  // namespace

absl::StatusOr<FoundCheckpoint> FindStored(const std::string& path) {
  MOE_ASSIGN_OR_RETURN(const bool is_folder, IsFolder(path));
  if (!is_folder) {
    return absl::NotFoundError(
        absl::StrCat("'", path, "' is no folder, expected that of a checkpoint or of a run"));
  }
  if (IsStep(path)) return FoundCheckpoint{.path = path};
  FoundCheckpoint all;
  for (const std::string& folder : {path, absl::StrCat(path, "/checkpoints")}) {
    MOE_ASSIGN_OR_RETURN(FoundCheckpoint found, FindCheckpoint(folder));
    if (!found.path.empty()) return found;
    all.warnings.insert(all.warnings.end(), found.warnings.begin(), found.warnings.end());
  }
  if (all.warnings.empty()) {
    return absl::NotFoundError(absl::StrCat("'", path, "' has no checkpoint"));
  }
  return absl::DataLossError(all.warnings.front());
}

absl::Status NamingTheOneBefore(absl::Status error, const std::string& path) {
  const fs::path step_folder = fs::path(path + "/.").lexically_normal().parent_path();
  const std::optional<int64_t> step = StepOf(step_folder.filename().string());
  if (FileFaultOf(error) != FileFault::kContent || !step.has_value()) return error;
  const fs::path folder = step_folder.has_parent_path() ? step_folder.parent_path() : ".";
  const auto found = FindCheckpoint(folder.string(), *step);
  if (!found.ok() || found->path.empty()) return error;
  return WithFileFault(
      absl::Status(error.code(),
                   absl::StrCat(error.message(), "; the one before it is '", found->path, "'")),
      FileFault::kContent);
}

void AddStoredRunSettings(Table& table) {
  table
      .Add(
          "--checkpoint PATH", Kind::kText,
          "a checkpoint, the folder of a run, whose newest whole one is taken, or that of a public "
          "model as moe train --init-from takes it; needed")
      .Roles(kByContent);
  table
      .Add("--tokenizer FILE", Kind::kText,
           "tokenizer.json that says what ids stand for, none = print ids; default: that of the "
           "model, or of the run")
      .Roles(kPerRank);
  table.Add("--dtype TYPE", {Kind::kWord, "", WordsOf(kStorageTypeWords)},
            "of activations and compute weights; default: as trained, f32 for a public model");
  table.Add("--bf16-order NAME", {Kind::kWord, "", BFloat16OrderWords()},
            "order in which products of bf16 add their terms on CPUs, as of moe train; default: as "
            "trained in bf16, else auto");
  AddWeightOffloadSettings(table);
}

absl::StatusOr<ReadInputs> StoredRun::Inputs() const {
  ReadInputs inputs;
  MOE_RETURN_IF_ERROR(
      public_model != nullptr
          ? inputs.AddModel(*public_model, "checkpoint")
          : inputs.AddFile("checkpoint", "checkpoint", absl::StrCat(path, "/", kManifestName)));
  return inputs;
}

absl::StatusOr<StoredRun> OpenStoredRun(const Settings& settings, const Launch& launch) {
  if (settings.empty("checkpoint")) {
    return absl::InvalidArgumentError(
        "--checkpoint is missing, expected the folder of a checkpoint or of a run");
  }
  auto run = Open(settings.text("checkpoint"));
  MOE_RETURN_IF_ERROR(InputError(kCheckpointFlag, run.status()));
  if (run->config.trainer.session.device != launch.device.kind) {
    run->config.trainer.session.device = launch.device.kind;
    run->config.trainer.session.grouped_gemm = GroupedGemmKernel::kAuto;
  }
  if (!settings.empty("dtype"))
    run->config.trainer.dtype = settings.choice("dtype", kStorageTypeWords);
  std::optional<BFloat16Order>& order = run->config.trainer.session.bfloat16_order;
  if (!HasBFloat16Order(run->config.trainer)) order.reset();
  if (!settings.empty("bf16-order")) {
    order = ValueOf(settings.text("bf16-order"), kBFloat16OrderWords);
  }
  MOE_RETURN_IF_ERROR(CheckBFloat16Order(run->config.trainer));
  MOE_ASSIGN_OR_RETURN(run->weights.file, WeightOffloadOf(settings));
  run->config.trainer.session.threads = ThreadsOf(settings, launch.world);
  return run;
}

std::string TokenizerPathOf(const std::string& model_or_step) {
  const fs::path folder = fs::path(model_or_step + "/.").lexically_normal().parent_path();
  std::error_code ignored;
  for (const fs::path& at : {folder, folder.parent_path()}) {
    const fs::path path = at / kTokenizerName;
    if (fs::exists(path, ignored)) return path.string();
    if (!IsStep(folder.string())) break;
  }
  return "";
}

absl::StatusOr<TokenTable> OpenTokenizer(const std::string& path, int64_t vocab_size) {
  auto table = TokenTable::Open(path);
  if (!table.ok()) return InputError("--tokenizer", table.status());
  if (table->num_ids() <= vocab_size) return table;
  return WrongFlag("--tokenizer", path,
                   absl::StrCat("one of ids below the ", vocab_size, " of the model: it has ",
                                table->num_ids() - 1));
}

absl::StatusOr<std::unique_ptr<TokenTable>> TokenizerOf(const Settings& settings,
                                                        const StoredRun& run) {
  std::string path = settings.text("tokenizer");
  if (path == "none") return nullptr;
  if (path.empty()) path = TokenizerPathOf(run.path);
  if (path.empty()) return nullptr;
  MOE_ASSIGN_OR_RETURN(TokenTable table, OpenTokenizer(path, run.config.model.vocab_size));
  return std::make_unique<TokenTable>(std::move(table));
}

}  // namespace moe::cli
