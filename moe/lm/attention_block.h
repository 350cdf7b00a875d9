// y = x + Attention(RMSNorm(x)): the first half of a transformer layer.
#ifndef MOE_MOE_LM_ATTENTION_BLOCK_H_
#define MOE_MOE_LM_ATTENTION_BLOCK_H_

#include <string>

#include <absl/status/statusor.h>

#include "gating/routing.h"
#include "kernels/attention/attention.h"
#include "moe/lm/dense.h"

namespace moe::lm {

struct AttentionBlockConfig {
  int64_t hidden_size = 0;  // H
  int heads = 1;
  float rotary_base = 10000.0f;
  float norm_epsilon = 1e-5f;
  double init_std = 0.02;      // qkv_proj
  double out_init_std = 0.02;  // o_proj
};

// What backward needs of one call; views into the workspace.
template <typename T>
struct AttentionBlockSaved {
  NormSaved<T> norm;
  MatrixView<T> qkv;              // [T, 3H]: q | k | v, q and k rotated
  MatrixView<T> attended;         // [T, H]
  MatrixView<float> log_sum_exp;  // [T, heads]
};

// Parameters: "<prefix>input_layernorm.weight", "<prefix>self_attn.qkv_proj.weight" [3H, H],
// "<prefix>self_attn.o_proj.weight" [H, H]. All work goes to the compute stream; zero tokens only
// mark parameters ready.
template <typename T>
class AttentionBlock {
 public:
  static absl::StatusOr<AttentionBlock> Create(const AttentionBlockConfig& config,
                                               const std::string& prefix, ParameterStore& store);

  // x, y [T, H]; they must not overlap. `saved` lives in the context's workspace.
  absl::Status Forward(MatrixView<const T> x, const Batch& batch, MatrixView<T> y,
                       AttentionBlockSaved<T>& saved, const Context& context) const;
  // d [T, H]: in, the gradient by y; out, the gradient by x.
  absl::Status Backward(const Batch& batch, const AttentionBlockSaved<T>& saved, MatrixView<T> d,
                        GradientReady ready, const Context& context) const;

 private:
  AttentionBlock(const AttentionBlockConfig& config, const Norm<T>& norm, Parameter* qkv_proj,
                 Parameter* o_proj)
      : config_(config), norm_(norm), qkv_proj_(qkv_proj), o_proj_(o_proj) {}
  MatrixView<T> Part(MatrixView<T> qkv, int part) const;  // 0: q, 1: k, 2: v
  absl::Status Rotate(const Batch& batch, RotaryDirection direction, MatrixView<T> qkv,
                      const Context& context) const;
  absl::Status ProjectionsBackward(const Batch& batch, const AttentionBlockSaved<T>& saved,
                                   MatrixView<const T> d, MatrixView<T> d_normed,
                                   GradientReady ready, const Context& context) const;

  AttentionBlockConfig config_;
  Norm<T> norm_;
  Parameter* qkv_proj_;
  Parameter* o_proj_;
};

}  // namespace moe::lm

#endif  // MOE_MOE_LM_ATTENTION_BLOCK_H_
