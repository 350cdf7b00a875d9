// What follows from a training configuration: the model's, and what the text must hold.
#ifndef MOE_MOE_LM_TRAIN_CONFIG_H_
#define MOE_MOE_LM_TRAIN_CONFIG_H_

#include <memory>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "comm/communicator.h"
#include "kernels/base/stream.h"
#include "moe/lm/training_loop.h"
#include "moe/train/trainer.h"

namespace moe::lm {

// The model's configuration with what depends on the shape of a micro-batch filled in.
TransformerConfig ModelConfig(const TrainConfig& config);

// Whether the router takes micro-batches of one known length alone: for capacity padding and blocks
// of N tokens.
bool NeedsWholeMicroBatches(const TrainConfig& config);

// What runs steps and evaluations of such a model, without the model. Collective over `world`.
// Errors: as Trainer::Create.
absl::StatusOr<std::unique_ptr<Trainer>> CreateTrainer(const TrainConfig& config,
                                                       std::unique_ptr<Communicator> world);

// kInvalidArgument unless sequences, micro-batches and steps have a number of tokens that fits.
absl::Status CheckBatch(const TrainConfig& config);

// kInvalidArgument unless the text holds one global batch and one micro-batch to validate on.
absl::Status CheckTextLength(const TrainConfig& config, const Corpus& corpus);

// kInvalidArgument, naming the divisors, unless `size` is one of `ranks`.
absl::Status CheckExpertParallelSize(int size, int ranks);

// kInvalidArgument unless the traced steps, if any, are a range from 1.
absl::Status CheckTraceSteps(const TrainConfig& config);

// kInvalidArgument unless every rank records and traces the same, and rank 0 has hooks for it:
// collectives follow from it. Collective over `world`, blocks; the same status on every rank.
absl::Status CheckRecords(const TrainConfig& config, const TrainHooks& hooks, Communicator& world,
                          Stream& stream);

}  // namespace moe::lm

#endif  // MOE_MOE_LM_TRAIN_CONFIG_H_
