#include "moe/lm/feed_forward_block.h"

#include <array>

#include "kernels/base/workspace.h"
#include "kernels/elementwise/elementwise.h"

namespace moe::lm {

template <typename T>
absl::StatusOr<FeedForwardBlock<T>> FeedForwardBlock<T>::CreateMoe(const NormConfig& norm,
                                                                   const MoeLayerConfig& config,
                                                                   const std::string& prefix,
                                                                   ParameterStore& store,
                                                                   const Context& context) {
  MOE_ASSIGN_OR_RETURN(const Norm<T> layer_norm,
                       Norm<T>::Create(prefix + "post_attention_layernorm.weight", norm.hidden_size,
                                       norm.epsilon, store));
  FeedForwardBlock block(layer_norm);
  MOE_ASSIGN_OR_RETURN(block.moe_, MoeLayer<T>::Create(config, prefix + "mlp.", store, context));
  return block;
}

template <typename T>
absl::StatusOr<FeedForwardBlock<T>> FeedForwardBlock<T>::CreateDense(const NormConfig& norm,
                                                                     const ExpertsConfig& config,
                                                                     const std::string& prefix,
                                                                     ParameterStore& store) {
  MOE_ASSIGN_OR_RETURN(const Norm<T> layer_norm,
                       Norm<T>::Create(prefix + "post_attention_layernorm.weight", norm.hidden_size,
                                       norm.epsilon, store));
  FeedForwardBlock block(layer_norm);
  MOE_ASSIGN_OR_RETURN(block.dense_, Experts<T>::Create(config, {prefix + "mlp."},
                                                        ParameterGroup::kReplicated, store));
  return block;
}

template <typename T>
absl::Status FeedForwardBlock<T>::DenseForward(MatrixView<const T> x, MatrixView<T> y,
                                               FeedForwardBlockSaved<T>& saved,
                                               const Context& context) const {
  if (x.rows() == 0) return absl::OkStatus();
  const std::array<int64_t, 2> offsets = {0, x.rows()};
  MOE_RETURN_IF_ERROR(norm_.Forward(x, saved.norm, context));
  MOE_RETURN_IF_ERROR(dense_->Prepare(saved.norm.y, *context.workspace, saved.dense));
  MOE_RETURN_IF_ERROR(dense_->Forward(0, 1, offsets, saved.dense, y, context));
  return AddRows<T>(x, y, y, *context.compute);
}

template <typename T>
absl::Status FeedForwardBlock<T>::Forward(MatrixView<const T> x, const Batch& batch,
                                          MatrixView<T> y, FeedForwardBlockSaved<T>& saved,
                                          RouterStats* stats, const Context& context) const {
  if (dense_ != nullptr) {
    return TimedDense(context, "dense FFN", [&] { return DenseForward(x, y, saved, context); });
  }
  MOE_RETURN_IF_ERROR(
      TimedDense(context, "norm", [&] { return norm_.Forward(x, saved.norm, context); }));
  MOE_RETURN_IF_ERROR(moe_->Forward(saved.norm.y, batch, y, &saved.moe, stats));
  return TimedDense(context, "residual", [&] { return AddRows<T>(x, y, y, *context.compute); });
}

template <typename T>
absl::Status FeedForwardBlock<T>::DenseBackward(FeedForwardBlockSaved<T>& saved, MatrixView<T> d,
                                                GradientReady ready, const Context& context) const {
  MOE_ASSIGN_OR_RETURN(const auto d_normed, context.workspace->Matrix<T>(d.rows(), d.cols()));
  if (d.rows() > 0) {
    const std::array<int64_t, 2> offsets = {0, d.rows()};
    MOE_RETURN_IF_ERROR(dense_->Backward(0, 1, offsets, /*segment_offsets=*/offsets, /*segments=*/1,
                                         saved.dense, d, d_normed, context));
  }
  for (Parameter* parameter : dense_->parameters()) MOE_RETURN_IF_ERROR(ready(*parameter));
  return norm_.Backward(saved.norm, d_normed, d, Write::kAdd, ready, context);
}

template <typename T>
absl::Status FeedForwardBlock<T>::Backward(FeedForwardBlockSaved<T>& saved, float loss_scale,
                                           MatrixView<T> d, GradientReady ready,
                                           const Context& context) const {
  const WorkspaceScope scope(*context.workspace);
  if (dense_ != nullptr) {
    return TimedDense(context, "dense FFN backward",
                      [&] { return DenseBackward(saved, d, ready, context); });
  }
  MOE_ASSIGN_OR_RETURN(const auto d_normed, context.workspace->Matrix<T>(d.rows(), d.cols()));
  MOE_RETURN_IF_ERROR(moe_->Backward(d, saved.moe, loss_scale, d_normed, ready));
  return TimedDense(context, "norm backward", [&] {
    return norm_.Backward(saved.norm, d_normed, d, Write::kAdd, ready, context);
  });
}

template class FeedForwardBlock<float>;
template class FeedForwardBlock<BFloat16>;
template class FeedForwardBlock<Float16>;

}  // namespace moe::lm
