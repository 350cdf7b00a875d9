#include "moe/bench/layer_on_rank.h"

#include <algorithm>
#include <type_traits>

#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/trace.h"
#include "moe/bench/slots.h"

namespace moe::bench {
namespace {

// Results that calls are compared with, of one rank; those of a trace's later records are not kept.
constexpr int64_t kMostKeptBytes = int64_t{256} << 20;

// The slots of this rank in a call.
TokenSlots SlotsOf(const LayerSpec& spec, const Communicator& world, int64_t call) {
  if (spec.routing->kind == RoutingSpec::kTrace) {
    const Replay& replay = *spec.routing->replay;
    return DealSlots(replay.slots_of(call, world.rank()), replay.record(call).tokens[world.rank()]);
  }
  return DrawSlots(*spec.routing, {.rank = world.rank(),
                                   .ranks = world.size(),
                                   .expert_parallel_size = spec.expert_parallel_size,
                                   .tokens = spec.tokens,
                                   .top_k = spec.layer.router.top_k,
                                   .num_experts = spec.layer.router.num_experts,
                                   .seed = spec.seed});
}

void Add(const RouterStats& stats, RouterLoad& load) {
  load.expert_count.resize(stats.expert_count.size(), 0);
  for (size_t e = 0; e < stats.expert_count.size(); ++e) {
    load.expert_count[e] += stats.expert_count[e];
  }
  load.dropped += stats.dropped_slots;
  ++load.calls;
}

}  // namespace

template <typename T>
LayerOnRank<T>::LayerOnRank(const LayerSpec& spec, const Context& context)
    : spec_(spec),
      context_(context),
      store_(DTypeOf<T>::value, spec.seed),
      first_(kMostKeptBytes) {}

template <typename T>
absl::Status LayerOnRank<T>::Setup(Stream& gradients) {
  MoeLayerConfig config = spec_.layer;
  config.router.seed = spec_.seed;
  config.router.micro_batch_tokens = spec_.tokens;
  int64_t most = spec_.tokens;
  if (spec_.routing.has_value()) {
    const bool trace = spec_.routing->kind == RoutingSpec::kTrace;
    if (trace) most = spec_.routing->replay->most_tokens();
    const int64_t most_slots =
        trace ? spec_.routing->replay->most_slots_of_a_token() : spec_.layer.router.top_k;
    gate_ = std::make_unique<AssignedGate>(SlotsOf(spec_, context_.mesh->world(), 0),
                                           static_cast<int32_t>(most_slots));
    gate_->Choose(config.router);
    // Ranks and calls may differ.
    config.router.micro_batch_tokens = 0;
  }
  MOE_ASSIGN_OR_RETURN(layer_, MoeLayer<T>::Create(config, "layer.", store_, context_));
  MOE_ASSIGN_OR_RETURN(reducer_, GradientReducer::Create({}, store_, context_, gradients));
  const auto fill = [&](std::vector<T>& values, uint32_t which) {
    values.resize(most * hidden());
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] =
          T(static_cast<float>(Normal({.seed = spec_.seed,
                                       .purpose = RandomPurpose::kData,
                                       .layer = which,
                                       .step = static_cast<uint64_t>(context_.mesh->world().rank()),
                                       .item = i})));
    }
  };
  fill(x_, 0);
  fill(dy_, 1);
  y_.resize(x_.size());
  dx_.resize(x_.size());
  return absl::OkStatus();
}

template <typename T>
int64_t LayerOnRank<T>::records() const {
  return spec_.routing.has_value() ? CallsOf(*spec_.routing) : 1;
}

template <typename T>
int64_t LayerOnRank<T>::tokens() const {
  return gate_ == nullptr ? spec_.tokens : gate_->tokens();
}

template <typename T>
int64_t LayerOnRank<T>::bytes() const {
  const int64_t of_element = 4 + (std::is_same_v<T, float> ? 0 : int64_t{sizeof(T)}) +
                             (context_.numerics == Numerics::kLayoutInvariant ? 8 : 4);
  return context_.workspace->peak_bytes() + store_.total_size() * of_element +
         static_cast<int64_t>(4 * x_.size() * sizeof(T));
}

template <typename T>
absl::Status LayerOnRank<T>::Call(int64_t call, CallTimes& times, std::array<int64_t, 2>& wrong,
                                  RouterLoad* load) {
  const WorkspaceScope scratch(*context_.workspace);
  MOE_RETURN_IF_ERROR(reducer_->Begin());
  const int64_t record = call % records();
  if (record != record_) gate_->Assign(SlotsOf(spec_, context_.mesh->world(), record));
  record_ = record;
  // Another number in every call, so that an element which no call writes differs too.
  const T unwritten(static_cast<float>(++calls_ % 127));
  std::fill(y_.begin(), y_.end(), unwritten);
  std::fill(dx_.begin(), dx_.end(), unwritten);
  const int64_t tokens = this->tokens();
  const Batch batch = {.first_global_token = context_.mesh->world().rank() * spec_.tokens};
  MoeLayerSaved<T> saved;
  RouterStats stats;
  MOE_RETURN_IF_ERROR(Pass(0, times, [&] {
    return layer_->Forward(View(x_, tokens), batch, View(y_, tokens), &saved,
                           load == nullptr ? nullptr : &stats);
  }));
  MOE_RETURN_IF_ERROR(Pass(1, times, [&] {
    return layer_->Backward(View(dy_, tokens), saved, 1.0f, View(dx_, tokens),
                            [](Parameter&) { return absl::OkStatus(); });
  }));
  if (load != nullptr) Add(stats, *load);
  const auto elements = static_cast<size_t>(tokens * hidden());
  first_.Compare(record, absl::MakeConstSpan(y_).first(elements),
                 absl::MakeConstSpan(dx_).first(elements), wrong);
  return absl::OkStatus();
}

template <typename T>
template <typename Work>
absl::Status LayerOnRank<T>::Pass(int pass, CallTimes& times, Work work) {
  MOE_RETURN_IF_ERROR(context_.mesh->world().Barrier());
  context_.clock->Reset();
  const int64_t start = MonotonicNs();
  MOE_RETURN_IF_ERROR(Timed(context_, {.name = kPasses[pass]}, *context_.compute, work));
  MOE_RETURN_IF_ERROR(context_.exchange->Synchronize());
  MOE_RETURN_IF_ERROR(context_.compute->Synchronize());
  double* const part = times.data() + pass * kLayerParts;
  for (int p = 0; p < kLayerParts - 1; ++p) {
    part[p] = context_.clock->seconds(kLayerPhases[p]) * 1e6;
  }
  part[kLayerParts - 1] = static_cast<double>(MonotonicNs() - start) * 1e-3;
  return absl::OkStatus();
}

template class LayerOnRank<float>;
template class LayerOnRank<BFloat16>;

}  // namespace moe::bench
