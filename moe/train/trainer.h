// One way to run training steps: rounds, gradients, weights, and the end when something fails.
#ifndef MOE_MOE_TRAIN_TRAINER_H_
#define MOE_MOE_TRAIN_TRAINER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "comm/all_reduce.h"
#include "kernels/base/status_macros.h"
#include "moe/layer/moe_layer.h"
#include "moe/pipeline/runner.h"
#include "moe/pipeline/schedule.h"
#include "moe/run/micro_batches.h"
#include "moe/run/pass.h"
#include "moe/run/round.h"
#include "moe/run/session.h"
#include "moe/state/module.h"
#include "moe/state/parameter.h"
#include "moe/train/gradient_reducer.h"
#include "moe/train/grid_unit.h"
#include "moe/train/optimizer.h"

namespace moe {

struct TrainerOptions {
  SessionOptions session = {};
  DType dtype = DType::kFloat32;  // layers' storage type: the T of AddMoeLayer
  uint64_t seed = 1234;           // seed of the initial weights
  // M, the micro-batches of a step over all ranks: the same for every layout whose bits are to be
  // equal. 0 = one for each rank.
  int64_t micro_batches = 0;
  AllReduceAlgorithm all_reduce = AllReduceAlgorithm::kRing;
  // Order of a pipeline's passes (RunRounds), and chunks of each of its stages.
  ScheduleKind pipeline_schedule = ScheduleKind::k1F1B;
  int pipeline_chunks = 1;
  ZeroStage zero = ZeroStage::kNone;  // with a stage above 0, gradients are in parts after Reduce
  Offload offload = {};
  int64_t bucket_bytes = GradientReducerOptions().bucket_bytes;
  // Unit of the exact grid, 2^unit_log2 for losses that are not scaled. Left out: it follows the
  // gradients, and is the default until they are known (moe/train/grid_unit.h).
  std::optional<int> unit_log2 = {};
  OptimizerOptions optimizer = {};
};

// The pipeline of these options: 1F1B over several chunks is interleaved.
PipelineShape PipelineOf(const TrainerOptions& options);

// Whether products of bfloat16 run on a CPU, where they have an order.
bool HasBFloat16Order(const TrainerOptions& options);

// kInvalidArgument, naming flags, for an order of products that the trainer does not have.
absl::Status CheckBFloat16Order(const TrainerOptions& options);

class Trainer;

// A layer of a trainer without its type, for bindings to other languages and frameworks. Its rows
// are [rows, H] of the trainer's type, dense, in memory of the session's device; calls run in the
// trainer's round().
class TrainedLayerBase : public TrainedModule {
 public:
  // A Forward in a host's graph, which saves what its Backward needs.
  struct GraphForward {
    const void* x = nullptr;
    int64_t rows = 0, cols = 0;  // shape of x and y; other columns than H are refused
    void* y = nullptr;
    int64_t sequence_length = 0;            // divides rows; 0: the rows are one sequence
    const uint8_t* padding_mask = nullptr;  // [rows] Batch::padding_mask; nullptr: no padding
    Mode mode = Mode::kTraining;
    bool backward = true;  // false: in any round or none; nothing is saved or counted
  };
  // The Backward of such a Forward, to be called once. d_router_loss: the gradient by
  // stats().loss(), as in MoeLayer::Backward. Copies share the stash. kFailedPrecondition for
  // a second call, where nothing was saved, and when the trainer is gone.
  using GraphBackward = std::function<absl::Status(const void* dy, float d_router_loss, void* dx)>;

  virtual absl::Span<Parameter* const> parameters() const = 0;
  // Statistics of the last Forward. On a CUDA device call its Wait before reading values.
  RouterStats& stats() { return calls_.back().stats; }

  // Forward and Backward of TrainedLayer with these arguments; dy and dx have as many rows as the
  // last ForwardRows. Pointers are null only without rows, that of the mask [rows] also without
  // padding. kUnimplemented on tensor-parallel ranks, as ForwardInGraph: without a batch a rank
  // does not know the rows of the others.
  virtual absl::Status ForwardRows(const void* x, int64_t rows, const uint8_t* padding_mask,
                                   void* y) = 0;
  virtual absl::Status BackwardRows(const void* dy, void* dx) = 0;
  // At most one in a round; its Backward may run any time before Trainer::Reduce, which otherwise
  // names the layer (kFailedPrecondition). Forward and Backward are collective.
  virtual absl::StatusOr<GraphBackward> ForwardInGraph(const GraphForward& call) = 0;

 protected:
  struct Call {
    RouterStats stats;
    bool counts = false;  // whether the stats count in this step's load
  };
  // Calls whose stats were not taken yet; the last one stays.
  std::vector<Call> calls_ = std::vector<Call>(1);
};

// An MoE layer that a trainer owns.
template <typename T>
class TrainedLayer final : public TrainedLayerBase {
 public:
  // y = layer(x), both [T, H] in memory of the session's device; zero rows in an empty round. A
  // batch without micro_batch_offsets is one micro-batch of T rows, whose first global token is
  // micro_batch * T if left out. Tensor-parallel ranks have their own of the T rows (own_rows.h);
  // their batch has offsets and mask of all T. In an evaluation nothing is saved for Backward or
  // counted. Collective. kFailedPrecondition for a round that has ended; errors of
  // MoeLayer::Forward, including that for y in the memory of x where a Backward may follow.
  absl::Status Forward(const Round& round, MatrixView<const T> x, MatrixView<T> y,
                       Batch batch = {});
  // dx [T, H] overwritten; gradients of weights are added. dy: gradients of the micro-batch's loss,
  // times Trainer::loss_scale(). Once in every round. Collective.
  absl::Status Backward(const Round& round, MatrixView<const T> dy, MatrixView<T> dx);

  absl::Span<Parameter* const> parameters() const override { return layer_->parameters(); }
  absl::Status ForwardRows(const void* x, int64_t rows, const uint8_t* padding_mask,
                           void* y) override;
  absl::Status BackwardRows(const void* dy, void* dx) override;
  absl::StatusOr<GraphBackward> ForwardInGraph(const GraphForward& call) override;

  std::vector<ModuleState> states() override { return {layer_->router_share()}; }
  // Number of the router's outputs, each of which has a count of slots.
  int64_t count_size() const override { return std::ssize(counts_); }
  absl::Status TakeCounts(absl::Span<int64_t> counts) override;
  absl::Status CheckPasses() const override;
  absl::Status EndStep(absl::Span<const int64_t> counts) override;

  const MoeLayer<T>& layer() const { return *layer_; }
  MoeLayer<T>& layer() { return *layer_; }

 private:
  friend class Trainer;
  TrainedLayer(Trainer& trainer, std::unique_ptr<MoeLayer<T>> layer)
      : trainer_(trainer),
        layer_(std::move(layer)),
        counts_(static_cast<size_t>(layer_->config().router.num_outputs()), 0) {}
  absl::Status CheckRound(const Round& round, int64_t rows, const Batch& batch) const;
  // kUnimplemented where tensor-parallel ranks divide rows.
  absl::Status CheckAllRowsHere() const;
  // This rank among those that divide the rows of a micro-batch, and their number.
  TensorShare share() const;
  // Waits for the statistics of all calls, and adds them to counts_.
  absl::Status TakeStats();
  // Forward of the layer; `counts`: Call::counts.
  absl::Status Forward(Pass pass, MatrixView<const T> x, MatrixView<T> y, bool counts);
  MatrixView<const T> RowsAt(const void* data, int64_t rows) const {
    return {static_cast<const T*>(data), rows, layer_->config().router.hidden_size};
  }
  MatrixView<T> RowsAt(void* data, int64_t rows) const {
    return {static_cast<T*>(data), rows, layer_->config().router.hidden_size};
  }

  Trainer& trainer_;
  const std::unique_ptr<MoeLayer<T>> layer_;
  std::vector<int64_t> counts_;           // counts of this step so far
  int64_t rows_ = 0;                      // rows of the last ForwardRows
  int64_t forwards_ = 0, backwards_ = 0;  // passes of this step in a graph
  // Not shared with anything else: a GraphBackward sees by it that the layer is gone.
  const std::shared_ptr<const bool> here_ = std::make_shared<bool>(true);
};

// Owns session, parameters, gradient reducer and optimiser of one rank, and runs its steps:
//
//   BeginStep (or the first BeginRound) · rounds() times {BeginRound · forward, backward} · Step
//   BeginEvaluation                     · rounds() times {BeginRound · forward}           · EndStep
//
// Nothing fails silently: non-finite gradients, a round too few or too many and a layer without a
// Backward are errors. After an error, or when the trainer is destroyed inside a step, the groups
// are aborted, so that no peer waits, and the streams are empty before anything they use is freed.
// One thread at a time.
class Trainer {
 public:
  // Collective over `world`, blocks the host. Errors: those of Session::Create and of
  // CheckBFloat16Order; kInvalidArgument for micro_batches < 0, kUnimplemented for an offload from
  // a CUDA device.
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(const TrainerOptions& options,
                                                         std::unique_ptr<Communicator> world);
  ~Trainer();

  const TrainerOptions& options() const { return options_; }
  // The order of products of bfloat16; none unless HasBFloat16Order.
  std::optional<BFloat16Order> bfloat16_order() const;
  Session& session() { return *session_; }
  const Context& context() const { return session_->context(); }
  // For layers of the caller's own: a parameter whose gradient is what AddGradient received before
  // the round ends. kFailedPrecondition once the first step has begun; errors of
  // ParameterStore::Add.
  absl::StatusOr<Parameter*> AddParameter(const ParameterSpec& spec);
  // A parameter that is added here also requires MarkReady in the last round; its gradient then
  // travels while backward still runs.
  ParameterStore& parameters() { return store_; }
  const ParameterStore& parameters() const { return store_; }

  // To be called before the first step. The trainer owns the layer. Errors: those of
  // MoeLayer::Create.
  template <typename T>
  absl::StatusOr<TrainedLayer<T>*> AddMoeLayer(const std::string& prefix,
                                               const MoeLayerConfig& config);
  // The same for a layer of the trainer's type.
  absl::StatusOr<TrainedLayerBase*> AddMoeLayer(const std::string& prefix,
                                                const MoeLayerConfig& config);

  // To be called before the first step, once the module's parameters are in parameters(). The
  // trainer owns the module and ends its steps; the caller runs its passes.
  template <typename M>
  absl::StatusOr<M*> Add(std::unique_ptr<M> module) {
    MOE_RETURN_IF_ERROR(CheckNoStepYet("a module"));
    M* const borrowed = module.get();
    modules_.push_back(std::move(module));
    return borrowed;
  }
  // TrainedModule::states of all modules.
  std::vector<ModuleState> states();
  // Integers of the caller's loop, borrowed: Reduce, or EndStep where Reduce was not called,
  // overwrites them with their sums over all ranks.
  void SumOverRanks(absl::Span<int64_t> counts) { loop_counts_ = counts; }

  int64_t micro_batches() const { return micro_batches_; }
  // Rounds of the step or evaluation that has begun; before the first, of a step.
  int64_t rounds() const {
    return PaddedRounds(runner_->shape(), RoundsOf(context().mesh->size(MeshGroup::kData), dealt_));
  }
  double loss_scale() const;
  // Factor from the reducer's sums to the mean gradient: 1 / micro_batches / loss_scale.
  double gradient_scale() const;
  // The sums of this step; valid after the first BeginStep.
  GradientReducer& reducer() { return *reducer_; }

  // Begins a step whose losses, and therefore dy, are 2^loss_scale_log2 times larger. The first
  // call fixes the set of parameters. kFailedPrecondition inside a step.
  absl::Status BeginStep(int loss_scale_log2 = 0);
  // Begins an evaluation, forward passes alone, of `micro_batches` over all ranks: no gradients,
  // and no memory for any. kFailedPrecondition inside a step.
  absl::Status BeginEvaluation(int64_t micro_batches);
  // Begins a step if none has begun. kFailedPrecondition after the last round.
  absl::StatusOr<Round> BeginRound();
  const Round& round() const { return round_; }  // the round that began last
  // Runs all rounds of the step, or of the evaluation that has begun, with passes of `model`, in
  // the order of the schedule. Collective. Errors: those of modules and host.
  template <typename T>
  absl::Status RunRounds(const PipelineModel<T>& model, RoundHost& host) {
    MOE_RETURN_IF_ERROR(BeginRounds());
    return runner_->Run(model, host, *this);
  }
  const PipelineRunner& pipeline() const { return *runner_; }
  // For the runner, whose rounds need not be the current one: round `index` of the step or
  // evaluation; before a backward in it; MarkReady.
  Round RoundAt(int64_t index) const;
  absl::Status BeginBackward(const Round& round, int chunk);
  absl::Status MarkComplete(const Round& round, const Parameter& parameter);
  // Adds `values`, [parameter.size()] in memory of the session's device, to the step's sum as one
  // term. Called once in a round. Enqueued; kInvalidArgument for another size, kFailedPrecondition
  // for a parameter that has no sum: frozen, or added after the first step.
  absl::Status AddGradient(const Parameter& parameter, absl::Span<const float> values);
  // The pass to give to modules of the caller's own in a round; in a step with the round's stash.
  Pass PassOf(const Round& round, const Batch& batch = {}) const;
  // Passes of the following rounds lease weights from `source`, which the caller keeps; nullptr, as
  // at first: all weights are resident. Not for ZeRO-3, where the trainer's own source has them.
  void set_weights(WeightSource* source) { weights_ = source; }
  // The gradient of `parameter` is complete for this round.
  absl::Status MarkReady(const Round& round, const Parameter& parameter);
  // After the last round: sums the gradients over all ranks, which are complete on return. Part of
  // Step. kDataLoss, on a CUDA device: RouterStats::Wait of a Forward fails; for an evaluation
  // EndStep returns that error.
  absl::Status Reduce();
  // After Reduce: norm of the mean gradient over the parameters of all ranks. Step measures it,
  // too. Collective.
  absl::StatusOr<GradientNorm> MeasureGradients();
  // For an optimiser of the caller's own, between Reduce and the next step. As
  // torch.nn.utils.clip_grad_norm_: scales what Gradient returns where its L2 norm is more than
  // `most`, and returns the norm before clipping. Collective. kDataLoss where it is not finite,
  // kInvalidArgument unless most >= 0.
  absl::StatusOr<double> ClipGradNorm(double most);
  // The mean gradient, clipped by ClipGradNorm. out: [parameter.size()] in memory of the session's
  // device. Enqueued. Errors: those of GradientReducer::Gradient.
  absl::Status Gradient(const Parameter& parameter, absl::Span<float> out) const;
  // Ends a step: Reduce, AdamW from the mean gradient over the M micro-batches, and updates of the
  // routers from the counts of all ranks. options.gradient_scale multiplies the mean. Collective.
  // kDataLoss for gradients that are not finite, unless options choose kSkip; where the exact grid
  // alone could not hold them, its unit is larger in the next step. kDataLoss, on every rank, also
  // for weights or moments that are not finite after the update (Optimizer::CheckFinite): neither
  // training nor saving them is then of use.
  absl::StatusOr<GradientNorm> Step(const StepOptions& options);
  // Ends an evaluation, or a step whose weights another optimiser moves, or none: after Reduce, or
  // with gradients that no rank marked ready, which are discarded. Part of Step. Collective.
  // Measures the grid loss of the gradients unless it was measured in this step; a warning
  // (kernels/base/log.h) names the first loss above kNamedGridLoss, and a unit that changes.
  absl::Status EndStep();

  // Bytes of memory for parameters, sums and optimizer state of this rank: allocated, and by the
  // formula (StateBytesOf, and two pages of state in a file). After the first BeginStep, with an
  // optimizer.
  struct StateBytes {
    int64_t allocated = 0, formula = 0;
  };
  StateBytes state_bytes() const;
  // Traffic of this rank so far for the parameters that a group holds: gradients and, with ZeRO,
  // weights. After the first BeginStep.
  GradientReducer::Traffic traffic(MeshGroup holders) const;

  int64_t step() const { return step_; }  // the step that began last, from 1
  // The state that steps move beside the parameters; the first call, or the first Step, allocates
  // it (zeros). The set of parameters is fixed from then on, and with ZeRO the masters are in
  // parts: weights must be read from files before that. Collective.
  absl::StatusOr<Optimizer*> optimizer();
  // The next step is step + 1: a run whose state has been restored resumes.
  // kFailedPrecondition inside a step.
  absl::Status ResumeAfter(int64_t step);

  // After Reduce: discards the sums, which EndStep then does not measure.
  void ForgetGradients() { gradients_ = Gradients::kHere; }
  // The norm of the step's gradients, from the Step, MeasureGradients, ClipGradNorm or EndStep that
  // measured it until the next step begins; otherwise nullptr.
  const GradientNorm* gradient_norm() const { return norm_.has_value() ? &*norm_ : nullptr; }

  // The unit of the exact grid in the following steps. A resumed run restores it.
  const GridUnit::State& grid_unit() const { return grid_unit_.state(); }
  void RestoreGridUnit(const GridUnit::State& state) { grid_unit_.Restore(state); }

  bool evaluates() const { return running_ == Running::kEvaluation; }
  // kFailedPrecondition unless `round` is the current one.
  absl::Status CheckCurrent(const Round& round) const;

 private:
  Trainer(const TrainerOptions& options, std::unique_ptr<Session> session);
  absl::Status CheckEnded(const char* function) const;
  absl::Status CheckLastRound(const char* function) const;
  absl::Status CheckInStep(const char* function) const;
  absl::Status CheckReduced(const char* function) const;
  absl::Status MarkReady(const Parameter& parameter);
  absl::Status MarkOwn();
  absl::Status BeginRounds();
  absl::Status Freeze();
  absl::Status HaveWeights();
  void EndRound();
  absl::Status CheckNoStepYet(absl::string_view what) const;
  absl::Status TakeCounts();
  absl::Status SumCounts(absl::Span<int64_t> counts, const char* name);
  absl::Status EndModules();
  absl::Status FollowGradients();
  absl::Status CheckWeights() const;
  template <typename T>
  friend class TrainedLayer;  // for passes without a round

  const TrainerOptions options_;
  // Declared before its borrowers: it is destroyed last, and its streams are emptied first
  // (~Trainer).
  const std::unique_ptr<Session> session_;
  const int64_t micro_batches_;
  const StatePlacement placement_;
  int64_t dealt_;  // micro-batches of the current step or evaluation
  ParameterStore store_;
  std::unique_ptr<GradientReducer> reducer_;
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<std::unique_ptr<TrainedModule>> modules_;
  std::vector<const Parameter*> own_;  // trainable parameters of AddParameter
  absl::Span<int64_t> loop_counts_;
  // Counts of modules and loop, followed by the number of elements that the optimiser left not
  // finite.
  std::vector<int64_t> counts_;
  // counts_ holds this step's sums over ranks, its last element apart.
  bool counts_are_sums_ = false;
  bool counts_weights_ = false;  // the last element of counts_ is counted in this step
  GridUnit grid_unit_;
  std::optional<GradientNorm> norm_;  // norm of this step, once it is measured
  bool grid_loss_is_said_ = false;
  enum class Running : uint8_t { kNothing, kStep, kEvaluation } running_ = Running::kNothing;
  enum class Gradients : uint8_t { kHere, kMarked, kReduced } gradients_ = Gradients::kHere;
  double clip_ = 1;  // factor of Gradient
  int loss_scale_log2_ = 0;
  int64_t step_ = 0;
  WeightSource* weights_ = nullptr;
  int64_t rounds_begun_ = 0;  // rounds of this step or evaluation
  Round round_;
  std::optional<WorkspaceScope> scope_, host_scope_;  // what the caller takes in the round
  StashHandle stash_;                                 // of the round of a step
  std::unique_ptr<PipelineRunner> runner_;
};

}  // namespace moe

#endif  // MOE_MOE_TRAIN_TRAINER_H_
