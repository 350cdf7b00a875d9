// Saving and resuming of lm::Train: what a checkpoint says of the run, and what of it must agree.
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
#include "moe/lm/trainer.h"
#include "moe/run/context.h"
#include "moe/train/loss_scaler.h"
#include "moe/train/trainer.h"

namespace moe::lm {

// What stands in the manifest beside the tensors. run: whose it is (RunOf). scaler: nullptr without
// one.
CheckpointSections Describe(const std::vector<RunSetting>& settings, const std::string& run,
                            int64_t steps_taken, const LossScaler* scaler,
                            const moe::Trainer& core);

struct ResumedRun {
  int64_t step = 0;           // of the checkpoint; 0: there is none to go on from
  GridUnit::State grid_unit;  // of the exact grid
  // Whose checkpoints these are (RunOf), so that it may be empty; nullopt: the run begins.
  std::optional<std::string> run;
  std::vector<int64_t> damaged_steps;  // newer ones whose data are damaged, newest first
};

// Puts the run where the checkpoint that `config` names was written. Warns of newer checkpoints
// that are passed over, and of differing settings that are allowed. Collective over the world,
// blocks the host. Errors: as of Train.
absl::StatusOr<ResumedRun> Resume(const TrainConfig& config,
                                  const std::vector<RunSetting>& settings, TrainingState& state,
                                  LossScaler* scaler, const Context& context);

// The folder that this run saves to, its own from now on; nullptr where nothing is saved.
// Collective, blocks the host. Errors: as of Train.
absl::StatusOr<std::unique_ptr<RunFolder>> OpenFolder(const TrainCheckpoints& checkpoints,
                                                      const Context& context);

// What saves a run that begins as `resumed` says to `folder`, which outlives it; nullptr where that
// is nullptr. Refuses where there is no room for what is to come. Collective, blocks the host.
// Errors: as of Train.
absl::StatusOr<std::unique_ptr<Checkpointer>> MakeCheckpointer(
    const TrainConfig& config, const ResumedRun& resumed, RunFolder* folder, const StopSignal* stop,
    TrainingState& state, const Context& context);

}  // namespace moe::lm

#endif  // MOE_MOE_LM_RUN_CHECKPOINTS_H_
