#include "moe/lm/layer.h"

#include <string>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/workspace.h"
#include "moe/run/finite.h"
#include "moe/state/weight_lease.h"

namespace moe::lm {
namespace {

constexpr Work kAttention = {.phase = Phase::kAttention, .name = "attention"};
constexpr Work kAttentionBackward = {.phase = Phase::kAttention, .name = "attention backward"};

}  // namespace

template <typename T>
absl::StatusOr<std::unique_ptr<Layer<T>>> Layer<T>::Create(const TransformerConfig& config,
                                                           int index, ParameterStore& store,
                                                           const Context& context) {
  const std::string prefix = absl::StrCat("model.layers.", index, ".");
  const size_t before = store.parameters().size();
  MOE_ASSIGN_OR_RETURN(auto attention,
                       AttentionBlock<T>::Create(config, prefix, ShareOf(context), store));
  MOE_ASSIGN_OR_RETURN(auto feed_forward,
                       FeedForwardBlock<T>::Create(config, index, prefix, store, context));
  auto layer = std::unique_ptr<Layer>(new Layer(std::move(attention), std::move(feed_forward)));
  layer->parameters_ = store.AddedSince(before);
  return layer;
}

template <typename T>
absl::Status Layer<T>::Forward(const Pass& pass, MatrixView<const T> x, MatrixView<T> y) {
  const WorkspaceScope scope(*pass.context.workspace), host_scope(*pass.context.host_workspace);
  MOE_ASSIGN_OR_RETURN(const WeightLease lease, WeightLease::Take(pass, parameters_));
  Saved& saved = saved_.Begin(pass.stash);
  saved = {};  // without rows not all of it is written again
  MOE_ASSIGN_OR_RETURN(const auto middle, pass.kept().Matrix<T>(x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(Timed(pass, kAttention, *pass.context.compute,
                            [&] { return attention_.Forward(pass, x, middle, saved.attention); }));
  MOE_RETURN_IF_ERROR(CheckFinite(pass, "attention", middle));
  return feed_forward_.Forward(pass, middle, y, saved.feed_forward);
}

template <typename T>
absl::Status Layer<T>::Extend(const Pass& pass, MatrixView<const T> x, KeyValueCache<T>& cache,
                              MatrixView<T> y) {
  const WorkspaceScope scope(*pass.context.workspace);
  MOE_ASSIGN_OR_RETURN(const WeightLease lease, WeightLease::Take(pass, parameters_));
  const int64_t tokens = cache.size() + RowsOf(pass.batch);
  const int layer = pass.site.layer;
  MOE_ASSIGN_OR_RETURN(const auto middle, pass.context.workspace->Matrix<T>(x.rows(), x.cols()));
  Saved& saved = saved_.Begin(pass.stash);
  MOE_RETURN_IF_ERROR(attention_.ForwardCached(pass, x, cache.keys(layer, tokens),
                                               cache.values(layer, tokens), middle));
  return feed_forward_.Forward(pass, middle, y, saved.feed_forward);
}

template <typename T>
absl::Status Layer<T>::Backward(const Pass& pass, MatrixView<const T> /*dy*/, MatrixView<T> dx,
                                GradientReady ready) {
  Saved* const saved = pass.stash == nullptr ? nullptr : saved_.Find(pass.stash);
  if (saved == nullptr) {
    return absl::FailedPreconditionError(
        "Transformer: Backward of a layer with a stash that has no Forward, expected one");
  }
  MOE_ASSIGN_OR_RETURN(const WeightLease lease, WeightLease::Take(pass, parameters_));
  MOE_RETURN_IF_ERROR(feed_forward_.Backward(pass, saved->feed_forward, dx, ready));
  MOE_RETURN_IF_ERROR(Timed(pass, kAttentionBackward, *pass.context.compute, [&] {
    return attention_.Backward(pass, saved->attention, dx, ready);
  }));
  NoteNonFinite(pass, "attention backward", dx);
  return absl::OkStatus();
}

template class Layer<float>;
template class Layer<BFloat16>;
template class Layer<Float16>;

}  // namespace moe::lm
