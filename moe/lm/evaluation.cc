#include "moe/lm/evaluation.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "comm/local/local_world.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "moe/io/file.h"
#include "moe/lm/run_settings.h"
#include "moe/lm/text_rounds.h"
#include "moe/lm/train_config.h"
#include "moe/train/non_finite.h"

namespace moe::lm {
namespace {

template <typename T>
absl::StatusOr<EvaluationReport> EvaluateAs(const TrainConfig& config, const ModelWeights& weights,
                                            const Tokens& text, Trainer& trainer) {
  const Context& context = trainer.context();
  MOE_ASSIGN_OR_RETURN(const auto model, MakeModel<T>(config, weights, trainer));
  StepTotals totals(model->moe_layers());
  trainer.SumOverRanks(totals.fields());
  MOE_RETURN_IF_ERROR(trainer.ResumeAfter(weights.step));  // messages name it
  EvaluationReport report = {.sequences =
                                 EvaluationSequences(config, text, config.evaluation.sequences)};
  const int64_t start_ns = MonotonicNs();
  MOE_ASSIGN_OR_RETURN(report.loss,
                       MeanLoss<T>(config, text, report.sequences, trainer, *model, totals));
  report.seconds = SecondsSince(start_ns);
  report.tokens = report.sequences * config.sequence_length;
  report.bfloat16_order = trainer.bfloat16_order();
  MOE_RETURN_IF_ERROR(
      context.mesh->world().AllReduce<double>({&report.seconds, 1}, ReduceOp::kMax, *context.host,
                                              {.name = "validation", .step = weights.step}));
  MOE_RETURN_IF_ERROR(context.host->Synchronize());
  return report;
}

}  // namespace

template <typename T>
absl::StatusOr<std::unique_ptr<Model<T>>> MakeModel(const TrainConfig& config,
                                                    const ModelWeights& weights, Trainer& trainer) {
  ParameterStore& store = trainer.parameters();
  store.set_use(weights.use);
  MOE_ASSIGN_OR_RETURN(auto model, Model<T>::Create(ModelConfig(config), trainer.pipeline().shape(),
                                                    store, trainer.context()));
  const absl::Status status = weights.load(store, trainer.context());
  if (absl::IsDataLoss(status)) return WithFileFault(status, FileFault::kContent);
  MOE_RETURN_IF_ERROR(status);
  return model;
}

absl::StatusOr<std::vector<CanonicalTensor>> StoredTensors(const CheckpointManifest& manifest) {
  MOE_ASSIGN_OR_RETURN(TrainConfig config, StoredConfig(manifest.sections));
  const auto stored = std::ssize(manifest.tensors);
  const TransformerConfig& model_config = config.model;
  const int64_t layers = model_config.num_layers, experts = model_config.moe.router.num_experts;
  if (layers < 1 || layers > stored || experts < 1 || model_config.moe_layer_freq < 1 ||
      layers / model_config.moe_layer_freq > stored / experts) {
    return absl::DataLossError(
        absl::StrCat(stored, " tensors, expected more for ", layers, " layers of ", experts));
  }
  config.trainer.session.device = DeviceKind::kCpu;
  config.trainer.dtype = DType::kBFloat16;
  config.trainer.session.grouped_gemm = GroupedGemmKernel::kAuto;
  config.trainer.session.threads = 1;
  config.trainer.session.mesh = {};
  config.trainer.micro_batches = config.micro_batch_size = 1;
  MOE_ASSIGN_OR_RETURN(const auto trainer,
                       CreateTrainer(config, std::move(MakeLocalWorld({.ranks = 1}).front())));
  ParameterStore& store = trainer->parameters();
  store.set_use(StoreUse::kInference);
  MOE_ASSIGN_OR_RETURN(const auto model,
                       Stage<BFloat16>::Create(ModelConfig(config), store, trainer->context()));
  std::vector<CanonicalTensor> tensors;
  for (const auto& parameter : store.parameters()) {
    tensors.insert(tensors.end(), parameter->parts().begin(), parameter->parts().end());
  }
  return tensors;
}

int64_t EvaluationSequences(const TrainConfig& config, const Tokens& text, int64_t most) {
  const int64_t count = std::min(most, SequenceCount(text, config.sequence_length));
  return NeedsWholeMicroBatches(config) ? count - count % config.micro_batch_size : count;
}

template <typename T>
absl::StatusOr<float> MeanLoss(const TrainConfig& config, const Tokens& text, int64_t count,
                               Trainer& trainer, Model<T>& model, StepTotals& totals) {
  const int64_t size = config.micro_batch_size;
  MOE_RETURN_IF_ERROR(trainer.BeginEvaluation((count + size - 1) / size));
  totals.Clear();
  TextRounds<T> rounds(config, text, count, model, totals);
  MOE_RETURN_IF_ERROR(WithWeight(trainer.RunRounds(model.pipeline(), rounds), trainer.parameters(),
                                 trainer.context()));
  MOE_RETURN_IF_ERROR(trainer.EndStep());
  if (totals.non_finite() > 0) {
    return absl::DataLossError(
        absl::StrCat("step ", trainer.step(), ": validation loss is not finite"));
  }
  return totals.MeanLoss();
}

absl::StatusOr<EvaluationReport> Evaluate(const TrainConfig& config, const ModelWeights& weights,
                                          const Corpus& corpus, Tokens Corpus::*part,
                                          std::unique_ptr<Communicator> world) {
  std::vector<RunSetting> settings = SettingsOf(config, corpus);
  settings.push_back(
      {.kind = SettingKind::kLayout, .name = "--checkpoint", .text = absl::StrCat(weights.step)});
  const Tokens& text = corpus.*part;
  settings.push_back(
      {.kind = SettingKind::kData, .name = "--split", .text = absl::StrCat(text.size())});
  MOE_RETURN_IF_ERROR(CheckAgreement(settings, *world));
  MOE_RETURN_IF_ERROR(ValidateTrainConfig(config, world->size()));
  if (EvaluationSequences(config, text, config.evaluation.sequences) == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the text is ", text.size(), " ", corpus.unit, "s, expected at least one ",
                     NeedsWholeMicroBatches(config) ? "micro-batch" : "sequence", " of ",
                     config.sequence_length, " and one more"));
  }
  MOE_ASSIGN_OR_RETURN(const auto trainer, CreateTrainer(config, std::move(world)));
  return WithStorageType(config.trainer.dtype, [&]<typename T>(T) {
    return trainer->session().OrEnd([&] { return EvaluateAs<T>(config, weights, text, *trainer); });
  });
}

#define MOE_INSTANTIATE(T)                                                                      \
  template absl::StatusOr<std::unique_ptr<Model<T>>> MakeModel(const TrainConfig&,              \
                                                               const ModelWeights&, Trainer&);  \
  template absl::StatusOr<float> MeanLoss(const TrainConfig&, const Tokens&, int64_t, Trainer&, \
                                          Model<T>&, StepTotals&);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe::lm
