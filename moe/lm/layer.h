// One layer of the reference model.
#ifndef MOE_MOE_LM_LAYER_H_
#define MOE_MOE_LM_LAYER_H_

#include <memory>
#include <utility>
#include <vector>

#include <absl/status/statusor.h>

#include "moe/lm/attention_block.h"
#include "moe/lm/feed_forward_block.h"
#include "moe/lm/key_value_cache.h"
#include "moe/lm/transformer_config.h"
#include "moe/run/pass.h"
#include "moe/state/module.h"

namespace moe::lm {

// y = x + Attention(RMSNorm(x)), then y += FeedForward(RMSNorm(y)); rows are [T, H]. Parameters:
// "model.layers.<index>.…". pass.site.layer is the index, in messages and in a cache. Collective
// over the expert-parallel group where the layer has experts, with zero tokens too.
template <typename T>
class Layer final : public Module<T> {
 public:
  // Collective. config.moe.router.hidden_size is filled in.
  static absl::StatusOr<std::unique_ptr<Layer>> Create(const TransformerConfig& config, int index,
                                                       ParameterStore& store,
                                                       const Context& context);

  absl::Span<Parameter* const> parameters() const override { return parameters_; }
  // y may be x where pass has no stash.
  absl::Status Forward(const Pass& pass, MatrixView<const T> x, MatrixView<T> y) override;
  // Forward of the tokens that follow those of `cache`, which receives their keys and values
  // (AttentionBlock::ForwardCached).
  absl::Status Extend(const Pass& pass, MatrixView<const T> x, KeyValueCache<T>& cache,
                      MatrixView<T> y);
  // dx is the memory of dy.
  absl::Status Backward(const Pass& pass, MatrixView<const T> dy, MatrixView<T> dx,
                        GradientReady ready) override;

  // Null in a dense layer.
  MoeLayer<T>* moe() { return feed_forward_.moe(); }

 private:
  struct Saved {
    AttentionBlockSaved<T> attention;
    FeedForwardBlockSaved<T> feed_forward;
  };

  Layer(AttentionBlock<T> attention, FeedForwardBlock<T> feed_forward)
      : attention_(std::move(attention)), feed_forward_(std::move(feed_forward)) {}

  AttentionBlock<T> attention_;
  FeedForwardBlock<T> feed_forward_;
  std::vector<Parameter*> parameters_;
  PerStash<Saved> saved_;
};

}  // namespace moe::lm

#endif  // MOE_MOE_LM_LAYER_H_
