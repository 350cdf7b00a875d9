#include "moe/lm/transformer.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/workspace.h"
#include "kernels/embedding/embedding.h"
#include "kernels/permute/permute.h"
#include "moe/lm/attention_block.h"
#include "moe/lm/feed_forward_block.h"
#include "moe/lm/key_value_cache.h"
#include "moe/lm/output_head.h"
#include "moe/lm/token_batch.h"

namespace moe::lm {
template <typename T>
struct Transformer<T>::Impl {
  struct Layer {
    AttentionBlock<T> attention;
    FeedForwardBlock<T> feed_forward;
  };
  struct LayerSaved {
    AttentionBlockSaved<T> attention;
    FeedForwardBlockSaved<T> feed_forward;
  };

  // One round's tokens where the model computes: the caller's own memory on a CPU.
  struct Tokens {
    absl::Span<const int32_t> ids, targets;  // [T]
    absl::Span<float> row_loss;              // [T]
  };

  absl::StatusOr<Tokens> PutOnDevice(absl::Span<const int32_t> tokens,
                                     absl::Span<const int32_t> targets,
                                     absl::Span<float> row_loss) const;
  absl::Status TakeLosses(const Tokens& tokens, absl::Span<float> row_loss,
                          ForwardStats* stats) const;
  absl::Status AddLayer(ParameterStore& store);
  RouterStats* StatsOf(int layer, ForwardStats* stats) const;
  absl::Status Embed(absl::Span<const int32_t> tokens, int64_t step, MatrixView<T> x) const;
  absl::Status LayerForward(int layer, MatrixView<const T> x, const Batch& batch,
                            MatrixView<T> middle, MatrixView<T> y, LayerSaved& saved,
                            ForwardStats* stats) const;
  absl::StatusOr<MatrixView<const T>> Forward(absl::Span<const int32_t> tokens, const Batch& batch,
                                              ForwardStats* stats);
  absl::Status Backward(absl::Span<const int32_t> tokens, const Batch& batch, float loss_scale,
                        MatrixView<T> d, GradientReady ready);

  TransformerConfig config;
  Context context;
  Parameter* embedding = nullptr;
  std::vector<Layer> layers;
  std::optional<OutputHead<T>> head;
  std::vector<LayerSaved> saved;  // of the round that runs
  int moe_layers = 0;
};

template <typename T>
absl::Status Transformer<T>::Impl::AddLayer(ParameterStore& store) {
  const int index = static_cast<int>(layers.size());
  const std::string prefix = absl::StrCat("model.layers.", index, ".");
  const double out_init_std = config.init_std / std::sqrt(2.0 * config.num_layers);
  MOE_ASSIGN_OR_RETURN(auto attention,
                       AttentionBlock<T>::Create({.hidden_size = config.hidden_size,
                                                  .heads = config.num_attention_heads,
                                                  .kv_heads = config.key_value_heads(),
                                                  .head_dim = config.head_dim(),
                                                  .qkv_bias = config.qkv_bias,
                                                  .qk_norm = config.qk_norm,
                                                  .rotary_base = config.rotary_base,
                                                  .norm_epsilon = config.norm_epsilon,
                                                  .init_std = config.init_std,
                                                  .out_init_std = out_init_std,
                                                  .pack_weights = config.moe.pack_weights},
                                                 prefix, store));
  const typename FeedForwardBlock<T>::NormConfig norm = {.hidden_size = config.hidden_size,
                                                         .epsilon = config.norm_epsilon};
  if (index % config.moe_layer_freq == config.moe_layer_freq - 1) {
    MoeLayerConfig moe = config.moe;
    moe.router.layer = static_cast<uint32_t>(index);
    moe.init_std = config.init_std;
    moe.down_init_std = out_init_std;
    MOE_ASSIGN_OR_RETURN(auto mixture,
                         FeedForwardBlock<T>::CreateMoe(norm, moe, prefix, store, context));
    layers.push_back({std::move(attention), std::move(mixture)});
    ++moe_layers;
    return absl::OkStatus();
  }
  MOE_ASSIGN_OR_RETURN(auto dense,
                       FeedForwardBlock<T>::CreateDense(norm,
                                                        {.hidden_size = config.hidden_size,
                                                         .ffn_hidden_size = config.dense_width(),
                                                         .activation = config.moe.activation,
                                                         .init_std = config.init_std,
                                                         .down_init_std = out_init_std,
                                                         .pack_weights = config.moe.pack_weights},
                                                        prefix, store));
  layers.push_back({std::move(attention), std::move(dense)});
  return absl::OkStatus();
}

template <typename T>
auto Transformer<T>::Impl::PutOnDevice(absl::Span<const int32_t> tokens,
                                       absl::Span<const int32_t> targets,
                                       absl::Span<float> row_loss) const -> absl::StatusOr<Tokens> {
  Tokens on_device = {.row_loss = row_loss};
  MOE_ASSIGN_OR_RETURN(on_device.ids, OnDevice(tokens, context));
  MOE_ASSIGN_OR_RETURN(on_device.targets, OnDevice(targets, context));
  if (OnCuda(context)) {
    MOE_ASSIGN_OR_RETURN(on_device.row_loss,
                         context.workspace->Array<float>(static_cast<int64_t>(row_loss.size())));
  }
  return on_device;
}

// Blocks the host: the one time that a round does so for its own sake. The routers' measures have
// come, too.
template <typename T>
absl::Status Transformer<T>::Impl::TakeLosses(const Tokens& tokens, absl::Span<float> row_loss,
                                              ForwardStats* stats) const {
  if (!OnCuda(context)) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(
      context.compute->CopyBytes(tokens.row_loss.data(), row_loss.data(),
                                 static_cast<int64_t>(row_loss.size() * sizeof(float))));
  MOE_RETURN_IF_ERROR(context.compute->Synchronize());
  if (stats == nullptr) return absl::OkStatus();
  for (RouterStats& layer : stats->router) MOE_RETURN_IF_ERROR(layer.Wait());
  return absl::OkStatus();
}

// Where MoE layer `layer` writes its measures; null in a dense layer or when not wanted.
template <typename T>
RouterStats* Transformer<T>::Impl::StatsOf(int layer, ForwardStats* stats) const {
  if (stats == nullptr || layers[layer].feed_forward.moe() == nullptr) return nullptr;
  return &stats->router[layer / config.moe_layer_freq];
}

template <typename T>
absl::Status Transformer<T>::Impl::Embed(absl::Span<const int32_t> tokens, int64_t step,
                                         MatrixView<T> x) const {
  context.mesh->SetPhase({.name = "embedding", .step = step});
  return TimedDense(context, "embedding", [&] {
    return GatherRows<T>(embedding->view<T>(), tokens, x, *context.compute);
  });
}

template <typename T>
absl::Status Transformer<T>::Impl::LayerForward(int layer, MatrixView<const T> x,
                                                const Batch& batch, MatrixView<T> middle,
                                                MatrixView<T> y, LayerSaved& layer_saved,
                                                ForwardStats* stats) const {
  context.mesh->SetPhase({.name = "forward", .layer = layer, .step = batch.step});
  const Layer& l = layers[layer];
  MOE_RETURN_IF_ERROR(TimedDense(context, "attention", [&] {
    return l.attention.Forward(x, batch, middle, layer_saved.attention, context);
  }));
  return l.feed_forward.Forward(middle, batch, y, layer_saved.feed_forward, StatsOf(layer, stats),
                                context);
}

// The residual stream after the last layer, with everything that backward needs kept.
template <typename T>
absl::StatusOr<MatrixView<const T>> Transformer<T>::Impl::Forward(absl::Span<const int32_t> tokens,
                                                                  const Batch& batch,
                                                                  ForwardStats* stats) {
  Workspace& workspace = *context.workspace;
  const auto count = static_cast<int64_t>(tokens.size());
  MOE_ASSIGN_OR_RETURN(MatrixView<T> x, workspace.Matrix<T>(count, config.hidden_size));
  MOE_RETURN_IF_ERROR(Embed(tokens, batch.step, x));
  for (int l = 0; l < config.num_layers; ++l) {
    MOE_ASSIGN_OR_RETURN(const auto middle, workspace.Matrix<T>(count, config.hidden_size));
    MOE_ASSIGN_OR_RETURN(const auto y, workspace.Matrix<T>(count, config.hidden_size));
    MOE_RETURN_IF_ERROR(LayerForward(l, x, batch, middle, y, saved[l], stats));
    x = y;
  }
  return MatrixView<const T>(x);
}

template <typename T>
absl::Status Transformer<T>::Impl::Backward(absl::Span<const int32_t> tokens, const Batch& batch,
                                            float loss_scale, MatrixView<T> d,
                                            GradientReady ready) {
  for (int l = config.num_layers - 1; l >= 0; --l) {
    context.mesh->SetPhase({.name = "backward", .layer = l, .step = batch.step});
    MOE_RETURN_IF_ERROR(
        layers[l].feed_forward.Backward(saved[l].feed_forward, loss_scale, d, ready, context));
    MOE_RETURN_IF_ERROR(TimedDense(context, "attention backward", [&] {
      return layers[l].attention.Backward(batch, saved[l].attention, d, ready, context);
    }));
  }
  context.mesh->SetPhase({.name = "embedding", .step = batch.step});
  if (!tokens.empty()) {
    MOE_RETURN_IF_ERROR(TimedDense(context, "embedding backward", [&] {
      return embedding->grad().Add(
          [&](absl::Span<float> out, Write write) {
            return EmbeddingBackward<T>(
                tokens, d, MatrixView<float>(out.data(), config.vocab_size, config.hidden_size),
                write, *context.compute);
          },
          *context.workspace, *context.compute);
    }));
  }
  return ready(*embedding);
}

template <typename T>
Transformer<T>::Transformer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

template <typename T>
Transformer<T>::~Transformer() = default;

template <typename T>
absl::StatusOr<std::unique_ptr<Transformer<T>>> Transformer<T>::Create(
    const TransformerConfig& config, ParameterStore& store, const Context& context) {
  MOE_RETURN_IF_ERROR(ValidateTransformerConfig(config));
  if (store.compute() != DTypeOf<T>::value) {
    return absl::InvalidArgumentError(absl::StrCat("Transformer: the store computes in ",
                                                   NameOf(store.compute()), ", expected ",
                                                   NameOf(DTypeOf<T>::value)));
  }
  auto impl = std::make_unique<Impl>();
  impl->config = config;
  impl->config.moe.router.hidden_size = config.hidden_size;
  impl->context = context;
  MOE_ASSIGN_OR_RETURN(impl->embedding, store.Add({.name = "model.embed_tokens.weight",
                                                   .rows = config.vocab_size,
                                                   .cols = config.hidden_size,
                                                   .init_std = config.init_std,
                                                   .partials = config.tied_embeddings ? 2 : 1}));
  impl->layers.reserve(config.num_layers);
  for (int l = 0; l < config.num_layers; ++l) MOE_RETURN_IF_ERROR(impl->AddLayer(store));
  MOE_ASSIGN_OR_RETURN(impl->head, OutputHead<T>::Create(
                                       {.vocab_size = config.vocab_size,
                                        .hidden_size = config.hidden_size,
                                        .norm_epsilon = config.norm_epsilon,
                                        .init_std = config.init_std,
                                        .pack_weights = config.moe.pack_weights,
                                        .tied = config.tied_embeddings ? impl->embedding : nullptr},
                                       store));
  impl->saved.resize(config.num_layers);
  return std::unique_ptr<Transformer>(new Transformer(std::move(impl)));
}

template <typename T>
absl::Status Transformer<T>::Evaluate(absl::Span<const int32_t> tokens,
                                      absl::Span<const int32_t> targets, const Batch& batch,
                                      absl::Span<float> row_loss, ForwardStats* stats) {
  Impl& m = *impl_;
  MOE_RETURN_IF_ERROR(CheckTokenBatch("Transformer::Evaluate", tokens, targets, batch,
                                      m.config.vocab_size, row_loss.size()));
  if (stats != nullptr) stats->router.resize(m.moe_layers);
  Workspace& workspace = *m.context.workspace;
  const WorkspaceScope scope(workspace), host_scope(*m.context.host_workspace);
  MOE_ASSIGN_OR_RETURN(const typename Impl::Tokens on_device,
                       m.PutOnDevice(tokens, targets, row_loss));
  const auto count = static_cast<int64_t>(tokens.size());
  MOE_ASSIGN_OR_RETURN(const auto x, workspace.Matrix<T>(count, m.config.hidden_size));
  MOE_ASSIGN_OR_RETURN(const auto middle, workspace.Matrix<T>(count, m.config.hidden_size));
  MOE_RETURN_IF_ERROR(m.Embed(on_device.ids, batch.step, x));
  for (int l = 0; l < m.config.num_layers; ++l) {
    // Nothing is kept: a layer's scratch is given back, and its output replaces its input.
    const WorkspaceScope layer_scope(workspace), host_layer_scope(*m.context.host_workspace);
    typename Impl::LayerSaved layer_saved;
    MOE_RETURN_IF_ERROR(m.LayerForward(l, x, batch, middle, x, layer_saved, stats));
  }
  m.context.mesh->SetPhase({.name = "loss", .step = batch.step});
  MOE_RETURN_IF_ERROR(TimedDense(m.context, "loss", [&] {
    return m.head->Loss(x, on_device.targets, on_device.row_loss, m.context);
  }));
  return m.TakeLosses(on_device, row_loss, stats);
}

template <typename T>
absl::Status Transformer<T>::Extend(absl::Span<const int32_t> tokens, KeyValueCache<T>& cache,
                                    MatrixView<float> logits) {
  Impl& m = *impl_;
  if (OnCuda(m.context)) return absl::UnimplementedError("Transformer::Extend: on a CUDA device");
  const auto count = static_cast<int64_t>(tokens.size());
  const int64_t offsets[] = {0, count}, past = cache.size();
  const Batch batch = {.sequence_offsets = offsets,
                       .micro_batch_offsets = offsets,
                       .first_global_token = past,
                       .first_position = past,
                       .mode = Mode::kEvaluation};
  MOE_RETURN_IF_ERROR(CheckTokenBatch("Transformer::Extend", tokens, tokens, batch,
                                      m.config.vocab_size, tokens.size()));
  if (past + count > cache.capacity() || logits.rows() > count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Transformer::Extend: ", count, " tokens after ", past, " and logits of ", logits.rows(),
        ", expected room for ", cache.capacity(), " tokens, and logits of new ones"));
  }
  Workspace& workspace = *m.context.workspace;
  const WorkspaceScope scope(workspace);
  MOE_ASSIGN_OR_RETURN(const auto x, workspace.Matrix<T>(count, m.config.hidden_size));
  MOE_ASSIGN_OR_RETURN(const auto middle, workspace.Matrix<T>(count, m.config.hidden_size));
  MOE_RETURN_IF_ERROR(m.Embed(tokens, past, x));
  for (int l = 0; l < m.config.num_layers; ++l) {
    const WorkspaceScope layer_scope(workspace);
    m.context.mesh->SetPhase({.name = "forward", .layer = l, .step = past});
    const typename Impl::Layer& layer = m.layers[l];
    MOE_RETURN_IF_ERROR(layer.attention.ForwardCached(
        x, batch, cache.keys(l, past + count), cache.values(l, past + count), middle, m.context));
    FeedForwardBlockSaved<T> saved;
    MOE_RETURN_IF_ERROR(layer.feed_forward.Forward(middle, batch, x, saved, nullptr, m.context));
  }
  cache.Grow(count);
  if (logits.rows() > 0) {
    NormSaved<T> saved;
    MOE_ASSIGN_OR_RETURN(const auto rows, m.head->Logits(RowRange(MatrixView<const T>(x),
                                                                  count - logits.rows(), count),
                                                         saved, m.context));
    for (int64_t r = 0; r < rows.rows(); ++r) std::copy_n(rows.row(r), rows.cols(), logits.row(r));
  }
  return m.context.compute->Synchronize();
}

template <typename T>
absl::Status Transformer<T>::ForwardBackward(absl::Span<const int32_t> tokens,
                                             absl::Span<const int32_t> targets, const Batch& batch,
                                             float loss_scale, absl::Span<float> row_loss,
                                             ForwardStats* stats, GradientReady ready) {
  Impl& m = *impl_;
  MOE_RETURN_IF_ERROR(CheckTokenBatch("Transformer::ForwardBackward", tokens, targets, batch,
                                      m.config.vocab_size, row_loss.size()));
  if (batch.micro_batch_offsets.size() > 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("Transformer::ForwardBackward: ", batch.micro_batch_offsets.size() - 1,
                     " micro-batches, expected one per round"));
  }
  if (stats != nullptr) stats->router.resize(m.moe_layers);
  Workspace& workspace = *m.context.workspace;
  const WorkspaceScope scope(workspace), host_scope(*m.context.host_workspace);
  MOE_ASSIGN_OR_RETURN(const typename Impl::Tokens on_device,
                       m.PutOnDevice(tokens, targets, row_loss));
  MOE_ASSIGN_OR_RETURN(const MatrixView<const T> x, m.Forward(on_device.ids, batch, stats));
  MOE_ASSIGN_OR_RETURN(const auto d, workspace.Matrix<T>(x.rows(), x.cols()));
  const float scale = tokens.empty() ? 0 : loss_scale / static_cast<float>(tokens.size());
  m.context.mesh->SetPhase({.name = "loss", .step = batch.step});
  MOE_RETURN_IF_ERROR(TimedDense(m.context, "loss", [&] {
    return m.head->LossAndGradient(x, on_device.targets, scale, on_device.row_loss, d, ready,
                                   m.context);
  }));
  MOE_RETURN_IF_ERROR(m.Backward(on_device.ids, batch, loss_scale, d, ready));
  MOE_RETURN_IF_ERROR(JoinStreams(*m.context.compute, *m.context.exchange));
  return m.TakeLosses(on_device, row_loss, stats);
}

template <typename T>
absl::Status Transformer<T>::EndStep(const std::vector<std::vector<int64_t>>& expert_load) {
  size_t index = 0;
  for (auto& layer : impl_->layers) {
    MoeLayer<T>* const moe = layer.feed_forward.moe();
    if (moe != nullptr) MOE_RETURN_IF_ERROR(moe->EndStep(expert_load[index++]));
  }
  return absl::OkStatus();
}

template <typename T>
std::vector<RouterShare> Transformer<T>::router_shares() {
  std::vector<RouterShare> shares;
  for (auto& layer : impl_->layers) {
    if (layer.feed_forward.moe() != nullptr) {
      shares.push_back(layer.feed_forward.moe()->router_share());
    }
  }
  return shares;
}

template <typename T>
void Transformer<T>::CountSlots(absl::Span<int64_t> slots) {
  const size_t experts = impl_->config.moe.router.num_experts;
  for (auto& layer : impl_->layers) {
    MoeLayer<T>* const moe = layer.feed_forward.moe();
    if (moe == nullptr) continue;
    moe->CountSlots(slots.subspan(0, experts));
    if (!slots.empty()) slots.remove_prefix(experts);
  }
}

template <typename T>
const TransformerConfig& Transformer<T>::config() const {
  return impl_->config;
}

template <typename T>
int Transformer<T>::moe_layers() const {
  return impl_->moe_layers;
}

template <typename T>
ExchangeBytes Transformer<T>::exchange_bytes() const {
  ExchangeBytes total;
  for (const auto& layer : impl_->layers) {
    const MoeLayer<T>* const moe = layer.feed_forward.moe();
    if (moe == nullptr) continue;
    const ExchangeBytes bytes = moe->exchange_bytes();
    total.self += bytes.self;
    total.same_node += bytes.same_node;
    total.cross_node += bytes.cross_node;
  }
  return total;
}

template class Transformer<float>;
template class Transformer<BFloat16>;
template class Transformer<Float16>;

}  // namespace moe::lm
