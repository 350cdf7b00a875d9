// The reference model: a decoder-only transformer with mixture-of-experts layers.
#ifndef MOE_MOE_LM_STAGE_H_
#define MOE_MOE_LM_STAGE_H_

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
#include "moe/run/stash.h"
#include "moe/state/module.h"
#include "moe/state/parameter.h"

namespace moe::lm {

// The part of the reference model that a rank holds, so far all of it: embedding, layers, head.
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
class Stage final : public Module<T>, public TrainedModule {
 public:
  // Collective.
  static absl::StatusOr<std::unique_ptr<Stage>> Create(const TransformerConfig& config,
                                                       ParameterStore& store,
                                                       const Context& context);

  absl::Span<Parameter* const> parameters() const override { return parameters_; }
  // The tokens of the micro-batch whose passes are given `pass`, and room for its losses: memory of
  // the host, borrowed until TakeLosses. kInvalidArgument for a batch that does not fit the model.
  absl::Status Load(const Pass& pass, const TokenBatch& batch);
  // Reads the tokens that were loaded; x and y are empty. Without a stash it computes the losses,
  // with one it keeps the rows after the last layer. Collective over the expert-parallel group.
  absl::Status Forward(const Pass& pass, MatrixView<const T> x, MatrixView<T> y) override;
  // Computes the losses, and adds the gradients of pass.d_loss * (mean of row_loss + the routers'
  // losses); dy and dx are empty. kFailedPrecondition without a Forward that kept its rows.
  absl::Status Backward(const Pass& pass, MatrixView<const T> dy, MatrixView<T> dx,
                        GradientReady ready) override;
  // Ends the micro-batch: its losses are in row_loss, and pass.router_stats have arrived. With a
  // stash their slots count in the step. On a CUDA device blocks the host.
  absl::Status TakeLosses(const Pass& pass);

  // Forward of the tokens [T] that follow those of `cache`, to which they are added; logits [n, V]
  // of the last n <= T of them: the bits of one Forward over the whole sequence where a router
  // decides about each token by itself. Other ranks, without a sequence, call it without tokens.
  // kInvalidArgument, before any communication: ids outside the vocabulary, no room in the cache;
  // kUnimplemented on a CUDA device. Collective over the expert-parallel group; blocks.
  absl::Status Extend(const Context& context, absl::Span<const int32_t> tokens,
                      KeyValueCache<T>& cache, MatrixView<float> logits);

  // MoeLayer::router_share of every MoE layer.
  std::vector<ModuleState> states() override;
  // Slots [MoE layer][E] chosen by the routers; EndStep passes them to MoeLayer::EndStep.
  int64_t count_size() const override { return std::ssize(counts_); }
  absl::Status TakeCounts(absl::Span<int64_t> counts) override;
  absl::Status EndStep(absl::Span<const int64_t> counts) override;
  // [MoE layer][E]: the counts of the last EndStep, identity experts last.
  const std::vector<std::vector<int64_t>>& expert_load() const { return expert_load_; }

  // MoeLayer::CountSlots for every MoE layer: slots [MoE layer][E], borrowed; empty = no longer.
  void CountSlots(absl::Span<int64_t> slots);

  int moe_layers() const { return static_cast<int>(mixtures_.size()); }
  // Sum over the MoE layers.
  ExchangeBytes exchange_bytes() const;

 private:
  struct RoundState {
    TokenBatch batch, on_device;
    MatrixView<const T> rows;  // rows after the last layer
    bool forward = false;      // whether a Forward has ended and no Backward has begun
  };

  explicit Stage(const TransformerConfig& config) : config_(config) {}
  // The residual stream after the last layer. With a cache the tokens follow its own.
  absl::StatusOr<MatrixView<T>> LayersForward(const Pass& pass, absl::Span<const int32_t> tokens,
                                              KeyValueCache<T>* cache);
  Module<T>& ModuleOf(size_t layer) {
    return recomputed_.empty() ? *layers_[layer] : *recomputed_[layer];
  }
  absl::Status EmbeddingBackward(const Pass& pass, absl::Span<const int32_t> tokens,
                                 MatrixView<const T> d, GradientReady ready);

  TransformerConfig config_;
  std::vector<Parameter*> parameters_;
  Parameter* embedding_ = nullptr;
  std::vector<std::unique_ptr<Layer<T>>> layers_;
  std::vector<std::unique_ptr<Module<T>>> recomputed_;  // layers with Recompute::kLayer; or none
  std::optional<OutputHead<T>> head_;
  std::vector<Layer<T>*> mixtures_;                // layers with experts
  std::vector<int64_t> counts_;                    // slots [MoE layer][E] of this step so far
  std::vector<std::vector<int64_t>> expert_load_;  // loads of the last step, over all ranks
  PerStash<RoundState> rounds_;
};

}  // namespace moe::lm

#endif  // MOE_MOE_LM_STAGE_H_
