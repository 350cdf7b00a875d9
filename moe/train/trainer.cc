#include "moe/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "kernels/base/caught.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "kernels/elementwise/elementwise.h"
#include "moe/run/finite.h"

namespace moe {

Trainer::Trainer(const TrainerOptions& options, std::unique_ptr<Session> session)
    : options_(options),
      session_(std::move(session)),
      micro_batches_(options.micro_batches > 0 ? options.micro_batches
                                               : session_->context().mesh->world().size()),
      placement_(PlacementOf(options.zero, options.offload.optimizer)),
      dealt_(micro_batches_),
      store_(options.dtype, options.seed, session_->context()),
      grid_unit_(options.unit_log2) {
  if (placement_.weights == Holding::kPart) store_.set_deferred();
}

std::optional<BFloat16Order> Trainer::bfloat16_order() const {
  if (!HasBFloat16Order(options_)) return std::nullopt;
  return context().gemm.bfloat16_order;
}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(const TrainerOptions& options,
                                                         std::unique_ptr<Communicator> world) {
  if (options.micro_batches < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("Trainer: micro_batches is ", options.micro_batches, ", expected >= 0"));
  }
  MOE_RETURN_IF_ERROR(CheckBFloat16Order(options));
  if (options.offload.optimizer != OffloadTo::kNone &&
      options.session.device == DeviceKind::kCuda) {
    return absl::UnimplementedError(
        "Trainer: optimiser state is not offloaded from CUDA devices, expected Offload of kNone");
  }
  if (options.offload.optimizer == OffloadTo::kHost && world->rank() == 0) {
    Log(LogLevel::kInfo, "optimiser state is in memory of the host already: offload has no effect");
  }
  SessionOptions of_session = options.session;
  if (options.pipeline_schedule == ScheduleKind::k1F1BOverlap) of_session.overlap_exchange = true;
  MOE_ASSIGN_OR_RETURN(auto session, Session::Create(of_session, std::move(world)));
  std::unique_ptr<Trainer> trainer(new Trainer(options, std::move(session)));
  MOE_ASSIGN_OR_RETURN(trainer->runner_,
                       PipelineRunner::Create(PipelineOf(options), trainer->context()));
  return trainer;
}

Trainer::~Trainer() {
  if (running_ == Running::kNothing) return;
  session_->End(
      Caught([&] { return absl::AbortedError(absl::StrCat("step ", step_, " was given up")); }));
}

template <typename T>
absl::StatusOr<TrainedLayer<T>*> Trainer::AddMoeLayer(const std::string& prefix,
                                                      const MoeLayerConfig& config) {
  MOE_RETURN_IF_ERROR(CheckNoStepYet(absl::StrCat("layer ", prefix)));
  MOE_ASSIGN_OR_RETURN(auto layer, MoeLayer<T>::Create(config, prefix, store_, context()));
  return Add(std::unique_ptr<TrainedLayer<T>>(new TrainedLayer<T>(*this, std::move(layer))));
}

absl::StatusOr<TrainedLayerBase*> Trainer::AddMoeLayer(const std::string& prefix,
                                                       const MoeLayerConfig& config) {
  return WithStorageType(store_.compute(), [&](auto element) -> absl::StatusOr<TrainedLayerBase*> {
    return AddMoeLayer<decltype(element)>(prefix, config);
  });
}

absl::StatusOr<Parameter*> Trainer::AddParameter(const ParameterSpec& spec) {
  MOE_RETURN_IF_ERROR(CheckNoStepYet(absl::StrCat("parameter ", spec.name)));
  MOE_ASSIGN_OR_RETURN(Parameter* const parameter, store_.Add(spec));
  if (spec.trainable) own_.push_back(parameter);
  return parameter;
}

double Trainer::loss_scale() const {
  return std::ldexp(1.0, loss_scale_log2_);
}

double Trainer::gradient_scale() const {
  return 1.0 / (static_cast<double>(micro_batches_) * loss_scale());
}

absl::Status Trainer::Freeze() {
  int partials = 1;
  for (const auto& parameter : store_.parameters()) {
    partials = std::max(partials, parameter->spec().partials);
  }
  MOE_ASSIGN_OR_RETURN(
      reducer_,
      GradientReducer::Create({.bucket_bytes = options_.bucket_bytes,
                               .algorithm = options_.all_reduce,
                               .max_terms = context().tensor_leaves * partials * micro_batches_,
                               .placement = placement_},
                              store_, context(), session_->gradient_stream()));
  return absl::OkStatus();
}

absl::Status Trainer::BeginStep(int loss_scale_log2) {
  MOE_RETURN_IF_ERROR(CheckEnded("BeginStep"));
  if (reducer_ == nullptr) MOE_RETURN_IF_ERROR(Freeze());
  // Masters that only their owners keep go before the sums are allocated: the peak is lower.
  if (placement_.optimizer == Holding::kPart || placement_.tier == StateTier::kFile) {
    MOE_RETURN_IF_ERROR(optimizer().status());
  }
  running_ = Running::kStep;
  gradients_ = Gradients::kHere;
  clip_ = 1;
  norm_.reset();
  context().non_finite->Clear();
  counts_are_sums_ = false;
  loss_scale_log2_ = loss_scale_log2;
  ++step_;
  return reducer_->Begin(loss_scale_log2, grid_unit_.state().log2);
}

absl::Status Trainer::BeginEvaluation(int64_t micro_batches) {
  MOE_RETURN_IF_ERROR(CheckEnded("BeginEvaluation"));
  MOE_RETURN_IF_ERROR(HaveWeights());
  running_ = Running::kEvaluation;
  dealt_ = micro_batches;
  return absl::OkStatus();
}

// Those in parts are made with the state of their optimiser.
absl::Status Trainer::HaveWeights() {
  return placement_.weights == Holding::kPart ? optimizer().status() : absl::OkStatus();
}

absl::StatusOr<Round> Trainer::BeginRound() {
  if (running_ == Running::kNothing) MOE_RETURN_IF_ERROR(BeginStep());
  if (rounds_begun_ == rounds()) {
    return absl::FailedPreconditionError(absl::StrCat("Trainer::BeginRound: step ", step_, " has ",
                                                      rounds(), " rounds, expected ",
                                                      evaluates() ? "EndStep" : "Step"));
  }
  if (!evaluates() && rounds_begun_ > 0) {
    MOE_RETURN_IF_ERROR(MarkOwn());
    for (int chunk = 0; chunk < runner_->shape().chunks; ++chunk) {
      MOE_RETURN_IF_ERROR(reducer_->BeginRound(chunk));
    }
  }
  EndRound();
  scope_.emplace(*context().workspace);
  host_scope_.emplace(*context().host_workspace);
  if (!evaluates()) stash_ = session_->stashes().Take();
  const Round round = RoundAt(rounds_begun_++);
  round_ = Round(round.micro_batch(), round.index(), step_, round_.number() + 1);
  return round_;
}

Round Trainer::RoundAt(int64_t index) const {
  const Mesh& mesh = *context().mesh;
  const MicroBatchRange mine =
      MicroBatchesOf(mesh.index(MeshGroup::kData), mesh.size(MeshGroup::kData), dealt_);
  const int64_t micro_batch = mine.begin + index;
  return Round(micro_batch < mine.end ? micro_batch : -1, index, step_, 0);
}

// The runner begins all rounds, in the order of its own.
absl::Status Trainer::BeginRounds() {
  if (running_ == Running::kNothing) MOE_RETURN_IF_ERROR(BeginStep());
  if (rounds_begun_ > 0) {
    return absl::FailedPreconditionError(absl::StrCat("Trainer::RunRounds: ", rounds_begun_, " of ",
                                                      rounds(),
                                                      " rounds have begun, expected none"));
  }
  rounds_begun_ = rounds();
  return absl::OkStatus();
}

absl::Status Trainer::BeginBackward(const Round& round, int chunk) {
  return round.index() == 0 ? absl::OkStatus() : reducer_->BeginRound(chunk);
}

absl::Status Trainer::MarkComplete(const Round& round, const Parameter& parameter) {
  const bool last = round.index() + 1 == rounds();
  if (!last && !reducer_->travels_each_round(parameter)) return absl::OkStatus();
  if (last) gradients_ = Gradients::kMarked;
  return reducer_->MarkReady(parameter, PassOf(round).site);
}

void Trainer::EndRound() {
  stash_.reset();
  host_scope_.reset();
  scope_.reset();
}

Pass Trainer::PassOf(const Round& round, const Batch& batch) const {
  return {.context = context(),
          .batch = batch,
          .stash = stash_.get(),
          .site = runner_->SiteOf(round, evaluates() ? "evaluation" : "step"),
          .weights = weights_,
          .d_loss = static_cast<float>(loss_scale())};
}

absl::Status Trainer::AddGradient(const Parameter& parameter, absl::Span<const float> values) {
  if (std::ssize(values) != parameter.size()) {
    return absl::InvalidArgumentError(absl::StrCat("Trainer::AddGradient: ", values.size(),
                                                   " values for ", parameter.spec().name,
                                                   ", expected ", parameter.size()));
  }
  if (!parameter.has_sum()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "Trainer::AddGradient: ", parameter.spec().name,
        " has no sum of gradients, expected one that is trained, from before the first "
        "step, and a round"));
  }
  Stream& stream = *context().compute;
  MOE_ASSIGN_OR_RETURN(const GradAccumulator sum, parameter.OpenGradient());
  return sum.Add(
      [&](absl::Span<float> out, Write write) { return Scale(values, 1, out, write, stream); },
      *context().workspace, stream);
}

absl::Status Trainer::CheckEnded(const char* function) const {
  if (running_ == Running::kNothing) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "Trainer::", function, ": ", evaluates() ? "the evaluation after step " : "step ", step_,
      " has not ended, expected ", evaluates() ? "EndStep" : "Step", " before"));
}

absl::Status Trainer::CheckLastRound(const char* function) const {
  if (running_ != Running::kNothing && rounds_begun_ == rounds()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("Trainer::", function, ": ", rounds_begun_,
                                                    " of ", rounds(),
                                                    " rounds have begun, expected all"));
}

absl::Status Trainer::CheckInStep(const char* function) const {
  if (!evaluates()) return CheckLastRound(function);
  return absl::FailedPreconditionError(
      absl::StrCat("Trainer::", function, ": an evaluation has no gradients, expected EndStep"));
}

absl::Status Trainer::CheckReduced(const char* function) const {
  if (gradients_ == Gradients::kReduced) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "Trainer::", function, ": the gradients of step ", step_, " are no sums, expected Reduce"));
}

absl::Status Trainer::CheckCurrent(const Round& round) const {
  if (scope_.has_value() && round.number() == round_.number()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("Trainer: round ", round.index(), " of step ", round.step(),
                   " has ended, expected the round that BeginRound returned last"));
}

absl::Status Trainer::MarkReady(const Round& round, const Parameter& parameter) {
  MOE_RETURN_IF_ERROR(CheckCurrent(round));
  return MarkReady(parameter);
}

absl::Status Trainer::MarkReady(const Parameter& parameter) {
  if (evaluates()) return CheckInStep("MarkReady");
  return MarkComplete(RoundAt(rounds_begun_ - 1), parameter);
}

absl::Status Trainer::MarkOwn() {
  for (const Parameter* const parameter : own_) MOE_RETURN_IF_ERROR(MarkReady(*parameter));
  return absl::OkStatus();
}

absl::Status Trainer::Reduce() {
  MOE_RETURN_IF_ERROR(CheckInStep("Reduce"));
  if (gradients_ == Gradients::kReduced) return absl::OkStatus();
  for (const auto& module : modules_) MOE_RETURN_IF_ERROR(module->CheckPasses());
  MOE_RETURN_IF_ERROR(MarkOwn());
  EndRound();
  MOE_RETURN_IF_ERROR(Timed(context(), {.step = step_}, {.name = "wait for gradients"},
                            *context().compute, [&] { return reducer_->Finish(); }));
  MOE_RETURN_IF_ERROR(context().compute->Synchronize());
  MOE_RETURN_IF_ERROR(TakeCounts());
  gradients_ = Gradients::kReduced;
  // A loop reads its sums before weights move; other counts wait for those of the optimiser.
  if (loop_counts_.empty()) return absl::OkStatus();
  counts_are_sums_ = true;
  return Timed(context(), {.name = "step totals", .step = step_}, {.name = "step totals"},
               *context().compute,
               [&] { return SumCounts(absl::MakeSpan(counts_), "step totals"); });
}

absl::Status Trainer::CheckNoStepYet(absl::string_view what) const {
  if (reducer_ == nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("Trainer: ", what, " comes after the first step, expected before"));
}

std::vector<ModuleState> Trainer::states() {
  std::vector<ModuleState> states;
  for (const auto& module : modules_) {
    for (const ModuleState& state : module->states()) states.push_back(state);
  }
  return states;
}

// Fills counts_ with what this rank has counted in the step so far.
absl::Status Trainer::TakeCounts() {
  int64_t size = std::ssize(loop_counts_) + 1;
  for (const auto& module : modules_) size += module->count_size();
  counts_.resize(size);
  absl::Span<int64_t> counts = absl::MakeSpan(counts_);
  for (const auto& module : modules_) {
    const auto count = static_cast<size_t>(module->count_size());
    MOE_RETURN_IF_ERROR(module->TakeCounts(counts.first(count)));
    counts.remove_prefix(count);
  }
  std::copy(loop_counts_.begin(), loop_counts_.end(), counts.begin());
  counts.back() = 0;
  return absl::OkStatus();
}

// Replaces counts, all of counts_ or its last ones, by their sums over ranks: integers, so the same
// on every rank.
absl::Status Trainer::SumCounts(absl::Span<int64_t> counts, const char* name) {
  Stream& host = *context().host;
  MOE_RETURN_IF_ERROR(context().mesh->world().AllReduce<int64_t>(
      counts, ReduceOp::kSum, host, {.name = name, .step = step_, .grace = runner_->grace()}));
  MOE_RETURN_IF_ERROR(host.Synchronize());
  std::copy_n(counts_.end() - 1 - std::ssize(loop_counts_), loop_counts_.size(),
              loop_counts_.begin());
  return absl::OkStatus();
}

absl::StatusOr<GradientNorm> Trainer::MeasureGradients() {
  MOE_RETURN_IF_ERROR(CheckReduced("MeasureGradients"));
  MOE_ASSIGN_OR_RETURN(norm_,
                       reducer_->Norm(gradient_scale(), {.name = "gradients", .step = step_}));
  return *norm_;
}

absl::StatusOr<double> Trainer::ClipGradNorm(double most) {
  MOE_ASSIGN_OR_RETURN(GradientNorm norm, MeasureGradients());
  norm.value *= clip_;
  MOE_ASSIGN_OR_RETURN(const double factor, norm.ClipFactor(most));
  clip_ *= factor;
  return norm.value;
}

absl::Status Trainer::Gradient(const Parameter& parameter, absl::Span<float> out) const {
  MOE_RETURN_IF_ERROR(CheckReduced("Gradient"));
  return reducer_->Gradient(parameter, clip_ * gradient_scale(), out, *context().compute).status();
}

absl::StatusOr<Optimizer*> Trainer::optimizer() {
  if (optimizer_ == nullptr) {
    if (reducer_ == nullptr) MOE_RETURN_IF_ERROR(Freeze());
    Stream* weight_stream = nullptr;
    if (placement_.weights == Holding::kPart) {
      MOE_ASSIGN_OR_RETURN(weight_stream, session_->WeightStream());
    }
    MOE_ASSIGN_OR_RETURN(optimizer_,
                         Optimizer::Create(options_.optimizer, store_, *reducer_, context(),
                                           {weight_stream, options_.offload.file}));
    if (weight_stream != nullptr) weights_ = optimizer_->weights();
  }
  return optimizer_.get();
}

Trainer::StateBytes Trainer::state_bytes() const {
  const OptimizerState& state = optimizer_->state();
  StateBytes bytes = {
      .allocated = store_.bytes() + reducer_->bytes() + state.bytes(),
      .formula = static_cast<int64_t>(StateBytesOf(reducer_->buckets(), store_.compute(),
                                                   context().numerics, *context().mesh)) +
                 2 * state.page_bytes()};
  if (const GatheredWeights* const weights = optimizer_->weights(); weights != nullptr) {
    bytes.allocated += weights->bytes();
    bytes.formula += weights->formula_bytes();
  }
  return bytes;
}

GradientReducer::Traffic Trainer::traffic(MeshGroup holders) const {
  GradientReducer::Traffic traffic = reducer_->traffic(holders);
  if (optimizer_ != nullptr) {
    traffic.bytes_sent += optimizer_->bytes_gathered(context().mesh->Canonical(holders));
  }
  return traffic;
}

absl::Status Trainer::ResumeAfter(int64_t step) {
  MOE_RETURN_IF_ERROR(CheckEnded("ResumeAfter"));
  step_ = step;
  return absl::OkStatus();
}

absl::StatusOr<GradientNorm> Trainer::Step(const StepOptions& options) {
  MOE_RETURN_IF_ERROR(CheckInStep("Step"));
  MOE_RETURN_IF_ERROR(Reduce());
  MOE_RETURN_IF_ERROR(optimizer().status());
  const Site site = {.name = "optimiser", .step = step_};
  StepOptions scaled = options;
  scaled.gradient_scale *= gradient_scale();
  GradientNorm norm;
  MOE_RETURN_IF_ERROR(Timed(context(), site, {.phase = Phase::kOptimizer, .name = "optimiser"},
                            *context().compute, [&]() -> absl::Status {
                              MOE_ASSIGN_OR_RETURN(norm, optimizer_->Step(scaled, site));
                              norm_ = norm;
                              return absl::OkStatus();
                            }));
  counts_weights_ = options.weights == NonFiniteWeights::kRefuse;
  MOE_RETURN_IF_ERROR(EndStep());
  return norm;
}

absl::Status Trainer::CheckWeights() const {
  const absl::Status found = optimizer_->CheckFinite({.name = "expert counts", .step = step_});
  if (!absl::IsDataLoss(found)) return found;
  return absl::DataLossError(absl::StrCat("Trainer: step ", step_, ": ", found.message(),
                                          ", expected finite ones: look at the learning rate and "
                                          "at OptimizerOptions::epsilon"));
}

absl::Status Trainer::EndStep() {
  MOE_RETURN_IF_ERROR(CheckLastRound("EndStep"));
  if (!counts_are_sums_) MOE_RETURN_IF_ERROR(TakeCounts());
  if (!evaluates()) {
    if (gradients_ == Gradients::kMarked) MOE_RETURN_IF_ERROR(CheckReduced("EndStep"));
    if (gradients_ == Gradients::kReduced) MOE_RETURN_IF_ERROR(FollowGradients());
    MOE_RETURN_IF_ERROR(EndModules());
  } else if (!loop_counts_.empty()) {
    MOE_RETURN_IF_ERROR(SumCounts(absl::MakeSpan(counts_), "validation"));
  }
  EndRound();
  running_ = Running::kNothing;
  rounds_begun_ = 0;
  dealt_ = micro_batches_;
  return absl::OkStatus();
}

// Every rank sees the same norm and does the same.
absl::Status Trainer::FollowGradients() {
  if (context().numerics != Numerics::kLayoutInvariant) return absl::OkStatus();
  if (!norm_.has_value()) MOE_RETURN_IF_ERROR(MeasureGradients().status());
  const int before = grid_unit_.state().log2;
  grid_unit_.Follow(*norm_, reducer_->max_terms());
  const int after = grid_unit_.state().log2;
  const bool loses = norm_->grid_loss_is_named() && !grid_loss_is_said_;
  grid_loss_is_said_ = grid_loss_is_said_ || loses;
  if (context().mesh->world().rank() != 0 || (!loses && before == after)) return absl::OkStatus();
  std::string text =
      absl::StrCat("step ", step_, ": the exact grid of gradients (unit 2^", before, ")");
  if (loses) {
    absl::StrAppendFormat(&text, " took up to %.1e of %s, relative to its norm", norm_->grid_loss,
                          norm_->grid_loss_tensor);
  } else {
    absl::StrAppendFormat(&text, " has little room for partials of %g", norm_->largest);
  }
  absl::StrAppend(&text, before == after ? "; numerics fast has no grid"
                                         : absl::StrCat("; from now on its unit is 2^", after));
  Log(LogLevel::kWarning, text);
  return absl::OkStatus();
}

absl::Status Trainer::EndModules() {
  const bool weights = std::exchange(counts_weights_, false);
  if (weights) counts_.back() = optimizer_->non_finite();
  absl::Span<int64_t> counts = absl::MakeSpan(counts_);
  if (std::exchange(counts_are_sums_, false)) counts = counts.last(1);
  if (weights || counts.size() > 1) MOE_RETURN_IF_ERROR(SumCounts(counts, "expert counts"));
  absl::Span<const int64_t> sums = counts_;
  for (const auto& module : modules_) {
    const auto count = static_cast<size_t>(module->count_size());
    MOE_RETURN_IF_ERROR(module->EndStep(sums.first(count)));
    sums.remove_prefix(count);
  }
  return counts_.back() > 0 ? CheckWeights() : absl::OkStatus();
}

template absl::StatusOr<TrainedLayer<float>*> Trainer::AddMoeLayer(const std::string&,
                                                                   const MoeLayerConfig&);
template absl::StatusOr<TrainedLayer<BFloat16>*> Trainer::AddMoeLayer(const std::string&,
                                                                      const MoeLayerConfig&);
template absl::StatusOr<TrainedLayer<Float16>*> Trainer::AddMoeLayer(const std::string&,
                                                                     const MoeLayerConfig&);

}  // namespace moe
