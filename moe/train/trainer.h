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
#include "moe/run/micro_batches.h"
#include "moe/run/pass.h"
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
  uint64_t seed = 1234;           // of the initial weights
  // M, of a step over all ranks: the same for every layout whose bits are to be equal. 0 = one for
  // each rank.
  int64_t micro_batches = 0;
  AllReduceAlgorithm all_reduce = AllReduceAlgorithm::kRing;
  ZeroStage zero = ZeroStage::kNone;  // with it, gradients are in parts after Reduce
  int64_t bucket_bytes = GradientReducerOptions().bucket_bytes;
  // Of the exact grid, 2^unit_log2 for losses that are not scaled. Left out: that of the gradients,
  // and until they are known the default (moe/train/grid_unit.h).
  std::optional<int> unit_log2 = {};
  OptimizerOptions optimizer = {};
};

class Trainer;

// One round of a step: a micro-batch of this rank, or none, for which the rank joins the exchanges
// with zero rows. What is taken of the workspaces in a round is given back when the next begins.
class Round {
 public:
  bool empty() const { return micro_batch_ < 0; }
  // Which of the global batch's M; -1: none.
  int64_t micro_batch() const { return micro_batch_; }
  int64_t index() const { return index_; }  // of this rank's rounds, from 0
  int64_t step() const { return step_; }    // from 1

 private:
  friend class Trainer;
  int64_t micro_batch_ = -1, index_ = 0, step_ = 0;
  uint64_t number_ = 0;  // of all rounds of the trainer
};

// A layer of a trainer whatever its type, for bindings to other languages and frameworks: rows
// [rows, H] of the trainer's type, dense, in memory of the session's device; in the trainer's
// round().
class TrainedLayerBase : public ModuleBase {
 public:
  // A Forward in a host's graph, which keeps what its Backward needs.
  struct GraphForward {
    const void* x = nullptr;
    int64_t rows = 0, cols = 0;  // of x and y; other columns than H are refused
    void* y = nullptr;
    int64_t sequence_length = 0;  // divides rows; 0: they are one sequence
    Mode mode = Mode::kTraining;
    bool backward = true;  // false: in any round or none; nothing is kept or counted
  };
  // Its Backward, once. d_router_loss: the gradient by stats().loss(), as MoeLayer::Backward's.
  // Copies share what was kept. kFailedPrecondition for a second one, where nothing was kept, and
  // when the trainer is gone.
  using GraphBackward = std::function<absl::Status(const void* dy, float d_router_loss, void* dx)>;

  virtual absl::Span<Parameter* const> parameters() const = 0;
  // Statistics of the last Forward. On a CUDA device its Wait comes before its values.
  RouterStats& stats() { return calls_.back().stats; }

  // As TrainedLayer's of these arguments; dy and dx have the last ForwardRows' rows. Null only
  // without rows.
  virtual absl::Status ForwardRows(const void* x, int64_t rows, void* y) = 0;
  virtual absl::Status BackwardRows(const void* dy, void* dx) = 0;
  // One in a round, and its Backward any time before Trainer::Reduce, which else names the layer
  // (kFailedPrecondition). Collective, as the Backward.
  virtual absl::StatusOr<GraphBackward> ForwardInGraph(const GraphForward& call) = 0;

 protected:
  struct Call {
    RouterStats stats;
    bool counts = false;  // in this step's load, once it is taken
  };
  std::vector<Call> calls_ = std::vector<Call>(1);  // those to be taken; the last one stays
};

// An MoE layer that a trainer owns.
template <typename T>
class TrainedLayer final : public TrainedLayerBase {
 public:
  // y = layer(x), both [T, H] in memory of the session's device; zero rows in an empty round.
  // A batch without micro_batch_offsets is one micro-batch of T tokens, whose first global token is
  // micro_batch * T if left out. In an evaluation nothing is kept for Backward or counted.
  // Collective. kFailedPrecondition for a round that has ended; errors of MoeLayer::Forward, also
  // of y in the memory of x where a Backward may follow.
  absl::Status Forward(const Round& round, MatrixView<const T> x, MatrixView<T> y,
                       Batch batch = {});
  // dx [T, H] overwritten; gradients of weights are added. dy: gradients of the micro-batch's loss,
  // times Trainer::loss_scale(). Once in every round. Collective.
  absl::Status Backward(const Round& round, MatrixView<const T> dy, MatrixView<T> dx);

  absl::Span<Parameter* const> parameters() const override { return layer_->parameters(); }
  absl::Status ForwardRows(const void* x, int64_t rows, void* y) override;
  absl::Status BackwardRows(const void* dy, void* dx) override;
  absl::StatusOr<GraphBackward> ForwardInGraph(const GraphForward& call) override;

  std::vector<ModuleState> states() override { return {layer_->router_share()}; }
  // Slots of each of the router's outputs.
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
  // Waits for the statistics of all calls, and adds them to counts_.
  absl::Status TakeStats();
  // The layer's Forward; `counts`: Call's.
  absl::Status Forward(const Pass& pass, MatrixView<const T> x, MatrixView<T> y,
                       MoeLayerSaved<T>* saved, bool counts);
  MatrixView<const T> RowsAt(const void* data, int64_t rows) const {
    return {static_cast<const T*>(data), rows, layer_->config().router.hidden_size};
  }
  MatrixView<T> RowsAt(void* data, int64_t rows) const {
    return {static_cast<T*>(data), rows, layer_->config().router.hidden_size};
  }

  Trainer& trainer_;
  const std::unique_ptr<MoeLayer<T>> layer_;
  MoeLayerSaved<T> saved_;
  std::vector<int64_t> counts_;           // of this step so far
  int64_t rows_ = 0;                      // of the last ForwardRows
  int64_t forwards_ = 0, backwards_ = 0;  // of this step, in a graph
  // Nothing else shares it: a GraphBackward sees that the layer is gone.
  const std::shared_ptr<const bool> here_ = std::make_shared<bool>(true);
};

// Owns session, parameters, gradient reducer and optimiser of one rank, and runs its steps:
//
//   BeginStep (or the first BeginRound) · rounds() times {BeginRound · forward, backward} · Step
//   BeginEvaluation                     · rounds() times {BeginRound · forward}           · EndStep
//
// Nothing is silent: gradients that are not finite, a round too few or too many, a layer without a
// Backward are errors. After an error, or when it is destroyed inside a step, the groups are
// aborted, so that no peer waits, and the streams are empty before anything they use goes.
// One thread at a time.
class Trainer {
 public:
  // Collective over `world`, blocks the host. Errors: those of Session::Create; kInvalidArgument
  // for micro_batches < 0.
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(const TrainerOptions& options,
                                                         std::unique_ptr<Communicator> world);
  ~Trainer();

  const TrainerOptions& options() const { return options_; }
  Session& session() { return *session_; }
  const Context& context() const { return session_->context(); }
  // For layers of one's own: a parameter whose gradient is what AddGradient got until a round ends.
  // kFailedPrecondition once the first step has begun; errors of ParameterStore::Add.
  absl::StatusOr<Parameter*> AddParameter(const ParameterSpec& spec);
  // What is added here waits for MarkReady in the last round, too, and then travels while backward
  // goes on.
  ParameterStore& parameters() { return store_; }
  const ParameterStore& parameters() const { return store_; }

  // Before the first step. The layer is the trainer's. Errors: those of MoeLayer::Create.
  template <typename T>
  absl::StatusOr<TrainedLayer<T>*> AddMoeLayer(const std::string& prefix,
                                               const MoeLayerConfig& config);
  // The same for a layer of the trainer's type.
  absl::StatusOr<TrainedLayerBase*> AddMoeLayer(const std::string& prefix,
                                                const MoeLayerConfig& config);

  // Before the first step, once its parameters are in parameters(). The module is the trainer's,
  // which ends its steps; whoever adds it runs its passes.
  template <typename M>
  absl::StatusOr<M*> Add(std::unique_ptr<M> module) {
    MOE_RETURN_IF_ERROR(CheckNoStepYet("a module"));
    M* const borrowed = module.get();
    modules_.push_back(std::move(module));
    return borrowed;
  }
  // ModuleBase::states of all modules.
  std::vector<ModuleState> states();
  // Integers of the caller's loop, borrowed: Reduce, or EndStep where it was not called, overwrites
  // them with their sums over all ranks.
  void SumOverRanks(absl::Span<int64_t> counts) { loop_counts_ = counts; }

  int64_t micro_batches() const { return micro_batches_; }
  // Rounds of the step or evaluation that has begun; before the first, of a step.
  int64_t rounds() const { return RoundsOf(context().mesh->size(MeshGroup::kData), dealt_); }
  double loss_scale() const;
  // What makes the mean gradient of the reducer's sums: 1 / micro_batches / loss_scale.
  double gradient_scale() const;
  // The sums of this step; valid after the first BeginStep.
  GradientReducer& reducer() { return *reducer_; }

  // Losses, and so dy, of the step that begins are 2^loss_scale_log2 times larger. The first call
  // fixes the parameters. kFailedPrecondition inside a step.
  absl::Status BeginStep(int loss_scale_log2 = 0);
  // Forward alone, of `micro_batches` over all ranks: no gradients, and no memory for any.
  // kFailedPrecondition inside a step.
  absl::Status BeginEvaluation(int64_t micro_batches);
  // Begins a step if none has begun. kFailedPrecondition after the last round.
  absl::StatusOr<Round> BeginRound();
  const Round& round() const { return round_; }  // that has begun last
  // `values`, [parameter.size()] in memory of the session's device, are one term of the step's sum.
  // Once in a round. Enqueued; kInvalidArgument for another size, kFailedPrecondition for a
  // parameter that has no sum: frozen, or added after the first step.
  absl::Status AddGradient(const Parameter& parameter, absl::Span<const float> values);
  // What modules of one's own are given in a round.
  Pass PassOf(const Round& round, const Batch& batch = {}) const;
  // The gradient of `parameter` is complete for this round.
  absl::Status MarkReady(const Round& round, const Parameter& parameter);
  // After the last round: the gradients are summed over all ranks when it returns. Part of Step.
  // kDataLoss, on a CUDA device: RouterStats::Wait of a Forward; EndStep says so of an evaluation.
  absl::Status Reduce();
  // After Reduce: the norm of the mean gradient of all ranks' parameters. Step does it, too.
  // Collective.
  absl::StatusOr<GradientNorm> MeasureGradients();
  // For an optimiser of one's own, from Reduce to the next step. As torch.nn.utils.clip_grad_norm_:
  // scales what Gradient gives where its L2 norm is more than `most`, and returns the norm from
  // before. Collective. kDataLoss where it is not finite, kInvalidArgument unless most >= 0.
  absl::StatusOr<double> ClipGradNorm(double most);
  // The mean gradient, as clipped. out: [parameter.size()] in memory of the session's device.
  // Enqueued. Errors: those of GradientReducer::Gradient.
  absl::Status Gradient(const Parameter& parameter, absl::Span<float> out) const;
  // Ends a step: Reduce, AdamW from the mean gradient over the M micro-batches, and what routers
  // learn from the counts of all ranks. options.gradient_scale multiplies the mean. Collective.
  // kDataLoss for gradients that are not finite, unless options say kSkip. Where the exact grid
  // alone could not hold them, its unit is larger in the next step.
  // Also, on every rank, for weights or moments that are not finite when they have moved
  // (Optimizer::CheckFinite): to train on is then of no use, nor to save.
  absl::StatusOr<GradientNorm> Step(const StepOptions& options);
  // Ends an evaluation, or a step whose weights something else moves, or nothing: after Reduce, or
  // with gradients that no rank marked ready and that are forgotten. Part of Step. Collective. What
  // the exact grid took of the gradients, if nothing has measured it in this step, is measured
  // here; a warning (kernels/base/log.h) names the first loss above kNamedGridLoss, and a unit that
  // changes.
  absl::Status EndStep();

  // Bytes of parameters, sums and optimizer state of this rank: what is allocated, and the formula
  // (StateBytesOf). After the first BeginStep, with an optimizer.
  struct StateBytes {
    int64_t allocated = 0, formula = 0;
  };
  StateBytes state_bytes() const;
  // What this rank has sent so far for the parameters that a group holds: gradients, and with ZeRO
  // weights. After the first BeginStep.
  GradientReducer::Traffic traffic(MeshGroup holders) const;

  int64_t step() const { return step_; }  // that has begun last, from 1
  // The state that steps move beside the parameters; the first call, or the first Step, allocates
  // it (zeros). The set of parameters is fixed from then on, and with ZeRO the masters are in
  // parts: weights that are read from files come before. Collective.
  absl::StatusOr<Optimizer*> optimizer();
  // The next step is step + 1: a run whose state has been restored resumes.
  // kFailedPrecondition inside a step.
  absl::Status ResumeAfter(int64_t step);

  // After Reduce: what was summed counts no more, and EndStep does not look at it.
  void ForgetGradients() { gradients_ = Gradients::kHere; }
  // The norm of the step's gradients, once Step, MeasureGradients, ClipGradNorm or EndStep has made
  // it, until the next step begins; else nullptr.
  const GradientNorm* gradient_norm() const { return norm_.has_value() ? &*norm_ : nullptr; }

  // The unit of the exact grid in the steps to come. A run resumes with it.
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
  absl::Status Freeze();
  void EndRound();
  absl::Status CheckNoStepYet(absl::string_view what) const;
  absl::Status TakeCounts();
  absl::Status SumCounts(absl::Span<int64_t> counts, const char* name);
  absl::Status EndModules();
  absl::Status FollowGradients();
  absl::Status CheckWeights() const;
  template <typename T>
  friend class TrainedLayer;  // MarkReady of a Backward of no round

  const TrainerOptions options_;
  // Before what it lends to: it is destroyed last, and emptied first (~Trainer).
  const std::unique_ptr<Session> session_;
  const int64_t micro_batches_;
  const StatePlacement placement_;
  int64_t dealt_;  // micro-batches of the step or evaluation
  ParameterStore store_;
  std::unique_ptr<GradientReducer> reducer_;
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<std::unique_ptr<ModuleBase>> modules_;
  std::vector<const Parameter*> own_;  // of AddParameter, trained
  absl::Span<int64_t> loop_counts_;
  // Counts of modules and loop, then the elements that the optimiser left not finite.
  std::vector<int64_t> counts_;
  bool counts_are_sums_ = false;  // of this step, but for the last one
  bool counts_weights_ = false;   // of this step
  GridUnit grid_unit_;
  std::optional<GradientNorm> norm_;  // of this step, once it is measured
  bool grid_loss_is_said_ = false;
  enum class Running : uint8_t { kNothing, kStep, kEvaluation } running_ = Running::kNothing;
  enum class Gradients : uint8_t { kHere, kMarked, kReduced } gradients_ = Gradients::kHere;
  double clip_ = 1;  // of Gradient
  int loss_scale_log2_ = 0;
  int64_t step_ = 0;
  int64_t rounds_begun_ = 0;  // of this step or evaluation
  Round round_;
  std::optional<WorkspaceScope> scope_, host_scope_;  // of the round
};

}  // namespace moe

#endif  // MOE_MOE_TRAIN_TRAINER_H_
