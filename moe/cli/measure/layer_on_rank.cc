#include "moe/cli/measure/layer_on_rank.h"

#include <algorithm>
#include <mutex>
#include <type_traits>

#include <absl/strings/str_cat.h>

#include "gating/gate.h"
#include "gating/token_choice_gate.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/trace.h"
#include "kernels/draw/draw.h"
#include "kernels/topk_gate/select_experts.h"
#include "moe/tensor/own_rows.h"

namespace moe::measure {

namespace {

using Given = AssignedGate::Given;

constexpr char kGateName[] = "bench-assigned";

// Assignments that are alive, by the seed that stands for each.
class Registry {
 public:
  uint64_t Add(std::shared_ptr<const Given> given) {
    const std::lock_guard<std::mutex> lock(mu_);
    given_[++last_] = std::move(given);
    return last_;
  }
  void Remove(uint64_t id) {
    const std::lock_guard<std::mutex> lock(mu_);
    given_.erase(id);
  }
  std::shared_ptr<const Given> Find(uint64_t id) const {
    const std::lock_guard<std::mutex> lock(mu_);
    const auto at = given_.find(id);
    MOE_CHECK(at != given_.end());
    return at->second;
  }

 private:
  mutable std::mutex mu_;
  uint64_t last_ = 0;                                       // guarded by mu_
  std::map<uint64_t, std::shared_ptr<const Given>> given_;  // guarded by mu_
};

Registry& TheRegistry() {
  static Registry registry;
  return registry;
}

class GivenGate final : public ScaledTokenChoiceGate {
 public:
  GivenGate(std::shared_ptr<const Given> given, int32_t top_k)
      : ScaledTokenChoiceGate({.top_k = given->most_slots}, Weights::kNormalised),
        given_(std::move(given)),
        top_k_(top_k) {}

  bool RunsOn(DeviceKind device) const override { return device == DeviceKind::kCpu; }

  absl::StatusOr<GateSelection> Select(const GateInput& input, Workspace& workspace,
                                       Stream& stream) const override {
    const TokenSlots& given = given_->slots;
    const int64_t tokens = input.logits.rows();
    const int64_t experts = input.logits.cols();
    if (tokens != given.tokens()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "AssignedGate: ", tokens, " tokens, expected the ", given.tokens(), " that have slots"));
    }
    const auto slots = static_cast<int64_t>(given.expert.size());
    MOE_ASSIGN_OR_RETURN(const auto found, workspace.Matrix<int32_t>(tokens, top_k_));
    MOE_ASSIGN_OR_RETURN(const auto value, workspace.Matrix<float>(tokens, top_k_));
    MOE_ASSIGN_OR_RETURN(const auto score, workspace.Matrix<float>(tokens, experts));
    MOE_ASSIGN_OR_RETURN(const auto log_sum_exp, workspace.Array<float>(tokens));
    MOE_ASSIGN_OR_RETURN(const auto count, workspace.Array<int64_t>(experts));
    MOE_ASSIGN_OR_RETURN(const auto weight, workspace.Array<float>(slots));
    MOE_RETURN_IF_ERROR(SelectExperts({}, {.logits = input.logits},
                                      {.score = score,
                                       .expert = found,
                                       .weight = value,
                                       .log_sum_exp = log_sum_exp,
                                       .count = count},
                                      stream));
    MOE_RETURN_IF_ERROR(stream.Enqueue([&given, score, weight, count] {
      std::fill(count.begin(), count.end(), int64_t{0});
      for (int64_t t = 0; t < given.tokens(); ++t) {
        const int64_t first = given.slot_offset[t];
        const int64_t last = given.slot_offset[t + 1];
        for (int64_t s = first; s < last; ++s) {
          weight[s] = score(t, given.expert[s]);
          ++count[given.expert[s]];
        }
        Normalise(weight.subspan(first, last - first));
      }
      return absl::OkStatus();
    }));
    return GateSelection{.slot_offset = given.slot_offset,
                         .expert = given.expert,
                         .weight = weight,
                         .count = count,
                         .score = score,
                         .log_sum_exp = log_sum_exp};
  }

 private:
  const std::shared_ptr<const Given> given_;
  const int32_t top_k_;
};

// Once in the life of the process.
void Register() {
  static const absl::Status status = RegisterGate(
      {.name = kGateName, .make = [](const RouterConfig& config) {
         return std::make_unique<GivenGate>(TheRegistry().Find(config.seed), config.top_k);
       }});
  MOE_CHECK(status.ok());
}

// Bytes of kept results of one rank, with which calls are compared; those of a trace's later
// records are not kept.
constexpr int64_t kMostKeptBytes = int64_t{256} << 20;

// The slots of this rank in a call; those of a tensor group are the same.
TokenSlots SlotsOf(const LayerSpec& spec, const Mesh& mesh, int64_t call) {
  const int rank = mesh.index(MeshGroup::kData);
  if (spec.routing->kind == RoutingSpec::kTrace) {
    const Replay& replay = *spec.routing->replay;
    return DealSlots(replay.slots_of(call, rank), replay.record(call).tokens[rank]);
  }
  return DrawSlots(*spec.routing, {.rank = rank,
                                   .ranks = mesh.size(MeshGroup::kData),
                                   .expert_parallel_size = spec.trainer.session.mesh.expert,
                                   .tokens = spec.rows(),
                                   .top_k = spec.layer.router.top_k,
                                   .num_experts = spec.layer.router.num_experts,
                                   .seed = spec.trainer.seed});
}

void Add(const RouterStats& stats, RouterLoad& load) {
  load.expert_count.resize(stats.expert_count.size(), 0);
  for (size_t e = 0; e < stats.expert_count.size(); ++e) {
    load.expert_count[e] += stats.expert_count[e];
  }
  load.dropped += stats.dropped_slots;
}

}  // namespace

AssignedGate::AssignedGate(TokenSlots slots, int32_t most_slots)
    : given_(std::make_shared<Given>(Given{std::move(slots), most_slots})) {
  Register();
  id_ = TheRegistry().Add(given_);
}

AssignedGate::~AssignedGate() {
  TheRegistry().Remove(id_);
}

void AssignedGate::Choose(RouterConfig& config) const {
  config.gate = kGateName;
  config.seed = id_;
}

template <typename T>
LayerOnRank<T>::LayerOnRank(const LayerSpec& spec, Trainer& trainer)
    : spec_(spec), trainer_(trainer), context_(trainer.context()), first_(kMostKeptBytes) {}

template <typename T>
absl::Status LayerOnRank<T>::Setup() {
  MoeLayerConfig config = spec_.layer;
  config.router.seed = spec_.trainer.seed;
  config.router.micro_batch_tokens = spec_.rows();
  int64_t most = spec_.rows();
  if (spec_.routing.has_value()) {
    const bool trace = spec_.routing->kind == RoutingSpec::kTrace;
    if (trace) most = spec_.routing->replay->most_tokens();
    const int64_t most_slots =
        trace ? spec_.routing->replay->most_slots_of_a_token() : spec_.layer.router.top_k;
    gate_ = std::make_unique<AssignedGate>(SlotsOf(spec_, *context_.mesh, 0),
                                           static_cast<int32_t>(most_slots));
    gate_->Choose(config.router);
    // Ranks and calls may differ.
    config.router.micro_batch_tokens = 0;
  }
  MOE_ASSIGN_OR_RETURN(layer_,
                       MoeLayer<T>::Create(config, "layer.", trainer_.parameters(), context_));
  MOE_ASSIGN_OR_RETURN(x_, RandomTokens(most, 0));
  MOE_ASSIGN_OR_RETURN(dy_, RandomTokens(most, 1));
  MOE_ASSIGN_OR_RETURN(y_, Buffer::Allocate(x_.bytes(), *context_.memory, "y"));
  MOE_ASSIGN_OR_RETURN(dx_, Buffer::Allocate(x_.bytes(), *context_.memory, "dx"));
  return absl::OkStatus();
}

template <typename T>
absl::StatusOr<Buffer> LayerOnRank<T>::RandomTokens(int64_t tokens, uint32_t which) const {
  const RandomKey key = {.seed = spec_.trainer.seed,
                         .purpose = RandomPurpose::kData,
                         .layer = which,
                         .step = static_cast<uint64_t>(context_.mesh->index(MeshGroup::kData))};
  const int64_t count = tokens * hidden();
  MOE_ASSIGN_OR_RETURN(Buffer buffer, Buffer::Allocate(count * static_cast<int64_t>(sizeof(T)),
                                                       *context_.memory, "tokens"));
  const absl::Span<T> values(buffer.template span<T>().data(), static_cast<size_t>(count));
  MOE_RETURN_IF_ERROR(DrawNormal(key, values, *context_.compute));
  return buffer;
}

template <typename T>
int64_t LayerOnRank<T>::records() const {
  return spec_.routing.has_value() ? CallsOf(*spec_.routing) : 1;
}

template <typename T>
int64_t LayerOnRank<T>::tokens() const {
  return gate_ == nullptr ? spec_.rows() : gate_->tokens();
}

template <typename T>
int64_t LayerOnRank<T>::bytes() const {
  const int64_t of_element = 4 + (std::is_same_v<T, float> ? 0 : int64_t{sizeof(T)}) +
                             (context_.numerics == Numerics::kLayoutInvariant ? 8 : 4);
  return trainer_.session().peak_bytes() + trainer_.parameters().total_size() * of_element +
         layer_->packed_bytes() + 4 * x_.bytes();
}

template <typename T>
absl::Status LayerOnRank<T>::Call(int64_t call, CallTimes& times, std::array<int64_t, 2>& wrong,
                                  RouterLoad* load) {
  // One micro-batch of every rank. Its gradients are not summed over ranks.
  MOE_RETURN_IF_ERROR(trainer_.BeginStep());
  MOE_ASSIGN_OR_RETURN(const Round round, trainer_.BeginRound());
  const int64_t record = call % records();
  if (record != record_) gate_->Assign(SlotsOf(spec_, *context_.mesh, record));
  record_ = record;
  // Other numbers than before the last call, so that an element which no call writes differs too.
  const Buffer& before = ++calls_ % 2 == 0 ? x_ : dy_;
  MOE_RETURN_IF_ERROR(context_.compute->CopyBytes(before.data(), y_.data(), y_.bytes()));
  if (!spec_.forward_only) {
    MOE_RETURN_IF_ERROR(context_.compute->CopyBytes(before.data(), dx_.data(), dx_.bytes()));
  }
  const int64_t tokens = this->tokens();
  const OwnRows own = OwnRowsOf(context_, tokens);
  const auto view = [&](const Buffer& values) {
    return own.Of(View(values, tokens));
  };
  const int64_t ends[] = {0, tokens};
  RouterStats stats;
  const Pass pass = {
      .context = context_,
      .batch = {.micro_batch_offsets = ends,
                .first_global_token = context_.mesh->index(MeshGroup::kData) * spec_.rows()},
      .stash = trainer_.PassOf(round).stash,
      .site = {.round = static_cast<int32_t>(call)},  // a call is no step
      .router_stats = {&stats, load == nullptr ? 0u : 1u}};
  MOE_RETURN_IF_ERROR(
      TimedPass(pass, 0, times, [&] { return layer_->Forward(pass, view(x_), view(y_)); }));
  if (!spec_.forward_only) {
    MOE_RETURN_IF_ERROR(TimedPass(pass, 1, times, [&] {
      return layer_->Backward(pass, view(dy_), view(dx_),
                              [](Parameter&) { return absl::OkStatus(); });
    }));
  }
  MOE_RETURN_IF_ERROR(stats.Wait());
  if (load != nullptr) {
    if (context_.mesh->index(MeshGroup::kTensor) == 0) Add(stats, *load);
    ++load->calls;
  }
  MOE_RETURN_IF_ERROR(CompareResults(record, wrong));
  return trainer_.EndStep();
}

template <typename T>
absl::Status LayerOnRank<T>::CompareResults(int64_t record, std::array<int64_t, 2>& wrong) {
  absl::Span<const T> y = y_.span<T>(), dx = dx_.span<T>();
  if (OnCuda(context_)) {
    host_y_.resize(y.size());
    host_dx_.resize(dx.size());
    MOE_RETURN_IF_ERROR(context_.compute->CopyBytes(y.data(), host_y_.data(), y_.bytes()));
    MOE_RETURN_IF_ERROR(context_.compute->CopyBytes(dx.data(), host_dx_.data(), dx_.bytes()));
    MOE_RETURN_IF_ERROR(context_.compute->Synchronize());
    y = host_y_;
    dx = host_dx_;
  }
  const OwnRows own = OwnRowsOf(context_, tokens());
  const auto first = static_cast<size_t>(own.begin() * hidden());
  const auto elements = static_cast<size_t>(own.count() * hidden());
  first_.Compare(record, y.subspan(first, elements),
                 dx.subspan(first, spec_.forward_only ? 0 : elements), wrong);
  return absl::OkStatus();
}

template <typename T>
template <typename Work>
absl::Status LayerOnRank<T>::TimedPass(const Pass& pass, int which, CallTimes& times, Work work) {
  MOE_RETURN_IF_ERROR(
      context_.compute->Synchronize());  // what the call prepared is not the layer's
  MOE_RETURN_IF_ERROR(context_.mesh->world().Barrier());
  MOE_RETURN_IF_ERROR(context_.clock->Reset());
  const int64_t start = MonotonicNs();
  MOE_RETURN_IF_ERROR(Timed(pass, {.name = kPasses[which]}, *context_.compute, work));
  MOE_RETURN_IF_ERROR(context_.exchange->Synchronize());
  MOE_RETURN_IF_ERROR(context_.compute->Synchronize());
  const int64_t end = MonotonicNs();
  MOE_RETURN_IF_ERROR(context_.clock->Collect());
  double* const part = times.data() + which * kLayerParts;
  for (int p = 0; p < kLayerParts - 1; ++p) {
    part[p] = context_.clock->seconds(kLayerPhases[p]) * 1e6;
  }
  part[kLayerParts - 1] = static_cast<double>(end - start) * 1e-3;
  return absl::OkStatus();
}

template class LayerOnRank<float>;
template class LayerOnRank<BFloat16>;
template class LayerOnRank<Float16>;

}  // namespace moe::measure
