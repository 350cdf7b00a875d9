#include "moe/lm/stage.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/workspace.h"
#include "kernels/embedding/embedding.h"
#include "kernels/permute/permute.h"
#include "moe/lm/dense.h"
#include "moe/run/finite.h"
#include "moe/state/weight_lease.h"

namespace moe::lm {
namespace {

constexpr Work kLoss = {.phase = Phase::kOutput, .name = "loss"};

absl::Status CheckIds(const char* name, absl::Span<const int32_t> ids, int64_t vocab_size) {
  for (size_t t = 0; t < ids.size(); ++t) {
    if (ids[t] < 0 || ids[t] >= vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat("Transformer: ", name, "[", t, "] is ", ids[t],
                                                     ", expected 0 to ", vocab_size - 1));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckOffsets(const char* name, absl::Span<const int64_t> offsets, int64_t tokens) {
  bool good = !offsets.empty() && offsets.front() == 0 && offsets.back() == tokens;
  for (size_t i = 1; good && i < offsets.size(); ++i) good = offsets[i - 1] <= offsets[i];
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("Transformer: ", name, " [", offsets.size(),
                                                 "], expected to ascend from 0 to ", tokens));
}

// kInvalidArgument unless ids are in [0, vocab_size) and the batch's
// offsets ascend from 0 to the number of tokens.
absl::Status CheckTokens(absl::Span<const int32_t> tokens, const Batch& batch, int64_t vocab_size) {
  const auto count = static_cast<int64_t>(tokens.size());
  // Without tokens there may be no sequences; without micro-batches the call is one.
  if (count > 0 || !batch.sequence_offsets.empty()) {
    MOE_RETURN_IF_ERROR(CheckOffsets("sequence_offsets", batch.sequence_offsets, count));
  }
  if (!batch.micro_batch_offsets.empty()) {
    MOE_RETURN_IF_ERROR(CheckOffsets("micro_batch_offsets", batch.micro_batch_offsets, count));
  }
  if (!batch.attention_offsets.empty()) {
    MOE_RETURN_IF_ERROR(CheckOffsets("attention_offsets", batch.attention_offsets, count));
  }
  if (!batch.position_offsets.empty()) {
    MOE_RETURN_IF_ERROR(CheckOffsets("position_offsets", batch.position_offsets, count));
  }
  return CheckIds("tokens", tokens, vocab_size);
}

// kInvalidArgument unless there is a loss for each target, and a token that predicts it.
absl::Status CheckLosses(const TokenBatch& batch) {
  const size_t count = batch.tokens.size(), targets = batch.targets.size();
  const absl::Span<const int32_t> rows = batch.loss_rows;
  bool good = batch.row_loss.size() == targets && (targets == count || rows.size() == targets);
  for (size_t i = 0; good && targets != count && i < rows.size(); ++i) {
    good = rows[i] > (i == 0 ? -1 : rows[i - 1]) && rows[i] < std::ssize(batch.tokens);
  }
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "Transformer: tokens [", count, "], targets [", targets, "], row_loss [",
      batch.row_loss.size(), "], loss_rows [", rows.size(),
      "], expected equal lengths, or fewer targets than tokens and their rows, ascending"));
}

// The batch in memory of the compute device, which `pass` keeps: the caller's own on a CPU.
absl::StatusOr<TokenBatch> PutOnDevice(const TokenBatch& batch, const Pass& pass) {
  TokenBatch on_device = batch;
  MOE_ASSIGN_OR_RETURN(on_device.tokens, KeptOnDevice(batch.tokens, pass));
  MOE_ASSIGN_OR_RETURN(on_device.targets, KeptOnDevice(batch.targets, pass));
  if (OnCuda(pass.context)) {
    MOE_ASSIGN_OR_RETURN(on_device.row_loss,
                         pass.kept().Array<float>(static_cast<int64_t>(batch.row_loss.size())));
  }
  return on_device;
}

}  // namespace

template <typename T>
absl::StatusOr<std::unique_ptr<Stage<T>>> Stage<T>::Create(const TransformerConfig& config,
                                                           LayerRange layers, ParameterStore& store,
                                                           const Context& context) {
  MOE_RETURN_IF_ERROR(ValidateTransformerConfig(config));
  if (store.compute() != DTypeOf<T>::value) {
    return absl::InvalidArgumentError(absl::StrCat("Transformer: the store computes in ",
                                                   NameOf(store.compute()), ", expected ",
                                                   NameOf(DTypeOf<T>::value)));
  }
  auto stage = std::unique_ptr<Stage>(new Stage(config, layers));
  const size_t before = store.parameters().size();
  stage->config_.moe.router.hidden_size = config.hidden_size;
  const bool first = layers.first == 0, last = layers.last == config.num_layers;
  if (first || (last && config.tied_embeddings)) {
    const bool two_hold_it = config.tied_embeddings && !(first && last);
    MOE_ASSIGN_OR_RETURN((first ? stage->embedding_ : stage->tied_),
                         store.Add({.name = "model.embed_tokens.weight",
                                    .rows = config.vocab_size,
                                    .cols = config.hidden_size,
                                    .holders = two_hold_it ? MeshGroup::kEnds : MeshGroup::kStage,
                                    .init_std = config.init_std,
                                    .partials = config.tied_embeddings ? 2 : 1}));
  }
  for (int l = layers.first; l < layers.last; ++l) {
    MOE_ASSIGN_OR_RETURN(auto layer, Layer<T>::Create(stage->config_, l, store, context));
    if (layer->moe() != nullptr) stage->mixtures_.push_back(layer->moe());
    if (config.recompute == Recompute::kLayer) {
      stage->recomputed_.push_back(std::make_unique<Recomputed<T>>(*layer));
    }
    stage->layers_.push_back(std::move(layer));
  }
  if (last) {
    Parameter* const own = first ? stage->embedding_ : stage->tied_;
    Parameter* const tied = config.tied_embeddings ? own : nullptr;
    MOE_ASSIGN_OR_RETURN(stage->head_,
                         OutputHead<T>::Create(config, tied, ShareOf(context), store));
  }
  stage->parameters_ = store.AddedSince(before);
  const auto outputs = static_cast<size_t>(config.moe.router.num_outputs());
  stage->counts_.assign(stage->mixtures_.size() * outputs, 0);
  return stage;
}

template <typename T>
std::vector<std::vector<Parameter*>> Stage<T>::leases() const {
  std::vector<std::vector<Parameter*>> leases;
  if (embedding_ != nullptr) leases.push_back({embedding_});
  const auto add = [&](absl::Span<Parameter* const> parameters) {
    leases.emplace_back(parameters.begin(), parameters.end());
  };
  for (const auto& layer : layers_) add(layer->parameters());
  if (head_.has_value()) add(head_->parameters());
  return leases;
}

template <typename T>
absl::Status Stage<T>::Load(const Pass& pass, const TokenBatch& batch) {
  MOE_RETURN_IF_ERROR(CheckLosses(batch));
  MOE_RETURN_IF_ERROR(CheckTokens(batch.tokens, pass.batch, config_.vocab_size));
  MOE_RETURN_IF_ERROR(CheckIds("targets", batch.targets, config_.vocab_size));
  if (pass.stash != nullptr && pass.batch.micro_batch_offsets.size() > 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("Transformer: ", pass.batch.micro_batch_offsets.size() - 1,
                     " micro-batches, expected one per round"));
  }
  RoundState& round = rounds_.Begin(pass.stash);
  round = {.batch = batch};
  MOE_ASSIGN_OR_RETURN(round.on_device, PutOnDevice(batch, pass));
  if (!head_.has_value()) return absl::OkStatus();
  const OwnRows own = round.with_loss = OwnRowsOf(pass.context, std::ssize(batch.tokens));
  if (batch.targets.size() == batch.tokens.size()) return absl::OkStatus();
  round.with_loss = OwnRowsAmong(pass.context, own.all(), batch.loss_rows);
  const int64_t count = round.with_loss.count();
  MOE_ASSIGN_OR_RETURN(const auto rows, pass.kept_host().Array<int32_t>(count));
  std::transform(batch.loss_rows.begin() + round.with_loss.begin(),
                 batch.loss_rows.begin() + round.with_loss.end(), rows.begin(),
                 [&](int32_t row) { return row - static_cast<int32_t>(own.begin()); });
  MOE_ASSIGN_OR_RETURN(round.losses, MakeRowSubset(rows, own.count(), pass));
  return absl::OkStatus();
}

template <typename T>
absl::Span<const float> Stage<T>::own_losses(const Pass& pass) const {
  const RoundState& round = *rounds_.Find(pass.stash);
  if (!head_.has_value()) return {};
  return round.batch.row_loss.subspan(static_cast<size_t>(round.with_loss.begin()),
                                      static_cast<size_t>(round.with_loss.count()));
}

template <typename T>
absl::StatusOr<MatrixView<T>> Stage<T>::LayersForward(const Pass& pass,
                                                      absl::Span<const int32_t> tokens,
                                                      MatrixView<const T> x, MatrixView<T> y,
                                                      KeyValueCache<T>* cache) {
  const OwnRows own = OwnRowsOf(pass.context, RowsOf(pass.batch));
  const int64_t count = own.count();
  const auto rows = [&] {
    return pass.kept().Matrix<T>(count, config_.hidden_size);
  };
  MatrixView<T> out = y;
  if (head_.has_value()) {
    MOE_ASSIGN_OR_RETURN(out, rows());
  }
  if (embedding_ != nullptr) {
    MatrixView<T> embedded = out;  // where nothing is kept, a layer's output replaces its input
    if (pass.stash != nullptr) {
      MOE_ASSIGN_OR_RETURN(embedded, rows());
    }
    MOE_RETURN_IF_ERROR(TimedDense(pass, "embedding", [&]() -> absl::Status {
      MOE_ASSIGN_OR_RETURN(const WeightLease lease, WeightLease::Take(pass, {&embedding_, 1}));
      return GatherRows<T>(
          embedding_->view<T>(),
          tokens.subspan(static_cast<size_t>(own.begin()), static_cast<size_t>(count)), embedded,
          *pass.context.compute);
    }));
    MOE_RETURN_IF_ERROR(CheckFinite(pass, "embedding", embedded));
    x = embedded;
  }
  absl::Span<RouterStats> stats = pass.router_stats;  // of the MoE layers to come
  for (size_t l = 0; l < layers_.size(); ++l) {
    Pass in_layer = pass.InLayer(range_.first + static_cast<int32_t>(l));
    in_layer.router_stats = {};
    if (layers_[l]->moe() != nullptr && !stats.empty()) {
      in_layer.router_stats = stats.first(1);
      stats.remove_prefix(1);
    }
    MatrixView<T> to = out;
    if (pass.stash != nullptr && l + 1 < layers_.size()) {
      MOE_ASSIGN_OR_RETURN(to, rows());
    }
    MOE_RETURN_IF_ERROR(cache == nullptr ? ModuleOf(l).Forward(in_layer, x, to)
                                         : layers_[l]->Extend(in_layer, x, *cache, to));
    x = to;
  }
  return out;
}

template <typename T>
absl::Status Stage<T>::Forward(const Pass& pass, MatrixView<const T> x, MatrixView<T> y) {
  RoundState* const round = rounds_.Find(pass.stash);
  if (round == nullptr) {
    return absl::FailedPreconditionError("Transformer: Forward before Load, expected it after");
  }
  const WorkspaceScope scope(*pass.context.workspace), host_scope(*pass.context.host_workspace);
  MOE_ASSIGN_OR_RETURN(round->rows, LayersForward(pass, round->on_device.tokens, x, y, nullptr));
  round->forward = true;
  if (pass.stash != nullptr || !head_.has_value()) return absl::OkStatus();
  return Timed(pass, kLoss, *pass.context.compute, [&]() -> absl::Status {
    MatrixView<const T> rows = round->rows;
    if (round->losses.whole() > 0) {
      MOE_ASSIGN_OR_RETURN(
          rows, Gathered(rows, round->losses, *pass.context.workspace, *pass.context.compute));
    }
    return head_->Loss(pass, round->with_loss, rows, round->on_device);
  });
}

template <typename T>
absl::Status Stage<T>::Backward(const Pass& pass, MatrixView<const T> /*dy*/, MatrixView<T> dx,
                                GradientReady ready) {
  RoundState* const round = rounds_.Find(pass.stash);
  if (pass.stash == nullptr || round == nullptr || !std::exchange(round->forward, false)) {
    return absl::FailedPreconditionError(
        "Transformer: Backward without a Forward that kept its rows, expected one before");
  }
  Workspace& workspace = *pass.context.workspace;
  const WorkspaceScope scope(workspace), host_scope(*pass.context.host_workspace);
  MatrixView<T> d = dx;
  if (d.cols() == 0) {
    MOE_ASSIGN_OR_RETURN(d, workspace.Matrix<T>(round->rows.rows(), round->rows.cols()));
  }
  if (head_.has_value()) {
    MOE_RETURN_IF_ERROR(Timed(pass, kLoss, *pass.context.compute,
                              [&] { return HeadBackward(pass, *round, d, ready); }));
    NoteNonFinite(pass, "loss backward", d);
  }
  for (size_t l = layers_.size(); l-- > 0;) {
    const Pass in_layer = pass.InLayer(range_.first + static_cast<int32_t>(l));
    MOE_RETURN_IF_ERROR(ModuleOf(l).Backward(in_layer, d, d, ready));
  }
  if (embedding_ != nullptr) return EmbeddingBackward(pass, round->on_device.tokens, d, ready);
  return tied_ == nullptr ? absl::OkStatus() : ready(*tied_);
}

template <typename T>
absl::Status Stage<T>::HeadBackward(const Pass& pass, const RoundState& round, MatrixView<T> d,
                                    GradientReady ready) {
  if (round.losses.whole() == 0) {
    return head_->LossAndGradient(pass, round.with_loss, round.rows, round.on_device, d, ready);
  }
  Workspace& workspace = *pass.context.workspace;
  Stream& compute = *pass.context.compute;
  const WorkspaceScope scope(workspace);
  MOE_ASSIGN_OR_RETURN(const auto rows, Gathered(round.rows, round.losses, workspace, compute));
  MOE_ASSIGN_OR_RETURN(const auto d_rows, workspace.Matrix<T>(rows.rows(), rows.cols()));
  MOE_RETURN_IF_ERROR(
      head_->LossAndGradient(pass, round.with_loss, rows, round.on_device, d_rows, ready));
  return Spread<T>(d_rows, round.losses, d, compute);
}

template <typename T>
absl::Status Stage<T>::EmbeddingBackward(const Pass& pass, absl::Span<const int32_t> tokens,
                                         MatrixView<T> d, GradientReady ready) {
  const OwnRows own = OwnRowsOf(pass.context, std::ssize(tokens));
  for (size_t s = 0; s + 1 < own.segments.size(); ++s) {
    const int64_t begin = own.segments[s], end = own.segments[s + 1];
    if (begin == end) continue;
    const auto ids =
        tokens.subspan(static_cast<size_t>(own.begin() + begin), static_cast<size_t>(end - begin));
    const MatrixView<T> rows = RowRange(d, begin, end);
    MOE_ASSIGN_OR_RETURN(const GradAccumulator sum, embedding_->OpenGradient());
    MOE_RETURN_IF_ERROR(TimedDense(pass, "embedding backward", [&] {
      ReplaceValue(pass, "embedding backward", rows);
      return AddEmbeddingGradient<T>(ids, rows, sum, *pass.context.workspace,
                                     *pass.context.compute);
    }));
  }
  return ready(*embedding_);
}

template <typename T>
absl::Status Stage<T>::TakeLosses(const Pass& pass) {
  const RoundState& round = *rounds_.Find(pass.stash);
  if (OnCuda(pass.context)) {
    // The only time in a round that the host waits for the round's own sake: the routers'
    // statistics have then arrived, too.
    Stream& compute = *pass.context.compute;
    if (head_.has_value()) {
      MOE_RETURN_IF_ERROR(
          compute.CopyBytes(round.on_device.row_loss.data(), round.batch.row_loss.data(),
                            static_cast<int64_t>(round.batch.row_loss.size() * sizeof(float))));
    }
    MOE_RETURN_IF_ERROR(compute.Synchronize());
    for (RouterStats& router : pass.router_stats) {
      MOE_RETURN_IF_ERROR(AtPlace(router.Wait(), pass, "gate"));
    }
  }
  if (head_.has_value()) {
    const OwnRows& own = round.with_loss;
    const MatrixView<float> losses(round.batch.row_loss.data(), own.all(), 1);
    MOE_RETURN_IF_ERROR(CheckFinite(pass, "loss", own.Of(losses)));
  }
  // Routers of a tensor group decide about the same rows.
  const bool repeats = pass.context.mesh->index(MeshGroup::kTensor) > 0;
  if (pass.stash == nullptr || repeats) return absl::OkStatus();
  auto count = counts_.begin();
  for (const RouterStats& router : pass.router_stats) {
    for (const int64_t slots : router.expert_count) *count++ += slots;
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status Stage<T>::Extend(const Context& context, absl::Span<const int32_t> tokens,
                              KeyValueCache<T>& cache, MatrixView<float> logits,
                              WeightSource* weights) {
  if (OnCuda(context)) return absl::UnimplementedError("Transformer: on a CUDA device");
  const auto count = static_cast<int64_t>(tokens.size());
  const int64_t offsets[] = {0, count}, past = cache.size();
  const Pass pass = {.context = context,
                     .batch = {.sequence_offsets = offsets,
                               .micro_batch_offsets = offsets,
                               .first_global_token = past,
                               .first_position = past,
                               .mode = Mode::kEvaluation},
                     .site = {.step = past},
                     .weights = weights};
  MOE_RETURN_IF_ERROR(CheckTokens(tokens, pass.batch, config_.vocab_size));
  if (past + count > cache.capacity() || logits.rows() > count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Transformer: ", count, " tokens after ", past, " and logits of ", logits.rows(),
        ", expected room for ", cache.capacity(), " tokens, and logits of new ones"));
  }
  const WorkspaceScope scope(*context.workspace);
  MOE_ASSIGN_OR_RETURN(const MatrixView<const T> x, LayersForward(pass, tokens, {}, {}, &cache));
  cache.Grow(count);
  if (logits.rows() > 0) {
    std::vector<int32_t> last(static_cast<size_t>(logits.rows()));
    std::iota(last.begin(), last.end(), static_cast<int32_t>(count - logits.rows()));
    const OwnRows own = OwnRowsAmong(context, count, last);  // the last of this rank's
    MOE_ASSIGN_OR_RETURN(
        const auto rows,
        head_->AllLogits(pass, own, RowRange(x, x.rows() - own.count(), x.rows())));
    for (int64_t r = 0; r < rows.rows(); ++r) std::copy_n(rows.row(r), rows.cols(), logits.row(r));
  }
  return context.compute->Synchronize();
}

template class Stage<float>;
template class Stage<BFloat16>;
template class Stage<Float16>;

}  // namespace moe::lm
