#include "moe/train/gradient_reducer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/caught.h"
#include "kernels/base/finite.h"
#include "kernels/base/status_macros.h"
#include "kernels/elementwise/elementwise.h"
#include "moe/state/unit_grid.h"

namespace moe {
namespace {

absl::Status CheckTrainable(const Parameter& parameter, size_t known) {
  if (static_cast<size_t>(parameter.index()) >= known) {
    return absl::FailedPreconditionError(absl::StrCat("GradientReducer: ", parameter.spec().name,
                                                      " came after the sums, expected before"));
  }
  if (parameter.spec().trainable) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("GradientReducer: ", parameter.spec().name,
                                                 " is not trained, so it has no gradient"));
}

// Appends the units of elements `piece.range`, whole row groups, from whose squares the norm is
// computed. `first`: position of these elements in the sum.
void AppendUnits(const ParameterPiece& piece, int64_t first, std::vector<SquaresUnit>& units) {
  for (const BoxInMemory& held : BoxesOf(*piece.parameter, piece.range)) {
    const int64_t begin = first + held.first - piece.range.begin, cols = held.box.cols();
    UnitGrid(*held.tensor).ForEachUnit(held.box, [&](int64_t /*unit*/, const TensorBox& unit) {
      units.push_back({.begin = begin + (unit.row_begin - held.box.row_begin) * cols +
                                unit.col_begin - held.box.col_begin,
                       .rows = unit.rows(),
                       .cols = unit.cols(),
                       .stride = cols,
                       .sum = piece.parameter->index()});
    });
  }
}

}  // namespace

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
  reducer->buckets_ = MakeBuckets(store,
                                  {.bucket_bytes = options.bucket_bytes,
                                   .element_bytes = reducer->element_bytes(),
                                   .placement = options.placement},
                                  *context.mesh);
  reducer->parameter_sums_.resize(store.parameters().size());
  const auto all = store.parameters();
  reducer->chunks_.resize(all.empty() ? 2 : static_cast<size_t>(all.back()->chunk()) + 2);
  for (size_t b = 0; b < reducer->buckets_.size(); ++b) {
    const ParameterBucket& bucket = reducer->buckets_[b];
    auto& all_reducer = reducer->reducers_[bucket.holders];
    if (all_reducer == nullptr) {
      MOE_ASSIGN_OR_RETURN(all_reducer,
                           AllReducer::Create(options.algorithm, reducer->HoldersOf(bucket)));
    }
    Chunk& chunk = reducer->ChunkOf(bucket);
    if (chunk.end == 0) chunk.begin = b;
    chunk.end = b + 1;
    for (size_t i = 0; i < bucket.parameters.size(); ++i) {
      reducer->parameter_sums_[bucket.parameters[i]->index()] = {static_cast<int>(b),
                                                                 bucket.first[i]};
    }
  }
  return reducer;
}

GradientReducer::~GradientReducer() {
  if (in_flight_.has_value()) {
    context_.mesh->Abort(
        Caught([] { return absl::AbortedError("gradients of a step were given up"); }));
  }
  stream_.Synchronize().IgnoreError();
}

absl::Status GradientReducer::Allocate() {
  constexpr int64_t kLine = 64;  // bytes
  Stream& stream = *context_.compute;
  sums_.resize(buckets_.size());
  std::vector<SquaresUnit> units;
  int64_t elements = 0;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const ParameterBucket& bucket = buckets_[b];
    sums_[b].first = elements;
    for (const ParameterPiece& piece : PiecesOf(bucket, bucket.own)) {
      AppendUnits(piece, At(b, piece.bucket.begin), units);
    }
    const int64_t line = kLine / element_bytes();
    elements += (bucket.summed().size() + line - 1) / line * line;
  }
  MOE_ASSIGN_OR_RETURN(
      sum_, Buffer::Allocate(elements * element_bytes(), *context_.memory, "sums of gradients"));
  const auto bytes = static_cast<int64_t>(units.size() * sizeof(SquaresUnit));
  MOE_ASSIGN_OR_RETURN(units_, Buffer::Allocate(bytes, *context_.memory, "units"));
  if (exact()) {
    const auto tallies = static_cast<int64_t>(parameter_sums_.size() * sizeof(GridTally));
    MOE_ASSIGN_OR_RETURN(tallies_, Buffer::Allocate(tallies, *context_.memory, "tallies"));
  }
  MOE_RETURN_IF_ERROR(stream.CopyBytes(units.data(), units_.data(), bytes));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  for (int64_t i = RoundBuffersOf(buckets_).count; i > 0; --i) {
    MOE_ASSIGN_OR_RETURN(RoundSums* const round, AddRoundSums());
    free_.push_back(round);
  }
  return absl::OkStatus();
}

absl::StatusOr<GradientReducer::RoundSums*> GradientReducer::AddRoundSums() {
  auto round = std::make_unique<RoundSums>();
  MOE_ASSIGN_OR_RETURN(round->sum,
                       Buffer::Allocate(RoundBuffersOf(buckets_).elements * element_bytes(),
                                        *context_.memory, "gradients of a round"));
  rounds_.push_back(std::move(round));
  return rounds_.back().get();
}

absl::Status GradientReducer::OpenRound(size_t b) {
  BucketSums& sums = sums_[b];
  if (sums.round != nullptr) return absl::OkStatus();
  if (free_.empty()) {
    MOE_ASSIGN_OR_RETURN(RoundSums* const added, AddRoundSums());
    free_.push_back(added);
  }
  sums.round = free_.front();
  free_.pop_front();
  if (sums.round->travelled.state() == nullptr) return absl::OkStatus();
  return context_.compute->WaitFor(sums.round->travelled);
}

absl::StatusOr<GradAccumulator> GradientReducer::Open(const Parameter& parameter) {
  ParameterSums& sums = parameter_sums_[parameter.index()];
  const auto b = static_cast<size_t>(sums.bucket);
  if (in_parts(b)) MOE_RETURN_IF_ERROR(OpenRound(b));
  const Buffer& memory = in_parts(b) ? sums_[b].round->sum : sum_;
  const auto first = static_cast<size_t>(sums.first + (in_parts(b) ? 0 : sums_[b].first));
  const auto size = static_cast<size_t>(parameter.size());
  if (!exact()) return GradAccumulator(memory.span<float>().subspan(first, size), &sums.empty);
  return GradAccumulator(memory.span<int64_t>().subspan(first, size), grid_,
                         &tallies_.span<GridTally>()[parameter.index()], &sums.empty);
}

absl::Status GradientReducer::Begin(int loss_scale_log2, int unit_log2) {
  unit_log2 += loss_scale_log2;
  grid_.unit_log2 = unit_log2;
  loss_scale_log2_ = loss_scale_log2;
  if (sums_.empty()) {
    MOE_RETURN_IF_ERROR(Allocate());
    for (size_t b = 0; b < buckets_.size(); ++b) {
      for (Parameter* const p : buckets_[b].parameters) {
        p->set_sum([this, p] { return Open(*p); }, in_parts(b) ? static_cast<int>(b) : -1);
      }
    }
  }
  for (BucketSums& sums : sums_) {
    sums.ready = 0;
    sums.empty = true;
  }
  for (ParameterSums& sums : parameter_sums_) sums.empty = true;
  for (Chunk& chunk : chunks_) chunk.next = chunk.begin;
  return context_.compute->Zero(tallies_.data(), tallies_.bytes());
}

absl::Status GradientReducer::BeginRound(int chunk) {
  if (!travels_each_round()) return absl::OkStatus();
  Chunk& of_round = chunks_[static_cast<size_t>(chunk)];
  MOE_RETURN_IF_ERROR(CheckLaunched(of_round));
  of_round.next = of_round.begin;
  for (size_t b = of_round.begin; b < of_round.end; ++b) {
    sums_[b].ready = 0;
  }
  return absl::OkStatus();
}

absl::Status GradientReducer::MarkReady(const Parameter& parameter, const Site& site) {
  MOE_RETURN_IF_ERROR(CheckTrainable(parameter, parameter_sums_.size()));
  const auto b = static_cast<size_t>(parameter_sums_[parameter.index()].bucket);
  BucketSums& sums = sums_[b];
  const auto parameters = static_cast<int>(buckets_[b].parameters.size());
  if (++sums.ready > parameters) {
    return absl::FailedPreconditionError(
        absl::StrCat("GradientReducer: ", parameter.spec().name, " was marked ready twice in one ",
                     travels_each_round(parameter) ? "round" : "step"));
  }
  if (sums.ready == parameters) {
    MOE_RETURN_IF_ERROR(ClearEmpty(b));
    MOE_ASSIGN_OR_RETURN(sums.filled, context_.compute->Record());
  }
  if (buckets_[b].holders == MeshGroup::kEnds) {
    ends_site_ = site;
    return absl::OkStatus();
  }
  return LaunchReady(ChunkOf(buckets_[b]), site);
}

absl::Status GradientReducer::LaunchReady(Chunk& chunk, const Site& site) {
  const auto is_ready = [&](size_t b) {
    return sums_[b].ready == static_cast<int>(buckets_[b].parameters.size());
  };
  for (; chunk.next < chunk.end && is_ready(chunk.next); ++chunk.next) {
    MOE_RETURN_IF_ERROR(Launch(chunk.next, site));
  }
  return absl::OkStatus();
}

// Writes zeros for the parameters of a full bucket that no partial of this rank's has reached, one
// operation for a run of neighbours.
absl::Status GradientReducer::ClearEmpty(size_t b) {
  const ParameterBucket& bucket = buckets_[b];
  if (in_parts(b)) MOE_RETURN_IF_ERROR(OpenRound(b));
  std::byte* const sums =
      in_parts(b) ? sums_[b].round->sum.data() : sum_.data() + sums_[b].first * element_bytes();
  const auto reached = [&](const Parameter* p) {
    return !std::exchange(parameter_sums_[p->index()].empty, false);
  };
  size_t begin = 0;  // first parameter of the run that ends at i
  for (size_t i = 0; i <= bucket.parameters.size(); ++i) {
    if (i < bucket.parameters.size() && !reached(bucket.parameters[i])) continue;
    const int64_t from = bucket.first[begin], to = bucket.first[i];
    begin = i + 1;
    if (from >= to) continue;
    MOE_RETURN_IF_ERROR(
        context_.compute->Zero(sums + from * element_bytes(), (to - from) * element_bytes()));
  }
  return absl::OkStatus();
}

absl::Status GradientReducer::Launch(size_t b, const Site& site) {
  const ParameterBucket& bucket = buckets_[b];
  Communicator& group = HoldersOf(bucket);
  if (group.size() == 1) return absl::OkStatus();
  in_flight_.emplace(context_.gemm.spare);
  const bool of_experts = HoldExperts(bucket.holders);
  const char* const name = bucket.sharded() ? "reduce-scatter" : "all-reduce";
  MOE_RETURN_IF_ERROR(stream_.WaitFor(sums_[b].filled));
  const int64_t all = bucket.elements() * element_bytes();
  const int64_t bytes = (bucket.sharded() ? 1 : 2) * all * (group.size() - 1) / group.size();
  Traffic& traffic = traffic_[bucket.holders];
  ++traffic.buckets;
  traffic.bytes_sent += bytes;
  const char* const experts = bucket.sharded() ? "reduce-scatter experts" : "all-reduce experts";
  const Work work = {.phase = Phase::kAllReduce,
                     .name = of_experts ? experts : name,
                     .bucket = static_cast<int32_t>(b),
                     .bytes = bytes};
  const Site at = site.Named(name);
  return Timed(context_, at, work, stream_,
               [&] { return exact() ? Travel<int64_t>(b, at) : Travel<float>(b, at); });
}

template <typename T>
absl::Status GradientReducer::Travel(size_t b, const Site& site) {
  const ParameterBucket& bucket = buckets_[b];
  BucketSums& sums = sums_[b];
  AllReducer& reducer = *reducers_[bucket.holders];
  const absl::Span<T> kept = SumsOf<T>(b);
  if (!bucket.sharded()) return reducer.Sum(kept, stream_, site);
  if (!in_parts(b)) return reducer.ReduceScatter(kept, bucket.counts, stream_, site);
  const auto all = sums.round->sum.span<T>().first(static_cast<size_t>(bucket.elements()));
  MOE_RETURN_IF_ERROR(reducer.ReduceScatter(all, bucket.counts, stream_, site));
  const auto own = all.subspan(static_cast<size_t>(bucket.own.begin), kept.size());
  MOE_RETURN_IF_ERROR(std::exchange(sums.empty, false)
                          ? stream_.CopyBytes(own.data(), kept.data(),
                                              static_cast<int64_t>(kept.size() * sizeof(T)))
                          : AddPartial<T>(own, kept, stream_));
  // What comes next is of another round, which backward may have begun already.
  for (const Parameter* const p : bucket.parameters) parameter_sums_[p->index()].empty = true;
  RoundSums* const round = std::exchange(sums.round, nullptr);
  MOE_ASSIGN_OR_RETURN(round->travelled, stream_.Record());
  free_.push_back(round);
  return absl::OkStatus();
}

absl::Status GradientReducer::CheckLaunched(const Chunk& chunk) const {
  if (chunk.next == chunk.end) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("GradientReducer: ", chunk.end - chunk.next,
                                                    " of ", chunk.end - chunk.begin,
                                                    " buckets still miss gradients"));
}

absl::Status GradientReducer::CheckAllLaunched() const {
  for (const Chunk& chunk : chunks_) MOE_RETURN_IF_ERROR(CheckLaunched(chunk));
  return absl::OkStatus();
}

absl::Status GradientReducer::Finish() {
  MOE_RETURN_IF_ERROR(LaunchReady(chunks_.back(), ends_site_));
  MOE_RETURN_IF_ERROR(CheckAllLaunched());
  MOE_RETURN_IF_ERROR(JoinStreams(*context_.compute, stream_));
  in_flight_.reset();
  return absl::OkStatus();
}

// Squares are computed from gradients scaled up by as much as the grid is finer than the default,
// so that they fit their sum equally well at any grid unit.
absl::StatusOr<GradientNorm> GradientReducer::Norm(double scale, const Site& site) const {
  MOE_RETURN_IF_ERROR(CheckAllLaunched());
  Stream& stream = *context_.compute;
  const WorkspaceScope scope(*context_.workspace), host_scope(*context_.host_workspace);
  const int finer_log2 = exact() ? ExactGrid().unit_log2 + loss_scale_log2_ - grid_.unit_log2 : 0;
  const double larger = std::ldexp(scale, finer_log2);
  const auto size = static_cast<int64_t>(parameter_sums_.size()) * kSquareSumSize;
  MOE_ASSIGN_OR_RETURN(const auto squares, context_.workspace->Array<int64_t>(size));
  MOE_RETURN_IF_ERROR(stream.Zero(squares.data(), size * int64_t{sizeof(int64_t)}));
  MOE_RETURN_IF_ERROR(AddSquares(Sums(larger), units_.span<SquaresUnit>(), squares.data(), stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  MOE_ASSIGN_OR_RETURN(const auto sums, OnHost<int64_t>(squares, context_));
  MOE_ASSIGN_OR_RETURN(const auto tallies, OnHost<GridTally>(tallies_.span<GridTally>(), context_));
  MOE_ASSIGN_OR_RETURN(const auto gradients, context_.host_workspace->Array<GradientSquares>(
                                                 std::ssize(parameter_sums_)));
  size_t count = 0;
  for (const ParameterBucket& bucket : buckets_) {
    for (const Parameter* const p : bucket.parameters) {
      gradients[count++] = {.parameter = p,
                            .sum = &sums[p->index() * kSquareSumSize],
                            .tally = exact() ? tallies[p->index()] : GridTally()};
    }
  }
  MOE_ASSIGN_OR_RETURN(
      GradientNorm norm,
      NormOverRanks(gradients.first(count), exact() ? std::ldexp(larger, grid_.unit_log2) : 0,
                    context_, site));
  norm.value = std::ldexp(norm.value, -finer_log2);
  norm.largest = std::ldexp(norm.largest, -loss_scale_log2_);
  return norm;
}

absl::StatusOr<const Parameter*> GradientReducer::NonFiniteParameter() const {
  const WorkspaceScope scope(*context_.host_workspace);
  MOE_ASSIGN_OR_RETURN(const auto tallies, OnHost<GridTally>(tallies_.span<GridTally>(), context_));
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (exact()) {
      for (const Parameter* const p : buckets_[b].parameters) {
        if (!std::isfinite(tallies[p->index()].largest_value())) return p;
      }
      continue;
    }
    MOE_ASSIGN_OR_RETURN(const auto sums, OnHost<float>(SumsOf<float>(b), context_));
    for (const ParameterPiece& piece : PiecesOf(buckets_[b], buckets_[b].summed())) {
      const int64_t begin = piece.bucket.begin - buckets_[b].summed().begin;
      if (CountNonFinite(&sums[begin], piece.bucket.size()) > 0) return piece.parameter;
    }
  }
  return nullptr;
}

ScaledSum GradientReducer::Sums(double scale) const {
  return exact() ? ScaledSum(sum_.span<int64_t>(), grid_, scale)
                 : ScaledSum(sum_.span<float>(), scale);
}

int64_t GradientReducer::At(size_t b, int64_t element) const {
  return sums_[b].first + element - buckets_[b].summed().begin;
}

absl::StatusOr<ScaledSum> GradientReducer::Sum(const Parameter& parameter, double scale) const {
  MOE_RETURN_IF_ERROR(CheckTrainable(parameter, parameter_sums_.size()));
  const ParameterSums& sums = parameter_sums_[parameter.index()];
  const auto b = static_cast<size_t>(sums.bucket);
  if (buckets_[b].sharded()) {
    return absl::FailedPreconditionError(
        absl::StrCat("GradientReducer: the gradient of ", parameter.spec().name,
                     " is in parts on several ranks (ZeRO), expected a whole one"));
  }
  return Sums(scale).Part(At(b, sums.first), parameter.size());
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

int64_t GradientReducer::bytes() const {
  int64_t total = sum_.bytes();
  for (const auto& round : rounds_) total += round->sum.bytes();
  return total;
}

}  // namespace moe
