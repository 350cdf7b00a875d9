#include "moe/lm/attention_block.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/workspace.h"
#include "kernels/elementwise/elementwise.h"

namespace moe::lm {
namespace {

// `offsets` or, where there are none, those of sequences.
absl::Span<const int64_t> OrSequences(absl::Span<const int64_t> offsets, const Batch& batch) {
  return offsets.empty() ? batch.sequence_offsets : offsets;
}

AttentionShape AttentionOf(const Batch& batch, int heads) {
  return {.heads = heads, .sequence_offsets = OrSequences(batch.attention_offsets, batch)};
}

// Heads of queries stay with the head of keys that they share.
int64_t WidthOfSharedHeads(const TransformerConfig& config) {
  return config.num_attention_heads / config.key_value_heads() * config.head_dim();
}

// The model whose heads are those that a rank holds.
TransformerConfig OfHeads(TransformerConfig config, const TensorShare& share) {
  const int groups = config.key_value_heads(), each = config.num_attention_heads / groups;
  const TreeNode mine = share.ItemsOf(groups);
  config.kv_channels = config.head_dim();
  config.num_query_groups = mine.last - mine.first;
  config.num_attention_heads = config.num_query_groups * each;
  return config;
}

LinearSpec QkvSpec(const TransformerConfig& config, const std::string& prefix,
                   const TensorShare& share) {
  ParameterSpec weight = {.name = prefix + "qkv_proj.weight",
                          .rows = config.qkv_cols(),
                          .cols = config.hidden_size,
                          .holders = MeshGroup::kData,
                          .init_std = config.init_std};
  const auto add_part = [&](const char* name, int64_t rows, int64_t item) {
    weight.parts.push_back({.name = prefix + name,
                            .rows = rows,
                            .cols = config.hidden_size,
                            .axis = TensorAxis::kRows,
                            .item = item});
  };
  add_part("q_proj.weight", config.q_cols(), WidthOfSharedHeads(config));
  add_part("k_proj.weight", config.kv_cols(), config.head_dim());
  add_part("v_proj.weight", config.kv_cols(), config.head_dim());
  return {.weights = {weight},
          .biases = config.qkv_bias,
          .pack = config.moe.pack_weights,
          .share = share};
}

LinearSpec OutSpec(const TransformerConfig& config, const std::string& prefix,
                   const TensorShare& share) {
  return {.weights = {CutAlong(TensorAxis::kColumns,
                               {.name = prefix + "o_proj.weight",
                                .rows = config.hidden_size,
                                .cols = config.q_cols(),
                                .init_std = config.out_init_std()},
                               WidthOfSharedHeads(config))},
          .pack = config.moe.pack_weights,
          .share = share};
}

}  // namespace

template <typename T>
AttentionBlock<T>::AttentionBlock(const TransformerConfig& config, const TensorShare& share,
                                  const Norm<T>& norm, Linear<T> qkv_proj, Linear<T> o_proj)
    : config_(share.cut() ? OfHeads(config, share) : config),
      norm_(norm),
      qkv_proj_(std::move(qkv_proj)),
      o_proj_(std::move(o_proj)) {
  const TreeCut heads = {share.leaves, config.key_value_heads(), 1};
  const TreeNode held = LeavesOf(share.index, share.ranks, share.leaves);
  for (int leaf = held.first; leaf <= held.last; ++leaf) {
    key_heads_.push_back(heads.Begin(leaf) - heads.Begin(held.first));
  }
}

template <typename T>
absl::StatusOr<AttentionBlock<T>> AttentionBlock<T>::Create(const TransformerConfig& config,
                                                            const std::string& prefix,
                                                            const TensorShare& share,
                                                            ParameterStore& store) {
  const auto norm = [&](const char* name, int64_t cols) {
    return Norm<T>::Create(prefix + name, cols, config.norm_epsilon, store);
  };
  MOE_ASSIGN_OR_RETURN(const Norm<T> input, norm("input_layernorm.weight", config.hidden_size));
  MOE_ASSIGN_OR_RETURN(Linear<T> qkv,
                       Linear<T>::Create(QkvSpec(config, prefix + "self_attn.", share), store));
  MOE_ASSIGN_OR_RETURN(Linear<T> out,
                       Linear<T>::Create(OutSpec(config, prefix + "self_attn.", share), store));
  AttentionBlock block(config, share, input, std::move(qkv), std::move(out));
  if (config.qk_norm == QkNorm::kNone) return block;
  const bool per_head = config.qk_norm == QkNorm::kHead;
  MOE_ASSIGN_OR_RETURN(block.q_norm_, norm("self_attn.q_norm.weight",
                                           per_head ? config.head_dim() : config.q_cols()));
  MOE_ASSIGN_OR_RETURN(block.k_norm_, norm("self_attn.k_norm.weight",
                                           per_head ? config.head_dim() : config.kv_cols()));
  if (!per_head && share.leaves > 1) block.tree_norms_.emplace(config, share);
  return block;
}

template <typename T>
absl::Status AttentionBlock<T>::Rotate(const Pass& pass, RotaryDirection direction,
                                       MatrixView<T> qk) const {
  // q and k are side by side and rotate alike: together they are one tensor of more heads.
  return ApplyRotary<T>({.heads = config_.num_attention_heads + config_.key_value_heads(),
                         .sequence_offsets = OrSequences(pass.batch.position_offsets, pass.batch),
                         .first_position = pass.batch.first_position},
                        config_.rotary_base, direction, qk, *pass.context.workspace,
                        *pass.context.compute);
}

template <typename T>
absl::Status AttentionBlock<T>::Project(const Pass& pass, const OwnRows& rows,
                                        MatrixView<const T> x,
                                        AttentionBlockSaved<T>& saved) const {
  const Pass activations = ActivationsPass(pass, config_.recompute);
  MOE_RETURN_IF_ERROR(norm_.Forward(activations, x, saved.norm));
  MOE_ASSIGN_OR_RETURN(saved.qkv, pass.kept().Matrix<T>(rows.all(), config_.qkv_cols()));
  {
    const WorkspaceScope scope(*pass.context.workspace);
    MOE_ASSIGN_OR_RETURN(const auto normed,
                         AllRows<T>(pass.context, rows, saved.norm.y, pass.site));
    MOE_RETURN_IF_ERROR(qkv_proj_.Forward(pass.context, {}, normed, saved.qkv));
  }
  saved.v = ColumnRange(saved.qkv, config_.qk_cols(), config_.qkv_cols());
  return NormHeads(activations, saved);
}

template <typename T>
absl::Status AttentionBlock<T>::NormHeads(const Pass& pass, AttentionBlockSaved<T>& saved) const {
  const int64_t q_cols = config_.q_cols(), qk_cols = config_.qk_cols();
  MatrixView<T> qk = ColumnRange(saved.qkv, 0, qk_cols);
  if (q_norm_.has_value()) {
    MOE_ASSIGN_OR_RETURN(qk, pass.kept().Matrix<T>(saved.qkv.rows(), qk_cols));
  }
  if (tree_norms_.has_value()) {
    MOE_RETURN_IF_ERROR(
        tree_norms_->Forward(pass, {{&*q_norm_, &*k_norm_}, {&saved.q_norm, &saved.k_norm}},
                             ColumnRange(saved.qkv, 0, qk_cols), qk));
  } else if (q_norm_.has_value()) {
    MOE_RETURN_IF_ERROR(q_norm_->Forward(pass, ColumnRange(saved.qkv, 0, q_cols),
                                         ColumnRange(qk, 0, q_cols), saved.q_norm));
    MOE_RETURN_IF_ERROR(k_norm_->Forward(pass, ColumnRange(saved.qkv, q_cols, qk_cols),
                                         ColumnRange(qk, q_cols, qk_cols), saved.k_norm));
  }
  saved.q = ColumnRange(qk, 0, q_cols);
  saved.k = ColumnRange(qk, q_cols, qk_cols);
  return Rotate(pass, RotaryDirection::kForward, qk);
}

template <typename T>
absl::Status AttentionBlock<T>::ActivationsAgain(const Pass& pass,
                                                 AttentionBlockSaved<T>& saved) const {
  return MakeAgain(pass, config_.recompute, [&](const Pass& again) -> absl::Status {
    MOE_RETURN_IF_ERROR(norm_.Forward(again, saved.norm.x, saved.norm));
    return q_norm_.has_value() ? NormHeads(again, saved) : absl::OkStatus();
  });
}

template <typename T>
absl::Status AttentionBlock<T>::Output(const Pass& pass, MatrixView<const T> x,
                                       MatrixView<const T> attended, MatrixView<T> y) const {
  MOE_RETURN_IF_ERROR(o_proj_.Forward(pass.context, {.site = pass.site}, attended, y));
  return AddRows<T>(x, y, y, *pass.context.compute);
}

template <typename T>
absl::Status AttentionBlock<T>::Forward(const Pass& pass, MatrixView<const T> x, MatrixView<T> y,
                                        AttentionBlockSaved<T>& saved) const {
  const OwnRows rows = OwnRowsOf(pass.context, RowsOf(pass.batch));
  if (rows.all() == 0) return absl::OkStatus();
  const WorkspaceScope scope(*pass.context.workspace);
  MOE_RETURN_IF_ERROR(Project(pass, rows, x, saved));
  MOE_ASSIGN_OR_RETURN(saved.attended, pass.kept().Matrix<T>(rows.all(), config_.q_cols()));
  MOE_ASSIGN_OR_RETURN(saved.log_sum_exp,
                       pass.kept().Matrix<float>(rows.all(), config_.num_attention_heads));
  MOE_RETURN_IF_ERROR(CausalAttention<T>(
      AttentionOf(pass.batch, config_.num_attention_heads), saved.q, saved.k, saved.v,
      saved.attended, saved.log_sum_exp, *pass.context.workspace, *pass.context.compute));
  return Output(pass, x, saved.attended, y);
}

template <typename T>
absl::Status AttentionBlock<T>::ForwardCached(const Pass& pass, MatrixView<const T> x,
                                              MatrixView<T> keys, MatrixView<T> values,
                                              MatrixView<T> y) const {
  const Context& context = pass.context;
  const OwnRows rows = OwnRowsOf(context, RowsOf(pass.batch));
  if (rows.all() == 0) return absl::OkStatus();
  AttentionBlockSaved<T> saved;
  MOE_RETURN_IF_ERROR(Project(pass, rows, x, saved));
  const int64_t past = pass.batch.first_position;
  MOE_RETURN_IF_ERROR(context.compute->Enqueue([=] {
    for (int64_t t = 0; t < saved.k.rows(); ++t) {
      std::copy_n(saved.k.row(t), saved.k.cols(), keys.row(past + t));
      std::copy_n(saved.v.row(t), saved.v.cols(), values.row(past + t));
    }
    return absl::OkStatus();
  }));
  MOE_ASSIGN_OR_RETURN(const auto attended,
                       context.workspace->Matrix<T>(rows.all(), config_.q_cols()));
  MOE_RETURN_IF_ERROR(CausalAttentionOfLast<T>(config_.num_attention_heads, saved.q, keys, values,
                                               attended, *context.workspace, *context.compute));
  return Output(pass, x, attended, y);
}

template <typename T>
absl::Status AttentionBlock<T>::HeadNormBackward(const Pass& pass, const Norm<T>& norm,
                                                 const NormSaved<T>& saved, MatrixView<const T> dy,
                                                 MatrixView<T> dx, GradientReady ready) const {
  const bool whole = config_.qk_norm == QkNorm::kHeads;  // a row is one group
  const int64_t heads = whole ? 1 : dx.cols() / config_.head_dim();
  const int64_t each = heads / config_.key_value_heads();
  RowOffsets segments;
  if (!whole && pass.context.numerics == Numerics::kLayoutInvariant) {
    for (const int64_t keys : key_heads_) segments.push_back(keys * each);
  } else {
    segments.push_back(0);
    segments.push_back(heads);
  }
  return norm.GroupsBackward(pass, saved, segments, dy, dx, ready);
}

template <typename T>
absl::Status AttentionBlock<T>::QkBackward(const Pass& pass, const AttentionBlockSaved<T>& saved,
                                           MatrixView<T> d_qk, MatrixView<T> d_qkv,
                                           GradientReady ready) const {
  MOE_RETURN_IF_ERROR(Rotate(pass, RotaryDirection::kBackward, d_qk));
  if (!q_norm_.has_value()) return absl::OkStatus();  // d_qk is part of d_qkv
  const int64_t q_cols = config_.q_cols(), qk_cols = config_.qk_cols();
  if (tree_norms_.has_value()) {
    return tree_norms_->Backward(pass, {{&*q_norm_, &*k_norm_}, {&saved.q_norm, &saved.k_norm}},
                                 d_qk, ColumnRange(d_qkv, 0, qk_cols), ready);
  }
  MOE_RETURN_IF_ERROR(HeadNormBackward(pass, *q_norm_, saved.q_norm, ColumnRange(d_qk, 0, q_cols),
                                       ColumnRange(d_qkv, 0, q_cols), ready));
  return HeadNormBackward(pass, *k_norm_, saved.k_norm, ColumnRange(d_qk, q_cols, qk_cols),
                          ColumnRange(d_qkv, q_cols, qk_cols), ready);
}

template <typename T>
absl::Status AttentionBlock<T>::ProjectionsBackward(const Pass& pass, const OwnRows& rows,
                                                    const AttentionBlockSaved<T>& saved,
                                                    MatrixView<const T> d, MatrixView<T> d_normed,
                                                    MatrixView<T> d_attended,
                                                    GradientReady ready) const {
  const Context& context = pass.context;
  Workspace& workspace = *context.workspace;
  {
    const WorkspaceScope scope(workspace);
    MOE_ASSIGN_OR_RETURN(const auto all, AllRows<T>(context, rows, d, pass.site));
    MOE_RETURN_IF_ERROR(o_proj_.WeightGradient(context, {}, all, saved.attended, ready));
    MOE_RETURN_IF_ERROR(o_proj_.InputGradient(context, {}, all, d_attended));
  }
  const int64_t q_cols = config_.q_cols(), qk_cols = config_.qk_cols();
  MOE_ASSIGN_OR_RETURN(const auto d_qkv, workspace.Matrix<T>(rows.all(), config_.qkv_cols()));
  MatrixView<T> d_qk = ColumnRange(d_qkv, 0, qk_cols);
  if (q_norm_.has_value()) {
    MOE_ASSIGN_OR_RETURN(d_qk, workspace.Matrix<T>(rows.all(), qk_cols));
  }
  MOE_RETURN_IF_ERROR(CausalAttentionBackward<T>(
      AttentionOf(pass.batch, config_.num_attention_heads), saved.q, saved.k, saved.v,
      saved.attended, saved.log_sum_exp, d_attended, ColumnRange(d_qk, 0, q_cols),
      ColumnRange(d_qk, q_cols, qk_cols), ColumnRange(d_qkv, qk_cols, config_.qkv_cols()),
      workspace, *context.compute));
  MOE_RETURN_IF_ERROR(QkBackward(pass, saved, d_qk, d_qkv, ready));
  {
    const WorkspaceScope scope(workspace);
    MOE_ASSIGN_OR_RETURN(const auto normed, AllRows<T>(context, rows, saved.norm.y, pass.site));
    MOE_RETURN_IF_ERROR(qkv_proj_.WeightGradient(context, {}, d_qkv, normed, ready));
  }
  return qkv_proj_.InputGradient(context, {.site = pass.site}, d_qkv, d_normed);
}

template <typename T>
absl::Status AttentionBlock<T>::Backward(const Pass& pass, AttentionBlockSaved<T>& saved,
                                         MatrixView<T> d, GradientReady ready) const {
  const Context& context = pass.context;
  const WorkspaceScope scope(*context.workspace);
  const OwnRows rows = OwnRowsOf(context, RowsOf(pass.batch));
  if (rows.all() == 0) {
    MOE_RETURN_IF_ERROR(o_proj_.WeightGradient(context, {}, d, {}, ready));
    if (q_norm_.has_value()) {
      MOE_RETURN_IF_ERROR(q_norm_->Backward(pass, {}, {}, d, d, Write::kOverwrite, ready));
      MOE_RETURN_IF_ERROR(k_norm_->Backward(pass, {}, {}, d, d, Write::kOverwrite, ready));
    }
    MOE_RETURN_IF_ERROR(qkv_proj_.WeightGradient(context, {}, d, {}, ready));
    return norm_.Backward(pass, saved.norm, {}, d, d, Write::kAdd, ready);
  }
  MOE_RETURN_IF_ERROR(ActivationsAgain(pass, saved));
  // The gradient by the attention's output is spent before that by the norm's is written: one
  // memory.
  const int64_t hidden = config_.hidden_size, q_cols = config_.q_cols();
  MOE_ASSIGN_OR_RETURN(
      const absl::Span<T> memory,
      context.workspace->Array<T>(std::max(rows.count() * hidden, rows.all() * q_cols)));
  const MatrixView<T> d_normed(memory.data(), rows.count(), hidden);
  const MatrixView<T> d_attended(memory.data(), rows.all(), q_cols);
  MOE_RETURN_IF_ERROR(ProjectionsBackward(pass, rows, saved, d, d_normed, d_attended, ready));
  return norm_.Backward(pass, saved.norm, rows.segments, d_normed, d, Write::kAdd, ready);
}

template class AttentionBlock<float>;
template class AttentionBlock<BFloat16>;
template class AttentionBlock<Float16>;

}  // namespace moe::lm
