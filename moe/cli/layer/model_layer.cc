#include "moe/cli/layer/model_layer.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "comm/extremes.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "moe/hf/tensor_pieces.h"

namespace moe::cli {
namespace {

constexpr Site kGathering = {.name = "gather results"};

// The most relative loss of a tensor's norm on the exact grid: that of float32's rounding.
constexpr double kMostGridLoss = 0x1p-24;

int64_t BlockTokens(int64_t tokens) {
  // Enough blocks for the ranks of a test to have tokens, and otherwise blocks large enough to keep
  // a rank's matrix products efficient.
  constexpr int64_t kBlocks = 16, kMostTokens = 64;
  return std::clamp<int64_t>((tokens + kBlocks - 1) / kBlocks, 1, kMostTokens);
}

int64_t BlocksOf(int64_t tokens) {
  return std::max<int64_t>(1, (tokens + BlockTokens(tokens) - 1) / BlockTokens(tokens));
}

// Replaces `mine`, rows of `width` elements, by those of all ranks in order on rank 0; empties it
// on other ranks. rows_of: number of rows of each rank.
template <typename V>
absl::Status GatherRows(std::vector<V>& mine, absl::Span<const int64_t> rows_of, int64_t width,
                        const Context& context) {
  Communicator& world = context.mesh->world();
  std::vector<int64_t> send(world.size()), receive(world.size());
  send[0] = std::ssize(mine);
  if (world.rank() == 0) {
    for (int r = 0; r < world.size(); ++r) receive[r] = rows_of[r] * width;
  }
  std::vector<V> all(std::accumulate(receive.begin(), receive.end(), int64_t{0}));
  MOE_RETURN_IF_ERROR(
      world.AllToAllV<V>(mine, send, absl::MakeSpan(all), receive, *context.host, kGathering));
  MOE_RETURN_IF_ERROR(context.host->Synchronize());
  mine = std::move(all);
  return absl::OkStatus();
}

// The work of one rank. T: type of activations and weights.
template <typename T>
class RankOfLayer {
 public:
  RankOfLayer(const hf::LayerWeights& weights, const ModelLayerInput& input, Trainer& trainer)
      : weights_(weights),
        input_(input),
        trainer_(trainer),
        context_(trainer.context()),
        tokens_(input.x.tensor->shape[0]) {}

  absl::StatusOr<ModelLayerResult> Run(TraceSink* sink);

 private:
  bool backward() const { return input_.dy.file != nullptr; }
  const RouterConfig& router() const { return layer_->config().router; }

  absl::Status CreateLayer();
  // Runs all blocks once; leaves the sums of gradients.
  absl::Status RunBlocks();
  // RunBlocks, repeated if the grid's unit does not fit the gradients.
  absl::Status RunUntilGridFits();
  absl::Status RunBlock(const Round& round);
  // `count` rows from `first` on, rounded to T, in memory of the layer's device; valid until the
  // round ends.
  absl::StatusOr<MatrixView<const T>> Read(const CheckpointTensor& rows, int64_t first,
                                           int64_t count);
  absl::Status Keep(MatrixView<const T> rows, std::vector<float>& in);
  absl::Status KeepRouting(const RouterSaved<T>& saved);
  absl::Status GatherTokens();
  absl::Status GatherGradients();

  const hf::LayerWeights& weights_;
  const ModelLayerInput& input_;
  Trainer& trainer_;
  const Context& context_;
  const int64_t tokens_;
  std::unique_ptr<MoeLayer<T>> layer_;
  int64_t forward_ns_ = 0, backward_ns_ = 0;
  ModelLayerResult result_;  // for this rank's tokens, until they are gathered
};

template <typename T>
absl::StatusOr<ModelLayerResult> RankOfLayer<T>::Run(TraceSink* sink) {
  Communicator& world = context_.mesh->world();
  TraceRecorder* const trace = trainer_.session().trace();
  MOE_RETURN_IF_ERROR(CreateLayer());
  if (trace != nullptr) trace->Switch(true);
  MOE_RETURN_IF_ERROR(RunUntilGridFits());
  MOE_RETURN_IF_ERROR(GatherTokens());
  if (backward()) MOE_RETURN_IF_ERROR(GatherGradients());
  MOE_RETURN_IF_ERROR(trainer_.EndStep());
  MOE_ASSIGN_OR_RETURN(const auto ns, ExtremesOverRanks({forward_ns_, backward_ns_}, world,
                                                        *context_.host, kGathering));
  result_.forward_seconds = static_cast<double>(ns[0].most) * 1e-9;
  result_.backward_seconds = static_cast<double>(ns[1].most) * 1e-9;
  if (trace != nullptr) {
    MOE_ASSIGN_OR_RETURN(result_.trace_left_out,
                         ExportTrace(*trace, sink, world, *context_.host, kGathering));
  }
  result_.tokens = tokens_;
  result_.bfloat16_order = trainer_.bfloat16_order();
  return std::move(result_);
}

template <typename T>
absl::Status RankOfLayer<T>::CreateLayer() {
  MoeLayerConfig config = weights_.config().moe;
  config.router.layer = static_cast<uint32_t>(weights_.layer());  // for messages
  ParameterStore& store = trainer_.parameters();
  MOE_ASSIGN_OR_RETURN(layer_, MoeLayer<T>::Create(config, /*prefix=*/"", store, context_));
  return weights_.Load(store, *context_.compute, *context_.host);
}

template <typename T>
absl::Status RankOfLayer<T>::RunUntilGridFits() {
  MOE_RETURN_IF_ERROR(RunBlocks());
  if (!backward()) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(GradientNorm norm, trainer_.MeasureGradients());
  const bool fits = !norm.off_grid() && norm.grid_loss <= kMostGridLoss;
  const bool is_known = norm.largest > 0 && std::isfinite(norm.largest);
  if (context_.numerics == Numerics::kLayoutInvariant && is_known && !fits) {
    // The same partials are added again, so that no headroom is needed.
    trainer_.ForgetGradients();
    MOE_RETURN_IF_ERROR(trainer_.EndStep());
    trainer_.RestoreGridUnit(
        {.log2 = GridUnitLog2(norm.largest, trainer_.reducer().max_terms(), 0)});
    MOE_RETURN_IF_ERROR(RunBlocks());
    MOE_ASSIGN_OR_RETURN(norm, trainer_.MeasureGradients());
  }
  if (norm.non_finite == 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      "weight gradients: ", norm.non_finite,
      " terms are not finite, expected none: look at x and dy, or use --numerics fast"));
}

template <typename T>
absl::Status RankOfLayer<T>::RunBlocks() {
  result_ = {};
  forward_ns_ = backward_ns_ = 0;
  MOE_RETURN_IF_ERROR(backward() ? trainer_.BeginStep()
                                 : trainer_.BeginEvaluation(BlocksOf(tokens_)));
  for (int64_t r = 0; r < trainer_.rounds(); ++r) {
    MOE_ASSIGN_OR_RETURN(const Round round, trainer_.BeginRound());
    MOE_RETURN_IF_ERROR(RunBlock(round));
  }
  return backward() ? trainer_.Reduce() : absl::OkStatus();
}

template <typename T>
absl::Status RankOfLayer<T>::RunBlock(const Round& round) {
  const int64_t first = round.empty() ? 0 : round.micro_batch() * BlockTokens(tokens_);
  const int64_t count = round.empty() ? 0 : std::min(BlockTokens(tokens_), tokens_ - first);
  const int64_t bounds[] = {0, count};
  RouterStats stats;
  Stash* stash = trainer_.PassOf(round).stash;
  StashHandle of_evaluation;  // for what the router decides
  if (stash == nullptr) {
    of_evaluation = trainer_.session().stashes().Take();
    stash = of_evaluation.get();
  }
  const Pass pass = {.context = context_,
                     .batch = {.sequence_offsets = bounds,
                               .micro_batch_offsets = bounds,
                               .first_global_token = first,
                               .mode = Mode::kEvaluation},
                     .stash = stash,
                     .site = {.round = static_cast<int32_t>(round.index())},
                     .router_stats = {&stats, 1}};
  Stream& compute = *context_.compute;
  MOE_ASSIGN_OR_RETURN(const auto x, Read(input_.x, first, count));
  MOE_ASSIGN_OR_RETURN(const auto y, context_.workspace->Matrix<T>(count, router().hidden_size));
  int64_t start_ns = MonotonicNs();
  MOE_RETURN_IF_ERROR(
      Timed(pass, {.name = "forward"}, compute, [&] { return layer_->Forward(pass, x, y); }));
  MOE_RETURN_IF_ERROR(compute.Synchronize());
  forward_ns_ += MonotonicNs() - start_ns;
  MOE_RETURN_IF_ERROR(stats.Wait());
  MOE_RETURN_IF_ERROR(Keep(y, result_.y));
  MOE_RETURN_IF_ERROR(KeepRouting(*layer_->routed(*stash)));
  if (!backward()) return absl::OkStatus();

  MOE_ASSIGN_OR_RETURN(const auto dy, Read(input_.dy, first, count));
  MOE_ASSIGN_OR_RETURN(const auto dx, context_.workspace->Matrix<T>(count, router().hidden_size));
  start_ns = MonotonicNs();
  MOE_RETURN_IF_ERROR(Timed(pass, {.name = "backward"}, compute, [&] {
    return layer_->Backward(
        pass, dy, dx, [&](Parameter& parameter) { return trainer_.MarkReady(round, parameter); });
  }));
  MOE_RETURN_IF_ERROR(compute.Synchronize());
  backward_ns_ += MonotonicNs() - start_ns;
  return Keep(dx, result_.dx);
}

template <typename T>
absl::StatusOr<MatrixView<const T>> RankOfLayer<T>::Read(const CheckpointTensor& rows,
                                                         int64_t first, int64_t count) {
  const int64_t hidden = router().hidden_size;
  std::vector<float> values(count * hidden);
  MOE_RETURN_IF_ERROR(
      rows.file->ReadFloat32(hf::RowsOf(*rows.tensor, first, count), absl::MakeSpan(values)));
  MOE_ASSIGN_OR_RETURN(const auto rounded, context_.host_workspace->Array<T>(count * hidden));
  std::transform(values.begin(), values.end(), rounded.begin(),
                 [](float v) { return static_cast<T>(v); });
  MOE_ASSIGN_OR_RETURN(const auto on_device, OnDevice<T>(rounded, context_));
  return MatrixView<const T>(on_device.data(), count, hidden);
}

template <typename T>
absl::Status RankOfLayer<T>::Keep(MatrixView<const T> rows, std::vector<float>& in) {
  MOE_ASSIGN_OR_RETURN(const auto values, OnHost(AllOf(rows), context_));
  for (const T value : values) in.push_back(static_cast<float>(value));
  return absl::OkStatus();
}

template <typename T>
absl::Status RankOfLayer<T>::KeepRouting(const RouterSaved<T>& saved) {
  const Routing& here = saved.on_device;
  MOE_ASSIGN_OR_RETURN(const auto slot_offset, OnHost(here.slot_offset, context_));
  MOE_ASSIGN_OR_RETURN(const auto expert, OnHost(here.expert, context_));
  MOE_ASSIGN_OR_RETURN(const auto weight, OnHost(here.weight, context_));
  MOE_ASSIGN_OR_RETURN(const auto logits, OnHost(AllOf<const float>(saved.logits), context_));
  for (int64_t t = 0; t < here.tokens(); ++t) {
    const int64_t slot = slot_offset[t];
    const int64_t choices = slot_offset[t + 1] - slot;
    for (int64_t k = 0; k < router().top_k; ++k) {
      result_.expert_ids.push_back(k < choices ? expert[slot + k] : -1);
      result_.expert_weights.push_back(k < choices ? weight[slot + k] : 0.0f);
    }
  }
  result_.router_logits.insert(result_.router_logits.end(), logits.begin(), logits.end());
  return absl::OkStatus();
}

template <typename T>
absl::Status RankOfLayer<T>::GatherTokens() {
  Communicator& world = context_.mesh->world();
  const int64_t hidden = router().hidden_size, mine = std::ssize(result_.y) / hidden;
  std::vector<int64_t> rows_of(world.size());
  MOE_RETURN_IF_ERROR(
      world.AllGather<int64_t>({&mine, 1}, absl::MakeSpan(rows_of), *context_.host, kGathering));
  MOE_RETURN_IF_ERROR(context_.host->Synchronize());
  MOE_RETURN_IF_ERROR(GatherRows(result_.y, rows_of, hidden, context_));
  MOE_RETURN_IF_ERROR(GatherRows(result_.expert_ids, rows_of, router().top_k, context_));
  MOE_RETURN_IF_ERROR(GatherRows(result_.expert_weights, rows_of, router().top_k, context_));
  MOE_RETURN_IF_ERROR(GatherRows(result_.router_logits, rows_of, router().num_outputs(), context_));
  return backward() ? GatherRows(result_.dx, rows_of, hidden, context_) : absl::OkStatus();
}

template <typename T>
absl::Status RankOfLayer<T>::GatherGradients() {
  const auto read = [&](const Parameter& parameter) -> absl::StatusOr<std::vector<float>> {
    const WorkspaceScope scope(*context_.workspace), host_scope(*context_.host_workspace);
    MOE_ASSIGN_OR_RETURN(const auto scratch, context_.workspace->Array<float>(parameter.size()));
    MOE_ASSIGN_OR_RETURN(const auto gradient,
                         trainer_.reducer().Gradient(parameter, 1.0, scratch, *context_.compute));
    MOE_RETURN_IF_ERROR(context_.compute->Synchronize());
    MOE_ASSIGN_OR_RETURN(const auto values, OnHost(gradient, context_));
    return std::vector<float>(values.begin(), values.end());
  };
  hf::PieceReader reader("RunModelLayer", layer_->config(), trainer_.parameters(), context_, read);
  for (const hf::LayerTensor& tensor : weights_.tensors()) {
    if (!hf::IsTrained(tensor.rule->parameter)) continue;
    std::vector<float> gradient;
    for (const hf::TensorPiece& piece :
         hf::PiecesOf(*tensor.rule, tensor.expert, /*prefix=*/"", layer_->placement())) {
      MOE_ASSIGN_OR_RETURN(const auto values, reader.Next(piece));
      gradient.insert(gradient.end(), values.begin(), values.end());
    }
    if (context_.mesh->world().rank() != 0) continue;
    gradient.resize(tensor.found.tensor->num_elements);  // rows of identity experts come last
    result_.gradients.push_back({.of = &tensor, .values = std::move(gradient)});
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CheckpointTensor> FindTokens(const SafetensorsFile& file, absl::string_view name,
                                            std::optional<int64_t> tokens, int64_t hidden) {
  const auto bad = [&](absl::string_view what, absl::string_view expected) {
    return absl::DataLossError(
        absl::StrCat(file.path(), ": tensor '", name, "': ", what, ", expected ", expected));
  };
  const SafetensorsTensor* const tensor = file.Find(name);
  const std::string shape = tokens.has_value()
                                ? absl::StrCat("[", *tokens, ", ", hidden, "], x's shape")
                                : absl::StrCat("[tokens, ", hidden, "] (hidden_size)");
  if (tensor == nullptr) return bad("is missing", shape);
  if (!hf::IsReadable(tensor->type)) {
    return bad(absl::StrCat("is ", NameOf(tensor->type)), hf::kReadableTypes);
  }
  if (tensor->shape.size() != 2 || tensor->shape[1] != hidden ||
      tensor->shape[0] != tokens.value_or(tensor->shape[0])) {
    return bad(absl::StrCat("has shape [", absl::StrJoin(tensor->shape, ", "), "]"), shape);
  }
  return CheckpointTensor{.file = &file, .tensor = tensor};
}

absl::StatusOr<ModelLayerResult> RunModelLayer(const hf::LayerWeights& weights,
                                               const ModelLayerInput& input,
                                               const ModelLayerOptions& options,
                                               std::unique_ptr<Communicator> world) {
  MOE_RETURN_IF_ERROR(CheckTraceOnAll(options.trace != nullptr, *world));
  TrainerOptions all = options.trainer;
  all.session.trace_capacity = options.trace == nullptr ? 0 : kTraceEvents;
  all.micro_batches = BlocksOf(input.x.tensor->shape[0]);
  all.unit_log2 = ExactGrid().unit_log2;
  MOE_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(all, std::move(world)));
  return WithStorageType(all.dtype, [&]<typename T>(T) {
    RankOfLayer<T> rank(weights, input, *trainer);
    return trainer->session().OrEnd([&] { return rank.Run(options.trace); });
  });
}

}  // namespace moe::cli
