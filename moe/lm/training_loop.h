// The training loop of one rank.
#ifndef MOE_MOE_LM_TRAINING_LOOP_H_
#define MOE_MOE_LM_TRAINING_LOOP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/time/time.h>

#include "moe/checkpoint/stop_signal.h"
#include "moe/io/routing_trace.h"
#include "moe/lm/text_data.h"
#include "moe/lm/transformer_config.h"
#include "moe/run/context.h"
#include "moe/run/trace_export.h"
#include "moe/train/gradient_reducer.h"
#include "moe/train/loss_scaler.h"
#include "moe/train/optimizer.h"
#include "moe/train/trainer.h"

namespace moe::lm {

// Saving and resuming (docs/checkpoint.md).
struct TrainCheckpoints {
  std::string folder = {};  // parent of the step folders; empty: nothing is saved
  int64_t interval = 0;     // steps between saves; 0: save at the end, and when asked to stop
  int keep = 3;             // number of newest checkpoints that are kept
  int64_t keep_every = 0;   // checkpoints at multiples of it are kept, too; 0: none
  bool asynchronous = true;
  int max_failures = 3;                        // failures in a row that end the run
  absl::Duration timeout = absl::Minutes(10);  // limit for one file call
  enum class Resume : uint8_t {
    kNone,  // from the beginning
    kAuto,  // from the newest readable one in `folder`; from the beginning where it has none at all
    kPath,  // from `path`
  };
  static constexpr Choice<Resume> kResumeWords[] = {
      {"none", Resume::kNone}, {"auto", Resume::kAuto}, {"path", Resume::kPath}};
  Resume resume = Resume::kNone;
  std::string path = {};               // path of a step folder
  bool allow_numerics_change = false;  // resume although the next steps have other bits
};

struct EvaluationOptions {
  int64_t interval = 0;     // steps between passes over held-out text; 0 = only before and after
  int64_t sequences = 256;  // most held-out sequences of a pass
};

struct TrainConfig {
  TransformerConfig model = {};
  // CreateTrainer adds what follows from the rest: overlap_exchange, trace_capacity.
  TrainerOptions trainer = {.micro_batches = 8};
  LossScaleOptions loss_scale = {};  // where the trainer's dtype is kFloat16
  LearningRateSchedule schedule = {};
  EvaluationOptions evaluation = {};
  int64_t sequence_length = 128;
  int64_t micro_batch_size = 4;    // sequences per micro-batch
  DocumentOptions documents = {};  // which end with tokens of model.eos_token_ids
  int64_t steps = 100;
  // Steps between comparisons of the weights that several ranks hold; 0 = only at the end.
  int64_t verify_replicas = 0;
  // Steps, from 1, whose time line goes to TrainHooks::trace; 0 = none.
  int64_t trace_first_step = 0, trace_last_step = 0;
  bool record_routing = false;  // record the routing of every step, for TrainHooks::on_routing
  TrainCheckpoints checkpoints = {};
};

// Metrics of one optimiser step, the same on every rank.
struct StepMetrics {
  int64_t step = 0;  // from 1
  float loss = 0;    // mean over the global batch, nats per token
  bool has_validation = false;
  float validation_loss = 0;
  double learning_rate = 0;
  double grad_norm = 0;     // infinite where the gradients were not finite
  double loss_scale = 0;    // loss scale of this step; 0: the dtype needs none
  bool skipped = false;     // the gradients overflowed: the weights are unchanged
  double grid_loss = 0;     // GradientNorm::grid_loss
  double step_seconds = 0;  // slowest rank
  double tokens_per_second = 0;
  double drop_fraction = 0;  // dropped share of all slots of the step
  double max_violation = 0;  // worst MoE layer
  int dead_experts = 0;      // over all MoE layers
  double aux_loss = 0;       // mean over micro-batches of the summed load-balance losses
  // Entropy of a token's probabilities, nats; mean over tokens and layers.
  double router_entropy = 0;
  std::vector<std::vector<int64_t>> expert_load;  // [MoE layer][E] slots, identity experts last
  // Mean over ranks, this step.
  double phase_seconds[static_cast<int>(Phase::kCount)] = {};
  ExchangeSeconds exchange_seconds;  // times of dispatch and combine
  // Largest memory of a rank (workspace + parameters + optimiser + buckets).
  int64_t peak_bytes = 0;
};

struct TrainReport {
  int64_t steps = 0;        // steps taken, including those before the run was resumed
  int64_t first_step = 0;   // step of the checkpoint it resumed from; 0: from the beginning
  bool stopped = false;     // stopped on request, before the last step
  int64_t saved_step = -1;  // the newest checkpoint; -1: none
  int64_t checkpoint_failures = 0;
  int64_t tokens = 0;
  double seconds = 0;
  float validation_loss_before = 0, validation_loss_after = 0;  // nats per byte
  double phase_seconds[static_cast<int>(Phase::kCount)] = {};   // mean over ranks
  ExchangeSeconds exchange_seconds;               // dispatch and combine, mean over ranks
  std::vector<std::vector<int64_t>> expert_load;  // [MoE layer][E], all steps
  int64_t dropped_slots = 0, total_slots = 0;
  // Steps skipped for gradients that overflowed float16 or were off the exact grid.
  int64_t skipped_steps = 0;
  // The largest GradientNorm::grid_loss, its tensor and its step; 0: none.
  double grid_loss = 0;
  std::string grid_loss_tensor;
  int64_t grid_loss_step = 0;
  std::optional<int> grid_unit_log2;  // unit of the exact grid after the last step; none in fast
  // Order of bfloat16 products; none where the run has none on a CPU.
  std::optional<BFloat16Order> bfloat16_order;
  uint64_t weights_xxh3 = 0;
  int64_t parameters_total = 0;   // over all experts, replicas counted once
  int64_t parameters_active = 0;  // used by one token
  ExchangeBytes exchange_bytes;   // bytes of steps, without validation; sum over ranks
  int64_t all_reduce_bytes = 0;   // sum over ranks; with ZeRO bytes of scatters and gathers
  int64_t pipeline_bytes = 0;     // sum over ranks: rows and their gradients between stages
  int64_t tensor_bytes = 0;       // sum over ranks: sums, rows and logits between tensor ranks
  // Bytes of parameters, gradients' sums and optimiser on the rank with most: measured, and by the
  // formula.
  int64_t state_bytes = 0, state_bytes_formula = 0;
  GradientReducer::Traffic reduced_replicated, reduced_experts;  // traffic of this rank
  int64_t trace_left_out = 0;  // events of the time line beyond its capacity, over all ranks
};

// Hooks of the calling program, on rank 0 unless stated otherwise; an error ends this rank's
// training with that error.
struct TrainHooks {
  std::function<absl::Status(const StepMetrics&)> on_step = {};  // after every step
  // Called after every step, before on_step, with a record for each MoE layer.
  std::function<absl::Status(absl::Span<const RoutingTraceRecord>)> on_routing = {};
  // Called on every rank once its model exists: overwrites initial weights.
  std::function<absl::Status(ParameterStore& parameters, const Context& context)> load_weights = {};
  // Called on every rank once the folder to save to is held and the checkpoint is read, before the
  // first validation: steps follow `first_step`.
  std::function<void(int64_t first_step, const Context& context)> on_begin = {};
  TraceSink* trace = nullptr;  // receives the time line once the last of its steps has ended
  // Set on every rank: after a stop signal the run ends and, with checkpoints, saves first.
  const StopSignal* stop = nullptr;
};

// Checks a configuration, without side effects; also that EP divides the ranks and that
// micro-batches >= 1. `ranks`: size of the world. kInvalidArgument names flag, value and nearest
// valid choice.
absl::Status ValidateTrainConfig(const TrainConfig& config, int ranks);

// Collective over `world`; returns the same report on every rank. kInvalidArgument, on every rank,
// unless: all ranks have the same text and settings (CheckAgreement), the same choice to record and
// trace, and rank 0 has the hooks for it; a checkpoint to resume from is of this model and, without
// allow_numerics_change, of these numerics (an order of bfloat16 products that `config` leaves out
// is the checkpoint's); all ranks see one folder to save to, which no other run holds. kNotFound:
// there is no such checkpoint. kDataLoss: the loss or the gradients are not finite, or copies of a
// weight differ (the same status on all ranks). Errors with a FileFault (moe/io/file.h):
// checkpoints that are damaged or cannot be written. Otherwise errors of the communicator.
absl::StatusOr<TrainReport> Train(const TrainConfig& config, const Corpus& corpus,
                                  std::unique_ptr<Communicator> world, const TrainHooks& hooks);

}  // namespace moe::lm

#endif  // MOE_MOE_LM_TRAINING_LOOP_H_
