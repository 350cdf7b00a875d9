#include "moe/hf/block_run.h"

#include <algorithm>
#include <cmath>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "gating/router_check.h"
#include "kernels/base/device_arrays.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "moe/hf/family.h"
#include "moe/trainer.h"

namespace moe::hf {
namespace {

// What the exact grid may take of a tensor, relative to its norm: as much as float32's rounding.
constexpr double kMostGridLoss = 0x1p-24;

template <typename T>
std::vector<T> Convert(const std::vector<float>& in) {
  std::vector<T> out(in.size());
  std::transform(in.begin(), in.end(), out.begin(), [](float v) { return static_cast<T>(v); });
  return out;
}

template <typename T>
void Append(absl::Span<const T> from, std::vector<float>& to) {
  for (const T value : from) to.push_back(static_cast<float>(value));
}

int64_t BlocksOf(int64_t tokens) {
  return std::max<int64_t>(1, (tokens + BlockTokens(tokens) - 1) / BlockTokens(tokens));
}

absl::StatusOr<std::vector<float>> Read(const CheckpointTensor& rows, int64_t first,
                                        int64_t count) {
  std::vector<float> values(count * rows.tensor->shape[1]);
  MOE_RETURN_IF_ERROR(
      rows.file->ReadFloat32(RowsOf(*rows.tensor, first, count), absl::MakeSpan(values)));
  return values;
}

// The whole layer on one rank. T: type of activations and weights.
template <typename T>
class RankRun {
 public:
  RankRun(const LayerWeights& weights, const BlockInput& input, TraceSink* sink, Trainer& trainer)
      : weights_(weights),
        input_(input),
        sink_(sink),
        moe_(weights.config().moe),
        trainer_(trainer),
        context_(trainer.context()),
        world_(context_.mesh->world()),
        tokens_(input.x.tensor->shape[0]),
        block_tokens_(BlockTokens(tokens_)),
        blocks_(BlocksOf(tokens_)) {}

  absl::StatusOr<BlockResult> Run();

 private:
  bool backward() const { return input_.dy.file != nullptr; }
  bool first() const { return world_.rank() == 0; }
  // First block and first token of rank r; those of rank R are the ends.
  int64_t FirstBlock(int r) const { return MicroBatchesOf(r, world_.size(), blocks_).begin; }
  int64_t FirstToken(int r) const { return std::min(tokens_, FirstBlock(r) * block_tokens_); }

  absl::Status Build();
  // Once over all tokens.
  absl::Status Pass();
  // The tokens of one block, or none of them.
  absl::Status RunRound(const Round& round);
  // Sigmoid gates pass over what is not finite, and the outputs would be finite.
  absl::Status CheckExpertBias() const;
  absl::Status KeepRouting(const RouterSaved<T>& router, int64_t first);
  absl::Status GatherTokens();
  // On rank 0: `mine` of every rank, in rank order; `width` elements a token.
  template <typename V>
  absl::Status GatherRows(std::vector<V>& mine, int64_t width);
  absl::Status CheckGradients();
  absl::Status GatherGradients();
  // Puts the gradient of a parameter into the result, from here or as its owner sends it to rank 0.
  absl::Status GatherGradient(ParameterKind kind, int32_t expert, int owner);
  absl::Status SlowestTimes();

  const LayerWeights& weights_;
  const BlockInput& input_;
  TraceSink* const sink_;
  const MoeLayerConfig& moe_;
  Trainer& trainer_;
  const Context& context_;
  Communicator& world_;
  const int64_t tokens_, block_tokens_, blocks_;
  std::unique_ptr<MoeLayer<T>> layer_;
  BlockResult result_;  // of this rank's tokens until they are gathered
};

template <typename T>
absl::StatusOr<BlockResult> RankRun<T>::Run() {
  MOE_RETURN_IF_ERROR(Build());
  TraceRecorder* const trace = trainer_.session().trace();
  if (trace != nullptr) trace->Switch(true);
  MOE_RETURN_IF_ERROR(Pass());
  if (backward() && context_.numerics == Numerics::kLayoutInvariant) {
    MOE_ASSIGN_OR_RETURN(const GradientNorm norm, trainer_.MeasureGradients());
    const bool is_known = norm.largest > 0 && std::isfinite(norm.largest);
    if (is_known && (norm.off_grid() || norm.grid_loss > kMostGridLoss)) {
      // The same partials come again, and need no headroom.
      trainer_.ForgetGradients();
      MOE_RETURN_IF_ERROR(trainer_.EndStep());
      trainer_.RestoreGridUnit(
          {.log2 = GridUnitLog2(norm.largest, trainer_.reducer().max_terms(), 0)});
      MOE_RETURN_IF_ERROR(Pass());
    }
  }
  MOE_RETURN_IF_ERROR(GatherTokens());
  if (backward()) {
    MOE_RETURN_IF_ERROR(CheckGradients());
    MOE_RETURN_IF_ERROR(GatherGradients());
  }
  MOE_RETURN_IF_ERROR(trainer_.EndStep());
  MOE_RETURN_IF_ERROR(SlowestTimes());
  if (trace != nullptr) {
    MOE_ASSIGN_OR_RETURN(result_.trace_left_out,
                         ExportTrace(*trace, sink_, world_, *context_.host));
  }
  result_.tokens = tokens_;
  return std::move(result_);
}

template <typename T>
absl::Status RankRun<T>::Pass() {
  result_ = {};
  TraceRecorder* const trace = trainer_.session().trace();
  MOE_RETURN_IF_ERROR(backward() ? trainer_.BeginStep() : trainer_.BeginEvaluation(blocks_));
  context_.mesh->SetPhase({});  // of no step
  for (int64_t r = 0; r < trainer_.rounds(); ++r) {
    if (trace != nullptr) trace->SetCall(static_cast<int32_t>(r));
    MOE_ASSIGN_OR_RETURN(const Round round, trainer_.BeginRound());
    MOE_RETURN_IF_ERROR(RunRound(round));
  }
  return backward() ? trainer_.Reduce() : absl::OkStatus();
}

template <typename T>
absl::Status RankRun<T>::Build() {
  ParameterStore& store = trainer_.parameters();
  MOE_ASSIGN_OR_RETURN(layer_, MoeLayer<T>::Create(moe_, /*prefix=*/"", store, context_));
  MOE_RETURN_IF_ERROR(weights_.Load(store, *context_.compute, *context_.host));
  return CheckExpertBias();
}

template <typename T>
absl::Status RankRun<T>::RunRound(const Round& round) {
  const int64_t first = round.empty() ? 0 : round.micro_batch() * block_tokens_;
  const int64_t count = round.empty() ? 0 : std::min(block_tokens_, tokens_ - first);
  MOE_ASSIGN_OR_RETURN(const auto x_values, Read(input_.x, first, count));
  const std::vector<T> host_x = Convert<T>(x_values);
  const auto elements = static_cast<int64_t>(host_x.size());
  MOE_ASSIGN_OR_RETURN(const auto x, OnDevice<T>(host_x, context_));
  MOE_ASSIGN_OR_RETURN(const auto y, context_.workspace->Array<T>(elements));
  const auto view = [&](auto rows) {
    return MatrixView(rows.data(), count, moe_.router.hidden_size);
  };
  const int64_t bounds[] = {0, count};
  const Batch batch = {.sequence_offsets = bounds,
                       .micro_batch_offsets = bounds,
                       .first_global_token = first,
                       .mode = Mode::kEvaluation};
  MoeLayerSaved<T> saved;
  int64_t start_ns = MonotonicNs();
  MOE_RETURN_IF_ERROR(Timed(context_, {.name = "forward"}, *context_.compute, [&] {
    return layer_->Forward(view(x), batch, view(y), &saved, nullptr);
  }));
  MOE_RETURN_IF_ERROR(context_.compute->Synchronize());
  result_.forward_seconds += SecondsSince(start_ns);
  MOE_ASSIGN_OR_RETURN(const auto host_y, OnHost<T>(y, context_));
  Append(host_y, result_.y);
  MOE_RETURN_IF_ERROR(KeepRouting(saved.router, first));
  if (!backward()) return absl::OkStatus();

  MOE_ASSIGN_OR_RETURN(const auto dy_values, Read(input_.dy, first, count));
  const std::vector<T> host_dy = Convert<T>(dy_values);
  MOE_ASSIGN_OR_RETURN(const auto dy, OnDevice<T>(host_dy, context_));
  MOE_ASSIGN_OR_RETURN(const auto dx, context_.workspace->Array<T>(elements));
  start_ns = MonotonicNs();
  MOE_RETURN_IF_ERROR(Timed(context_, {.name = "backward"}, *context_.compute, [&] {
    return layer_->Backward(
        view(dy), saved, /*loss_scale=*/1.0f, view(dx),
        [&](Parameter& parameter) { return trainer_.MarkReady(round, parameter); });
  }));
  MOE_RETURN_IF_ERROR(context_.compute->Synchronize());
  result_.backward_seconds += SecondsSince(start_ns);
  MOE_ASSIGN_OR_RETURN(const auto host_dx, OnHost<T>(dx, context_));
  Append(host_dx, result_.dx);
  return absl::OkStatus();
}

template <typename T>
absl::Status RankRun<T>::CheckExpertBias() const {
  const std::string name = ParameterName(ParameterKind::kExpertBias, 0);
  const Parameter* const bias = trainer_.parameters().Find(name);
  if (bias == nullptr) return absl::OkStatus();
  return moe::CheckExpertBias(bias->master(), name, weights_.layer());  // of the host: not trained
}

template <typename T>
absl::Status RankRun<T>::KeepRouting(const RouterSaved<T>& router, int64_t first) {
  const Routing& here = router.on_device;
  MOE_ASSIGN_OR_RETURN(const auto slot_offset, OnHost(here.slot_offset, context_));
  MOE_ASSIGN_OR_RETURN(const auto expert, OnHost(here.expert, context_));
  MOE_ASSIGN_OR_RETURN(const auto weight, OnHost(here.weight, context_));
  MOE_ASSIGN_OR_RETURN(const auto logits, OnHost(AllOf(router.logits), context_));
  const int64_t outputs = moe_.router.num_outputs();
  const auto logits_here = logits.subspan(0, here.tokens() * outputs);
  MOE_RETURN_IF_ERROR(CheckLogits(
      logits_here,
      {.columns = outputs, .outputs = outputs, .first_token = first, .layer = weights_.layer()}));
  for (int64_t t = 0; t < here.tokens(); ++t) {
    const int64_t slot = slot_offset[t];
    const int64_t choices = slot_offset[t + 1] - slot;
    for (int64_t k = 0; k < moe_.router.top_k; ++k) {
      result_.expert_ids.push_back(k < choices ? expert[slot + k] : -1);
      result_.expert_weights.push_back(k < choices ? weight[slot + k] : 0.0f);
    }
  }
  result_.router_logits.insert(result_.router_logits.end(), logits_here.begin(), logits_here.end());
  return absl::OkStatus();
}

template <typename T>
template <typename V>
absl::Status RankRun<T>::GatherRows(std::vector<V>& mine, int64_t width) {
  std::vector<int64_t> send(world_.size()), receive(world_.size());
  send[0] = static_cast<int64_t>(mine.size());
  std::vector<V> all(first() ? tokens_ * width : 0);
  for (int r = 0; r < world_.size() && first(); ++r) {
    receive[r] = (FirstToken(r + 1) - FirstToken(r)) * width;
  }
  MOE_RETURN_IF_ERROR(
      world_.AllToAllV<V>(mine, send, absl::MakeSpan(all), receive, *context_.host));
  MOE_RETURN_IF_ERROR(context_.host->Synchronize());
  mine = std::move(all);
  return absl::OkStatus();
}

template <typename T>
absl::Status RankRun<T>::GatherTokens() {
  context_.mesh->SetPhase({.name = "gather results"});
  const int64_t hidden = moe_.router.hidden_size;
  MOE_RETURN_IF_ERROR(GatherRows(result_.y, hidden));
  MOE_RETURN_IF_ERROR(GatherRows(result_.expert_ids, moe_.router.top_k));
  MOE_RETURN_IF_ERROR(GatherRows(result_.expert_weights, moe_.router.top_k));
  MOE_RETURN_IF_ERROR(GatherRows(result_.router_logits, moe_.router.num_outputs()));
  return backward() ? GatherRows(result_.dx, hidden) : absl::OkStatus();
}

template <typename T>
absl::Status RankRun<T>::CheckGradients() {
  MOE_ASSIGN_OR_RETURN(const GradientNorm norm, trainer_.MeasureGradients());
  if (norm.non_finite == 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      "weight gradients: ", norm.non_finite,
      " terms are not finite, expected none: look at x and dy, or use --numerics fast"));
}

template <typename T>
absl::Status RankRun<T>::GatherGradients() {
  // The ranks of the first expert-parallel group hold every expert once.
  if (world_.rank() >= context_.mesh->expert_parallel_size()) return absl::OkStatus();
  if (first()) result_.gradients = LayerGradients(weights_);
  std::vector<ParameterKind> done;
  for (const TensorRule& rule : weights_.config().family->tensors) {
    const ParameterKind kind = rule.parameter;
    if (!IsPresent(rule, weights_.config().moe)) continue;
    if (!IsTrained(kind) || std::find(done.begin(), done.end(), kind) != done.end()) continue;
    done.push_back(kind);
    if (rule.experts == ExpertAxis::kNone) {
      MOE_RETURN_IF_ERROR(GatherGradient(kind, 0, 0));
      continue;
    }
    for (int32_t e = 0; e < moe_.router.num_experts; ++e) {
      MOE_RETURN_IF_ERROR(GatherGradient(kind, e, layer_->placement().RankOf(e)));
    }
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status RankRun<T>::GatherGradient(ParameterKind kind, int32_t expert, int owner) {
  Communicator& group = context_.mesh->expert_parallel();
  Stream& stream = *context_.host;
  if (group.rank() != owner && group.rank() != 0) return absl::OkStatus();
  const int64_t size = ShapeOf(kind, moe_).size();
  const int64_t bytes = size * static_cast<int64_t>(sizeof(float));
  if (group.rank() != owner) {
    std::vector<float> values(size);
    const SendRecvOp receive = {.peer = owner, .recv = values.data(), .bytes = bytes};
    MOE_RETURN_IF_ERROR(group.SendRecv({&receive, 1}, stream));
    MOE_RETURN_IF_ERROR(stream.Synchronize());
    return result_.gradients.Set(kind, expert, values);
  }
  const Parameter* const parameter = trainer_.parameters().Find(ParameterName(kind, expert));
  MOE_CHECK(parameter != nullptr);
  const WorkspaceScope scope(*context_.workspace), host_scope(*context_.host_workspace);
  MOE_ASSIGN_OR_RETURN(const auto scratch, context_.workspace->Array<float>(size));
  MOE_ASSIGN_OR_RETURN(const absl::Span<const float> on_device,
                       trainer_.reducer().Gradient(*parameter, 1.0, scratch, *context_.compute));
  MOE_RETURN_IF_ERROR(context_.compute->Synchronize());
  MOE_ASSIGN_OR_RETURN(const auto gradient, OnHost(on_device, context_));
  if (owner == 0) return result_.gradients.Set(kind, expert, gradient);
  const SendRecvOp send = {.peer = 0, .send = gradient.data(), .bytes = bytes};
  MOE_RETURN_IF_ERROR(group.SendRecv({&send, 1}, stream));
  return stream.Synchronize();
}

template <typename T>
absl::Status RankRun<T>::SlowestTimes() {
  double seconds[] = {result_.forward_seconds, result_.backward_seconds};
  MOE_RETURN_IF_ERROR(
      world_.AllReduce<double>(absl::MakeSpan(seconds), ReduceOp::kMax, *context_.host));
  MOE_RETURN_IF_ERROR(context_.host->Synchronize());
  result_.forward_seconds = seconds[0];
  result_.backward_seconds = seconds[1];
  return absl::OkStatus();
}

}  // namespace

int64_t BlockTokens(int64_t tokens) {
  // Enough blocks that the ranks of a test have tokens, and then what keeps a rank's matrices busy.
  constexpr int64_t kBlocks = 16, kMostTokens = 64;
  return std::clamp<int64_t>((tokens + kBlocks - 1) / kBlocks, 1, kMostTokens);
}

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
  if (!IsReadable(tensor->type)) {
    return bad(absl::StrCat("is ", NameOf(tensor->type)), kReadableTypes);
  }
  if (tensor->shape.size() != 2 || tensor->shape[1] != hidden ||
      tensor->shape[0] != tokens.value_or(tensor->shape[0])) {
    return bad(absl::StrCat("has shape [", absl::StrJoin(tensor->shape, ", "), "]"), shape);
  }
  return CheckpointTensor{.file = &file, .tensor = tensor};
}

absl::StatusOr<BlockResult> RunBlock(const LayerWeights& weights, const BlockInput& input,
                                     const BlockRunOptions& options,
                                     std::unique_ptr<Communicator> world) {
  MOE_RETURN_IF_ERROR(CheckTraceOnAll(options.trace != nullptr, *world));
  MOE_ASSIGN_OR_RETURN(const Device device, DeviceOfRank(options.device, *world));
  MOE_ASSIGN_OR_RETURN(
      const auto trainer,
      Trainer::Create({.session = {.device = device,
                                   .expert_parallel_size = options.expert_parallel_size,
                                   .threads = options.threads,
                                   .numerics = options.numerics,
                                   .trace_capacity = options.trace == nullptr ? 0 : kTraceEvents},
                       .dtype = options.dtype,
                       .micro_batches = BlocksOf(input.x.tensor->shape[0]),
                       .unit_log2 = ExactGrid().unit_log2},
                      std::move(world)));
  return WithStorageType(options.dtype, [&]<typename T>(T) {
    RankRun<T> run(weights, input, options.trace, *trainer);
    return trainer->session().OrEnd([&] { return run.Run(); });
  });
}

}  // namespace moe::hf
