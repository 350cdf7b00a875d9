#include "moe/lm/trainer.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "moe/checkpoint/checkpointer.h"
#include "moe/checkpoint/run_folder.h"
#include "moe/checkpoint/training_state.h"
#include "moe/lm/evaluation.h"
#include "moe/lm/run_checkpoints.h"
#include "moe/lm/run_settings.h"
#include "moe/lm/step_totals.h"
#include "moe/lm/train_config.h"
#include "moe/state/parameter_hash.h"
#include "moe/train/trainer.h"

namespace moe::lm {
namespace {

constexpr int kPhases = static_cast<int>(Phase::kCount);

void AddDifference(const ExchangeBytes& before, const ExchangeBytes& after, ExchangeBytes& sum) {
  sum.self += after.self - before.self;
  sum.same_node += after.same_node - before.same_node;
  sum.cross_node += after.cross_node - before.cross_node;
}

// The training loop of one rank, for a model of storage type T.
template <typename T>
class Trainer {
 public:
  Trainer(const TrainConfig& config, const Corpus& corpus, const std::vector<RunSetting>& settings,
          moe::Trainer& core)
      : config_(config),
        corpus_(corpus),
        core_(core),
        context_(core.context()),
        world_(context_.mesh->world()),
        trace_(core.session().trace()),
        sampler_(SequenceCount(corpus.train, config.sequence_length),
                 config.trainer.micro_batches * config.micro_batch_size, config.trainer.seed),
        batch_(config.sequence_length, config.micro_batch_size),
        settings_(settings) {
    sequences_.reserve(config.micro_batch_size);
  }

  absl::Status Build(const TrainHooks& hooks);
  absl::StatusOr<TrainReport> Run(const TrainHooks& hooks);

 private:
  absl::Status Step(int64_t step);
  absl::Status Run(const Round& round);
  absl::Status Reduce(int64_t step);
  absl::Status Optimize(int64_t step);
  absl::Status Skipped(int64_t step);
  void KeepGridLoss(int64_t step, TrainReport& report) const;
  absl::Status CheckWeights(int64_t step) const;
  absl::StatusOr<float> Validate();
  absl::Status Measure(double seconds, StepMetrics& metrics);
  LossScaler* scaler() { return scaler_.has_value() ? &*scaler_ : nullptr; }
  // Learning rate of the next step: skipped steps do not count.
  double LearningRate() const { return config_.schedule.At(optimizer_->steps_taken() + 1); }
  // Compares copies of weights where --verify-replicas asks for it; the end of the run has its own
  // comparison.
  absl::Status VerifyReplicas(int64_t step);
  // Returns the step after which the run begins, and prepares its saving.
  absl::StatusOr<int64_t> Restore();
  absl::Status Finish(TrainReport& report);

  const TrainConfig& config_;
  const Corpus& corpus_;
  moe::Trainer& core_;
  const Context& context_;
  Communicator& world_;
  TraceRecorder* const trace_;  // nullptr: no time line
  Sampler sampler_;
  std::vector<int64_t> sequences_;  // sequences of the current micro-batch
  SequenceBatch batch_;
  Transformer<T>* model_ = nullptr;  // owned by core_
  std::optional<StepTotals> totals_;
  std::unique_ptr<RoutingRecorder> routing_;  // nullptr: routing is not recorded
  ForwardStats stats_;
  ExchangeBytes exchanged_;  // bytes of steps; validation counts apart
  GradientNorm gradient_norm_;
  std::optional<LossScaler> scaler_;  // for float16
  const std::vector<RunSetting>& settings_;
  Optimizer* optimizer_ = nullptr;
  std::optional<TrainingState> state_;
  std::unique_ptr<RunFolder> folder_;  // nullptr: nothing is saved
  std::string run_;                    // identifier of the run that its checkpoints are of (RunOf)
  std::unique_ptr<Checkpointer> checkpointer_;  // nullptr: nothing is saved
  const StopSignal* stop_ = nullptr;            // nullptr: the run takes all its steps
};

template <typename T>
absl::Status Trainer<T>::Build(const TrainHooks& hooks) {
  stop_ = hooks.stop;
  MOE_ASSIGN_OR_RETURN(auto model,
                       Transformer<T>::Create(ModelConfig(config_), core_.parameters(), context_));
  MOE_ASSIGN_OR_RETURN(model_, core_.Add(std::move(model)));
  if (config_.trainer.dtype == DType::kFloat16) scaler_.emplace(config_.loss_scale);
  totals_.emplace(model_->moe_layers());
  core_.SumOverRanks(totals_->fields());
  if (config_.record_routing) {
    routing_ = std::make_unique<RoutingRecorder>(model_->moe_layers(),
                                                 config_.model.moe.router.num_experts);
    model_->CountSlots(routing_->slots());
  }
  if (hooks.load_weights) MOE_RETURN_IF_ERROR(hooks.load_weights(core_.parameters(), context_));
  MOE_ASSIGN_OR_RETURN(optimizer_, core_.optimizer());  // with ZeRO it takes over the masters
  state_.emplace(core_.parameters(), *optimizer_, core_.states(), context_);
  return absl::OkStatus();
}

template <typename T>
absl::StatusOr<int64_t> Trainer<T>::Restore() {
  MOE_ASSIGN_OR_RETURN(folder_, OpenFolder(config_.checkpoints, context_));
  MOE_ASSIGN_OR_RETURN(const ResumedRun resumed,
                       Resume(config_, settings_, *state_, scaler(), context_));
  run_ = resumed.run.value_or(folder_ == nullptr ? "" : folder_->run());
  MOE_RETURN_IF_ERROR(core_.ResumeAfter(resumed.step));
  if (!config_.trainer.unit_log2.has_value()) core_.RestoreGridUnit(resumed.grid_unit);
  MOE_ASSIGN_OR_RETURN(checkpointer_,
                       MakeCheckpointer(config_, resumed, folder_.get(), stop_, *state_, context_));
  return resumed.step;
}

template <typename T>
absl::Status Trainer<T>::Step(int64_t step) {
  totals_->Clear();
  if (checkpointer_ != nullptr) {
    totals_->Vote(checkpointer_->Votes());
  } else if (stop_ != nullptr && stop_->received() != 0) {
    totals_->Vote({.stop = 1});
  }
  if (routing_ != nullptr) routing_->Clear();
  MOE_RETURN_IF_ERROR(core_.BeginStep(scaler_.has_value() ? scaler_->scale_log2() : 0));
  for (int64_t r = 0; r < core_.rounds(); ++r) {
    MOE_ASSIGN_OR_RETURN(const Round round, core_.BeginRound());
    MOE_RETURN_IF_ERROR(Timed(context_, core_.PassOf(round).site, {.name = "micro-batch"},
                              *context_.compute, [&] { return Run(round); }));
  }
  MOE_RETURN_IF_ERROR(Reduce(step));
  return Optimize(step);
}

template <typename T>
absl::Status Trainer<T>::Run(const Round& round) {
  const int64_t step = round.step();
  const int64_t first = round.empty() ? 0 : round.micro_batch() * config_.micro_batch_size;
  sequences_.clear();
  for (int64_t i = 0; !round.empty() && i < config_.micro_batch_size; ++i) {
    sequences_.push_back(sampler_.At(step - 1, first + i));
  }
  batch_.Load(corpus_.train, sequences_, first);
  MOE_RETURN_IF_ERROR(model_->ForwardBackward(
      core_.PassOf(round, batch_.batch(step, Mode::kTraining)),
      {batch_.tokens(), batch_.targets(), batch_.row_loss()}, &stats_,
      [&](Parameter& parameter) { return core_.MarkReady(round, parameter); }));
  totals_->Add(batch_.row_loss(), stats_);
  if (routing_ != nullptr) routing_->AddTokens(batch_.size());
  return absl::OkStatus();
}

// Weights move only if the loss of all ranks is finite.
template <typename T>
absl::Status Trainer<T>::Reduce(int64_t step) {
  MOE_RETURN_IF_ERROR(core_.Reduce());
  if (totals_->non_finite() > 0) {
    return absl::DataLossError(
        absl::StrCat("step ", step, ": loss is not finite (", totals_->non_finite(),
                     " values), expected a finite one: lower --lr or raise --lr-warmup-steps"));
  }
  return absl::OkStatus();
}

// Moves the weights unless gradients have overflowed: all ranks see the same sums and decide alike.
template <typename T>
absl::Status Trainer<T>::Optimize(int64_t step) {
  MOE_ASSIGN_OR_RETURN(gradient_norm_, core_.Step({.learning_rate = LearningRate(),
                                                   .non_finite = NonFiniteGradients::kSkip,
                                                   .weights = NonFiniteWeights::kReport}));
  if (!gradient_norm_.finite()) return Skipped(step);
  if (scaler_.has_value()) scaler_->StepTaken();
  return absl::OkStatus();
}

// Returns an error where neither another unit of the exact grid nor a loss scale can help.
template <typename T>
absl::Status Trainer<T>::Skipped(int64_t step) {
  const bool off_grid = gradient_norm_.off_grid();
  // The unit has grown.
  if (off_grid && !config_.trainer.unit_log2.has_value()) return absl::OkStatus();
  const absl::Status skipped =
      scaler_.has_value() && !off_grid ? scaler_->StepSkipped() : absl::DataLossError("");
  if (skipped.ok()) return skipped;
  std::string why = skipped.message().empty() ? "" : absl::StrCat(" and ", skipped.message());
  if (off_grid) {
    why = absl::StrCat(" (", gradient_norm_.non_finite, " partials of up to ",
                       gradient_norm_.largest, " are off the grid of --grid-unit-log2 ",
                       *config_.trainer.unit_log2, ", which holds ",
                       std::ldexp(1.0, 63 + *config_.trainer.unit_log2) /
                           static_cast<double>(config_.trainer.micro_batches),
                       ")");
  }
  return absl::DataLossError(
      absl::StrCat("step ", step, ": gradient norm is ", gradient_norm_.value, why,
                   ", expected a finite one: lower --lr or raise --lr-warmup-steps"));
}

template <typename T>
void Trainer<T>::KeepGridLoss(int64_t step, TrainReport& report) const {
  if (config_.trainer.session.numerics == Numerics::kFast) return;
  report.grid_unit_log2 = core_.grid_unit().log2;
  if (gradient_norm_.grid_loss <= report.grid_loss) return;
  report.grid_loss = gradient_norm_.grid_loss;
  report.grid_loss_tensor = gradient_norm_.grid_loss_tensor;
  report.grid_loss_step = step;
}

template <typename T>
absl::StatusOr<float> Trainer<T>::Validate() {
  return MeanLoss<T>(config_, corpus_.held_out,
                     EvaluationSequences(config_, corpus_.held_out, config_.evaluation.sequences),
                     core_, *model_, batch_, *totals_);
}

template <typename T>
absl::Status Trainer<T>::CheckWeights(int64_t step) const {
  const absl::Status found = optimizer_->CheckFinite({.name = "step metrics", .step = step});
  if (!absl::IsDataLoss(found)) return found;
  return absl::DataLossError(absl::StrCat("step ", step, ": ", found.message(),
                                          ", expected finite ones: lower --lr, or raise "
                                          "--lr-warmup-steps or --adam-eps"));
}

// Adds to `metrics` what differs between ranks: the slowest rank's time, mean phases, most memory.
// Fails where weights of any rank are not finite, so that no checkpoint of them begins.
template <typename T>
absl::Status Trainer<T>::Measure(double seconds, StepMetrics& metrics) {
  MOE_RETURN_IF_ERROR(context_.compute->Synchronize());  // waits for the clock's last tasks
  const Site site = {.name = "step metrics", .step = metrics.step};
  double most[2] = {seconds,
                    static_cast<double>(core_.state_bytes().allocated + DeviceBytes(context_))};
  MOE_ASSIGN_OR_RETURN(const ExchangeSeconds exchanges,
                       context_.clock->SplitExchanges(context_.mesh->group(MeshGroup::kExpert),
                                                      *context_.host, site));
  double sum[kPhases + 4] = {};
  for (int p = 0; p < kPhases; ++p) sum[p] = context_.clock->seconds(static_cast<Phase>(p));
  sum[kPhases] = exchanges.copy;
  sum[kPhases + 1] = exchanges.gather;
  sum[kPhases + 2] = exchanges.wait;
  sum[kPhases + 3] = static_cast<double>(optimizer_->non_finite());
  MOE_RETURN_IF_ERROR(context_.clock->Reset());
  MOE_RETURN_IF_ERROR(
      world_.AllReduce<double>(absl::MakeSpan(most), ReduceOp::kMax, *context_.host, site));
  MOE_RETURN_IF_ERROR(
      world_.AllReduce<double>(absl::MakeSpan(sum), ReduceOp::kSum, *context_.host, site));
  MOE_RETURN_IF_ERROR(context_.host->Synchronize());
  if (sum[kPhases + 3] > 0) return CheckWeights(metrics.step);
  metrics.step_seconds = most[0];
  metrics.peak_bytes = static_cast<int64_t>(most[1]);
  for (double& each : sum) each /= world_.size();
  std::copy_n(sum, kPhases, metrics.phase_seconds);
  metrics.exchange_seconds = {
      .copy = sum[kPhases], .gather = sum[kPhases + 1], .wait = sum[kPhases + 2]};
  return absl::OkStatus();
}

template <typename T>
absl::StatusOr<TrainReport> Trainer<T>::Run(const TrainHooks& hooks) {
  TrainReport report;
  context_.clock->KeepMeetings();
  MOE_ASSIGN_OR_RETURN(report.first_step, Restore());
  report.steps = report.first_step;
  MOE_ASSIGN_OR_RETURN(report.validation_loss_before, Validate());
  report.validation_loss_after = report.validation_loss_before;
  report.expert_load.assign(model_->moe_layers(),
                            std::vector<int64_t>(config_.model.moe.router.num_outputs(), 0));
  MOE_RETURN_IF_ERROR(context_.clock->Reset());
  StepMetrics metrics;  // its memory is reused by every step
  for (int64_t step = report.first_step + 1; step <= config_.steps && !report.stopped; ++step) {
    const int64_t start_ns = MonotonicNs();
    if (trace_ != nullptr) {
      trace_->Switch(step >= config_.trace_first_step && step <= config_.trace_last_step);
    }
    const ExchangeBytes before = model_->exchange_bytes();
    const double rate = LearningRate(), scale = scaler_.has_value() ? scaler_->scale() : 0;
    MOE_RETURN_IF_ERROR(Timed(context_, {.name = "step", .step = step}, {.name = "step"},
                              *context_.compute, [&] { return Step(step); }));
    if (trace_ != nullptr) trace_->Switch(false);
    const CheckpointVotes votes = totals_->votes();
    MOE_RETURN_IF_ERROR(VerifyReplicas(step));
    AddDifference(before, model_->exchange_bytes(), exchanged_);
    metrics.step = step;
    metrics.loss = totals_->MeanLoss();
    metrics.has_validation = false;
    metrics.learning_rate = rate;
    metrics.grad_norm = gradient_norm_.value;
    metrics.loss_scale = scale;
    metrics.skipped = !gradient_norm_.finite();
    metrics.grid_loss = gradient_norm_.grid_loss;
    metrics.aux_loss = totals_->MeanAuxLoss(config_.trainer.micro_batches);
    metrics.router_entropy = totals_->MeanEntropy();
    metrics.expert_load = model_->expert_load();
    const int32_t experts = config_.model.moe.router.num_experts;
    metrics.max_violation = MaxViolation(metrics.expert_load, experts);
    metrics.dead_experts = DeadExperts(metrics.expert_load, experts);
    metrics.drop_fraction = totals_->slots() == 0 ? 0
                                                  : static_cast<double>(totals_->dropped()) /
                                                        static_cast<double>(totals_->slots());
    report.tokens += totals_->tokens();
    report.dropped_slots += totals_->dropped();
    report.total_slots += totals_->slots();
    const int64_t step_tokens = totals_->tokens();
    MOE_RETURN_IF_ERROR(Measure(SecondsSince(start_ns), metrics));
    metrics.tokens_per_second = static_cast<double>(step_tokens) / metrics.step_seconds;
    report.seconds += metrics.step_seconds;
    for (int p = 0; p < kPhases; ++p) report.phase_seconds[p] += metrics.phase_seconds[p];
    report.exchange_seconds.copy += metrics.exchange_seconds.copy;
    report.exchange_seconds.gather += metrics.exchange_seconds.gather;
    report.exchange_seconds.wait += metrics.exchange_seconds.wait;
    for (size_t layer = 0; layer < report.expert_load.size(); ++layer) {
      for (size_t e = 0; e < report.expert_load[layer].size(); ++e) {
        report.expert_load[layer][e] += metrics.expert_load[layer][e];
      }
    }
    if (routing_ != nullptr) {
      MOE_ASSIGN_OR_RETURN(const auto records, routing_->Gather(step, world_, *context_.host));
      if (world_.rank() == 0) MOE_RETURN_IF_ERROR(hooks.on_routing(records));
    }
    const bool evaluate = step == config_.steps || (config_.evaluation.interval > 0 &&
                                                    step % config_.evaluation.interval == 0);
    if (evaluate) {
      MOE_ASSIGN_OR_RETURN(metrics.validation_loss, Validate());
      metrics.has_validation = true;
      report.validation_loss_after = metrics.validation_loss;
      MOE_RETURN_IF_ERROR(context_.clock->Reset());
    }
    report.steps = step;
    report.skipped_steps = step - optimizer_->steps_taken();
    KeepGridLoss(step, report);
    if (world_.rank() == 0 && hooks.on_step) MOE_RETURN_IF_ERROR(hooks.on_step(metrics));
    if (trace_ != nullptr && step == std::min(config_.steps, config_.trace_last_step)) {
      MOE_ASSIGN_OR_RETURN(report.trace_left_out,
                           ExportTrace(*trace_, hooks.trace, world_, *context_.host,
                                       {.name = "time line", .step = step}));
    }
    report.stopped = votes.stop > 0 && step < config_.steps;
    if (checkpointer_ == nullptr) continue;
    const auto describe = [&] {
      return Describe(settings_, run_, optimizer_->steps_taken(), scaler(), core_);
    };
    MOE_RETURN_IF_ERROR(step == config_.steps ? checkpointer_->Finish(step, describe)
                                              : checkpointer_->AfterStep(step, votes, describe));
    report.saved_step = checkpointer_->saved_step();
    report.checkpoint_failures = checkpointer_->failures();
  }
  MOE_RETURN_IF_ERROR(Finish(report));
  return report;
}

template <typename T>
absl::Status Trainer<T>::VerifyReplicas(int64_t step) {
  if (config_.verify_replicas == 0 || step % config_.verify_replicas != 0) return absl::OkStatus();
  return CheckReplicas(core_.parameters(), context_, {.name = "verify replicas", .step = step});
}

template <typename T>
absl::Status Trainer<T>::Finish(TrainReport& report) {
  const Site site = {.name = "end report", .step = config_.steps};
  Stream& stream = *context_.host;
  MOE_RETURN_IF_ERROR(CheckReplicas(core_.parameters(), context_, site));
  MOE_ASSIGN_OR_RETURN(report.weights_xxh3, state_->HashWeights(site));
  MOE_ASSIGN_OR_RETURN(report.parameters_total,
                       CountParameters(core_.parameters(), context_, site));
  const MoeLayerConfig& moe = config_.model.moe;
  const int64_t up_rows = moe.ffn_hidden_size * (IsGated(moe.activation) ? 2 : 1);
  const int64_t expert_size = config_.model.hidden_size * (up_rows + moe.ffn_hidden_size) +
                              (moe.projection_biases ? up_rows + config_.model.hidden_size : 0);
  report.parameters_active =
      report.parameters_total -
      model_->moe_layers() * expert_size * (moe.router.num_experts - moe.router.top_k);
  int64_t reduced = 0;
  if (report.steps > report.first_step) {  // otherwise there are no sums
    report.reduced_replicated = core_.traffic(MeshGroup::kStage);
    report.reduced_experts = core_.traffic(MeshGroup::kExpertData);
    reduced = report.reduced_replicated.bytes_sent + report.reduced_experts.bytes_sent;
  }
  int64_t bytes[] = {exchanged_.self, exchanged_.same_node, exchanged_.cross_node, reduced};
  MOE_RETURN_IF_ERROR(
      world_.AllReduce<int64_t>(absl::MakeSpan(bytes), ReduceOp::kSum, stream, site));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  report.exchange_bytes.self = bytes[0];
  report.exchange_bytes.same_node = bytes[1];
  report.exchange_bytes.cross_node = bytes[2];
  report.all_reduce_bytes = bytes[3];
  const moe::Trainer::StateBytes state = core_.state_bytes();
  int64_t most[] = {state.allocated, state.formula};
  MOE_RETURN_IF_ERROR(
      world_.AllReduce<int64_t>(absl::MakeSpan(most), ReduceOp::kMax, stream, site));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  report.state_bytes = most[0];
  report.state_bytes_formula = most[1];
  return absl::OkStatus();
}

template <typename T>
absl::StatusOr<TrainReport> TrainAs(const TrainConfig& config, const Corpus& corpus,
                                    const std::vector<RunSetting>& settings, moe::Trainer& core,
                                    const TrainHooks& hooks) {
  Trainer<T> trainer(config, corpus, settings, core);
  return core.session().OrEnd([&]() -> absl::StatusOr<TrainReport> {
    MOE_RETURN_IF_ERROR(trainer.Build(hooks));
    return trainer.Run(hooks);
  });
}

}  // namespace

absl::StatusOr<TrainReport> Train(const TrainConfig& config, const Corpus& corpus,
                                  std::unique_ptr<Communicator> world, const TrainHooks& hooks) {
  // First, so that what follows fails on every rank or on none.
  const std::vector<RunSetting> settings = SettingsOf(config, corpus);
  MOE_RETURN_IF_ERROR(CheckAgreement(settings, *world));
  MOE_RETURN_IF_ERROR(ValidateTrainConfig(config, world->size()));
  MOE_RETURN_IF_ERROR(CheckTextLength(config, corpus));
  MOE_RETURN_IF_ERROR(CheckTraceSteps(config));
  MOE_ASSIGN_OR_RETURN(const auto core, CreateCore(config, std::move(world)));
  const Context& context = core->context();
  MOE_RETURN_IF_ERROR(CheckRecords(config, hooks, context.mesh->world(), *context.host));
  return WithStorageType(config.trainer.dtype, [&]<typename T>(T) {
    return TrainAs<T>(config, corpus, settings, *core, hooks);
  });
}

}  // namespace moe::lm
