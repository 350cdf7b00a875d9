// The loss of a text under a model as it is.
#ifndef MOE_MOE_LM_EVALUATION_H_
#define MOE_MOE_LM_EVALUATION_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <absl/status/statusor.h>

#include "moe/checkpoint/manifest.h"
#include "moe/lm/model.h"
#include "moe/lm/step_totals.h"
#include "moe/lm/training_loop.h"
#include "moe/state/canonical_tensor.h"
#include "moe/state/parameter.h"
#include "moe/train/trainer.h"
#include "moe/zero/weight_pager.h"

namespace moe::lm {

// The weights of a model as it is, without optimiser state, wherever they are stored.
struct ModelWeights {
  int64_t step = 0;                   // that they are of; 0 without training
  StoreUse use = StoreUse::kReading;  // kInference where no masters are stored
  // Overwrites all parameters that this rank holds. Collective, blocks the host; may be called on
  // several threads at a time.
  std::function<absl::Status(ParameterStore& parameters, const Context& context)> load = {};
  // Where they are while they are used: nullopt: in memory.
  std::optional<WeightFileOptions> file = {};
};

// A model for forward passes alone.
template <typename T>
struct LoadedModel {
  std::unique_ptr<Model<T>> model;
  std::unique_ptr<WeightPager> pager;  // of ModelWeights::file
};
// A model of the trainer's with these weights; passes of the trainer lease them of the pager.
// Errors: as Model::Create, `load`, with a FileFault for what is damaged, and WeightPager.
// Collective, blocks the host.
template <typename T>
absl::StatusOr<LoadedModel<T>> MakeModel(const TrainConfig& config, const ModelWeights& weights,
                                         Trainer& trainer);
// What became of the weights of all ranks; nullopt without a pager. Collective over the world,
// blocks the host.
absl::StatusOr<std::optional<PagingReport>> ReportOf(const WeightPager* pager,
                                                     const Context& context);

// The canonical tensors of the model that wrote a checkpoint, with the axes along which ranks cut
// them. Takes address space for weights in 16 bits, and hardly any memory. kDataLoss: the manifest
// describes no model of moe train, or one of more layers and experts than it has tensors for.
// Errors of Stage::Create.
absl::StatusOr<std::vector<CanonicalTensor>> StoredTensors(const CheckpointManifest& manifest);

// Sequences of `text` that a pass takes: at most `most`. The last incomplete micro-batch is
// shortened, or left out where padding or token blocks need whole ones.
int64_t EvaluationSequences(const TrainConfig& config, const Tokens& text, int64_t most);

// Mean loss in nats per token of sequences [0, count) of `text`, summed into `totals`, which the
// trainer sums over ranks. Collective over the world. kDataLoss: it is not finite.
template <typename T>
absl::StatusOr<float> MeanLoss(const TrainConfig& config, const Tokens& text, int64_t count,
                               Trainer& trainer, Model<T>& model, StepTotals& totals);

struct EvaluationReport {
  float loss = 0;  // mean, nats per token
  int64_t sequences = 0, tokens = 0;
  double seconds = 0;                           // without the model's loading; the slowest rank's
  std::optional<BFloat16Order> bfloat16_order;  // as TrainReport's
  std::optional<PagingReport> paging;
};

// The loss of at most config.evaluation.sequences sequences of a part of `corpus`, with `weights`
// of a model described by `config` (StoredConfig, HfModel). No optimiser state is read, and no
// memory allocated for any. Collective over `world`; the same report, and the same bits at any
// layout, on every rank. kInvalidArgument, on every rank, unless all have the same text, settings
// and step, and unless there is a sequence; errors of MakeModel; kDataLoss when the loss is not
// finite.
absl::StatusOr<EvaluationReport> Evaluate(const TrainConfig& config, const ModelWeights& weights,
                                          const Corpus& corpus, Tokens Corpus::*part,
                                          std::unique_ptr<Communicator> world);

}  // namespace moe::lm

#endif  // MOE_MOE_LM_EVALUATION_H_
