// y = x + Attention(RMSNorm(x)): the first half of a transformer layer.
#ifndef MOE_MOE_LM_ATTENTION_BLOCK_H_
#define MOE_MOE_LM_ATTENTION_BLOCK_H_

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/status/statusor.h>

#include "gating/routing.h"
#include "kernels/attention/attention.h"
#include "moe/lm/dense.h"
#include "moe/lm/transformer_config.h"
#include "moe/lm/tree_norms.h"
#include "moe/tensor/linear.h"
#include "moe/tensor/own_rows.h"

namespace moe::lm {

// What backward needs of one call.
template <typename T>
struct AttentionBlockSaved {
  NormSaved<T> norm;              // of own rows
  MatrixView<T> qkv;              // [T, qkv_cols]: q | k | v as projected
  NormSaved<T> q_norm, k_norm;    // with QkNorm
  MatrixView<T> q, k, v;          // what attention reads: q and k normalised, rotated
  MatrixView<T> attended;         // [T, heads D]
  MatrixView<float> log_sum_exp;  // [T, heads]
};

// Parameters: "<prefix>input_layernorm.weight" [H], "<prefix>self_attn.qkv_proj.weight"
// [qkv_cols, H] and, with qkv_bias, its ".bias"; with QkNorm
// "<prefix>self_attn.q_norm.weight" and "k_norm.weight"; "<prefix>self_attn.o_proj.weight"
// [H, heads D]. Ranks that share the layer have their own rows of x and y (own_rows.h) and compute
// all rows of their own heads: heads, q_cols and so on are those of this rank, here and in what is
// kept, and T stays the number of all rows. All work goes to the compute stream; zero tokens only
// mark parameters ready.
template <typename T>
class AttentionBlock {
 public:
  static absl::StatusOr<AttentionBlock> Create(const TransformerConfig& config,
                                               const std::string& prefix, const TensorShare& share,
                                               ParameterStore& store);

  // x, y [own T, H]; they must not overlap. `saved` is memory that the pass keeps.
  absl::Status Forward(const Pass& pass, MatrixView<const T> x, MatrixView<T> y,
                       AttentionBlockSaved<T>& saved) const;
  // Forward for the T tokens that follow the first pass.batch.first_position of one sequence, whose
  // keys and values are in the first rows of `keys` and `values`, [that + T, kv_heads D] each; it
  // writes the others. The bits of Forward of all of them. CPU.
  absl::Status ForwardCached(const Pass& pass, MatrixView<const T> x, MatrixView<T> keys,
                             MatrixView<T> values, MatrixView<T> y) const;

  // d [own T, H]: in, the gradient by y; out, the gradient by x. x is as it was in Forward.
  absl::Status Backward(const Pass& pass, AttentionBlockSaved<T>& saved, MatrixView<T> d,
                        GradientReady ready) const;

 private:
  AttentionBlock(const TransformerConfig& config, const TensorShare& share, const Norm<T>& norm,
                 Linear<T> qkv_proj, Linear<T> o_proj);
  // Forward's two ends: from x to saved.q, saved.k and saved.v, and y from attended [T, heads D].
  absl::Status Project(const Pass& pass, const OwnRows& rows, MatrixView<const T> x,
                       AttentionBlockSaved<T>& saved) const;
  absl::Status Output(const Pass& pass, MatrixView<const T> x, MatrixView<const T> attended,
                      MatrixView<T> y) const;
  // q and k that attention reads, from saved.qkv: itself without QkNorm.
  absl::Status NormHeads(const Pass& pass, AttentionBlockSaved<T>& saved) const;
  // Activations that Forward did not keep, for Backward.
  absl::Status ActivationsAgain(const Pass& pass, AttentionBlockSaved<T>& saved) const;
  absl::Status Rotate(const Pass& pass, RotaryDirection direction, MatrixView<T> qk) const;
  // d_qk [T, (heads + kv_heads) D], the gradient by what is rotated, becomes that by d_qkv's q | k.
  absl::Status QkBackward(const Pass& pass, const AttentionBlockSaved<T>& saved, MatrixView<T> d_qk,
                          MatrixView<T> d_qkv, GradientReady ready) const;
  // Backward of a norm of each head, or with one tensor leaf of all heads. Its weight has a partial
  // of all rows for each leaf of the heads (Context::tensor_leaves), so that ranks that share them
  // need no exchange.
  absl::Status HeadNormBackward(const Pass& pass, const Norm<T>& norm, const NormSaved<T>& saved,
                                MatrixView<const T> dy, MatrixView<T> dx,
                                GradientReady ready) const;
  absl::Status ProjectionsBackward(const Pass& pass, const OwnRows& rows,
                                   const AttentionBlockSaved<T>& saved, MatrixView<const T> d,
                                   MatrixView<T> d_normed, MatrixView<T> d_attended,
                                   GradientReady ready) const;

  TransformerConfig config_;  // with the heads of this rank
  // [S + 1] heads of keys, from this rank's first, that each of its leaves has.
  std::vector<int64_t> key_heads_;
  Norm<T> norm_;
  std::optional<Norm<T>> q_norm_, k_norm_;
  std::optional<TreeNorms<T>> tree_norms_;  // of all heads, with several tensor leaves
  Linear<T> qkv_proj_, o_proj_;
};

}  // namespace moe::lm

#endif  // MOE_MOE_LM_ATTENTION_BLOCK_H_
