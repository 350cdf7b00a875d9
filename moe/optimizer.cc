#include "moe/optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include <absl/strings/str_cat.h>

#include "kernels/adamw/adamw.h"
#include "kernels/base/status_macros.h"
#include "kernels/exact_sum/scaled_sum.h"
#include "moe/parameter_hash.h"
#include "moe/unit_grid.h"

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

namespace {

// Of a parameter whose parts lie one behind the other, in units of whose squares the norm is made.
void AppendUnits(const Parameter& parameter, std::vector<SquaresUnit>& units) {
  int64_t first = 0;
  for (const CanonicalTensor& part : parameter.parts()) {
    const UnitGrid grid(part);
    for (int64_t u = 0; u < grid.size(); ++u) {
      const TensorBox box = grid.box(u);
      units.push_back({.begin = first + box.row_begin * part.cols + box.col_begin,
                       .rows = box.rows(),
                       .cols = box.cols(),
                       .stride = part.cols});
    }
    first += part.size();
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Optimizer>> Optimizer::Create(const OptimizerOptions& options,
                                                             ParameterStore& store,
                                                             const Context& context) {
  auto optimizer = std::unique_ptr<Optimizer>(new Optimizer(options, store, context));
  std::vector<SquaresUnit> units;
  for (const auto& p : store.parameters()) {
    const bool trainable = p->spec().trainable;
    optimizer->first_unit_.push_back(static_cast<int64_t>(units.size()));
    if (trainable && SpeaksFor(*p, context)) AppendUnits(*p, units);
    const int64_t bytes = trainable ? p->size() * static_cast<int64_t>(sizeof(float)) : 0;
    for (std::vector<Buffer>* moments : {&optimizer->m_, &optimizer->v_}) {
      MOE_ASSIGN_OR_RETURN(Buffer buffer,
                           Buffer::Allocate(bytes, *context.memory, "optimiser state"));
      moments->push_back(std::move(buffer));
    }
  }
  optimizer->first_unit_.push_back(static_cast<int64_t>(units.size()));
  const auto bytes = static_cast<int64_t>(units.size() * sizeof(SquaresUnit));
  MOE_ASSIGN_OR_RETURN(optimizer->units_, Buffer::Allocate(bytes, *context.memory, "units"));
  MOE_RETURN_IF_ERROR(context.compute->CopyBytes(units.data(), optimizer->units_.data(), bytes));
  MOE_RETURN_IF_ERROR(context.compute->Synchronize());
  return optimizer;
}

absl::StatusOr<StepOutcome> Optimizer::MeasureGradients(GradientReducer& reducer,
                                                        double gradient_scale) {
  Stream& stream = *context_.compute;
  MOE_ASSIGN_OR_RETURN(const int64_t non_finite, reducer.NonFiniteShare());
  // The exact sum of squares, then the share of gradients that are not finite.
  constexpr int64_t kFields = kSquareSumSize + 1;
  MOE_ASSIGN_OR_RETURN(const auto fields, context_.workspace->Array<int64_t>(kFields));
  MOE_RETURN_IF_ERROR(stream.Zero(fields.data(), kFields * sizeof(int64_t)));
  MOE_RETURN_IF_ERROR(stream.Upload(&non_finite, &fields.back(), sizeof(non_finite)));
  const absl::Span<const SquaresUnit> units = units_.span<SquaresUnit>();
  for (const auto& p : store_.parameters()) {
    const int64_t first = first_unit_[p->index()], last = first_unit_[p->index() + 1];
    if (first == last) continue;
    MOE_ASSIGN_OR_RETURN(const ScaledSum gradient, reducer.Sum(*p, gradient_scale));
    MOE_RETURN_IF_ERROR(AddSquares(gradient, units.subspan(first, last - first), fields.data(),
                                   *context_.workspace, stream));
  }
  // Each unit has one speaker.
  MOE_RETURN_IF_ERROR(
      context_.mesh->expert_parallel().AllReduce<int64_t>(fields, ReduceOp::kSum, stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  const WorkspaceScope scope(*context_.host_workspace);
  MOE_ASSIGN_OR_RETURN(const auto all, OnHost<int64_t>(fields, context_));
  int64_t squares[kSquareSumSize];
  std::copy_n(all.begin(), kSquareSumSize, squares);
  StepOutcome outcome = {.non_finite = all.back()};
  const bool finite = outcome.non_finite == 0 && squares[kSquareSumDigits] == 0;
  outcome.gradient_norm =
      finite ? std::sqrt(SquareSumValue(squares)) : std::numeric_limits<double>::infinity();
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
