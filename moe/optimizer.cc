#include "moe/optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include <absl/strings/str_cat.h>

#include "kernels/adamw/adamw.h"
#include "kernels/base/status_macros.h"
#include "kernels/exact_sum/scaled_sum.h"
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

// Of the elements `piece.range` of a parameter, whole row groups, in units of whose squares the
// norm is made. `first`: where these elements begin in the sum.
void AppendUnits(const ParameterPiece& piece, int64_t first, std::vector<SquaresUnit>& units) {
  int64_t at = 0;  // of the part
  for (const CanonicalTensor& part : piece.parameter->parts()) {
    const ElementRange here = Common(piece.range, {at, at + part.size()});
    if (here.size() > 0) {
      UnitGrid(part).ForEachUnit(
          (here.begin - at) / part.cols, (here.end - at) / part.cols,
          [&](int64_t /*unit*/, const TensorBox& box) {
            const int64_t row = at + box.row_begin * part.cols;
            units.push_back({.begin = first + row - piece.range.begin + box.col_begin,
                             .rows = box.rows(),
                             .cols = box.cols(),
                             .stride = part.cols});
          });
    }
    at += part.size();
  }
}

// The byte of a bucket's packed parameters where its element is.
int64_t ByteOf(const ParameterBucket& bucket, const PackedParameters& packed, int64_t element) {
  const auto after = std::upper_bound(bucket.first.begin(), bucket.first.end() - 1, element);
  const auto i = static_cast<size_t>(after - bucket.first.begin()) - 1;
  if (element == bucket.elements()) return packed.first_byte.back();
  return packed.first_byte[i] + (element - bucket.first[i]) * packed.element_bytes[i];
}

}  // namespace

absl::StatusOr<std::unique_ptr<Optimizer>> Optimizer::Create(const OptimizerOptions& options,
                                                             ParameterStore& store,
                                                             GradientReducer& reducer,
                                                             const Context& context) {
  auto optimizer = std::unique_ptr<Optimizer>(new Optimizer(options, store, reducer, context));
  optimizer->states_.resize(reducer.buckets().size());
  for (size_t b = 0; b < reducer.buckets().size(); ++b) {
    MOE_RETURN_IF_ERROR(optimizer->Keep(reducer.buckets()[b], optimizer->states_[b]));
  }
  return optimizer;
}

absl::Status Optimizer::Keep(const ParameterBucket& bucket, State& state) {
  Stream& stream = *context_.compute;
  const ElementRange kept = bucket.kept();
  state.keeps_masters = bucket.sharded && store_.compute() != DType::kFloat32;
  const int64_t states = state.keeps_masters ? 3 : 2;
  MOE_ASSIGN_OR_RETURN(state.values,
                       Buffer::Allocate(states * kept.size() * static_cast<int64_t>(sizeof(float)),
                                        *context_.memory, "optimiser state"));
  const auto values = state.values.span<float>();
  const auto all = static_cast<size_t>(kept.size());
  for (const ParameterPiece& piece : PiecesOf(bucket, kept)) {
    const auto at = static_cast<size_t>(piece.bucket.begin - kept.begin);
    const auto size = static_cast<size_t>(piece.range.size());
    const int64_t first = piece.bucket.begin - piece.range.begin;  // of the parameter
    Slice& slice = state.slices.emplace_back();
    slice.piece = piece;
    slice.own = {std::clamp(bucket.own.begin - first, piece.range.begin, piece.range.end),
                 std::clamp(bucket.own.end - first, piece.range.begin, piece.range.end)};
    slice.mean = values.subspan(at, size);
    slice.mean_square = values.subspan(all + at, size);
    if (!state.keeps_masters || piece.parameter->is_vector()) continue;
    slice.master = values.subspan(2 * all + at, size);
    MOE_RETURN_IF_ERROR(stream.CopyBytes(piece.parameter->master().data() + piece.range.begin,
                                         slice.master.data(),
                                         piece.range.size() * static_cast<int64_t>(sizeof(float))));
  }
  std::vector<SquaresUnit> units;
  for (const ParameterPiece& piece : PiecesOf(bucket, bucket.own)) {
    AppendUnits(piece, piece.bucket.begin - bucket.own.begin, units);
  }
  const auto bytes = static_cast<int64_t>(units.size() * sizeof(SquaresUnit));
  MOE_ASSIGN_OR_RETURN(state.units, Buffer::Allocate(bytes, *context_.memory, "units"));
  MOE_RETURN_IF_ERROR(stream.CopyBytes(units.data(), state.units.data(), bytes));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  if (!bucket.sharded) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(state.packed, store_.Pack(bucket.parameters, stream));
  int64_t element = 0;
  for (const int64_t count : bucket.counts) {
    state.part_bytes.push_back(ByteOf(bucket, state.packed, element + count) -
                               ByteOf(bucket, state.packed, element));
    element += count;
  }
  return absl::OkStatus();
}

absl::Span<float> Optimizer::MasterOf(const Slice& slice) {
  if (!slice.master.empty()) return slice.master;
  const ElementRange range = slice.piece.range;
  return slice.piece.parameter->master().subspan(static_cast<size_t>(range.begin),
                                                 static_cast<size_t>(range.size()));
}

std::vector<Optimizer::Slice> Optimizer::Slices() const {
  std::vector<Slice> all;
  for (const State& state : states_) {
    for (const Slice& slice : state.slices) {
      all.push_back(slice);
      all.back().master = MasterOf(slice);
    }
  }
  return all;
}

absl::StatusOr<StepOutcome> Optimizer::MeasureGradients(double gradient_scale) {
  Stream& stream = *context_.compute;
  MOE_ASSIGN_OR_RETURN(const int64_t non_finite, reducer_.NonFiniteShare());
  // The exact sum of squares, then the share of gradients that are not finite.
  constexpr int64_t kFields = kSquareSumSize + 1;
  MOE_ASSIGN_OR_RETURN(const auto fields, context_.workspace->Array<int64_t>(kFields));
  MOE_RETURN_IF_ERROR(stream.Zero(fields.data(), kFields * sizeof(int64_t)));
  MOE_RETURN_IF_ERROR(stream.Upload(&non_finite, &fields.back(), sizeof(non_finite)));
  for (size_t b = 0; b < states_.size(); ++b) {
    const absl::Span<const SquaresUnit> units = states_[b].units.span<SquaresUnit>();
    if (units.empty()) continue;
    const ScaledSum gradient = reducer_.Sum(b, reducer_.buckets()[b].own, gradient_scale);
    MOE_RETURN_IF_ERROR(AddSquares(gradient, units, fields.data(), *context_.workspace, stream));
  }
  MOE_RETURN_IF_ERROR(context_.mesh->world().AllReduce<int64_t>(fields, ReduceOp::kSum, stream));
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

absl::StatusOr<StepOutcome> Optimizer::Step(const StepOptions& options) {
  Stream& stream = *context_.compute;
  const WorkspaceScope scope(*context_.workspace);
  MOE_ASSIGN_OR_RETURN(const StepOutcome outcome, MeasureGradients(options.gradient_scale));
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
  for (size_t b = 0; b < states_.size(); ++b) {
    for (const Slice& slice : states_[b].slices) {
      const ScaledSum gradient = reducer_.Sum(b, slice.piece.bucket, options.gradient_scale);
      adamw.weight_decay =
          slice.piece.parameter->spec().weight_decay ? options_.weight_decay : 0.0f;
      MOE_RETURN_IF_ERROR(AdamW(adamw, gradient, MasterOf(slice), slice.mean, slice.mean_square,
                                *context_.workspace, stream));
    }
    MOE_RETURN_IF_ERROR(Publish(b));
  }
  MOE_RETURN_IF_ERROR(FinishPublishing());
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  return outcome;
}

absl::Status Optimizer::PublishMasters() {
  for (size_t b = 0; b < states_.size(); ++b) MOE_RETURN_IF_ERROR(Publish(b));
  return FinishPublishing();
}

absl::Status Optimizer::Publish(size_t b) {
  const State& state = states_[b];
  const bool sharded = reducer_.buckets()[b].sharded;
  for (const Slice& slice : state.slices) {
    Parameter& parameter = *slice.piece.parameter;
    if (!sharded) {
      MOE_RETURN_IF_ERROR(store_.RefreshCompute(parameter, *context_.compute));
    } else if (!slice.master.empty()) {
      MOE_RETURN_IF_ERROR(
          store_.RefreshPart(parameter, slice.piece.range.begin, slice.master, *context_.compute));
    }
  }
  if (!sharded) return absl::OkStatus();
  return reducer_.Gather(b, state.packed.block, state.part_bytes);
}

// What was gathered is there: vectors are rounded where they are read.
absl::Status Optimizer::FinishPublishing() {
  MOE_RETURN_IF_ERROR(reducer_.FinishGather());
  for (const ParameterBucket& bucket : reducer_.buckets()) {
    if (!bucket.sharded) continue;
    for (Parameter* const parameter : bucket.parameters) {
      MOE_RETURN_IF_ERROR(store_.RefreshCompute(*parameter, *context_.compute));
    }
  }
  return absl::OkStatus();
}

int64_t Optimizer::bytes() const {
  int64_t total = 0;
  for (const State& state : states_) total += state.values.bytes();
  return total;
}

}  // namespace moe
