#include "moe/lm/run_checkpoints.h"

#include <bit>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include <nlohmann/json.hpp>

#include "comm/agreed_status.h"
#include "comm/extremes.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/xxh3.h"
#include "kernels/grouped_gemm/simd_targets.h"
#include "moe/checkpoint/reader.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/io/file.h"
#include "moe/io/scratch_file.h"

namespace moe::lm {
namespace {

constexpr Site kResuming = {.name = "resume"};

using Json = nlohmann::ordered_json;

// State of the optimiser, the exact grid and the loss scale in a checkpoint, beside their settings.
struct Progress {
  int64_t steps_taken = 0;
  GridUnit::State grid_unit;
  std::optional<LossScaler::State> scaler;
};

std::optional<int64_t> Integer(const Json& object, const char* key) {
  const auto member = object.is_object() ? object.find(key) : object.end();
  if (member == object.end() || !member->is_number_integer()) return std::nullopt;
  return member->get<int64_t>();
}

// Checkpoints without a stored unit use the default unit, which never changed.
absl::StatusOr<GridUnit::State> GridUnitOf(const CheckpointReader& reader) {
  const Json numerics = Json::parse(reader.manifest().sections.numerics, nullptr, false);
  if (!numerics.contains("grid")) return GridUnit::State{.settled = true};
  const Json& grid = numerics["grid"];
  const auto log2 = Integer(grid, "unit_log2"), settled = Integer(grid, "settled");
  if (!log2 || !settled || *log2 < -kMostGridUnitLog2 || *log2 > kMostGridUnitLog2) {
    return absl::DataLossError(absl::StrCat(reader.path(), ": numerics.grid is incomplete"));
  }
  return GridUnit::State{.log2 = static_cast<int>(*log2), .settled = *settled != 0};
}

// The order in the checkpoint that `checkpoints` names; none also where it cannot be read, which
// Resume reports.
std::optional<BFloat16Order> StoredOrder(const TrainCheckpoints& checkpoints) {
  std::string path = checkpoints.path;
  if (checkpoints.resume == TrainCheckpoints::Resume::kAuto) {
    const auto found = FindCheckpoint(checkpoints.folder);
    if (!found.ok()) return std::nullopt;
    path = found->path;
  }
  if (path.empty()) return std::nullopt;
  const auto reader = CheckpointReader::Open(path);
  if (!reader.ok()) return std::nullopt;
  const auto stored = StoredConfig(reader->manifest().sections);
  return stored.ok() ? stored->trainer.session.bfloat16_order : std::nullopt;
}

absl::StatusOr<Progress> ProgressOf(const CheckpointReader& reader) {
  const CheckpointSections& sections = reader.manifest().sections;
  const Json trainer = Json::parse(sections.trainer, nullptr, false);
  Progress progress;
  const auto taken = Integer(trainer, "steps_taken");
  if (!taken.has_value() || *taken < 0 || *taken > reader.manifest().step) {
    return absl::DataLossError(
        absl::StrCat(reader.path(), ": trainer.steps_taken is no count up to the step"));
  }
  progress.steps_taken = *taken;
  MOE_ASSIGN_OR_RETURN(progress.grid_unit, GridUnitOf(reader));
  if (!trainer.contains("loss_scale")) return progress;
  const Json& scale = trainer["loss_scale"];
  const auto log2 = Integer(scale, "scale_log2"), row = Integer(scale, "taken_in_a_row"),
             left = Integer(scale, "overflows_left"), skipped = Integer(scale, "skipped");
  if (!log2 || !row || !left || !skipped || *log2 < -24 || *log2 > 32 || *row < 0 || *skipped < 0) {
    return absl::DataLossError(absl::StrCat(reader.path(), ": trainer.loss_scale is incomplete"));
  }
  progress.scaler = {.scale_log2 = static_cast<int>(*log2),
                     .taken_in_a_row = *row,
                     .overflows_left = static_cast<int>(*left),
                     .skipped = *skipped};
  return progress;
}

absl::Status NoneReadable(const std::string& folder, absl::string_view reasons) {
  return absl::DataLossError(absl::StrCat(
      "none of the checkpoints in '", folder, "' can be read, expected one that can, or --resume ",
      "none, which begins anew and leaves them there: ", reasons));
}

// Step of the newest readable checkpoint below `before`, found by rank 0; -1: there is none.
// Collective, the same on every rank.
absl::StatusOr<int64_t> FindNewest(const std::string& folder, int64_t before, Communicator& world,
                                   Stream& stream) {
  int64_t step = -1;
  absl::Status status;
  if (world.rank() == 0) {
    const auto found = FindCheckpoint(folder, before);
    status = found.status();
    if (found.ok()) {
      for (const std::string& warning : found->warnings) Log(LogLevel::kWarning, warning);
      if (!found->path.empty()) {
        step = found->step;
      } else if (!found->warnings.empty()) {
        status = NoneReadable(folder, absl::StrJoin(found->warnings, "; "));
      }
    }
  }
  MOE_RETURN_IF_ERROR(AgreedStatus(status, world, stream, kResuming));
  MOE_RETURN_IF_ERROR(world.Broadcast<int64_t>({&step, 1}, 0, stream, kResuming));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  return step;
}

// Refuses ranks that read several checkpoints. Collective.
absl::Status CheckSameOnAll(const CheckpointReader& reader, Communicator& world, Stream& stream) {
  const CheckpointManifest& manifest = reader.manifest();
  const std::string text = absl::StrCat(manifest.created, " ", manifest.sections.hash);
  const int64_t values[] = {manifest.step, std::bit_cast<int64_t>(Xxh3(text.data(), text.size()))};
  MOE_ASSIGN_OR_RETURN(const auto extremes, ExtremesOverRanks(values, world, stream, kResuming));
  if (extremes[0].same() && extremes[1].same()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("ranks read different checkpoints, of steps ",
                                                 extremes[0].least, " to ", extremes[0].most,
                                                 ", expected one on all"));
}

// Refuses settings with which the run cannot resume; `allowed` receives the differences that are
// permitted.
absl::Status CheckSettings(const CheckpointReader& reader, const TrainConfig& config,
                           const std::vector<RunSetting>& settings,
                           std::vector<std::string>& allowed) {
  const CheckpointSections& sections = reader.manifest().sections;
  const auto refuse = [&](const std::vector<std::string>& differences, const char* remedy) {
    return absl::InvalidArgumentError(
        absl::StrCat(reader.path(), ": ", absl::StrJoin(differences, "; "), remedy));
  };
  const auto model = Differences(settings, SettingKind::kModel, sections.model);
  if (!model.empty()) return refuse(model, ": expected the model of the checkpoint");
  if (const absl::Status tokens = CheckSameTokens(sections, config, settings); !tokens.ok()) {
    return refuse({std::string(tokens.message())}, "");
  }
  const auto numerics = Differences(settings, SettingKind::kNumerics, sections.numerics);
  if (!numerics.empty() && !config.checkpoints.allow_numerics_change) {
    return refuse(numerics,
                  ": the steps to come would have other bits; --allow-numerics-change goes on");
  }
  for (const auto& differences :
       {numerics, Differences(settings, SettingKind::kOptimizer, sections.optimizer),
        Differences(settings, SettingKind::kTrainer, sections.trainer),
        Differences(settings, SettingKind::kData, sections.data)}) {
    allowed.insert(allowed.end(), differences.begin(), differences.end());
  }
  return absl::OkStatus();
}

// Resumes from one checkpoint. Collective, the same status on every rank: kDataLoss or kNotFound
// for a checkpoint that is not whole.
absl::StatusOr<ResumedRun> ResumeFrom(const std::string& path, const TrainConfig& config,
                                      const std::vector<RunSetting>& settings, TrainingState& state,
                                      LossScaler* scaler, const Context& context) {
  Communicator& world = context.mesh->world();
  auto reader = CheckpointReader::Open(path);
  std::vector<std::string> allowed;
  Progress progress;
  const auto check = [&]() -> absl::Status {
    MOE_RETURN_IF_ERROR(reader.status());
    MOE_RETURN_IF_ERROR(CheckSettings(*reader, config, settings, allowed));
    MOE_ASSIGN_OR_RETURN(progress, ProgressOf(*reader));
    return absl::OkStatus();
  };
  MOE_RETURN_IF_ERROR(AgreedStatus(check(), world, *context.host, kResuming));
  MOE_RETURN_IF_ERROR(CheckSameOnAll(*reader, world, *context.host));
  MOE_RETURN_IF_ERROR(state.Restore(*reader, progress.steps_taken, kResuming));
  if (scaler != nullptr && progress.scaler.has_value()) scaler->Restore(*progress.scaler);
  if (world.rank() == 0 && !allowed.empty()) {
    Log(LogLevel::kWarning,
        absl::StrCat("resumed with other settings: ", absl::StrJoin(allowed, "; ")));
  }
  return ResumedRun{.step = reader->manifest().step,
                    .grid_unit = progress.grid_unit,
                    .run = RunOf(reader->manifest().sections),
                    .damaged_steps = {}};
}

// Resumes from the newest checkpoint that is whole. Damage of its data shows only when they are
// read: then all ranks take the checkpoint before it.
absl::StatusOr<ResumedRun> ResumeNewest(const TrainConfig& config,
                                        const std::vector<RunSetting>& settings,
                                        TrainingState& state, LossScaler* scaler,
                                        const Context& context) {
  Communicator& world = context.mesh->world();
  const std::string& folder = config.checkpoints.folder;
  std::vector<int64_t> damaged;
  absl::Status damage;  // damage of the oldest checkpoint tried
  for (int64_t before = std::numeric_limits<int64_t>::max();; before = damaged.back()) {
    MOE_ASSIGN_OR_RETURN(const int64_t step, FindNewest(folder, before, world, *context.host));
    // Weights that were read in part are no valid beginning.
    if (step < 0 && !damage.ok()) return NoneReadable(folder, damage.message());
    if (step < 0) return ResumedRun();
    const std::string path = absl::StrCat(folder, "/", StepFolderName(step));
    auto resumed = ResumeFrom(path, config, settings, state, scaler, context);
    if (resumed.ok()) resumed->damaged_steps = std::move(damaged);
    if (!absl::IsDataLoss(resumed.status()) && !absl::IsNotFound(resumed.status())) return resumed;
    damage = resumed.status();
    damaged.push_back(step);
    if (world.rank() == 0) Log(LogLevel::kWarning, PassedOver(path, damage));
  }
}

absl::Status OfSave(const absl::Status& status) {
  return status.ok() ? status : Prefixed("--save", status);
}

// Checks room for the checkpoints that a run which begins after `step` keeps, and the one being
// written.
absl::Status CheckRoom(const TrainConfig& config, int64_t step, RunFolder& folder,
                       TrainingState& state, const Context& context) {
  const TrainCheckpoints& checkpoints = config.checkpoints;
  if (step >= config.steps) return absl::OkStatus();
  const int64_t interval = checkpoints.interval > 0 ? checkpoints.interval : config.steps;
  const int64_t saves =  // the last step is always saved
      config.steps / interval - step / interval + (config.steps % interval == 0 ? 0 : 1);
  const auto there = ListSteps(checkpoints.folder).value_or(std::vector<int64_t>()).size();
  const int64_t to_come = CheckpointsToCome(static_cast<int64_t>(there), saves, checkpoints.keep);
  return folder.CheckRoom(state.BytesToWrite(), to_come, context.mesh->world(), *context.host);
}

// Returns a JSON object with members added.
std::string With(const std::string& object, const Json& members) {
  Json all = Json::parse(object);
  all.update(members);
  return all.dump();
}

}  // namespace

CheckpointSections Describe(const std::vector<RunSetting>& settings, const std::string& run,
                            int64_t steps_taken, const LossScaler* scaler, const Trainer& trainer) {
  Json progress = Json::object();
  progress["steps_taken"] = steps_taken;
  if (scaler != nullptr) {
    const LossScaler::State state = scaler->state();
    progress["loss_scale"] = {{"scale_log2", state.scale_log2},
                              {"taken_in_a_row", state.taken_in_a_row},
                              {"overflows_left", state.overflows_left},
                              {"skipped", state.skipped}};
  }
  std::string numerics = SettingsJson(settings, SettingKind::kNumerics);
  if (trainer.context().numerics == Numerics::kLayoutInvariant) {
    const GridUnit::State& grid = trainer.grid_unit();
    numerics =
        With(numerics, {{"grid", {{"unit_log2", grid.log2}, {"settled", int{grid.settled}}}}});
  }
  Mesh& mesh = *trainer.context().mesh;
  Json writer = Json::object();
  if (!run.empty()) writer["run"] = run;
  writer["ranks"] = mesh.world().size();
  if (mesh.size(MeshGroup::kTensor) > 1) writer["tp"] = mesh.size(MeshGroup::kTensor);
  const int etp = mesh.size(MeshGroup::kExpertTensor);
  if (etp > 1) writer["etp"] = etp;
  writer["ep"] = mesh.size(MeshGroup::kExpert);
  writer["dp"] = mesh.size(MeshGroup::kExpertData);
  writer["pp"] = mesh.size(MeshGroup::kPipeline);
  writer["zero"] = static_cast<int>(trainer.options().zero);
  writer["simd"] = gemm::SimdTargets().front();
  return {.numerics = std::move(numerics),
          .model = SettingsJson(settings, SettingKind::kModel),
          .optimizer = SettingsJson(settings, SettingKind::kOptimizer),
          .trainer = With(SettingsJson(settings, SettingKind::kTrainer), progress),
          .data = SettingsJson(settings, SettingKind::kData),
          .written_by = writer.dump(),
          .hash = "{}"};
}

absl::StatusOr<std::optional<BFloat16Order>> BFloat16OrderOf(const TrainConfig& config,
                                                             Communicator& world) {
  std::optional<BFloat16Order> order = config.trainer.session.bfloat16_order;
  if (order.has_value() || !HasBFloat16Order(config.trainer)) return order;
  const auto stream = MakeInlineStream();
  if (config.checkpoints.resume != TrainCheckpoints::Resume::kNone) {
    if (world.rank() == 0) order = StoredOrder(config.checkpoints);
    int64_t stored = order.has_value() ? static_cast<int64_t>(*order) : -1;
    MOE_RETURN_IF_ERROR(world.Broadcast<int64_t>({&stored, 1}, 0, *stream, kResuming));
    MOE_RETURN_IF_ERROR(stream->Synchronize());
    if (stored >= 0) return static_cast<BFloat16Order>(stored);
  }
  return AgreedBFloat16Order(std::nullopt, gemm::FastestBFloat16Order(), world, *stream);
}

absl::StatusOr<ResumedRun> Resume(const TrainConfig& config,
                                  const std::vector<RunSetting>& settings, TrainingState& state,
                                  LossScaler* scaler, const Context& context) {
  const TrainCheckpoints& checkpoints = config.checkpoints;
  if (checkpoints.resume == TrainCheckpoints::Resume::kNone) {
    if (context.mesh->world().rank() == 0 && !checkpoints.folder.empty()) {
      MOE_ASSIGN_OR_RETURN(const FoundCheckpoint found, FindCheckpoint(checkpoints.folder));
      for (const std::string& warning : found.warnings) Log(LogLevel::kWarning, warning);
    }
    return ResumedRun();
  }
  auto resumed = checkpoints.resume == TrainCheckpoints::Resume::kAuto
                     ? ResumeNewest(config, settings, state, scaler, context)
                     : ResumeFrom(checkpoints.path, config, settings, state, scaler, context);
  if (resumed.ok()) {
    if (resumed->step > 0 && resumed->step >= config.steps && context.mesh->world().rank() == 0) {
      Log(LogLevel::kWarning, absl::StrCat("--steps is ", config.steps, ", and the checkpoint has ",
                                           resumed->step, ": nothing is left to train"));
    }
    return resumed;
  }
  const absl::Status named = Prefixed("--resume", resumed.status());
  return absl::IsDataLoss(named) ? WithFileFault(named, FileFault::kContent) : named;
}

absl::StatusOr<std::unique_ptr<RunFolder>> OpenFolder(const TrainCheckpoints& checkpoints,
                                                      const Context& context) {
  if (checkpoints.folder.empty()) return nullptr;
  auto folder = RunFolder::Open({.folder = checkpoints.folder, .timeout = checkpoints.timeout},
                                context.mesh->world(), *context.host);
  return folder.ok() ? std::move(folder) : OfSave(folder.status());
}

absl::StatusOr<std::unique_ptr<Checkpointer>> MakeCheckpointer(
    const TrainConfig& config, const ResumedRun& resumed, RunFolder* folder, const StopSignal* stop,
    TrainingState& state, const Context& context) {
  if (folder == nullptr) return nullptr;
  const TrainCheckpoints& checkpoints = config.checkpoints;
  const Offload& offload = config.trainer.offload;
  std::shared_ptr<MemoryResource> copy_memory;  // where state does not fit, neither does its copy
  if (offload.optimizer == OffloadTo::kFile) {
    copy_memory = ScratchMemory(offload.file.folder,
                                absl::StrCat("moe-checkpoint-rank-", context.mesh->world().rank()));
  }
  auto checkpointer = Checkpointer::Create({.writer = {.folder = checkpoints.folder,
                                                       .keep = checkpoints.keep,
                                                       .keep_every = checkpoints.keep_every,
                                                       .first_step = resumed.step,
                                                       .damaged_steps = resumed.damaged_steps,
                                                       .run = folder->run(),
                                                       .lock = folder->lock(),
                                                       .hash_states = true,
                                                       .threads = &context.compute->threads(),
                                                       .copy_memory = copy_memory,
                                                       .timeout = checkpoints.timeout},
                                            .asynchronous = checkpoints.asynchronous,
                                            .interval = checkpoints.interval,
                                            .max_failures = checkpoints.max_failures,
                                            .stop = stop},
                                           state, context);
  const absl::Status& status = checkpointer.status();
  if (absl::IsAlreadyExists(status)) {
    return OfSave(absl::InvalidArgumentError(absl::StrCat(status.message(), ", or --resume auto")));
  }
  if (absl::IsInvalidArgument(status)) return OfSave(status);
  if (absl::IsFailedPrecondition(status)) {
    return OfSave(absl::InvalidArgumentError(status.message()));
  }
  if (!status.ok()) return OfSave(WithFileFault(status, FileFault::kWrite));
  MOE_RETURN_IF_ERROR(OfSave(CheckRoom(config, resumed.step, *folder, state, context)));
  return checkpointer;
}

}  // namespace moe::lm
