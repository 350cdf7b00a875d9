// Saving and resuming of lm::Train: how a checkpoint describes the run, and what must agree with
// it.
#ifndef MOE_MOE_LM_RUN_CHECKPOINTS_H_
#define MOE_MOE_LM_RUN_CHECKPOINTS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/statusor.h>

#include "moe/checkpoint/checkpointer.h"
#include "moe/checkpoint/manifest.h"
#include "moe/checkpoint/run_folder.h"
#include "moe/checkpoint/training_state.h"
#include "moe/lm/run_settings.h"
#include "moe/lm/training_loop.h"
#include "moe/run/context.h"
#include "moe/train/loss_scaler.h"
#include "moe/train/trainer.h"

namespace moe::lm {

// Sections of the manifest, beside its tensors. run: identifier of the run that owns the checkpoint
// (RunOf). scaler: nullptr without a loss scale.
CheckpointSections Describe(const std::vector<RunSetting>& settings, const std::string& run,
                            int64_t steps_taken, const LossScaler* scaler, const Trainer& trainer);

// The order of bfloat16 products of a run: the one that `config` chooses; otherwise that of the
// checkpoint from which the run resumes; otherwise that of AgreedBFloat16Order. None where the run
// has no such products. Where the data of that checkpoint turn out to be damaged, and the one
// before it has another order, Resume refuses the difference. Collective over `world`, blocks the
// host; the same on every rank. Errors: those of the communicator.
absl::StatusOr<std::optional<BFloat16Order>> BFloat16OrderOf(const TrainConfig& config,
                                                             Communicator& world);

struct ResumedRun {
  int64_t step = 0;           // step of the checkpoint; 0: there is none to resume from
  GridUnit::State grid_unit;  // state of the exact grid's unit
  // Identifier of the run that wrote the checkpoint (RunOf, may be empty); nullopt: a new run.
  std::optional<std::string> run;
  std::vector<int64_t> damaged_steps;  // newer checkpoints whose data are damaged, newest first
};

// Restores the run from the checkpoint that `config` names. Warns of newer checkpoints that are
// passed over, and of differing settings that are allowed. Collective over the world, blocks the
// host. Errors: those of Train.
absl::StatusOr<ResumedRun> Resume(const TrainConfig& config,
                                  const std::vector<RunSetting>& settings, TrainingState& state,
                                  LossScaler* scaler, const Context& context);

// The folder that this run saves to, owned by it from now on; nullptr where nothing is saved.
// Collective, blocks the host. Errors: those of Train.
absl::StatusOr<std::unique_ptr<RunFolder>> OpenFolder(const TrainCheckpoints& checkpoints,
                                                      const Context& context);

// Checkpointer that saves a run which begins from `resumed` to `folder`, which must outlive it;
// nullptr if `folder` is nullptr. Fails where there is no room for the checkpoints to come.
// Collective, blocks the host. Errors: those of Train.
absl::StatusOr<std::unique_ptr<Checkpointer>> MakeCheckpointer(
    const TrainConfig& config, const ResumedRun& resumed, RunFolder* folder, const StopSignal* stop,
    TrainingState& state, const Context& context);

}  // namespace moe::lm

#endif  // MOE_MOE_LM_RUN_CHECKPOINTS_H_
