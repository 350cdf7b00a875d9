// AdamW over a parameter store, with clipping by the true global norm and a learning-rate schedule.
#ifndef MOE_MOE_TRAIN_OPTIMIZER_H_
#define MOE_MOE_TRAIN_OPTIMIZER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/choice.h"
#include "moe/run/context.h"
#include "moe/state/parameter.h"
#include "moe/train/gradient_reducer.h"
#include "moe/zero/optimizer_state.h"
#include "moe/zero/weight_gather.h"
#include "moe/zero/weight_source.h"

namespace moe {

struct AdamWOptions;

enum class LearningRateDecay : uint8_t {
  kCosine,    // Loshchilov and Hutter, "SGDR" (2017), arXiv:1608.03983, one cycle
  kLinear,    // a straight line
  kConstant,  // none: `peak` for good
};
inline constexpr Choice<LearningRateDecay> kDecayWords[] = {
    {"cosine", LearningRateDecay::kCosine},
    {"linear", LearningRateDecay::kLinear},
    {"constant", LearningRateDecay::kConstant}};

// Linear warm-up, peak step / W up to `peak` at step W = warmup_steps; then, from `peak` at step
// W + 1, down to `minimum` at the step after `total_steps`, so that every step learns. The cosine:
//   minimum + (peak - minimum) (1 + cos(pi (step - 1 - W) / (total_steps - W))) / 2
// as Megatron's and PyTorch's, which count steps from 0.
struct LearningRateSchedule {
  double peak = 1e-3;
  double minimum = 0;
  int64_t warmup_steps = 0;
  int64_t total_steps = 1;
  LearningRateDecay decay = LearningRateDecay::kCosine;
  // step counts from 1.
  double At(int64_t step) const;
};

struct OptimizerOptions {
  float beta1 = 0.9f;
  float beta2 = 0.95f;
  float epsilon = 1e-8f;
  float weight_decay = 0.1f;  // not for vectors (norms, biases)
  double clip_grad = 1.0;     // 0 = off
};

// What a step does with gradients that are not finite. Either way the weights stay.
enum class NonFiniteGradients : uint8_t {
  kRefuse,  // kDataLoss: a run that continues would train on nothing
  kSkip,    // for a dynamic loss scale: the returned norm is not finite
};

// Who ends a run whose weights a step has made not finite: they have moved by then.
enum class NonFiniteWeights : uint8_t {
  kRefuse,  // Trainer::Step, kDataLoss, by the counts that its ranks exchange
  kReport,  // whoever sums Optimizer::non_finite over the ranks, later in the step
};

struct StepOptions {
  double gradient_scale = 1;  // times the reducer's sums: 1 / micro-batches / loss scale
  double learning_rate = 0;
  NonFiniteGradients non_finite = NonFiniteGradients::kRefuse;
  NonFiniteWeights weights = NonFiniteWeights::kRefuse;
};

// What state needs beside memory, by its placement.
struct StateResources {
  Stream* weight_stream = nullptr;  // Session::WeightStream, where weights are in parts
  StateFileOptions file = {};       // where optimiser state is in a file
};

// Replicas take the same step from the same sums, so their weights stay equal without exchange.
// Where ZeRO has the reducer's buckets in parts, a rank moves the elements of its own part, and the
// ranks gather what layers read of all.
class Optimizer {
 public:
  // `reducer` is the store's. Moments are zero. Packs what ZeRO shares out (ParameterStore::Pack).
  // Errors of OptimizerState::Create.
  static absl::StatusOr<std::unique_ptr<Optimizer>> Create(const OptimizerOptions& options,
                                                           ParameterStore& store,
                                                           GradientReducer& reducer,
                                                           const Context& context,
                                                           const StateResources& resources = {});

  // One step from the reducer's sums. Collective over the world. Returns their norm, before
  // clipping; where it is not finite, the weights have stayed. On CUDA some launches, whatever the
  // number of parameters; with ZeRO some for each bucket.
  absl::StatusOr<GradientNorm> Step(const StepOptions& options, const Site& site = {});
  // Elements that this rank keeps whose weight or moments the last Step made, or left, not finite.
  int64_t non_finite() const { return non_finite_; }
  // After a Step whose norm was not finite: "; first " and what this rank or another noted of its
  // backward passes (NoteNonFinite) or else a tensor whose gradient is not finite; "" where nothing
  // is known. Collective over the world, blocks the host; the same text on every rank.
  absl::StatusOr<std::string> NonFiniteSource(const Site& site = {}) const;
  // kDataLoss unless all weights and moments are finite, with how many are not, a tensor and the
  // rank that has it. A pass over the state. Collective over the world, blocks the host; the same
  // status on every rank.
  absl::Status CheckFinite(const Site& site = {});

  const OptimizerState& state() const { return state_; }
  OptimizerState& state() { return state_; }
  // The steps that moved the weights, which Adam's bias correction counts.
  int64_t steps_taken() const { return step_; }
  void set_steps_taken(int64_t steps) { step_ = steps; }
  // Where modules lease weights that are in parts; nullptr: all of them are resident.
  GatheredWeights* weights() { return weights_.get(); }
  // After masters were written: rounds them, and gathers what is in parts but for weights that
  // modules lease. Collective over the groups of the buckets; enqueued on the compute stream.
  absl::Status PublishMasters(const Site& site = {});

  // Bytes that this rank has sent so far for weights that ranks share out; holders: canonical.
  int64_t bytes_gathered(MeshGroup holders) const {
    return gather_.bytes_sent(holders) + (weights_ ? weights_->bytes_sent(holders) : 0);
  }

 private:
  Optimizer(const OptimizerOptions& options, ParameterStore& store, GradientReducer& reducer,
            const Context& context)
      : options_(options),
        store_(store),
        reducer_(reducer),
        context_(context),
        gather_(reducer.buckets(), context, MeshLane::kGradients, reducer.stream()) {}
  using Slices = absl::Span<const OptimizerState::Slice>;
  void ReplaceMoment(Slices slices, const Site& site) const;
  absl::Status Move(const AdamWOptions& adamw, double gradient_scale, Slices slices);
  // Rounds their masters where layers read a copy.
  absl::Status Round(Slices slices);
  // Starts to gather what ranks share out of buckets [begin, end).
  absl::Status Gather(size_t begin, size_t end, const Site& site);
  absl::Status FinishPublishing();

  const OptimizerOptions options_;
  ParameterStore& store_;
  GradientReducer& reducer_;
  const Context context_;
  OptimizerState state_;
  Buffer count_;  // [1] int64_t of the device: AdamW's values that are not finite
  int64_t non_finite_ = 0;
  int64_t step_ = 0;
  WeightGather gather_;  // last: what is in flight ends before its memory goes
  std::unique_ptr<GatheredWeights> weights_;
};

}  // namespace moe

#endif  // MOE_MOE_TRAIN_OPTIMIZER_H_
