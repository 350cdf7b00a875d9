#include "moe/optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include <absl/strings/str_cat.h>

#include "kernels/adamw/adamw.h"
#include "kernels/base/status_macros.h"
#include "kernels/exact_sum/scaled_sum.h"

namespace moe {

double LearningRateSchedule::At(int64_t step) const {
  if (step <= warmup_steps)
    return peak * static_cast<double>(step) / static_cast<double>(warmup_steps);
  if (decay == LearningRateDecay::kConstant) return peak;
  const int64_t decay_steps = std::max<int64_t>(1, total_steps - warmup_steps);
  const double progress = std::min(
      1.0, static_cast<double>(step - 1 - warmup_steps) / static_cast<double>(decay_steps));
  const double left = decay == LearningRateDecay::kLinear
                          ? 1.0 - progress
                          : 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return minimum + (peak - minimum) * left;
}

absl::StatusOr<std::unique_ptr<Optimizer>> Optimizer::Create(const OptimizerOptions& options,
                                                             ParameterStore& store,
                                                             const Context& context) {
  MOE_ASSIGN_OR_RETURN(CanonicalIndex index, CanonicalIndex::Create(store, context));
  auto optimizer =
      std::unique_ptr<Optimizer>(new Optimizer(options, store, context, std::move(index)));
  for (const auto& p : store.parameters()) {
    const int64_t bytes = p->spec().trainable ? p->size() * static_cast<int64_t>(sizeof(float)) : 0;
    for (std::vector<Buffer>* moments : {&optimizer->m_, &optimizer->v_}) {
      MOE_ASSIGN_OR_RETURN(Buffer buffer,
                           Buffer::Allocate(bytes, *context.memory, "optimiser state"));
      moments->push_back(std::move(buffer));
    }
  }
  return optimizer;
}

absl::StatusOr<StepOutcome> Optimizer::MeasureGradients(GradientReducer& reducer,
                                                        double gradient_scale) {
  Stream& stream = *context_.compute;
  MOE_ASSIGN_OR_RETURN(const int64_t non_finite, reducer.NonFiniteShare());
  const auto mine = static_cast<double>(non_finite);  // exact
  MOE_ASSIGN_OR_RETURN(const auto squares, context_.workspace->Array<double>(index_.size() + 1));
  MOE_RETURN_IF_ERROR(
      stream.Zero(squares.data(), index_.size() * static_cast<int64_t>(sizeof(double))));
  MOE_RETURN_IF_ERROR(stream.Upload(&mine, &squares.back(), sizeof(mine)));
  for (const auto& p : store_.parameters()) {
    if (!p->spec().trainable || !index_.speaks_for(*p)) continue;
    MOE_ASSIGN_OR_RETURN(const ScaledSum gradient, reducer.Sum(*p, gradient_scale));
    MOE_RETURN_IF_ERROR(
        SumOfSquares(gradient, &squares[index_.position(*p)], *context_.workspace, stream));
  }
  // One rank speaks for each tensor and the others add 0: exact in any order.
  MOE_RETURN_IF_ERROR(
      context_.mesh->expert_parallel().AllReduce<double>(squares, ReduceOp::kSum, stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  const WorkspaceScope scope(*context_.host_workspace);
  MOE_ASSIGN_OR_RETURN(const auto sums, OnHost<double>(squares, context_));
  StepOutcome outcome = {.non_finite = static_cast<int64_t>(sums.back())};
  double total = 0;
  for (const double s : sums.first(sums.size() - 1)) total += s;
  const double norm = std::sqrt(total);
  const bool finite = outcome.non_finite == 0 && std::isfinite(norm);
  // NaN compares with nothing, infinity does.
  outcome.gradient_norm = finite ? norm : std::numeric_limits<double>::infinity();
  return outcome;
}

absl::StatusOr<StepOutcome> Optimizer::Step(const StepOptions& options, GradientReducer& reducer) {
  Stream& stream = *context_.compute;
  const WorkspaceScope scope(*context_.workspace);
  MOE_ASSIGN_OR_RETURN(const StepOutcome outcome,
                       MeasureGradients(reducer, options.gradient_scale));
  const double norm = outcome.gradient_norm;
  if (!std::isfinite(norm)) {
    if (options.non_finite == NonFiniteGradients::kSkip) return outcome;
    return absl::DataLossError(
        absl::StrCat("Optimizer: the gradients are not finite (", outcome.non_finite,
                     " elements are NaN, infinite or off the exact grid), expected finite ones: "
                     "the weights have stayed"));
  }

  ++step_;
  const bool clip = options_.clip_grad > 0 && norm > options_.clip_grad;
  AdamWOptions adamw = {
      .learning_rate = static_cast<float>(options.learning_rate),
      .beta1 = options_.beta1,
      .beta2 = options_.beta2,
      .epsilon = options_.epsilon,
      .gradient_scale = clip ? static_cast<float>(options_.clip_grad / norm) : 1.0f,
      .step = step_};
  for (const auto& p : store_.parameters()) {
    if (!p->spec().trainable) continue;
    MOE_ASSIGN_OR_RETURN(const ScaledSum gradient, reducer.Sum(*p, options.gradient_scale));
    adamw.weight_decay = p->spec().weight_decay ? options_.weight_decay : 0.0f;
    MOE_RETURN_IF_ERROR(AdamW(adamw, gradient, p->master(), m_[p->index()].span<float>(),
                              v_[p->index()].span<float>(), *context_.workspace, stream));
    MOE_RETURN_IF_ERROR(store_.RefreshCompute(*p, stream));
  }
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  return outcome;
}

}  // namespace moe
