#include "moe/layer/moe_layer.h"

#include <numeric>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "kernels/expert_sort/expert_sort.h"

namespace moe {

template <typename T>
absl::StatusOr<std::unique_ptr<MoeLayer<T>>> MoeLayer<T>::Create(const MoeLayerConfig& config,
                                                                 const std::string& prefix,
                                                                 ParameterStore& store,
                                                                 const Context& context) {
  if (config.overlap_degree < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("MoeLayer: overlap degree ", config.overlap_degree, ", expected >= 1"));
  }
  if (config.pack_weights && OnCuda(context)) {
    return absl::InvalidArgumentError(
        "MoeLayer: pack_weights is true on a CUDA device, expected false: its products read "
        "weights "
        "as they are");
  }
  if (store.compute() != DTypeOf<T>::value) {
    return absl::InvalidArgumentError(
        absl::StrCat("MoeLayer: the store's compute type is ", NameOf(store.compute()),
                     ", expected the layer's, ", NameOf(DTypeOf<T>::value)));
  }
  const Device stored = store.memory().device(), computes = context.compute->device();
  if (stored.kind != computes.kind || stored.index != computes.index) {
    return absl::InvalidArgumentError(
        "MoeLayer: the store's memory is not of the device that the context computes on, expected "
        "ParameterStore(type, seed, context)");
  }
  auto layer = std::unique_ptr<MoeLayer>(new MoeLayer(config, context));
  layer->prefix_ = prefix;
  const size_t before = store.parameters().size();
  Communicator& group = context.mesh->group(MeshGroup::kExpert);
  const RouterConfig& router = config.router;
  MOE_ASSIGN_OR_RETURN(layer->router_, Router<T>::Create(router));
  MOE_ASSIGN_OR_RETURN(
      layer->dispatcher_,
      Dispatcher<T>::Create(config.dispatcher,
                            context.mesh->group(MeshGroup::kExpert, context.exchange_lane),
                            *context.memory));
  layer->dispatcher_->set_clock(context.clock);
  layer->plans_on_device_ = layer->CanPlanOnDevice(context);

  MOE_RETURN_IF_ERROR(layer->AddRouterParameters(prefix, store));
  ExpertsConfig experts = {.hidden_size = router.hidden_size,
                           .ffn_hidden_size = config.ffn_hidden_size,
                           .activation = config.activation,
                           .biases = config.projection_biases,
                           .train = config.train_experts,
                           .init_std = config.init_std,
                           .down_init_std = config.down_init_std,
                           .pack_weights = config.pack_weights,
                           .keep_hidden = config.keep_hidden,
                           .share = layer->experts_share_};
  std::vector<std::string> prefixes;
  const ExpertPlacement& placement = layer->placement_;
  for (int32_t e = placement.FirstExpert(group.rank()); e < placement.FirstExpert(group.rank() + 1);
       ++e) {
    prefixes.push_back(absl::StrCat(prefix, "experts.", e, "."));
  }
  MOE_ASSIGN_OR_RETURN(layer->experts_,
                       Experts<T>::Create(experts, prefixes, MeshGroup::kExpertData, store));
  if (config.shared_expert_ffn_hidden_size > 0) {
    experts.ffn_hidden_size = config.shared_expert_ffn_hidden_size;
    experts.biases = false;
    experts.share = ShareOf(context);
    using Gated = typename SharedExpert<T>::Gated;
    MOE_ASSIGN_OR_RETURN(
        layer->shared_,
        SharedExpert<T>::Create(experts, config.gated_shared_expert ? Gated::kYes : Gated::kNo,
                                prefix, store));
  }
  layer->parameters_ = store.AddedSince(before);
  return layer;
}

template <typename T>
bool MoeLayer<T>::CanPlanOnDevice(const Context& context) const {
  const RouterConfig& router = config_.router;
  const int ranks = placement_.ranks();
  if (!OnCuda(context) || placement_.LocalExperts(0) * ranks > kMaxSortedExperts ||
      dispatcher_->algorithm() != DispatchAlgorithm::kStaged) {
    return false;
  }
  // Ranks that share rows or experts divide them on the host.
  if (share_.cut() || experts_share_.cut()) return false;
  if (ranks > 1) return context.mesh->group(MeshGroup::kExpert).moves(DeviceKind::kCuda);
  return router.num_outputs() == router.num_experts &&
         (context.gemm.cublas == nullptr ||
          (context.gemm.kernel == GroupedGemmKernel::kAuto && router.num_experts > 1));
}

template <typename T>
absl::Status MoeLayer<T>::AddRouterParameters(const std::string& prefix, ParameterStore& store) {
  const int64_t rows = router_->weight_rows();
  MOE_ASSIGN_OR_RETURN(router_weight_, store.Add({.name = prefix + "gate.weight",
                                                  .rows = rows,
                                                  .cols = config_.router.hidden_size,
                                                  .init_std = config_.init_std,
                                                  .trainable = config_.train_router}));
  if (router_->traits().router_bias) {
    MOE_ASSIGN_OR_RETURN(router_bias_, store.Add({.name = prefix + "gate.bias",
                                                  .cols = rows,
                                                  .initializer = Initializer::kZeros,
                                                  .weight_decay = false,
                                                  .trainable = config_.train_router}));
  }
  if (router_->traits().expert_bias) {
    MOE_ASSIGN_OR_RETURN(expert_bias_, store.Add({.name = prefix + "gate.e_score_correction_bias",
                                                  .cols = config_.router.num_outputs(),
                                                  .initializer = Initializer::kZeros,
                                                  .weight_decay = false,
                                                  .trainable = false,
                                                  .host_state = true}));
  }
  return absl::OkStatus();
}

template <typename T>
RouterInputs<T> MoeLayer<T>::router_inputs() const {
  RouterInputs<T> inputs = {.weight = router_weight_->view<T>(), .expert_share = expert_share_};
  if (router_bias_ != nullptr) inputs.bias = router_bias_->vector();
  if (expert_bias_ != nullptr) inputs.expert_bias = expert_bias_->vector();
  return inputs;
}

template <typename T>
ModuleState MoeLayer<T>::router_share() {
  return {.tensor = {.name = prefix_ + "gate.expert_share", .cols = config_.router.num_outputs()},
          .values = &expert_share_};
}

template <typename T>
absl::Status MoeLayer<T>::EndStep(absl::Span<const int64_t> expert_count) {
  const auto outputs = static_cast<size_t>(config_.router.num_outputs());
  if (expert_count.size() != outputs) {
    return absl::InvalidArgumentError(
        absl::StrCat("MoeLayer::EndStep: ", expert_count.size(), " counts, expected ", outputs));
  }
  const int64_t total = std::accumulate(expert_count.begin(), expert_count.end(), int64_t{0});
  if (total == 0) return absl::OkStatus();
  expert_share_.resize(outputs);
  for (size_t e = 0; e < outputs; ++e) {
    expert_share_[e] = static_cast<double>(expert_count[e]) / static_cast<double>(total);
    if (expert_bias_ == nullptr) continue;
    // mean < c_e, without division: integers compare alike on every rank.
    const int64_t scaled = expert_count[e] * static_cast<int64_t>(outputs);
    const float sign = scaled < total ? 1.0f : scaled > total ? -1.0f : 0.0f;
    expert_bias_->master()[e] += sign * config_.router.bias_update_rate;
  }
  return absl::OkStatus();
}

template class MoeLayer<float>;
template class MoeLayer<BFloat16>;
template class MoeLayer<Float16>;

}  // namespace moe
