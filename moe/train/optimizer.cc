#include "moe/train/optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "comm/watch/rank_watch.h"
#include "kernels/adamw/adamw.h"
#include "kernels/base/finite.h"
#include "kernels/base/status_macros.h"
#include "moe/run/finite.h"
#include "moe/train/non_finite.h"

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
                                                             GradientReducer& reducer,
                                                             const Context& context,
                                                             const StateResources& resources) {
  auto optimizer = std::unique_ptr<Optimizer>(new Optimizer(options, store, reducer, context));
  MOE_ASSIGN_OR_RETURN(optimizer->count_, Buffer::Allocate(sizeof(int64_t), *context.memory));
  MOE_ASSIGN_OR_RETURN(optimizer->state_,
                       OptimizerState::Create(reducer.buckets(), store, context, resources.file));
  if (resources.weight_stream != nullptr) {
    optimizer->weights_ = std::make_unique<GatheredWeights>(
        reducer.buckets(), optimizer->state_, store, context, *resources.weight_stream);
  }
  return optimizer;
}

absl::StatusOr<GradientNorm> Optimizer::Step(const StepOptions& options, const Site& site) {
  Stream& stream = *context_.compute;
  MOE_ASSIGN_OR_RETURN(const GradientNorm norm, reducer_.Norm(options.gradient_scale, site));
  non_finite_ = 0;
  const double most =
      options_.clip_grad > 0 ? options_.clip_grad : std::numeric_limits<double>::infinity();
  const absl::StatusOr<double> clip = norm.ClipFactor(most);
  if (!norm.finite()) {
    if (options.non_finite == NonFiniteGradients::kSkip) return norm;
    MOE_ASSIGN_OR_RETURN(const std::string first, NonFiniteSource(site));
    return absl::DataLossError(absl::StrCat(clip.status().message(), first));
  }
  MOE_RETURN_IF_ERROR(clip.status());

  if (weights_ != nullptr) MOE_RETURN_IF_ERROR(weights_->Forget());
  ++step_;
  AdamWOptions adamw = {.learning_rate = static_cast<float>(options.learning_rate),
                        .beta1 = options_.beta1,
                        .beta2 = options_.beta2,
                        .epsilon = options_.epsilon,
                        .gradient_scale = static_cast<float>(*clip),
                        .step = step_,
                        .non_finite = count_.span<int64_t>().data()};
  MOE_RETURN_IF_ERROR(stream.Zero(count_.data(), count_.bytes()));
  // What ranks share out travels as soon as it has moved; all else moves at once.
  const auto& buckets = reducer_.buckets();
  const auto move = [&](Slices slices) -> absl::Status {
    ReplaceMoment(slices, site);
    MOE_RETURN_IF_ERROR(Move(adamw, options.gradient_scale, slices));
    return Round(slices);
  };
  for (size_t begin = 0, end = 1; end <= buckets.size(); ++end) {
    if (!buckets[end - 1].sharded() && end < buckets.size()) continue;
    MOE_RETURN_IF_ERROR(state_.ForEach(begin, end, StateUse::kUpdate, move));
    MOE_RETURN_IF_ERROR(Gather(begin, end, site));
    begin = end;
  }
  MOE_RETURN_IF_ERROR(FinishPublishing());
  MOE_RETURN_IF_ERROR(stream.CopyBytes(count_.data(), &non_finite_, count_.bytes()));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  return norm;
}

// If a fault of a test asks for it.
void Optimizer::ReplaceMoment(Slices slices, const Site& site) const {
  RankWatch* const watch = context_.mesh->world().watch();
  if (watch == nullptr || OnCuda(context_)) return;
  for (const OptimizerState::Slice& slice : slices) {
    if (slice.mean.empty()) continue;
    const std::optional<float> value = watch->TakeValue(site);
    if (value.has_value()) slice.mean.front() = *value;
    return;
  }
}

absl::StatusOr<std::string> Optimizer::NonFiniteSource(const Site& site) const {
  const FirstNonFinite& noted = *context_.non_finite;
  NonFiniteReport mine = {noted.order(), noted.text()};
  if (mine.text.empty()) {
    MOE_ASSIGN_OR_RETURN(const Parameter* const parameter, reducer_.NonFiniteParameter());
    if (parameter != nullptr) {
      mine = {FirstNonFinite::kNone - 1,
              absl::StrCat("in the gradient of '", parameter->spec().name, "'")};
      // Without the grid it is a sum over ranks.
      if (context_.numerics == Numerics::kLayoutInvariant) {
        absl::StrAppend(&mine.text, " of rank ", context_.mesh->world().rank());
      }
    }
  }
  MOE_ASSIGN_OR_RETURN(const NonFiniteReport first,
                       FirstOverRanks(mine, context_.mesh->world(), *context_.host, site));
  return first.text.empty() ? "" : absl::StrCat("; first ", first.text);
}

absl::Status Optimizer::Move(const AdamWOptions& adamw, double gradient_scale, Slices slices) {
  const WorkspaceScope scope(*context_.host_workspace);
  MOE_ASSIGN_OR_RETURN(const auto moved,
                       context_.host_workspace->Array<AdamWSlice>(std::ssize(slices)));
  auto to = moved.begin();
  for (const OptimizerState::Slice& slice : slices) {
    *to++ = {
        .first = reducer_.At(slice.bucket, slice.piece.bucket.begin),
        .size = slice.piece.range.size(),
        .weight = slice.master(),
        .m = slice.mean.data(),
        .v = slice.mean_square.data(),
        .weight_decay = slice.piece.parameter->spec().weight_decay ? options_.weight_decay : 0.0f};
  }
  return AdamW(adamw, reducer_.Sums(gradient_scale), moved, *context_.workspace, *context_.compute);
}

absl::Status Optimizer::CheckFinite(const Site& site) {
  int64_t found = 0;  // in all that this rank keeps: a copy may differ from the others
  std::string name;   // the first tensor that has some
  MOE_RETURN_IF_ERROR(state_.ForEach(StateUse::kRead, [&](Slices slices) -> absl::Status {
    for (const OptimizerState::Slice& slice : slices) {
      const auto size = static_cast<size_t>(slice.piece.range.size());
      for (const float* const values :
           {slice.master(), slice.mean.data(), slice.mean_square.data()}) {
        const WorkspaceScope scope(*context_.host_workspace);
        MOE_ASSIGN_OR_RETURN(const auto host,
                             OnHost<float>(absl::MakeConstSpan(values, size), context_));
        const int64_t here = CountNonFinite(host.data(), std::ssize(host));
        if (found == 0 && here > 0) name = slice.piece.parameter->spec().name;
        found += here;
      }
    }
    return absl::OkStatus();
  }));
  Communicator& world = context_.mesh->world();
  constexpr int64_t kNone = FirstNonFinite::kNone;
  if (found > 0) name = absl::StrCat("'", name, "' of rank ", world.rank());
  MOE_ASSIGN_OR_RETURN(const NonFiniteReport first,
                       FirstOverRanks({found > 0 ? 0 : kNone, name}, world, *context_.host, site));
  if (first.order == kNone) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(world.AllReduce<int64_t>({&found, 1}, ReduceOp::kSum, *context_.host, site));
  MOE_RETURN_IF_ERROR(context_.host->Synchronize());
  return absl::DataLossError(absl::StrCat(
      found, " values of weights or their moments are not finite, the first in tensor ",
      first.text));
}

absl::Status Optimizer::PublishMasters(const Site& site) {
  if (weights_ != nullptr) MOE_RETURN_IF_ERROR(weights_->Forget());
  MOE_RETURN_IF_ERROR(
      state_.ForEach(StateUse::kRead, [&](Slices slices) { return Round(slices); }));
  MOE_RETURN_IF_ERROR(Gather(0, reducer_.buckets().size(), site));
  return FinishPublishing();
}

absl::Status Optimizer::Round(Slices slices) {
  const WorkspaceScope scope(*context_.host_workspace);
  MOE_ASSIGN_OR_RETURN(auto parts, context_.host_workspace->Array<MasterPart>(std::ssize(slices)));
  auto to = parts.begin();
  for (const OptimizerState::Slice& slice : slices) {
    // Layers read a sharded bucket's master once it is gathered.
    if (reducer_.buckets()[slice.bucket].sharded() && !slice.keeps_master) continue;
    const ElementRange range = slice.piece.range;
    const absl::Span<std::byte> copy(reinterpret_cast<std::byte*>(slice.weights.data()),
                                     slice.weights.size());
    *to++ = {slice.piece.parameter, range.begin,
             absl::MakeConstSpan(slice.master(), static_cast<size_t>(range.size())), copy};
  }
  parts.remove_suffix(static_cast<size_t>(parts.end() - to));
  return store_.RefreshParts(parts, context_);
}

absl::Status Optimizer::Gather(size_t begin, size_t end, const Site& site) {
  const auto& buckets = reducer_.buckets();
  for (size_t b = begin; b < end; ++b) {
    if (!buckets[b].gathers_at_once()) continue;
    const BucketBlock& block = state_.block(b);
    MOE_RETURN_IF_ERROR(gather_.Start(
        {.bucket = b, .own = block.own, .all = block.bytes, .part_bytes = block.part_bytes}, site));
  }
  return absl::OkStatus();
}

// Once all is gathered, vectors are rounded where layers read them in a 16-bit type.
absl::Status Optimizer::FinishPublishing() {
  MOE_RETURN_IF_ERROR(gather_.Finish());
  int64_t count = 0;
  for (const ParameterBucket& bucket : reducer_.buckets()) {
    if (bucket.gathers_at_once()) count += std::ssize(bucket.parameters);
  }
  const WorkspaceScope scope(*context_.host_workspace);
  MOE_ASSIGN_OR_RETURN(const auto parts, context_.host_workspace->Array<MasterPart>(count));
  auto to = parts.begin();
  for (const ParameterBucket& bucket : reducer_.buckets()) {
    if (!bucket.gathers_at_once()) continue;
    for (Parameter* const parameter : bucket.parameters)
      *to++ = {parameter, 0, parameter->master()};
  }
  return store_.RefreshParts(parts, context_);
}

}  // namespace moe
