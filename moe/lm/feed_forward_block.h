// y = x + FeedForward(RMSNorm(x)): the second half of a transformer layer.
#ifndef MOE_MOE_LM_FEED_FORWARD_BLOCK_H_
#define MOE_MOE_LM_FEED_FORWARD_BLOCK_H_

#include <memory>
#include <string>

#include <absl/status/statusor.h>

#include "gating/routing.h"
#include "moe/layer/experts.h"
#include "moe/lm/dense.h"
#include "moe/lm/transformer_config.h"

namespace moe::lm {

// What backward needs of one call, beside what an MoE layer has of it.
template <typename T>
struct FeedForwardBlockSaved {
  NormSaved<T> norm;
  ExpertsSaved<T> dense;  // dense layers
};

// Parameters: "<prefix>post_attention_layernorm.weight", then those of the network at
// "<prefix>mlp.": a mixture of experts, or one dense network. A mixture is collective over the
// expert-parallel group, with zero tokens too.
template <typename T>
class FeedForwardBlock {
 public:
  // Layer `layer` of a model whose config.moe.router.hidden_size is filled in.
  static absl::StatusOr<FeedForwardBlock> Create(const TransformerConfig& config, int layer,
                                                 const std::string& prefix, ParameterStore& store,
                                                 const Context& context);

  // x, y [own T, H]; they must not overlap. `saved` is memory that the pass keeps.
  absl::Status Forward(const Pass& pass, MatrixView<const T> x, MatrixView<T> y,
                       FeedForwardBlockSaved<T>& saved) const;
  // d [own T, H]: in, the gradient by y; out, the gradient by x. x is as it was in Forward.
  absl::Status Backward(const Pass& pass, FeedForwardBlockSaved<T>& saved, MatrixView<T> d,
                        GradientReady ready) const;

  // Null in a dense layer.
  const MoeLayer<T>* moe() const { return moe_.get(); }
  MoeLayer<T>* moe() { return moe_.get(); }

 private:
  FeedForwardBlock(const Norm<T>& norm, Recompute recompute) : norm_(norm), recompute_(recompute) {}
  absl::Status DenseForward(const Pass& pass, MatrixView<const T> x, MatrixView<T> y,
                            FeedForwardBlockSaved<T>& saved) const;
  absl::Status DenseBackward(const Pass& pass, FeedForwardBlockSaved<T>& saved, MatrixView<T> d,
                             GradientReady ready) const;

  Norm<T> norm_;
  Recompute recompute_;
  std::unique_ptr<MoeLayer<T>> moe_;   // either this
  std::unique_ptr<Experts<T>> dense_;  // or this
};

}  // namespace moe::lm

#endif  // MOE_MOE_LM_FEED_FORWARD_BLOCK_H_
