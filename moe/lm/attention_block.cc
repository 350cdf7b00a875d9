#include "moe/lm/attention_block.h"

#include <absl/strings/str_cat.h>

#include "kernels/base/workspace.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/grouped_gemm/weight_gradient.h"

namespace moe::lm {

template <typename T>
absl::StatusOr<AttentionBlock<T>> AttentionBlock<T>::Create(const AttentionBlockConfig& config,
                                                            const std::string& prefix,
                                                            ParameterStore& store) {
  const int64_t hidden = config.hidden_size;
  MOE_ASSIGN_OR_RETURN(const Norm<T> norm, Norm<T>::Create(prefix + "input_layernorm.weight",
                                                           hidden, config.norm_epsilon, store));
  const auto part = [&](const char* name, TensorAxis axis) -> CanonicalTensor {
    return {.name = absl::StrCat(prefix, "self_attn.", name, ".weight"),
            .rows = hidden,
            .cols = hidden,
            .axis = axis,
            .item = hidden / config.heads};
  };
  MOE_ASSIGN_OR_RETURN(
      Parameter* const qkv_proj,
      store.Add({.name = prefix + "self_attn.qkv_proj.weight",
                 .rows = 3 * hidden,
                 .cols = hidden,
                 .init_std = config.init_std,
                 .parts = {part("q_proj", TensorAxis::kRows), part("k_proj", TensorAxis::kRows),
                           part("v_proj", TensorAxis::kRows)}}));
  MOE_ASSIGN_OR_RETURN(Parameter* const o_proj,
                       store.Add({.name = prefix + "self_attn.o_proj.weight",
                                  .rows = hidden,
                                  .cols = hidden,
                                  .init_std = config.out_init_std,
                                  .parts = {part("o_proj", TensorAxis::kColumns)}}));
  return AttentionBlock(config, norm, qkv_proj, o_proj);
}

template <typename T>
MatrixView<T> AttentionBlock<T>::Part(MatrixView<T> qkv, int part) const {
  return ColumnRange(qkv, part * config_.hidden_size, (part + 1) * config_.hidden_size);
}

template <typename T>
absl::Status AttentionBlock<T>::Rotate(const Batch& batch, RotaryDirection direction,
                                       MatrixView<T> qkv, const Context& context) const {
  // q and k lie side by side and turn alike: together they are one tensor of twice the heads.
  return ApplyRotary<T>({.heads = 2 * config_.heads, .sequence_offsets = batch.sequence_offsets},
                        config_.rotary_base, direction,
                        ColumnRange(qkv, 0, 2 * config_.hidden_size), *context.workspace,
                        *context.compute);
}

template <typename T>
absl::Status AttentionBlock<T>::Forward(MatrixView<const T> x, const Batch& batch, MatrixView<T> y,
                                        AttentionBlockSaved<T>& saved,
                                        const Context& context) const {
  const int64_t tokens = x.rows();
  if (tokens == 0) return absl::OkStatus();
  Workspace& workspace = *context.workspace;
  Stream& stream = *context.compute;
  MOE_RETURN_IF_ERROR(norm_.Forward(x, saved.norm, context));
  MOE_ASSIGN_OR_RETURN(saved.qkv, workspace.Matrix<T>(tokens, 3 * config_.hidden_size));
  MOE_ASSIGN_OR_RETURN(saved.attended, workspace.Matrix<T>(tokens, config_.hidden_size));
  MOE_ASSIGN_OR_RETURN(saved.log_sum_exp, workspace.Matrix<float>(tokens, config_.heads));

  MOE_RETURN_IF_ERROR(
      Gemm<T>(saved.norm.y, qkv_proj_->view<T>(), saved.qkv, workspace, stream, context.gemm));
  MOE_RETURN_IF_ERROR(Rotate(batch, RotaryDirection::kForward, saved.qkv, context));
  MOE_RETURN_IF_ERROR(
      CausalAttention<T>({.heads = config_.heads, .sequence_offsets = batch.sequence_offsets},
                         Part(saved.qkv, 0), Part(saved.qkv, 1), Part(saved.qkv, 2), saved.attended,
                         saved.log_sum_exp, workspace, stream));
  MOE_RETURN_IF_ERROR(
      Gemm<T>(saved.attended, o_proj_->view<T>(), y, workspace, stream, context.gemm,
              TensorTree(context, config_.hidden_size, config_.hidden_size / config_.heads)));
  return AddRows<T>(x, y, y, stream);
}

template <typename T>
absl::Status AttentionBlock<T>::ProjectionsBackward(const Batch& batch,
                                                    const AttentionBlockSaved<T>& saved,
                                                    MatrixView<const T> d, MatrixView<T> d_normed,
                                                    GradientReady ready,
                                                    const Context& context) const {
  Workspace& workspace = *context.workspace;
  Stream& stream = *context.compute;
  MOE_RETURN_IF_ERROR(
      AddWeightGradient<T>(d, saved.attended, o_proj_->grad(), workspace, stream, context.gemm));
  MOE_RETURN_IF_ERROR(ready(*o_proj_));

  // The gradient by the attention's output is spent before d_normed is written: one memory.
  const MatrixView<T> d_attended = d_normed;
  MOE_ASSIGN_OR_RETURN(const auto d_qkv, workspace.Matrix<T>(d.rows(), 3 * config_.hidden_size));
  MOE_RETURN_IF_ERROR(
      GemmInputGradient<T>(d, o_proj_->view<T>(), d_attended, workspace, stream, context.gemm));
  MOE_RETURN_IF_ERROR(CausalAttentionBackward<T>(
      {.heads = config_.heads, .sequence_offsets = batch.sequence_offsets}, Part(saved.qkv, 0),
      Part(saved.qkv, 1), Part(saved.qkv, 2), saved.attended, saved.log_sum_exp, d_attended,
      Part(d_qkv, 0), Part(d_qkv, 1), Part(d_qkv, 2), workspace, stream));
  MOE_RETURN_IF_ERROR(Rotate(batch, RotaryDirection::kBackward, d_qkv, context));

  MOE_RETURN_IF_ERROR(AddWeightGradient<T>(d_qkv, saved.norm.y, qkv_proj_->grad(), workspace,
                                           stream, context.gemm));
  MOE_RETURN_IF_ERROR(ready(*qkv_proj_));
  return GemmInputGradient<T>(
      d_qkv, qkv_proj_->view<T>(), d_normed, workspace, stream, context.gemm,
      TensorTree(context, config_.hidden_size, config_.hidden_size / config_.heads, /*parts=*/3));
}

template <typename T>
absl::Status AttentionBlock<T>::Backward(const Batch& batch, const AttentionBlockSaved<T>& saved,
                                         MatrixView<T> d, GradientReady ready,
                                         const Context& context) const {
  const WorkspaceScope scope(*context.workspace);
  if (d.rows() == 0) {
    MOE_RETURN_IF_ERROR(ready(*o_proj_));
    MOE_RETURN_IF_ERROR(ready(*qkv_proj_));
    return norm_.Backward(saved.norm, d, d, Write::kAdd, ready, context);
  }
  MOE_ASSIGN_OR_RETURN(const auto d_normed, context.workspace->Matrix<T>(d.rows(), d.cols()));
  MOE_RETURN_IF_ERROR(ProjectionsBackward(batch, saved, d, d_normed, ready, context));
  return norm_.Backward(saved.norm, d_normed, d, Write::kAdd, ready, context);
}

template class AttentionBlock<float>;
template class AttentionBlock<BFloat16>;
template class AttentionBlock<Float16>;

}  // namespace moe::lm
