#include "moe/gradient_reducer.h"

#include <algorithm>
#include <numeric>

#include <absl/container/inlined_vector.h>
#include <absl/strings/str_cat.h>

#include "kernels/base/caught.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

absl::Status CheckTrainable(const Parameter& parameter) {
  if (parameter.spec().trainable) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("GradientReducer: ", parameter.spec().name,
                                                 " is not trained, so it has no gradient"));
}

}  // namespace

// Which parameters make up each bucket, in launch order: backward fills a bucket last when it
// reaches the bucket's first parameter.
std::vector<std::vector<const Parameter*>> GradientReducer::Partition(const ParameterStore& store,
                                                                      int64_t bucket_bytes,
                                                                      int64_t element_bytes) {
  struct Open {
    std::vector<const Parameter*> parameters;
    int64_t bytes = 0;
  };
  std::vector<std::vector<const Parameter*>> closed;
  Open open[2];  // by group
  const auto all = store.parameters();
  for (auto p = all.rbegin(); p != all.rend(); ++p) {
    if (!(*p)->spec().trainable) continue;
    Open& bucket = open[static_cast<int>((*p)->spec().group)];
    bucket.parameters.push_back(p->get());
    bucket.bytes += (*p)->size() * element_bytes;
    if (bucket.bytes >= bucket_bytes)
      closed.push_back(std::move(std::exchange(bucket, {}).parameters));
  }
  for (Open& bucket : open) {
    if (!bucket.parameters.empty()) closed.push_back(std::move(bucket.parameters));
  }
  std::stable_sort(closed.begin(), closed.end(), [](const auto& a, const auto& b) {
    return a.back()->index() > b.back()->index();
  });
  return closed;
}

absl::StatusOr<std::unique_ptr<GradientReducer>> GradientReducer::Create(
    const GradientReducerOptions& options, ParameterStore& store, const Context& context,
    Stream& stream) {
  if (options.bucket_bytes < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("GradientReducer: bucket of ", options.bucket_bytes, " bytes, expected >= 1"));
  }
  if (options.max_terms < 1 && context.numerics == Numerics::kLayoutInvariant) {
    return absl::InvalidArgumentError(absl::StrCat(
        "GradientReducer: max_terms is ", options.max_terms,
        ", expected the number of micro-batches of a step over all ranks, at least 1"));
  }
  auto reducer =
      std::unique_ptr<GradientReducer>(new GradientReducer(options, store, context, stream));
  MOE_ASSIGN_OR_RETURN(reducer->world_,
                       AllReducer::Create(options.algorithm, context.mesh->world_gradients()));
  MOE_ASSIGN_OR_RETURN(reducer->expert_,
                       AllReducer::Create(options.algorithm, context.mesh->expert_gradients()));

  const bool exact = context.numerics == Numerics::kLayoutInvariant;
  const int64_t element_bytes = exact ? sizeof(int64_t) : sizeof(float);
  reducer->place_.resize(store.parameters().size());
  const auto partition = Partition(store, options.bucket_bytes, element_bytes);
  reducer->buckets_.reserve(partition.size());
  for (const auto& parameters : partition) {
    Bucket& bucket = reducer->buckets_.emplace_back();
    bucket.group = parameters.front()->spec().group;
    bucket.parameters = static_cast<int>(parameters.size());
    for (const Parameter* p : parameters) {
      reducer->place_[p->index()] = {static_cast<int>(reducer->buckets_.size()) - 1,
                                     bucket.elements};
      bucket.elements += p->size();
    }
    MOE_ASSIGN_OR_RETURN(bucket.sum,
                         Buffer::Allocate((bucket.elements + (exact ? 1 : 0)) * element_bytes,
                                          *context.memory, "gradient bucket"));
  }
  reducer->SetAccumulators();
  return reducer;
}

GradientReducer::~GradientReducer() {
  if (in_flight_) {
    context_.mesh->Abort(
        Caught([] { return absl::AbortedError("gradients of a step were given up"); }));
  }
  stream_.Synchronize().IgnoreError();
}

void GradientReducer::SetAccumulators() {
  for (const auto& parameter : store_.parameters()) {
    if (!parameter->spec().trainable) continue;
    Place& place = place_[parameter->index()];
    const Bucket& bucket = buckets_[place.bucket];
    if (context_.numerics == Numerics::kLayoutInvariant) {
      parameter->set_grad(
          GradAccumulator(bucket.sum.span<int64_t>().subspan(place.offset, parameter->size()),
                          grid_, NonFiniteOf(bucket), &place.empty));
    } else {
      parameter->set_grad(GradAccumulator(
          bucket.sum.span<float>().subspan(place.offset, parameter->size()), &place.empty));
    }
  }
}

absl::Status GradientReducer::Begin(int loss_scale_log2) {
  const int unit_log2 = options_.unit_log2 + loss_scale_log2;
  if (unit_log2 != grid_.unit_log2) {
    grid_.unit_log2 = unit_log2;
    SetAccumulators();
  }
  for (Place& place : place_) place.empty = true;
  for (Bucket& bucket : buckets_) {
    bucket.ready = 0;
    if (context_.numerics != Numerics::kLayoutInvariant) continue;
    MOE_RETURN_IF_ERROR(context_.compute->Zero(NonFiniteOf(bucket), sizeof(int64_t)));
  }
  next_ = 0;
  return absl::OkStatus();
}

absl::Status GradientReducer::MarkReady(const Parameter& parameter) {
  MOE_RETURN_IF_ERROR(CheckTrainable(parameter));
  Bucket& bucket = buckets_[place_[parameter.index()].bucket];
  if (++bucket.ready > bucket.parameters) {
    return absl::FailedPreconditionError(absl::StrCat("GradientReducer: ", parameter.spec().name,
                                                      " was marked ready twice in one step"));
  }
  MOE_RETURN_IF_ERROR(parameter.grad().ClearIfEmpty(*context_.compute));
  if (bucket.ready == bucket.parameters) {
    MOE_ASSIGN_OR_RETURN(bucket.filled, context_.compute->Record());
  }
  for (; next_ < buckets_.size() && buckets_[next_].ready == buckets_[next_].parameters; ++next_) {
    MOE_RETURN_IF_ERROR(Launch(buckets_[next_]));
  }
  return absl::OkStatus();
}

absl::Status GradientReducer::Launch(Bucket& bucket) {
  const bool replicated = bucket.group == ParameterGroup::kReplicated;
  Communicator& group =
      replicated ? context_.mesh->world_gradients() : context_.mesh->expert_gradients();
  if (group.size() == 1) return absl::OkStatus();
  in_flight_ = true;
  AllReducer& all_reduce = replicated ? *world_ : *expert_;
  group.SetPhase({.name = "all-reduce", .step = context_.mesh->world().phase().step});
  MOE_RETURN_IF_ERROR(stream_.WaitFor(bucket.filled));
  const int64_t bytes = 2 * bucket.sum.bytes() * (group.size() - 1) / group.size();
  Traffic& traffic = traffic_[static_cast<int>(bucket.group)];
  ++traffic.buckets;
  traffic.bytes_sent += bytes;
  const Work work = {.phase = Phase::kAllReduce,
                     .name = replicated ? "all-reduce" : "all-reduce experts",
                     .bucket = static_cast<int32_t>(&bucket - buckets_.data()),
                     .bytes = bytes};
  return Timed(context_, work, stream_, [&] {
    return context_.numerics == Numerics::kLayoutInvariant
               ? all_reduce.Sum(bucket.sum.span<int64_t>(), stream_)
               : all_reduce.Sum(bucket.sum.span<float>(), stream_);
  });
}

absl::Status GradientReducer::Finish() {
  if (next_ != buckets_.size()) {
    return absl::FailedPreconditionError(absl::StrCat("GradientReducer: ", buckets_.size() - next_,
                                                      " of ", buckets_.size(),
                                                      " buckets still miss gradients"));
  }
  MOE_RETURN_IF_ERROR(JoinStreams(*context_.compute, stream_));
  in_flight_ = false;
  return absl::OkStatus();
}

absl::StatusOr<int64_t> GradientReducer::NonFinite(ParameterGroup group) const {
  if (context_.numerics != Numerics::kLayoutInvariant) return 0;
  absl::InlinedVector<int64_t, 64> counts(buckets_.size());
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (buckets_[b].group != group) continue;
    MOE_RETURN_IF_ERROR(
        context_.compute->CopyBytes(NonFiniteOf(buckets_[b]), &counts[b], sizeof(int64_t)));
  }
  MOE_RETURN_IF_ERROR(context_.compute->Synchronize());
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// Each rank's experts, and what all hold once.
absl::StatusOr<int64_t> GradientReducer::NonFiniteShare() const {
  MOE_ASSIGN_OR_RETURN(const int64_t experts, NonFinite(ParameterGroup::kExpert));
  if (context_.mesh->expert_parallel().rank() != 0) return experts;
  MOE_ASSIGN_OR_RETURN(const int64_t replicated, NonFinite(ParameterGroup::kReplicated));
  return experts + replicated;
}

absl::StatusOr<ScaledSum> GradientReducer::Sum(const Parameter& parameter, double scale) const {
  MOE_RETURN_IF_ERROR(CheckTrainable(parameter));
  const Place place = place_[parameter.index()];
  const Buffer& sum = buckets_[place.bucket].sum;
  if (context_.numerics == Numerics::kLayoutInvariant) {
    return ScaledSum(sum.span<int64_t>().subspan(place.offset, parameter.size()), grid_, scale);
  }
  return ScaledSum(sum.span<float>().subspan(place.offset, parameter.size()), scale);
}

absl::StatusOr<absl::Span<const float>> GradientReducer::Gradient(const Parameter& parameter,
                                                                  double scale,
                                                                  absl::Span<float> scratch,
                                                                  Stream& stream) const {
  MOE_ASSIGN_OR_RETURN(const ScaledSum sum, Sum(parameter, scale));
  const auto out = scratch.subspan(0, parameter.size());
  MOE_RETURN_IF_ERROR(sum.ToFloat(out, stream));
  return out;
}

}  // namespace moe
