#include "moe/lm/training_loop.h"

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
#include "moe/lm/model.h"
#include "moe/lm/run_checkpoints.h"
#include "moe/lm/run_settings.h"
#include "moe/lm/step_totals.h"
#include "moe/lm/text_rounds.h"
#include "moe/lm/train_config.h"
#include "moe/state/parameter_hash.h"
#include "moe/train/non_finite.h"
#include "moe/train/trainer.h"

namespace moe::lm {
namespace {

constexpr int kPhases = static_cast<int>(Phase::kCount);

void AddDifference(const ExchangeBytes& before, const ExchangeBytes& after, ExchangeBytes& sum) {
  sum.self += after.self - before.self;
  sum.same_node += after.same_node - before.same_node;
  sum.cross_node += after.cross_node - before.cross_node;
}

// The training loop of one rank, for a model of storage type T. Build, then Run, once.
template <typename T>
class TrainingLoop {
 public:
  TrainingLoop(const TrainConfig& config, const Corpus& corpus,
               const std::vector<RunSetting>& settings, const TrainHooks& hooks, Trainer& trainer)
      : config_(config),
        corpus_(corpus),
        settings_(settings),
        hooks_(hooks),
        trainer_(trainer),
        context_(trainer.context()),
        world_(context_.mesh->world()),
        trace_(trainer.session().trace()) {}

  absl::Status Build();
  absl::StatusOr<TrainReport> Run();

 private:
  // What comes before the first step.
  absl::Status Begin();
  absl::Status Restore();
  // One step with all that follows it: metrics, hooks, evaluation, checkpoint.
  absl::Status Step(int64_t step);
  // The step itself: its passes and the update of the weights.
  absl::Status Learn(int64_t step);
  absl::Status Optimize(int64_t step);
  absl::Status Skipped(int64_t step);
  absl::Status VerifyReplicas(int64_t step);
  // Completes metrics_ with what the step has summed and measured.
  absl::Status Collect(int64_t start_ns);
  absl::Status Measure(double seconds);
  absl::Status CheckWeights() const;
  void AddToReport();
  absl::Status HandOverRouting(int64_t step);
  absl::Status HandOverTrace(int64_t step);
  // Measures report_.validation_loss_after.
  absl::Status Evaluate();
  absl::Status Save(int64_t step, const CheckpointVotes& votes);
  // What comes after the last step: comparisons, and the report's sums over ranks.
  absl::Status Finish();
  absl::Status SumBytes(const Site& site);
  int64_t ActiveParameters() const;
  // Sent by this rank so far to others that share matrices with it.
  int64_t TensorBytes() const {
    Mesh& mesh = *context_.mesh;
    int64_t bytes = 0;
    for (const MeshGroup group : {MeshGroup::kTensor, MeshGroup::kExpertTensor}) {
      if (mesh.size(group) > 1) bytes += mesh.group(group).bytes_sent();
    }
    return bytes;
  }

  LossScaler* scaler() { return scaler_.has_value() ? &*scaler_ : nullptr; }
  // Learning rate of the next step: skipped steps do not count.
  double LearningRate() const { return config_.schedule.At(optimizer_->steps_taken() + 1); }

  const TrainConfig& config_;
  const Corpus& corpus_;
  const std::vector<RunSetting>& settings_;
  const TrainHooks& hooks_;
  Trainer& trainer_;
  const Context& context_;
  Communicator& world_;
  TraceRecorder* const trace_;        // nullptr: no time line
  Model<T>* model_ = nullptr;         // owned by trainer_
  Optimizer* optimizer_ = nullptr;    // owned by trainer_
  std::optional<LossScaler> scaler_;  // for float16
  std::optional<StepTotals> totals_;
  std::unique_ptr<RoutingRecorder> routing_;  // nullptr: routing is not recorded
  std::optional<TextRounds<T>> rounds_;
  ExchangeBytes exchanged_;  // bytes of steps; validation counts apart
  GradientNorm gradient_norm_;
  StepMetrics metrics_;  // those of the last step; every step reuses their memory
  TrainReport report_;
  std::optional<TrainingState> state_;
  std::unique_ptr<RunFolder> folder_;  // nullptr: nothing is saved
  std::string run_;                    // identifier of the run that its checkpoints are of (RunOf)
  std::unique_ptr<Checkpointer> checkpointer_;  // nullptr: nothing is saved
};

template <typename T>
absl::Status TrainingLoop<T>::Build() {
  MOE_ASSIGN_OR_RETURN(auto model,
                       Model<T>::Create(ModelConfig(config_), trainer_.pipeline().shape(),
                                        trainer_.parameters(), context_));
  MOE_ASSIGN_OR_RETURN(model_, trainer_.Add(std::move(model)));
  if (config_.trainer.dtype == DType::kFloat16) scaler_.emplace(config_.loss_scale);
  totals_.emplace(model_->moe_layers());
  trainer_.SumOverRanks(totals_->fields());
  if (config_.record_routing) {
    routing_ = std::make_unique<RoutingRecorder>(model_->moe_layers(),
                                                 config_.model.moe.router.num_experts);
    model_->CountSlots(routing_->slots());
  }
  rounds_.emplace(config_, corpus_.train, *model_, *totals_, routing_.get());
  if (hooks_.load_weights) {
    MOE_RETURN_IF_ERROR(hooks_.load_weights(trainer_.parameters(), context_));
  }
  MOE_ASSIGN_OR_RETURN(optimizer_, trainer_.optimizer());  // with ZeRO it takes over the masters
  state_.emplace(trainer_.parameters(), *optimizer_, trainer_.states(), context_);
  return absl::OkStatus();
}

template <typename T>
absl::StatusOr<TrainReport> TrainingLoop<T>::Run() {
  MOE_RETURN_IF_ERROR(Begin());
  for (int64_t step = report_.first_step + 1; step <= config_.steps && !report_.stopped; ++step) {
    MOE_RETURN_IF_ERROR(Step(step));
  }
  MOE_RETURN_IF_ERROR(Finish());
  return std::move(report_);
}

template <typename T>
absl::Status TrainingLoop<T>::Begin() {
  context_.clock->KeepMeetings();
  MOE_RETURN_IF_ERROR(Restore());
  if (hooks_.on_begin) hooks_.on_begin(report_.first_step, context_);
  MOE_RETURN_IF_ERROR(Evaluate());
  report_.validation_loss_before = report_.validation_loss_after;
  report_.expert_load.assign(model_->moe_layers(),
                             std::vector<int64_t>(config_.model.moe.router.num_outputs(), 0));
  return absl::OkStatus();
}

template <typename T>
absl::Status TrainingLoop<T>::Restore() {
  MOE_ASSIGN_OR_RETURN(folder_, OpenFolder(config_.checkpoints, context_));
  MOE_ASSIGN_OR_RETURN(const ResumedRun resumed,
                       Resume(config_, settings_, *state_, scaler(), context_));
  run_ = resumed.run.value_or(folder_ == nullptr ? "" : folder_->run());
  MOE_RETURN_IF_ERROR(trainer_.ResumeAfter(resumed.step));
  if (!config_.trainer.unit_log2.has_value()) trainer_.RestoreGridUnit(resumed.grid_unit);
  MOE_ASSIGN_OR_RETURN(checkpointer_, MakeCheckpointer(config_, resumed, folder_.get(), hooks_.stop,
                                                       *state_, context_));
  report_.first_step = report_.steps = resumed.step;
  return absl::OkStatus();
}

template <typename T>
absl::Status TrainingLoop<T>::Step(int64_t step) {
  const int64_t start_ns = MonotonicNs();
  const bool traced = step >= config_.trace_first_step && step <= config_.trace_last_step;
  if (trace_ != nullptr) trace_->Switch(traced);
  const ExchangeBytes before = model_->exchange_bytes();
  const int64_t between_stages = trainer_.pipeline().bytes_sent();
  const int64_t of_tensors = TensorBytes();
  metrics_.step = step;
  metrics_.learning_rate = LearningRate();
  metrics_.loss_scale = scaler_.has_value() ? scaler_->scale() : 0;
  MOE_RETURN_IF_ERROR(Timed(context_, {.name = "step", .step = step}, {.name = "step"},
                            *context_.compute, [&] { return Learn(step); }));
  if (trace_ != nullptr) trace_->Switch(false);
  const CheckpointVotes votes = totals_->votes();  // an evaluation clears the totals
  MOE_RETURN_IF_ERROR(VerifyReplicas(step));
  AddDifference(before, model_->exchange_bytes(), exchanged_);
  report_.pipeline_bytes += trainer_.pipeline().bytes_sent() - between_stages;
  report_.tensor_bytes += TensorBytes() - of_tensors;
  MOE_RETURN_IF_ERROR(Collect(start_ns));
  AddToReport();
  MOE_RETURN_IF_ERROR(HandOverRouting(step));
  const int64_t interval = config_.evaluation.interval;
  metrics_.has_validation = step == config_.steps || (interval > 0 && step % interval == 0);
  if (metrics_.has_validation) {
    MOE_RETURN_IF_ERROR(Evaluate());
    metrics_.validation_loss = report_.validation_loss_after;
  }
  if (world_.rank() == 0 && hooks_.on_step) MOE_RETURN_IF_ERROR(hooks_.on_step(metrics_));
  MOE_RETURN_IF_ERROR(HandOverTrace(step));
  report_.stopped = votes.stop > 0 && step < config_.steps;
  return Save(step, votes);
}

template <typename T>
absl::Status TrainingLoop<T>::Learn(int64_t step) {
  totals_->Clear();
  // Votes travel with the totals: all ranks stop or save together.
  if (checkpointer_ != nullptr) {
    totals_->Vote(checkpointer_->Votes());
  } else if (hooks_.stop != nullptr && hooks_.stop->received() != 0) {
    totals_->Vote({.stop = 1});
  }
  if (routing_ != nullptr) routing_->Clear();
  MOE_RETURN_IF_ERROR(trainer_.BeginStep(scaler_.has_value() ? scaler_->scale_log2() : 0));
  MOE_RETURN_IF_ERROR(WithWeight(trainer_.RunRounds(model_->pipeline(), *rounds_),
                                 trainer_.parameters(), context_));
  MOE_RETURN_IF_ERROR(trainer_.Reduce());
  // Weights move only if the loss of all ranks is finite.
  if (totals_->non_finite() > 0) {
    return absl::DataLossError(
        absl::StrCat("step ", step, ": loss is not finite (", totals_->non_finite(),
                     " values), expected a finite one: lower --lr or raise --lr-warmup-steps"));
  }
  return Optimize(step);
}

// Moves the weights unless gradients have overflowed: all ranks see the same sums and decide alike.
template <typename T>
absl::Status TrainingLoop<T>::Optimize(int64_t step) {
  MOE_ASSIGN_OR_RETURN(gradient_norm_, trainer_.Step({.learning_rate = LearningRate(),
                                                      .non_finite = NonFiniteGradients::kSkip,
                                                      .weights = NonFiniteWeights::kReport}));
  if (!gradient_norm_.finite()) return Skipped(step);
  if (scaler_.has_value()) scaler_->StepTaken();
  return absl::OkStatus();
}

// Returns an error where neither another unit of the exact grid nor a loss scale can help.
template <typename T>
absl::Status TrainingLoop<T>::Skipped(int64_t step) {
  const bool off_grid = gradient_norm_.off_grid();
  // The unit has grown.
  if (off_grid && !config_.trainer.unit_log2.has_value()) return absl::OkStatus();
  absl::Status skipped =
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
  MOE_ASSIGN_OR_RETURN(const std::string first, optimizer_->NonFiniteSource());
  return absl::DataLossError(
      absl::StrCat("step ", step, ": gradient norm is ", gradient_norm_.value, why,
                   ", expected a finite one: lower --lr or raise --lr-warmup-steps", first));
}

// Compares copies of weights where --verify-replicas asks for it; the end of the run has its own
// comparison.
template <typename T>
absl::Status TrainingLoop<T>::VerifyReplicas(int64_t step) {
  if (config_.verify_replicas == 0 || step % config_.verify_replicas != 0) return absl::OkStatus();
  return CheckReplicas(trainer_.parameters(), context_, {.name = "verify replicas", .step = step});
}

template <typename T>
absl::Status TrainingLoop<T>::Collect(int64_t start_ns) {
  const int32_t experts = config_.model.moe.router.num_experts;
  metrics_.loss = totals_->MeanLoss();
  metrics_.grad_norm = gradient_norm_.value;
  metrics_.skipped = !gradient_norm_.finite();
  metrics_.grid_loss = gradient_norm_.grid_loss;
  metrics_.aux_loss = totals_->MeanAuxLoss(config_.trainer.micro_batches);
  metrics_.router_entropy = totals_->MeanEntropy();
  metrics_.expert_load = model_->expert_load();
  metrics_.max_violation = MaxViolation(metrics_.expert_load, experts);
  metrics_.dead_experts = DeadExperts(metrics_.expert_load, experts);
  metrics_.drop_fraction = totals_->slots() == 0 ? 0
                                                 : static_cast<double>(totals_->dropped()) /
                                                       static_cast<double>(totals_->slots());
  MOE_RETURN_IF_ERROR(Measure(SecondsSince(start_ns)));
  metrics_.tokens_per_second = static_cast<double>(totals_->tokens()) / metrics_.step_seconds;
  return absl::OkStatus();
}

// Adds to metrics_ what differs between ranks: the slowest rank's time, mean phases, most memory.
// Fails where weights of any rank are not finite, so that no checkpoint of them begins.
template <typename T>
absl::Status TrainingLoop<T>::Measure(double seconds) {
  MOE_RETURN_IF_ERROR(context_.compute->Synchronize());  // waits for the clock's last tasks
  const Site site = {.name = "step metrics", .step = metrics_.step};
  double most[2] = {seconds, static_cast<double>(trainer_.state_bytes().allocated +
                                                 trainer_.session().peak_bytes() +
                                                 trainer_.pipeline().peak_bytes())};
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
  if (sum[kPhases + 3] > 0) return CheckWeights();
  metrics_.step_seconds = most[0];
  metrics_.peak_bytes = static_cast<int64_t>(most[1]);
  for (double& each : sum) each /= world_.size();
  std::copy_n(sum, kPhases, metrics_.phase_seconds);
  metrics_.exchange_seconds = {
      .copy = sum[kPhases], .gather = sum[kPhases + 1], .wait = sum[kPhases + 2]};
  return absl::OkStatus();
}

template <typename T>
absl::Status TrainingLoop<T>::CheckWeights() const {
  const int64_t step = metrics_.step;
  absl::Status found = optimizer_->CheckFinite({.name = "step metrics", .step = step});
  if (!absl::IsDataLoss(found)) return found;
  return absl::DataLossError(absl::StrCat("step ", step, ": ", found.message(),
                                          ", expected finite ones: lower --lr, or raise "
                                          "--lr-warmup-steps or --adam-eps"));
}

template <typename T>
void TrainingLoop<T>::AddToReport() {
  report_.steps = metrics_.step;
  report_.skipped_steps = metrics_.step - optimizer_->steps_taken();
  report_.tokens += totals_->tokens();
  report_.dropped_slots += totals_->dropped();
  report_.total_slots += totals_->slots();
  report_.seconds += metrics_.step_seconds;
  for (int p = 0; p < kPhases; ++p) report_.phase_seconds[p] += metrics_.phase_seconds[p];
  report_.exchange_seconds.copy += metrics_.exchange_seconds.copy;
  report_.exchange_seconds.gather += metrics_.exchange_seconds.gather;
  report_.exchange_seconds.wait += metrics_.exchange_seconds.wait;
  for (size_t layer = 0; layer < report_.expert_load.size(); ++layer) {
    for (size_t e = 0; e < report_.expert_load[layer].size(); ++e) {
      report_.expert_load[layer][e] += metrics_.expert_load[layer][e];
    }
  }
  if (config_.trainer.session.numerics == Numerics::kFast) return;
  report_.grid_unit_log2 = trainer_.grid_unit().log2;
  if (gradient_norm_.grid_loss <= report_.grid_loss) return;
  report_.grid_loss = gradient_norm_.grid_loss;
  report_.grid_loss_tensor = gradient_norm_.grid_loss_tensor;
  report_.grid_loss_step = metrics_.step;
}

template <typename T>
absl::Status TrainingLoop<T>::HandOverRouting(int64_t step) {
  if (routing_ == nullptr) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(const auto records,
                       routing_->Gather(step, model_->stage_of(), *context_.mesh, *context_.host));
  return world_.rank() == 0 ? hooks_.on_routing(records) : absl::OkStatus();
}

template <typename T>
absl::Status TrainingLoop<T>::HandOverTrace(int64_t step) {
  if (trace_ == nullptr || step != std::min(config_.steps, config_.trace_last_step)) {
    return absl::OkStatus();
  }
  MOE_ASSIGN_OR_RETURN(report_.trace_left_out,
                       ExportTrace(*trace_, hooks_.trace, world_, *context_.host,
                                   {.name = "time line", .step = step}));
  return absl::OkStatus();
}

template <typename T>
absl::Status TrainingLoop<T>::Evaluate() {
  const int64_t sequences =
      EvaluationSequences(config_, corpus_.held_out, config_.evaluation.sequences);
  MOE_ASSIGN_OR_RETURN(
      report_.validation_loss_after,
      MeanLoss<T>(config_, corpus_.held_out, sequences, trainer_, *model_, *totals_));
  return context_.clock->Reset();
}

template <typename T>
absl::Status TrainingLoop<T>::Save(int64_t step, const CheckpointVotes& votes) {
  if (checkpointer_ == nullptr) return absl::OkStatus();
  const auto describe = [&] {
    return Describe(settings_, run_, optimizer_->steps_taken(), scaler(), trainer_);
  };
  MOE_RETURN_IF_ERROR(step == config_.steps ? checkpointer_->Finish(step, describe)
                                            : checkpointer_->AfterStep(step, votes, describe));
  report_.saved_step = checkpointer_->saved_step();
  report_.checkpoint_failures = checkpointer_->failures();
  return absl::OkStatus();
}

template <typename T>
absl::Status TrainingLoop<T>::Finish() {
  const Site site = {.name = "end report", .step = config_.steps};
  MOE_RETURN_IF_ERROR(CheckReplicas(trainer_.parameters(), context_, site));
  MOE_ASSIGN_OR_RETURN(report_.weights_xxh3, state_->HashWeights(site));
  MOE_ASSIGN_OR_RETURN(report_.parameters_total,
                       CountParameters(trainer_.parameters(), context_, site));
  report_.parameters_active = ActiveParameters();
  report_.bfloat16_order = trainer_.bfloat16_order();
  return SumBytes(site);
}

// All parameters but those of experts that a token does not choose.
template <typename T>
int64_t TrainingLoop<T>::ActiveParameters() const {
  const MoeLayerConfig& moe = config_.model.moe;
  const int64_t up_rows = moe.ffn_hidden_size * (IsGated(moe.activation) ? 2 : 1);
  const int64_t expert_size = config_.model.hidden_size * (up_rows + moe.ffn_hidden_size) +
                              (moe.projection_biases ? up_rows + config_.model.hidden_size : 0);
  return report_.parameters_total -
         model_->moe_layers() * expert_size * (moe.router.num_experts - moe.router.top_k);
}

template <typename T>
absl::Status TrainingLoop<T>::SumBytes(const Site& site) {
  Stream& stream = *context_.host;
  int64_t reduced = 0;
  if (report_.steps > report_.first_step) {  // otherwise there are no sums
    report_.reduced_replicated = trainer_.traffic(MeshGroup::kStage);
    report_.reduced_experts = trainer_.traffic(MeshGroup::kExpertData);
    const auto add = [&](MeshGroup holders, MeshGroup apart, GradientReducer::Traffic& to) {
      if (context_.mesh->size(apart) == 1) return;  // they are ranks of those above
      const GradientReducer::Traffic more = trainer_.traffic(holders);
      to.buckets += more.buckets;
      to.bytes_sent += more.bytes_sent;
    };
    add(MeshGroup::kEnds, MeshGroup::kPipeline, report_.reduced_replicated);
    add(MeshGroup::kData, MeshGroup::kTensor, report_.reduced_replicated);
    add(MeshGroup::kExpertHolders, MeshGroup::kExpertTensor, report_.reduced_experts);
    reduced = report_.reduced_replicated.bytes_sent + report_.reduced_experts.bytes_sent;
  }
  int64_t bytes[] = {exchanged_.self, exchanged_.same_node,   exchanged_.cross_node,
                     reduced,         report_.pipeline_bytes, report_.tensor_bytes};
  MOE_RETURN_IF_ERROR(
      world_.AllReduce<int64_t>(absl::MakeSpan(bytes), ReduceOp::kSum, stream, site));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  report_.exchange_bytes.self = bytes[0];
  report_.exchange_bytes.same_node = bytes[1];
  report_.exchange_bytes.cross_node = bytes[2];
  report_.all_reduce_bytes = bytes[3];
  report_.pipeline_bytes = bytes[4];
  report_.tensor_bytes = bytes[5];
  const Trainer::StateBytes state = trainer_.state_bytes();
  int64_t most[] = {state.allocated, state.formula};
  MOE_RETURN_IF_ERROR(
      world_.AllReduce<int64_t>(absl::MakeSpan(most), ReduceOp::kMax, stream, site));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  report_.state_bytes = most[0];
  report_.state_bytes_formula = most[1];
  return absl::OkStatus();
}

template <typename T>
absl::StatusOr<TrainReport> TrainAs(const TrainConfig& config, const Corpus& corpus,
                                    const std::vector<RunSetting>& settings,
                                    const TrainHooks& hooks, Trainer& trainer) {
  TrainingLoop<T> loop(config, corpus, settings, hooks, trainer);
  return trainer.session().OrEnd([&]() -> absl::StatusOr<TrainReport> {
    MOE_RETURN_IF_ERROR(loop.Build());
    return loop.Run();
  });
}

}  // namespace

absl::StatusOr<TrainReport> Train(const TrainConfig& given, const Corpus& corpus,
                                  std::unique_ptr<Communicator> world, const TrainHooks& hooks) {
  // First, so that what follows fails on every rank or on none.
  MOE_RETURN_IF_ERROR(CheckAgreement(SettingsOf(given, corpus), *world));
  MOE_RETURN_IF_ERROR(ValidateTrainConfig(given, world->size()));
  TrainConfig config = given;
  MOE_ASSIGN_OR_RETURN(config.trainer.session.bfloat16_order, BFloat16OrderOf(given, *world));
  const std::vector<RunSetting> settings = SettingsOf(config, corpus);
  MOE_RETURN_IF_ERROR(CheckTextLength(config, corpus));
  MOE_RETURN_IF_ERROR(CheckTraceSteps(config));
  MOE_ASSIGN_OR_RETURN(const auto trainer, CreateTrainer(config, std::move(world)));
  const Context& context = trainer->context();
  MOE_RETURN_IF_ERROR(CheckRecords(config, hooks, context.mesh->world(), *context.host));
  return WithStorageType(config.trainer.dtype, [&]<typename T>(T) {
    return TrainAs<T>(config, corpus, settings, hooks, *trainer);
  });
}

}  // namespace moe::lm
