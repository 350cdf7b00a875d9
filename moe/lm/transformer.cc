#include "moe/lm/transformer.h"

#include <algorithm>
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

namespace moe::lm {
namespace {

absl::Status CheckIds(const char* function, const char* name, absl::Span<const int32_t> ids,
                      int64_t vocab_size) {
  for (size_t t = 0; t < ids.size(); ++t) {
    if (ids[t] < 0 || ids[t] >= vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat(function, ": ", name, "[", t, "] is ", ids[t],
                                                     ", expected 0 to ", vocab_size - 1));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckOffsets(const char* function, const char* name, absl::Span<const int64_t> offsets,
                          int64_t tokens) {
  bool good = !offsets.empty() && offsets.front() == 0 && offsets.back() == tokens;
  for (size_t i = 1; good && i < offsets.size(); ++i) good = offsets[i - 1] <= offsets[i];
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(function, ": ", name, " [", offsets.size(),
                                                 "], expected to ascend from 0 to ", tokens));
}

// kInvalidArgument, prefixed with `function`, unless ids are in [0, vocab_size) and the batch's
// offsets ascend from 0 to the number of tokens.
absl::Status CheckTokens(const char* function, absl::Span<const int32_t> tokens, const Batch& batch,
                         int64_t vocab_size) {
  const auto count = static_cast<int64_t>(tokens.size());
  // Without tokens there may be no sequences; without micro-batches the call is one.
  if (count > 0 || !batch.sequence_offsets.empty()) {
    MOE_RETURN_IF_ERROR(CheckOffsets(function, "sequence_offsets", batch.sequence_offsets, count));
  }
  if (!batch.micro_batch_offsets.empty()) {
    MOE_RETURN_IF_ERROR(
        CheckOffsets(function, "micro_batch_offsets", batch.micro_batch_offsets, count));
  }
  return CheckIds(function, "tokens", tokens, vocab_size);
}

// CheckTokens, and kInvalidArgument unless there are as many targets and losses as tokens.
absl::Status CheckTokenBatch(const char* function, const TokenBatch& tokens, const Batch& batch,
                             int64_t vocab_size) {
  const size_t count = tokens.tokens.size(), losses = tokens.row_loss.size();
  if (tokens.targets.size() != count || losses != count) {
    return absl::InvalidArgumentError(absl::StrCat(function, ": tokens [", count, "], targets [",
                                                   tokens.targets.size(), "], row_loss [", losses,
                                                   "], expected equal lengths"));
  }
  MOE_RETURN_IF_ERROR(CheckTokens(function, tokens.tokens, batch, vocab_size));
  return CheckIds(function, "targets", tokens.targets, vocab_size);
}

// The batch in memory of the compute device: the caller's own memory on a CPU.
absl::StatusOr<TokenBatch> PutOnDevice(const TokenBatch& batch, const Context& context) {
  TokenBatch on_device = batch;
  MOE_ASSIGN_OR_RETURN(on_device.tokens, OnDevice(batch.tokens, context));
  MOE_ASSIGN_OR_RETURN(on_device.targets, OnDevice(batch.targets, context));
  if (OnCuda(context)) {
    MOE_ASSIGN_OR_RETURN(on_device.row_loss, context.workspace->Array<float>(
                                                 static_cast<int64_t>(batch.row_loss.size())));
  }
  return on_device;
}

// Copies losses to the host, which it blocks: the only time in a round for the round's own sake.
// The routers' statistics have then arrived, too.
absl::Status TakeLosses(const TokenBatch& on_device, absl::Span<float> row_loss, const Pass& pass) {
  const Context& context = pass.context;
  if (!OnCuda(context)) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(
      context.compute->CopyBytes(on_device.row_loss.data(), row_loss.data(),
                                 static_cast<int64_t>(row_loss.size() * sizeof(float))));
  MOE_RETURN_IF_ERROR(context.compute->Synchronize());
  for (RouterStats& layer : pass.router_stats) MOE_RETURN_IF_ERROR(layer.Wait());
  return absl::OkStatus();
}

}  // namespace

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

  struct LayerRows {
    MatrixView<const T> x;
    MatrixView<T> middle, y;  // after attention, after the feed-forward block
  };

  absl::Status AddLayer(ParameterStore& store, const Context& context);
  absl::Status Embed(const Pass& pass, absl::Span<const int32_t> tokens, MatrixView<T> x) const;
  absl::Status LayerForward(const Pass& pass, int layer, const LayerRows& rows,
                            LayerSaved& saved) const;
  absl::StatusOr<MatrixView<const T>> Forward(const Pass& pass, absl::Span<const int32_t> tokens);
  absl::Status Backward(const Pass& pass, absl::Span<const int32_t> tokens, MatrixView<T> d,
                        GradientReady ready);
  void Count(absl::Span<const RouterStats> of_layers);

  TransformerConfig config;
  Parameter* embedding = nullptr;
  std::vector<Layer> layers;
  std::optional<OutputHead<T>> head;
  std::vector<MoeLayer<T>*> mixtures;             // layers of the MoE layers
  std::vector<int64_t> counts;                    // slots [MoE layer][E] of this step so far
  std::vector<std::vector<int64_t>> expert_load;  // loads of the last step, over all ranks
  PerStash<std::vector<LayerSaved>> saved;        // [layer]
};

template <typename T>
absl::Status Transformer<T>::Impl::AddLayer(ParameterStore& store, const Context& context) {
  const int index = static_cast<int>(layers.size());
  const std::string prefix = absl::StrCat("model.layers.", index, ".");
  MOE_ASSIGN_OR_RETURN(auto attention, AttentionBlock<T>::Create(config, prefix, store));
  MOE_ASSIGN_OR_RETURN(auto feed_forward,
                       FeedForwardBlock<T>::Create(config, index, prefix, store, context));
  if (feed_forward.moe() != nullptr) mixtures.push_back(feed_forward.moe());
  layers.push_back({std::move(attention), std::move(feed_forward)});
  return absl::OkStatus();
}

template <typename T>
absl::Status Transformer<T>::Impl::Embed(const Pass& pass, absl::Span<const int32_t> tokens,
                                         MatrixView<T> x) const {
  return TimedDense(pass, "embedding", [&] {
    return GatherRows<T>(embedding->view<T>(), tokens, x, *pass.context.compute);
  });
}

template <typename T>
absl::Status Transformer<T>::Impl::LayerForward(const Pass& pass, int layer, const LayerRows& rows,
                                                LayerSaved& layer_saved) const {
  Pass in_layer = pass.InLayer(layer);
  const Layer& l = layers[layer];
  MOE_RETURN_IF_ERROR(TimedDense(in_layer, "attention", [&] {
    return l.attention.Forward(in_layer, rows.x, rows.middle, layer_saved.attention);
  }));
  if (!pass.router_stats.empty() && l.feed_forward.moe() != nullptr) {
    in_layer.router_stats = pass.router_stats.subspan(layer / config.moe_layer_freq, 1);
  }
  return l.feed_forward.Forward(in_layer, rows.middle, rows.y, layer_saved.feed_forward);
}

// The residual stream after the last layer, with everything saved that backward needs.
template <typename T>
absl::StatusOr<MatrixView<const T>> Transformer<T>::Impl::Forward(
    const Pass& pass, absl::Span<const int32_t> tokens) {
  Workspace& kept = pass.kept();
  const auto count = static_cast<int64_t>(tokens.size());
  std::vector<LayerSaved>& layers_saved = saved.Begin(*pass.stash);
  layers_saved.resize(layers.size());
  MOE_ASSIGN_OR_RETURN(MatrixView<T> x, kept.Matrix<T>(count, config.hidden_size));
  MOE_RETURN_IF_ERROR(Embed(pass, tokens, x));
  for (int l = 0; l < config.num_layers; ++l) {
    MOE_ASSIGN_OR_RETURN(const auto middle, kept.Matrix<T>(count, config.hidden_size));
    MOE_ASSIGN_OR_RETURN(const auto y, kept.Matrix<T>(count, config.hidden_size));
    MOE_RETURN_IF_ERROR(LayerForward(pass, l, {x, middle, y}, layers_saved[l]));
    x = y;
  }
  return MatrixView<const T>(x);
}

template <typename T>
absl::Status Transformer<T>::Impl::Backward(const Pass& pass, absl::Span<const int32_t> tokens,
                                            MatrixView<T> d, GradientReady ready) {
  const Context& context = pass.context;
  std::vector<LayerSaved>& layers_saved = *saved.Find(*pass.stash);
  for (int l = config.num_layers - 1; l >= 0; --l) {
    const Pass in_layer = pass.InLayer(l);
    LayerSaved& of_layer = layers_saved[l];
    MOE_RETURN_IF_ERROR(layers[l].feed_forward.Backward(in_layer, of_layer.feed_forward, d, ready));
    MOE_RETURN_IF_ERROR(TimedDense(in_layer, "attention backward", [&] {
      return layers[l].attention.Backward(in_layer, of_layer.attention, d, ready);
    }));
  }
  if (!tokens.empty()) {
    MOE_ASSIGN_OR_RETURN(const GradAccumulator sum, embedding->OpenGradient());
    MOE_RETURN_IF_ERROR(TimedDense(pass, "embedding backward", [&] {
      return sum.Add(
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
void Transformer<T>::Impl::Count(absl::Span<const RouterStats> of_layers) {
  auto count = counts.begin();
  for (const RouterStats& router : of_layers) {
    for (const int64_t slots : router.expert_count) *count++ += slots;
  }
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
  MOE_ASSIGN_OR_RETURN(impl->embedding, store.Add({.name = "model.embed_tokens.weight",
                                                   .rows = config.vocab_size,
                                                   .cols = config.hidden_size,
                                                   .init_std = config.init_std,
                                                   .partials = config.tied_embeddings ? 2 : 1}));
  impl->layers.reserve(config.num_layers);
  for (int l = 0; l < config.num_layers; ++l) MOE_RETURN_IF_ERROR(impl->AddLayer(store, context));
  MOE_ASSIGN_OR_RETURN(
      impl->head,
      OutputHead<T>::Create(config, config.tied_embeddings ? impl->embedding : nullptr, store));
  const auto outputs = static_cast<size_t>(config.moe.router.num_outputs());
  impl->expert_load.assign(impl->mixtures.size(), std::vector<int64_t>(outputs, 0));
  impl->counts.assign(impl->mixtures.size() * outputs, 0);
  return std::unique_ptr<Transformer>(new Transformer(std::move(impl)));
}

template <typename T>
absl::Status Transformer<T>::Evaluate(const Pass& pass, const TokenBatch& batch) {
  Impl& m = *impl_;
  const Context& context = pass.context;
  MOE_RETURN_IF_ERROR(
      CheckTokenBatch("Transformer::Evaluate", batch, pass.batch, m.config.vocab_size));
  Workspace& workspace = *context.workspace;
  const WorkspaceScope scope(workspace), host_scope(*context.host_workspace);
  MOE_ASSIGN_OR_RETURN(const TokenBatch on_device, PutOnDevice(batch, context));
  const auto count = static_cast<int64_t>(batch.tokens.size());
  MOE_ASSIGN_OR_RETURN(const auto x, workspace.Matrix<T>(count, m.config.hidden_size));
  MOE_ASSIGN_OR_RETURN(const auto middle, workspace.Matrix<T>(count, m.config.hidden_size));
  MOE_RETURN_IF_ERROR(m.Embed(pass, on_device.tokens, x));
  for (int l = 0; l < m.config.num_layers; ++l) {
    // Nothing is saved: a layer's scratch is given back, and its output replaces its input.
    const WorkspaceScope layer_scope(workspace), host_layer_scope(*context.host_workspace);
    typename Impl::LayerSaved layer_saved;
    MOE_RETURN_IF_ERROR(m.LayerForward(pass.WithoutStash(), l, {x, middle, x}, layer_saved));
  }
  MOE_RETURN_IF_ERROR(TimedDense(pass, "loss", [&] { return m.head->Loss(pass, x, on_device); }));
  return TakeLosses(on_device, batch.row_loss, pass);
}

template <typename T>
absl::Status Transformer<T>::Extend(const Context& context, absl::Span<const int32_t> tokens,
                                    KeyValueCache<T>& cache, MatrixView<float> logits) {
  Impl& m = *impl_;
  if (OnCuda(context)) return absl::UnimplementedError("Transformer::Extend: on a CUDA device");
  const auto count = static_cast<int64_t>(tokens.size());
  const int64_t offsets[] = {0, count}, past = cache.size();
  const Pass pass = {.context = context,
                     .batch = {.sequence_offsets = offsets,
                               .micro_batch_offsets = offsets,
                               .first_global_token = past,
                               .first_position = past,
                               .mode = Mode::kEvaluation},
                     .site = {.step = past}};
  MOE_RETURN_IF_ERROR(CheckTokens("Transformer::Extend", tokens, pass.batch, m.config.vocab_size));
  if (past + count > cache.capacity() || logits.rows() > count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Transformer::Extend: ", count, " tokens after ", past, " and logits of ", logits.rows(),
        ", expected room for ", cache.capacity(), " tokens, and logits of new ones"));
  }
  Workspace& workspace = *context.workspace;
  const WorkspaceScope scope(workspace);
  MOE_ASSIGN_OR_RETURN(const auto x, workspace.Matrix<T>(count, m.config.hidden_size));
  MOE_ASSIGN_OR_RETURN(const auto middle, workspace.Matrix<T>(count, m.config.hidden_size));
  MOE_RETURN_IF_ERROR(m.Embed(pass, tokens, x));
  for (int l = 0; l < m.config.num_layers; ++l) {
    const WorkspaceScope layer_scope(workspace);
    const Pass in_layer = pass.InLayer(l);
    const typename Impl::Layer& layer = m.layers[l];
    MOE_RETURN_IF_ERROR(layer.attention.ForwardCached(in_layer, x, cache.keys(l, past + count),
                                                      cache.values(l, past + count), middle));
    FeedForwardBlockSaved<T> saved;
    MOE_RETURN_IF_ERROR(layer.feed_forward.Forward(in_layer, middle, x, saved));
  }
  cache.Grow(count);
  if (logits.rows() > 0) {
    NormSaved<T> saved;
    MOE_ASSIGN_OR_RETURN(
        const auto rows,
        m.head->Logits(pass, RowRange(MatrixView<const T>(x), count - logits.rows(), count),
                       saved));
    for (int64_t r = 0; r < rows.rows(); ++r) std::copy_n(rows.row(r), rows.cols(), logits.row(r));
  }
  return context.compute->Synchronize();
}

template <typename T>
absl::Status Transformer<T>::ForwardBackward(const Pass& pass, const TokenBatch& batch,
                                             GradientReady ready) {
  Impl& m = *impl_;
  const Context& context = pass.context;
  MOE_RETURN_IF_ERROR(
      CheckTokenBatch("Transformer::ForwardBackward", batch, pass.batch, m.config.vocab_size));
  if (pass.batch.micro_batch_offsets.size() > 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("Transformer::ForwardBackward: ", pass.batch.micro_batch_offsets.size() - 1,
                     " micro-batches, expected one per round"));
  }
  if (pass.stash == nullptr) {
    return absl::InvalidArgumentError(
        "Transformer::ForwardBackward: a pass without a stash, expected one");
  }
  Workspace& workspace = *context.workspace;
  const WorkspaceScope scope(workspace), host_scope(*context.host_workspace);
  MOE_ASSIGN_OR_RETURN(const TokenBatch on_device, PutOnDevice(batch, context));
  MOE_ASSIGN_OR_RETURN(const MatrixView<const T> x, m.Forward(pass, on_device.tokens));
  MOE_ASSIGN_OR_RETURN(const auto d, workspace.Matrix<T>(x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(TimedDense(
      pass, "loss", [&] { return m.head->LossAndGradient(pass, x, on_device, d, ready); }));
  MOE_RETURN_IF_ERROR(m.Backward(pass, on_device.tokens, d, ready));
  MOE_RETURN_IF_ERROR(JoinStreams(*context.compute, *context.exchange));
  MOE_RETURN_IF_ERROR(TakeLosses(on_device, batch.row_loss, pass));
  m.Count(pass.router_stats);
  return absl::OkStatus();
}

template <typename T>
std::vector<ModuleState> Transformer<T>::states() {
  std::vector<ModuleState> states;
  for (MoeLayer<T>* const moe : impl_->mixtures) states.push_back(moe->router_share());
  return states;
}

template <typename T>
int64_t Transformer<T>::count_size() const {
  return std::ssize(impl_->counts);
}

template <typename T>
absl::Status Transformer<T>::TakeCounts(absl::Span<int64_t> counts) {
  std::copy(impl_->counts.begin(), impl_->counts.end(), counts.begin());
  return absl::OkStatus();
}

template <typename T>
absl::Status Transformer<T>::EndStep(absl::Span<const int64_t> counts) {
  for (size_t i = 0; i < impl_->mixtures.size(); ++i) {
    std::vector<int64_t>& load = impl_->expert_load[i];
    std::copy_n(counts.begin(), load.size(), load.begin());
    counts.remove_prefix(load.size());
    MOE_RETURN_IF_ERROR(impl_->mixtures[i]->EndStep(load));
  }
  std::fill(impl_->counts.begin(), impl_->counts.end(), 0);
  return absl::OkStatus();
}

template <typename T>
const std::vector<std::vector<int64_t>>& Transformer<T>::expert_load() const {
  return impl_->expert_load;
}

template <typename T>
void Transformer<T>::CountSlots(absl::Span<int64_t> slots) {
  const size_t experts = impl_->config.moe.router.num_experts;
  for (MoeLayer<T>* const moe : impl_->mixtures) {
    moe->CountSlots(slots.subspan(0, experts));
    if (!slots.empty()) slots.remove_prefix(experts);
  }
}

template <typename T>
int Transformer<T>::moe_layers() const {
  return static_cast<int>(impl_->mixtures.size());
}

template <typename T>
ExchangeBytes Transformer<T>::exchange_bytes() const {
  ExchangeBytes total;
  for (const MoeLayer<T>* const moe : impl_->mixtures) {
    const ExchangeBytes& bytes = moe->exchange_bytes();
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
