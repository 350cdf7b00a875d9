#include "moe/train/optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "comm/extremes.h"
#include "kernels/adamw/adamw.h"
#include "kernels/base/finite.h"
#include "kernels/base/status_macros.h"

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

// The byte of a bucket's packed parameters where its element is.
int64_t ByteOf(const ParameterBucket& bucket, const PackedParameters& packed, int64_t element) {
  const auto after = std::upper_bound(bucket.first.begin(), bucket.first.end() - 1, element);
  const auto i = static_cast<size_t>(after - bucket.first.begin()) - 1;
  if (element == bucket.elements()) return packed.first_byte.back();
  return packed.first_byte[i] + (element - bucket.first[i]) * packed.element_bytes[i];
}

// kDataLoss, the same on every rank, if a rank has found values: with the first one's `name`.
absl::Status NonFiniteOverRanks(int64_t found, std::string name, Communicator& world,
                                Stream& stream) {
  MOE_ASSIGN_OR_RETURN(const auto ranks,
                       ExtremesOverRanks({found > 0 ? world.rank() : world.size()}, world, stream));
  const auto first = static_cast<int>(ranks[0].least);
  if (first == world.size()) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(world.AllReduce<int64_t>({&found, 1}, ReduceOp::kSum, stream));
  auto length = std::ssize(name);
  MOE_RETURN_IF_ERROR(world.Broadcast<int64_t>({&length, 1}, first, stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  name.resize(static_cast<size_t>(length));
  const absl::Span<uint8_t> letters(reinterpret_cast<uint8_t*>(name.data()), name.size());
  MOE_RETURN_IF_ERROR(world.Broadcast<uint8_t>(letters, first, stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  return absl::DataLossError(absl::StrCat(found,
                                          " values of weights or their moments are not finite, "
                                          "the first in tensor '",
                                          name, "' of rank ", first));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Optimizer>> Optimizer::Create(const OptimizerOptions& options,
                                                             ParameterStore& store,
                                                             GradientReducer& reducer,
                                                             const Context& context) {
  auto optimizer = std::unique_ptr<Optimizer>(new Optimizer(options, store, reducer, context));
  optimizer->states_.resize(reducer.buckets().size());
  MOE_ASSIGN_OR_RETURN(optimizer->count_, Buffer::Allocate(sizeof(int64_t), *context.memory));
  GroupMap<std::vector<size_t>> packs;  // buckets
  for (size_t b = 0; b < reducer.buckets().size(); ++b) {
    const ParameterBucket& bucket = reducer.buckets()[b];
    MOE_RETURN_IF_ERROR(optimizer->Keep(bucket, optimizer->states_[b]));
    if (!bucket.sharded) continue;
    std::vector<size_t>& pack = packs[bucket.holders];
    pack.push_back(b);
    if (!store.EndsSlab(*bucket.parameters.back())) continue;
    MOE_RETURN_IF_ERROR(optimizer->Pack(pack));
    pack.clear();
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
  return stream.Synchronize();
}

absl::Status Optimizer::Pack(absl::Span<const size_t> buckets) {
  std::vector<Parameter*> parameters;
  for (const size_t b : buckets) {
    const auto& more = reducer_.buckets()[b].parameters;
    parameters.insert(parameters.end(), more.begin(), more.end());
  }
  MOE_ASSIGN_OR_RETURN(const PackedParameters all, store_.Pack(parameters, *context_.compute));
  auto element_bytes = all.element_bytes.begin();
  auto first_byte = all.first_byte.begin();
  for (const size_t b : buckets) {
    const ParameterBucket& bucket = reducer_.buckets()[b];
    State& state = states_[b];
    const auto count = std::ssize(bucket.parameters);
    const int64_t begin = *first_byte, bytes = first_byte[count] - begin;
    state.packed.block = all.block.subspan(static_cast<size_t>(begin), static_cast<size_t>(bytes));
    state.packed.element_bytes.assign(element_bytes, element_bytes + count);
    for (auto at = first_byte; at <= first_byte + count; ++at) {
      state.packed.first_byte.push_back(*at - begin);
    }
    element_bytes += count;
    first_byte += count;
    int64_t element = 0;
    for (const int64_t part : bucket.counts) {
      state.part_bytes.push_back(ByteOf(bucket, state.packed, element + part) -
                                 ByteOf(bucket, state.packed, element));
      element += part;
    }
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

absl::StatusOr<GradientNorm> Optimizer::Step(const StepOptions& options) {
  Stream& stream = *context_.compute;
  MOE_ASSIGN_OR_RETURN(const GradientNorm norm, reducer_.Norm(options.gradient_scale));
  non_finite_ = 0;
  if (!norm.finite() && options.non_finite == NonFiniteGradients::kSkip) return norm;
  const double most =
      options_.clip_grad > 0 ? options_.clip_grad : std::numeric_limits<double>::infinity();
  MOE_ASSIGN_OR_RETURN(const double clip, norm.ClipFactor(most));

  ++step_;
  AdamWOptions adamw = {.learning_rate = static_cast<float>(options.learning_rate),
                        .beta1 = options_.beta1,
                        .beta2 = options_.beta2,
                        .epsilon = options_.epsilon,
                        .gradient_scale = static_cast<float>(clip),
                        .step = step_,
                        .non_finite = count_.span<int64_t>().data()};
  MOE_RETURN_IF_ERROR(stream.Zero(count_.data(), count_.bytes()));
  // What ranks share out travels as soon as it has moved; all else moves at once.
  const auto& buckets = reducer_.buckets();
  for (size_t begin = 0, end = 1; end <= buckets.size(); ++end) {
    if (!buckets[end - 1].sharded && end < buckets.size()) continue;
    MOE_RETURN_IF_ERROR(Move(adamw, options.gradient_scale, begin, end));
    MOE_RETURN_IF_ERROR(Publish(begin, end));
    begin = end;
  }
  MOE_RETURN_IF_ERROR(FinishPublishing());
  MOE_RETURN_IF_ERROR(stream.CopyBytes(count_.data(), &non_finite_, count_.bytes()));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  return norm;
}

absl::Status Optimizer::Move(const AdamWOptions& adamw, double gradient_scale, size_t begin,
                             size_t end) {
  int64_t count = 0;
  for (size_t b = begin; b < end; ++b) count += std::ssize(states_[b].slices);
  const WorkspaceScope scope(*context_.host_workspace);
  MOE_ASSIGN_OR_RETURN(const auto slices, context_.host_workspace->Array<AdamWSlice>(count));
  auto to = slices.begin();
  for (size_t b = begin; b < end; ++b) {
    for (const Slice& slice : states_[b].slices) {
      *to++ = {.first = reducer_.At(b, slice.piece.bucket.begin),
               .size = slice.piece.range.size(),
               .weight = MasterOf(slice).data(),
               .m = slice.mean.data(),
               .v = slice.mean_square.data(),
               .weight_decay =
                   slice.piece.parameter->spec().weight_decay ? options_.weight_decay : 0.0f};
    }
  }
  return AdamW(adamw, reducer_.Sums(gradient_scale), slices, *context_.workspace,
               *context_.compute);
}

absl::Status Optimizer::CheckFinite() const {
  int64_t found = 0;  // by this rank, of what it speaks for
  std::string name;   // of the first of their tensors
  for (const Slice& slice : Slices()) {
    const auto at = static_cast<size_t>(slice.own.begin - slice.piece.range.begin);
    const auto size = static_cast<size_t>(slice.own.size());
    for (const auto values : {slice.master, slice.mean, slice.mean_square}) {
      const WorkspaceScope scope(*context_.host_workspace);
      MOE_ASSIGN_OR_RETURN(const auto host, OnHost<float>(values.subspan(at, size), context_));
      const int64_t here = CountNonFinite(host.data(), std::ssize(host));
      if (found == 0 && here > 0) name = slice.piece.parameter->spec().name;
      found += here;
    }
  }
  return NonFiniteOverRanks(found, name, context_.mesh->world(), *context_.host);
}

absl::Status Optimizer::PublishMasters() {
  MOE_RETURN_IF_ERROR(Publish(0, states_.size()));
  return FinishPublishing();
}

absl::Status Optimizer::Publish(size_t begin, size_t end) {
  int64_t count = 0;
  for (size_t b = begin; b < end; ++b) count += std::ssize(states_[b].slices);
  const WorkspaceScope scope(*context_.host_workspace);
  MOE_ASSIGN_OR_RETURN(auto parts, context_.host_workspace->Array<MasterPart>(count));
  auto to = parts.begin();
  for (size_t b = begin; b < end; ++b) {
    for (const Slice& slice : states_[b].slices) {
      if (reducer_.buckets()[b].sharded && slice.master.empty()) continue;  // layers read it
      *to++ = {slice.piece.parameter, slice.piece.range.begin, MasterOf(slice)};
    }
  }
  parts.remove_suffix(static_cast<size_t>(parts.end() - to));
  MOE_RETURN_IF_ERROR(store_.RefreshParts(parts, context_));
  for (size_t b = begin; b < end; ++b) {
    if (!reducer_.buckets()[b].sharded) continue;
    MOE_RETURN_IF_ERROR(reducer_.Gather(b, states_[b].packed.block, states_[b].part_bytes));
  }
  return absl::OkStatus();
}

// What was gathered is there: vectors are rounded where they are read.
absl::Status Optimizer::FinishPublishing() {
  MOE_RETURN_IF_ERROR(reducer_.FinishGather());
  int64_t count = 0;
  for (const ParameterBucket& bucket : reducer_.buckets()) {
    if (bucket.sharded) count += std::ssize(bucket.parameters);
  }
  const WorkspaceScope scope(*context_.host_workspace);
  MOE_ASSIGN_OR_RETURN(const auto parts, context_.host_workspace->Array<MasterPart>(count));
  auto to = parts.begin();
  for (const ParameterBucket& bucket : reducer_.buckets()) {
    if (!bucket.sharded) continue;
    for (Parameter* const parameter : bucket.parameters)
      *to++ = {parameter, 0, parameter->master()};
  }
  return store_.RefreshParts(parts, context_);
}

int64_t Optimizer::bytes() const {
  int64_t total = 0;
  for (const State& state : states_) total += state.values.bytes();
  return total;
}

}  // namespace moe
