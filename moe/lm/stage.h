// A chain of layers of the reference model.
#ifndef MOE_MOE_LM_STAGE_H_
#define MOE_MOE_LM_STAGE_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/lm/key_value_cache.h"
#include "moe/lm/layer.h"
#include "moe/lm/output_head.h"
#include "moe/lm/transformer_config.h"
#include "moe/run/context.h"
#include "moe/run/pass.h"
#include "moe/run/row_subset.h"
#include "moe/run/stash.h"
#include "moe/state/module.h"
#include "moe/state/parameter.h"
#include "moe/tensor/own_rows.h"

namespace moe::lm {

// Layers [first, last).
struct LayerRange {
  int first = 0, last = 0;
};

// Consecutive layers of the reference model; those from the first on have the embedding before
// them, and those to the last one the output layer behind them.
//
// Pre-norm blocks: x += Attention(RMSNorm(x)); x += FeedForward(RMSNorm(x)); then RMSNorm and an
// output layer. Residual stream in T (float, BFloat16 or Float16); logits and loss in
// float32. Names follow Hugging Face: "model.layers.L.self_attn.qkv_proj.weight"
// [(heads + 2 key-value heads) D, H], and its ".bias", "…self_attn.q_norm.weight" and "k_norm",
// "…self_attn.o_proj.weight", "…input_layernorm.weight", "…post_attention_layernorm.weight",
// "…mlp.…", "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight".
//
// A micro-batch (T tokens, or none): Load · Forward · with a stash Backward · TakeLosses.
template <typename T>
class Stage final : public Module<T> {
 public:
  // Collective over the stage. Without a range: all layers.
  static absl::StatusOr<std::unique_ptr<Stage>> Create(const TransformerConfig& config,
                                                       LayerRange layers, ParameterStore& store,
                                                       const Context& context);
  static absl::StatusOr<std::unique_ptr<Stage>> Create(const TransformerConfig& config,
                                                       ParameterStore& store,
                                                       const Context& context) {
    return Create(config, {0, config.num_layers}, store, context);
  }

  absl::Span<Parameter* const> parameters() const override { return parameters_; }
  // What is leased at once, in the order of a forward: the embedding, each layer, the output layer.
  std::vector<std::vector<Parameter*>> leases() const;
  // The tokens of the micro-batch whose passes are given `pass`, and room for its losses: memory of
  // the host, borrowed until TakeLosses. kInvalidArgument for a batch that does not fit the model.
  // A token without a target adds nothing to loss and gradient: losses have the bits of an output
  // layer that is given the other rows alone. Every rank of a tensor group is given all tokens.
  absl::Status Load(const Pass& pass, const TokenBatch& batch);
  // The residual stream [T, H] before and after the layers, of a tensor group this rank's own rows
  // (own_rows.h), here and in Backward. With the embedding it reads the tokens
  // that were loaded, and x is not used; with the output layer y is not used: without a stash it
  // computes the losses, with one it keeps the rows after the last layer. x stays until Backward.
  // Collective over the expert-parallel group.
  absl::Status Forward(const Pass& pass, MatrixView<const T> x, MatrixView<T> y) override;
  // Adds the gradients of pass.d_loss * (mean of row_loss + the routers' losses). With the output
  // layer it computes the losses, and dy is not used; otherwise dx is the memory of dy. Without
  // rows of its own, dx empty, the gradient of the first rows is scratch. kFailedPrecondition
  // without a Forward that kept its rows.
  absl::Status Backward(const Pass& pass, MatrixView<const T> dy, MatrixView<T> dx,
                        GradientReady ready) override;
  // Ends the micro-batch: the losses of this rank's rows are in row_loss, and pass.router_stats
  // have arrived. With a stash their slots count in the step. On a CUDA device blocks the host.
  absl::Status TakeLosses(const Pass& pass);
  // After TakeLosses: the part of row_loss that this rank has written; empty without output layer.
  absl::Span<const float> own_losses(const Pass& pass) const;

  // Forward of the tokens [T] that follow those of `cache`, to which they are added; logits [n, V]
  // of the last n <= T of them: the bits of one Forward over the whole sequence where a router
  // decides about each token by itself. Tensor-parallel ranks are given the same tokens, each with
  // a cache of its own heads, and each receives the logits. Other ranks, without a sequence, call
  // it without tokens. kInvalidArgument, before any communication: ids outside the vocabulary, no
  // room in the cache; kUnimplemented on a CUDA device. Collective over the expert-parallel group;
  // blocks. `weights`: Pass::weights.
  absl::Status Extend(const Context& context, absl::Span<const int32_t> tokens,
                      KeyValueCache<T>& cache, MatrixView<float> logits,
                      WeightSource* weights = nullptr);

  // The MoE layers, and the slots [MoE layer][E] that their routers chose since ForgetCounts.
  absl::Span<MoeLayer<T>* const> mixtures() const { return mixtures_; }
  int moe_layers() const { return static_cast<int>(mixtures_.size()); }
  bool has_losses() const { return head_.has_value(); }
  const std::vector<int64_t>& counts() const { return counts_; }
  void ForgetCounts() { std::fill(counts_.begin(), counts_.end(), 0); }

 private:
  struct RoundState {
    TokenBatch batch, on_device;
    OwnRows with_loss;         // this rank's among the tokens with a target
    RowSubset losses;          // those, of its rows; whole() is 0 where all have one
    MatrixView<const T> rows;  // rows after the last layer
    bool forward = false;      // whether a Forward has ended and no Backward has begun
  };

  Stage(const TransformerConfig& config, LayerRange range) : config_(config), range_(range) {}
  // The residual stream after the last layer: in y or, with the output layer, in memory of the
  // pass. With the embedding it begins with those of `tokens`, otherwise with x. With a cache the
  // rows follow its own.
  absl::StatusOr<MatrixView<T>> LayersForward(const Pass& pass, absl::Span<const int32_t> tokens,
                                              MatrixView<const T> x, MatrixView<T> y,
                                              KeyValueCache<T>* cache);
  Module<T>& ModuleOf(size_t layer) {
    return recomputed_.empty() ? *layers_[layer] : *recomputed_[layer];
  }
  // The losses, and d [T, H] overwritten with the gradient by the rows after the last layer.
  absl::Status HeadBackward(const Pass& pass, const RoundState& round, MatrixView<T> d,
                            GradientReady ready);
  absl::Status EmbeddingBackward(const Pass& pass, absl::Span<const int32_t> tokens,
                                 MatrixView<T> d, GradientReady ready);

  TransformerConfig config_;
  const LayerRange range_;
  std::vector<Parameter*> parameters_;
  Parameter* embedding_ = nullptr;  // nullptr: layers come before
  Parameter* tied_ = nullptr;       // another stage's embedding, which is the output layer here
  std::vector<std::unique_ptr<Layer<T>>> layers_;
  std::vector<std::unique_ptr<Module<T>>> recomputed_;  // layers with Recompute::kLayer; or none
  std::optional<OutputHead<T>> head_;                   // nullopt: layers follow
  std::vector<MoeLayer<T>*> mixtures_;
  std::vector<int64_t> counts_;  // slots [MoE layer][E] of this step so far
  PerStash<RoundState> rounds_;
};

}  // namespace moe::lm

#endif  // MOE_MOE_LM_STAGE_H_
