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
  MOE_ASSIGN_OR_RETURN(const LoadedModel<T> loaded, MakeModel<T>(config, weights, trainer));
  const auto& model = loaded.model;
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
  MOE_ASSIGN_OR_RETURN(report.paging, ReportOf(loaded.pager.get(), context));
  return report;
}

}  // namespace

template <typename T>
absl::StatusOr<LoadedModel<T>> MakeModel(const TrainConfig& config, const ModelWeights& weights,
                                         Trainer& trainer) {
  ParameterStore& store = trainer.parameters();
  const Context& context = trainer.context();
  store.set_use(weights.use);
  if (weights.file.has_value()) store.set_deferred();
  LoadedModel<T> loaded;
  MOE_ASSIGN_OR_RETURN(loaded.model, Model<T>::Create(ModelConfig(config),
                                                      trainer.pipeline().shape(), store, context));
  if (weights.file.has_value()) {
    std::vector<std::vector<Parameter*>> leases;
    for (int c = 0; c < loaded.model->chunks(); ++c) {
      for (auto& lease : loaded.model->chunk(c).leases()) leases.push_back(std::move(lease));
    }
    MOE_ASSIGN_OR_RETURN(loaded.pager, WeightPager::Create(leases, store, context, *weights.file));
  }
  const absl::Status status = weights.load(store, context);
  if (absl::IsDataLoss(status)) return WithFileFault(status, FileFault::kContent);
  MOE_RETURN_IF_ERROR(status);
  if (loaded.pager == nullptr) return loaded;
  MOE_RETURN_IF_ERROR(loaded.pager->Begin());
  trainer.set_weights(loaded.pager.get());
  return loaded;
}

absl::StatusOr<std::optional<PagingReport>> ReportOf(const WeightPager* pager,
                                                     const Context& context) {
  if (pager == nullptr) return std::optional<PagingReport>();
  PagingReport sum = pager->report();
  int64_t counts[] = {sum.memory_bytes, sum.file_bytes, sum.experts,      sum.experts_in_memory,
                      sum.hits,         sum.misses,     sum.module_reads, sum.bytes_read};
  Communicator& world = context.mesh->world();
  const Site site = {.name = "report"};
  MOE_RETURN_IF_ERROR(
      world.AllReduce<int64_t>(absl::MakeSpan(counts), ReduceOp::kSum, *context.host, site));
  MOE_RETURN_IF_ERROR(
      world.AllReduce<double>({&sum.wait_seconds, 1}, ReduceOp::kMax, *context.host, site));
  MOE_RETURN_IF_ERROR(context.host->Synchronize());
  return PagingReport{.memory_bytes = counts[0],
                      .file_bytes = counts[1],
                      .experts = counts[2],
                      .experts_in_memory = counts[3],
                      .hits = counts[4],
                      .misses = counts[5],
                      .module_reads = counts[6],
                      .bytes_read = counts[7],
                      .wait_seconds = sum.wait_seconds};
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
  template absl::StatusOr<LoadedModel<T>> MakeModel(const TrainConfig&, const ModelWeights&,    \
                                                    Trainer&);                                  \
  template absl::StatusOr<float> MeanLoss(const TrainConfig&, const Tokens&, int64_t, Trainer&, \
                                          Model<T>&, StepTotals&);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe::lm
