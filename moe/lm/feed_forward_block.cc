#include "moe/lm/feed_forward_block.h"

#include <array>

#include "kernels/base/workspace.h"
#include "kernels/elementwise/elementwise.h"
#include "moe/run/finite.h"
#include "moe/tensor/own_rows.h"

namespace moe::lm {

template <typename T>
absl::StatusOr<FeedForwardBlock<T>> FeedForwardBlock<T>::Create(const TransformerConfig& config,
                                                                int layer,
                                                                const std::string& prefix,
                                                                ParameterStore& store,
                                                                const Context& context) {
  MOE_ASSIGN_OR_RETURN(const Norm<T> norm,
                       Norm<T>::Create(prefix + "post_attention_layernorm.weight",
                                       config.hidden_size, config.norm_epsilon, store));
  FeedForwardBlock block(norm, config.recompute);
  const std::string name = prefix + "mlp.";
  if (config.has_experts(layer)) {
    MoeLayerConfig moe = config.moe;
    moe.router.layer = static_cast<uint32_t>(layer);
    moe.init_std = config.init_std;
    moe.down_init_std = config.out_init_std();
    moe.keep_hidden = KeepsActivations(config.recompute);
    MOE_ASSIGN_OR_RETURN(block.moe_, MoeLayer<T>::Create(moe, name, store, context));
    return block;
  }
  MOE_ASSIGN_OR_RETURN(block.dense_,
                       Experts<T>::Create({.hidden_size = config.hidden_size,
                                           .ffn_hidden_size = config.dense_width(),
                                           .activation = config.moe.activation,
                                           .init_std = config.init_std,
                                           .down_init_std = config.out_init_std(),
                                           .pack_weights = config.moe.pack_weights,
                                           .keep_hidden = KeepsActivations(config.recompute),
                                           .share = ShareOf(context)},
                                          {name}, MeshGroup::kData, store));
  return block;
}

template <typename T>
absl::Status FeedForwardBlock<T>::DenseForward(const Pass& pass, MatrixView<const T> x,
                                               MatrixView<T> y,
                                               FeedForwardBlockSaved<T>& saved) const {
  const Context& context = pass.context;
  const OwnRows rows = OwnRowsOf(context, RowsOf(pass.batch));
  if (rows.all() == 0) return absl::OkStatus();
  const WorkspaceScope scope(*context.workspace);
  const std::array<int64_t, 2> offsets = {0, rows.all()};
  MOE_RETURN_IF_ERROR(norm_.Forward(ActivationsPass(pass, recompute_), x, saved.norm));
  MOE_ASSIGN_OR_RETURN(const auto normed, AllRows<T>(context, rows, saved.norm.y, pass.site));
  MOE_RETURN_IF_ERROR(dense_->Prepare(normed, pass.kept(), saved.dense));
  MOE_RETURN_IF_ERROR(
      dense_->Forward(context, {.offsets = offsets, .site = pass.site}, saved.dense, y));
  return AddRows<T>(x, y, y, *context.compute);
}

template <typename T>
absl::Status FeedForwardBlock<T>::Forward(const Pass& pass, MatrixView<const T> x, MatrixView<T> y,
                                          FeedForwardBlockSaved<T>& saved) const {
  if (dense_ != nullptr) {
    MOE_RETURN_IF_ERROR(
        TimedDense(pass, "dense FFN", [&] { return DenseForward(pass, x, y, saved); }));
    return CheckFinite(pass, "dense FFN", y);
  }
  MOE_RETURN_IF_ERROR(TimedDense(pass, "norm", [&] {
    return norm_.Forward(ActivationsPass(pass, recompute_), x, saved.norm);
  }));
  MOE_RETURN_IF_ERROR(moe_->Forward(pass, saved.norm.y, y));
  return TimedDense(pass, "residual", [&] { return AddRows<T>(x, y, y, *pass.context.compute); });
}

template <typename T>
absl::Status FeedForwardBlock<T>::DenseBackward(const Pass& pass, FeedForwardBlockSaved<T>& saved,
                                                MatrixView<T> d, GradientReady ready) const {
  const Context& context = pass.context;
  const OwnRows rows = OwnRowsOf(context, RowsOf(pass.batch));
  const auto make = [&](const Pass& again) -> absl::Status {
    MOE_RETURN_IF_ERROR(norm_.Forward(again, saved.norm.x, saved.norm));
    return dense_->PrepareBackward(*context.workspace, saved.dense);
  };
  if (rows.all() > 0) MOE_RETURN_IF_ERROR(MakeAgain(pass, recompute_, make));
  MOE_ASSIGN_OR_RETURN(const auto d_normed, context.workspace->Matrix<T>(d.rows(), d.cols()));
  MOE_ASSIGN_OR_RETURN(const auto all, AllRows<T>(context, rows, d, pass.site));
  const std::array<int64_t, 2> offsets = {0, rows.all()};
  MOE_RETURN_IF_ERROR(dense_->InputGradient(context, {.offsets = offsets, .site = pass.site},
                                            saved.dense, all, d_normed));
  MOE_ASSIGN_OR_RETURN(saved.dense.rows, AllRows<T>(context, rows, saved.norm.y, pass.site));
  MOE_RETURN_IF_ERROR(dense_->WeightGradient(context, offsets, saved.dense, all, ready));
  return norm_.Backward(pass, saved.norm, rows.segments, d_normed, d, Write::kAdd, ready);
}

template <typename T>
absl::Status FeedForwardBlock<T>::Backward(const Pass& pass, FeedForwardBlockSaved<T>& saved,
                                           MatrixView<T> d, GradientReady ready) const {
  const Context& context = pass.context;
  const WorkspaceScope scope(*context.workspace);
  if (dense_ != nullptr) {
    MOE_RETURN_IF_ERROR(TimedDense(pass, "dense FFN backward",
                                   [&] { return DenseBackward(pass, saved, d, ready); }));
    NoteNonFinite(pass, "dense FFN backward", d);
    return absl::OkStatus();
  }
  const auto make = [&](const Pass& again) -> absl::Status {
    MOE_RETURN_IF_ERROR(TimedDense(pass, "norm again",
                                   [&] { return norm_.Forward(again, saved.norm.x, saved.norm); }));
    return moe_->MoveInput(pass, saved.norm.y);
  };
  MOE_RETURN_IF_ERROR(MakeAgain(pass, recompute_, make));
  MOE_ASSIGN_OR_RETURN(const auto d_normed, context.workspace->Matrix<T>(d.rows(), d.cols()));
  MOE_RETURN_IF_ERROR(moe_->Backward(pass, d, d_normed, ready));
  return TimedDense(pass, "norm backward", [&] {
    const OwnRows rows = OwnRowsOf(context, RowsOf(pass.batch));
    return norm_.Backward(pass, saved.norm, rows.segments, d_normed, d, Write::kAdd, ready);
  });
}

template class FeedForwardBlock<float>;
template class FeedForwardBlock<BFloat16>;
template class FeedForwardBlock<Float16>;

}  // namespace moe::lm
