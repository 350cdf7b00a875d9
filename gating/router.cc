#include "gating/router.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include <absl/strings/str_cat.h>

#include "gating/balance.h"
#include "gating/router_losses.h"
#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "kernels/bias/bias.h"
#include "kernels/cast/cast.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/norm/rms_norm.h"

namespace moe {
namespace {

constexpr int64_t kTokensPerTask = 64;

template <typename T>
absl::Status CheckMatrix(absl::string_view where, absl::string_view what, MatrixView<T> matrix,
                         int64_t rows, int64_t cols) {
  if (matrix.rows() == rows && matrix.cols() == cols) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(where, ": ", what, " is [", matrix.rows(), ", ",
                                                 matrix.cols(), "], expected [", rows, ", ", cols,
                                                 "]"));
}

bool IsCuda(const Stream& stream) {
  return stream.device().kind == DeviceKind::kCuda;
}

absl::Status CheckHost(absl::string_view where, const Stream& stream, const Workspace* host) {
  if (!IsCuda(stream) || host != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(where, ": a stream of a CUDA device without a workspace of the host"));
}

// Where the gate runs: nothing where `stream` itself is of the CPU.
std::unique_ptr<Stream> HostStreamFor(const Stream& stream) {
  return IsCuda(stream) ? MakeInlineStream(&stream.threads()) : nullptr;
}

// Before workspace memory that `stream` works on is given back: what takes it next on a CUDA device is
// work of the same stream, later.
absl::Status EndScratch(Stream& stream) {
  return IsCuda(stream) ? absl::OkStatus() : stream.Synchronize();
}

// Waits for `stream` and copies a dense matrix of its device to the host.
absl::StatusOr<MatrixView<const float>> Download(MatrixView<const float> matrix, Workspace& host,
                                                 Stream& stream) {
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> copy,
                       host.Matrix<float>(matrix.rows(), matrix.cols()));
  MOE_RETURN_IF_ERROR(
      stream.CopyBytes(matrix.data(), copy.data(),
                       matrix.rows() * matrix.cols() * static_cast<int64_t>(sizeof(float))));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  return copy;
}

// The tokens of micro-batch b.
struct MicroBatch {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t tokens() const { return end - begin; }
};

size_t NumMicroBatches(const Batch& batch) {
  return batch.micro_batch_offsets.size() - 1;
}

MicroBatch MicroBatchAt(const Batch& batch, size_t b) {
  return {batch.micro_batch_offsets[b], batch.micro_batch_offsets[b + 1]};
}

// `matrix` itself when it is float32, else a float32 copy in the workspace.
template <typename T>
absl::StatusOr<MatrixView<const float>> AsFloat(MatrixView<const T> matrix, Workspace& workspace,
                                                Stream& stream) {
  if constexpr (std::is_same_v<T, float>) {
    return matrix;
  } else {
    MOE_ASSIGN_OR_RETURN(const MatrixView<float> copy,
                         workspace.Matrix<float>(matrix.rows(), matrix.cols()));
    if (matrix.stride() == matrix.cols()) {
      const auto size = static_cast<size_t>(matrix.rows() * matrix.cols());
      MOE_RETURN_IF_ERROR((Cast<T, float>({matrix.data(), size}, {copy.data(), size}, stream)));
      return copy;
    }
    for (int64_t r = 0; r < matrix.rows(); ++r) {
      const auto cols = static_cast<size_t>(matrix.cols());
      MOE_RETURN_IF_ERROR((Cast<T, float>({matrix.row(r), cols}, {copy.row(r), cols}, stream)));
    }
    return copy;
  }
}

// out += scale * term in float32 (* factor where there is one), rounded to T once.
template <typename T>
absl::Status AddTo(MatrixView<T> out, MatrixView<const float> term, float scale,
                   MatrixView<const float> factor, Stream& stream) {
  return stream.Enqueue([out, term, scale, factor, &threads = stream.threads()] {
    threads.For(out.rows(), kTokensPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        for (int64_t c = 0; c < out.cols(); ++c) {
          const float add = scale * term(r, c) * (factor.data() == nullptr ? 1.0f : factor(r, c));
          out(r, c) = static_cast<T>(static_cast<float>(out(r, c)) + add);
        }
      }
    });
    return absl::OkStatus();
  });
}

absl::Status CheckMicroBatchLengths(const RouterConfig& config, const Batch& batch) {
  if (config.micro_batch_tokens == 0) return absl::OkStatus();
  for (size_t b = 0; b < NumMicroBatches(batch); ++b) {
    const int64_t tokens = MicroBatchAt(batch, b).tokens();
    if (tokens != 0 && tokens != config.micro_batch_tokens) {
      return absl::InvalidArgumentError(
          absl::StrCat("Router::Forward: micro-batch ", b, " has ", tokens, " tokens, expected ",
                       config.micro_batch_tokens, " (micro_batch_tokens) or none"));
    }
  }
  return absl::OkStatus();
}

// Rows an expert gets per micro-batch; from the configuration alone, so that a rank without tokens
// agrees with the others.
int64_t PaddedRows(const RouterConfig& config, const GateTraits& traits) {
  if (!config.pad_to_capacity) return 0;
  const int64_t group =
      config.token_group.tokens > 0 ? config.token_group.tokens : config.micro_batch_tokens;
  const int32_t slots_per_token = traits.limits_itself ? 1 : config.top_k;
  return config.micro_batch_tokens / group *
         ExpertCapacity(group, slots_per_token, config.num_experts, *config.capacity_factor);
}

// Marks and unweights the slots that are over capacity; returns how many.
absl::StatusOr<int64_t> ApplyCapacity(const RouterConfig& config, const Gate& gate,
                                      const GateSelection& selection, const TokenGroups& groups,
                                      absl::Span<uint8_t> dropped, Workspace& workspace,
                                      Stream& stream) {
  if (!config.capacity_factor.has_value() || gate.traits().limits_itself) {
    std::fill(dropped.begin(), dropped.end(), uint8_t{0});
    return 0;
  }
  MOE_ASSIGN_OR_RETURN(const int64_t count,
                       MarkDropped({.slot_offset = selection.slot_offset,
                                    .expert = selection.expert,
                                    .weight = selection.weight,
                                    .num_experts = config.num_experts},
                                   groups, config.top_k, *config.capacity_factor,
                                   config.drop_policy, dropped, workspace));
  if (count == 0) return count;
  MOE_RETURN_IF_ERROR(gate.Reweigh(selection, dropped, stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  for (size_t s = 0; s < dropped.size(); ++s) {
    if (dropped[s] != 0) selection.weight[s] = 0.0f;
  }
  return count;
}

}  // namespace

template <typename T>
Router<T>::Router(const RouterConfig& config, std::unique_ptr<const Gate> gate)
    : config_(config), gate_(std::move(gate)), traits_(gate_->traits()) {}

template <typename T>
absl::StatusOr<std::unique_ptr<Router<T>>> Router<T>::Create(const RouterConfig& config) {
  MOE_RETURN_IF_ERROR(ValidateRouterConfig(config));
  return std::unique_ptr<Router<T>>(new Router(config, FindGate(config.gate)->make(config)));
}

template <typename T>
absl::Status Router<T>::CheckInputs(MatrixView<const T> tokens,
                                    const RouterInputs<T>& inputs) const {
  constexpr absl::string_view kWhere = "Router::Forward";
  MOE_RETURN_IF_ERROR(CheckMatrix(kWhere, "tokens", tokens, tokens.rows(), config_.hidden_size));
  MOE_RETURN_IF_ERROR(
      CheckMatrix(kWhere, "weight", inputs.weight, weight_rows(), config_.hidden_size));
  const auto check = [&](absl::string_view what, size_t size, int64_t expected, bool may_be_empty) {
    if (size == static_cast<size_t>(expected) || (size == 0 && may_be_empty)) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrCat(kWhere, ": ", what, " holds ", size, ", expected ", expected));
  };
  const int64_t outputs = config_.num_outputs();
  MOE_RETURN_IF_ERROR(
      check("bias", inputs.bias.size(), traits_.router_bias ? weight_rows() : 0, false));
  MOE_RETURN_IF_ERROR(
      check("expert_bias", inputs.expert_bias.size(), traits_.expert_bias ? outputs : 0, false));
  return check("expert_share", inputs.expert_share.size(), outputs, true);
}

template <typename T>
absl::Status Router<T>::Jitter(RouterSaved<T>& saved, Workspace& workspace, Stream& stream) const {
  const MatrixView<const T> x = saved.tokens;
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> factor, workspace.Matrix<float>(x.rows(), x.cols()));
  MOE_ASSIGN_OR_RETURN(const MatrixView<T> jittered, workspace.Matrix<T>(x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(
      stream.Enqueue([this, x, factor, jittered, step = saved.batch.step,
                      first_token = saved.batch.first_global_token, &threads = stream.threads()] {
        threads.For(x.rows(), kTokensPerTask, [&](int64_t begin, int64_t end) {
          for (int64_t t = begin; t < end; ++t) {
            const RandomKey key = {.seed = config_.seed,
                                   .purpose = RandomPurpose::kJitter,
                                   .layer = config_.layer,
                                   .step = static_cast<uint64_t>(step),
                                   .item = static_cast<uint64_t>(first_token + t)};
            for (int64_t h = 0; h < x.cols(); ++h) {
              const double u = 2 * Uniform(key, static_cast<uint32_t>(h)) - 1;
              factor(t, h) = static_cast<float>(1 + u * static_cast<double>(traits_.input_jitter));
              jittered(t, h) = static_cast<T>(static_cast<float>(x(t, h)) * factor(t, h));
            }
          }
        });
        return absl::OkStatus();
      }));
  saved.tokens = jittered;
  saved.jitter = factor;
  return absl::OkStatus();
}

template <typename T>
absl::StatusOr<MatrixView<const float>> Router<T>::Logits(MatrixView<const T> tokens,
                                                          const RouterInputs<T>& inputs,
                                                          const Batch& batch, Workspace& workspace,
                                                          Stream& stream) const {
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> logits,
                       workspace.Matrix<float>(tokens.rows(), weight_rows()));
  for (size_t b = 0; b < NumMicroBatches(batch); ++b) {
    const MicroBatch part = MicroBatchAt(batch, b);
    if (part.tokens() == 0) continue;
    MOE_RETURN_IF_ERROR(
        (Gemm<T, float>(RowRange(tokens, part.begin, part.end), inputs.weight,
                        RowRange(logits, part.begin, part.end), workspace, stream)));
  }
  if (traits_.router_bias) {
    const int64_t all[] = {0, tokens.rows()};
    MOE_RETURN_IF_ERROR(AddBias<float>(logits, all, {inputs.bias}, stream));
  }
  return logits;
}

template <typename T>
absl::StatusOr<Routing> Router<T>::Forward(MatrixView<const T> tokens,
                                           const RouterInputs<T>& inputs, const Batch& batch,
                                           Workspace& workspace, Stream& stream,
                                           RouterSaved<T>* saved, RouterStats* stats,
                                           Workspace* host) const {
  MOE_RETURN_IF_ERROR(CheckHost("Router::Forward", stream, host));
  MOE_RETURN_IF_ERROR(CheckInputs(tokens, inputs));
  const bool cuda = IsCuda(stream);
  Workspace& host_workspace = cuda ? *host : workspace;
  RouterSaved<T> s = {.tokens = tokens};
  MOE_ASSIGN_OR_RETURN(s.batch, CopyBatch(batch, tokens.rows(), host_workspace));
  MOE_RETURN_IF_ERROR(CheckMicroBatchLengths(config_, s.batch));
  if (traits_.input_jitter != 0 && batch.mode == Mode::kTraining) {
    if (cuda) return absl::UnimplementedError("Router::Forward: input jitter on a CUDA device");
    MOE_RETURN_IF_ERROR(Jitter(s, workspace, stream));
  }
  MOE_ASSIGN_OR_RETURN(s.logits, Logits(s.tokens, inputs, s.batch, workspace, stream));
  if (cuda) {
    MOE_ASSIGN_OR_RETURN(s.logits, Download(s.logits, host_workspace, stream));
  }
  const std::unique_ptr<Stream> host_stream = HostStreamFor(stream);
  MOE_RETURN_IF_ERROR(Decide(inputs, saved == nullptr ? Gradient::kNotWanted : Gradient::kWanted,
                             host_workspace, cuda ? *host_stream : stream, s, stats));
  if (saved != nullptr) *saved = s;
  return s.routing;
}

template <typename T>
absl::Status Router<T>::Decide(const RouterInputs<T>& inputs, Gradient gradient,
                               Workspace& workspace, Stream& stream, RouterSaved<T>& s,
                               RouterStats* stats) const {
  MOE_ASSIGN_OR_RETURN(const TokenGroups groups,
                       MakeTokenGroups(config_.token_group, s.batch, workspace));
  const GateInput input = {
      .logits = s.logits, .batch = s.batch, .groups = groups, .expert_bias = inputs.expert_bias};
  MOE_ASSIGN_OR_RETURN(s.selection, gate_->Select(input, workspace, stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());  // from here on the host reads the selection

  MOE_ASSIGN_OR_RETURN(
      const RouterLosses losses,
      ComputeLosses(config_, *gate_, input, s.selection, inputs.expert_share, gradient, workspace));
  s.d_aux = losses.d_logits;
  MOE_ASSIGN_OR_RETURN(const absl::Span<uint8_t> dropped,
                       workspace.Array<uint8_t>(static_cast<int64_t>(s.selection.expert.size())));
  MOE_ASSIGN_OR_RETURN(
      const int64_t dropped_slots,
      ApplyCapacity(config_, *gate_, s.selection, groups, dropped, workspace, stream));

  s.routing = {.slot_offset = s.selection.slot_offset,
               .expert = s.selection.expert,
               .weight = s.selection.weight,
               .dropped = dropped,
               .weight_on = traits_.weight_on,
               .num_experts = config_.num_outputs(),
               .num_routed_experts = config_.num_experts,
               .padded_rows = PaddedRows(config_, traits_)};
  if (stats != nullptr) {
    stats->aux_loss = losses.aux;
    stats->z_loss = losses.z;
    MOE_ASSIGN_OR_RETURN(stats->entropy_sum, EntropySum({.logits = s.logits,
                                                         .score = s.selection.score,
                                                         .function = traits_.score,
                                                         .log_sum_exp = s.selection.log_sum_exp},
                                                        workspace, stream.threads()));
    stats->expert_count.assign(s.selection.count.begin(), s.selection.count.end());
    stats->dropped_slots = dropped_slots;
  }
  return absl::OkStatus();
}

template <typename T>
absl::StatusOr<MatrixView<const float>> Router<T>::LogitGradient(
    absl::Span<const float> d_weight, const RouterSaved<T>& saved, float loss_scale,
    Workspace& workspace, Stream& stream, Workspace* host) const {
  const bool cuda = IsCuda(stream);
  Workspace& host_workspace = cuda ? *host : workspace;
  const std::unique_ptr<Stream> own_host_stream = HostStreamFor(stream);
  Stream& host_stream = cuda ? *own_host_stream : stream;
  if (cuda) {
    const MatrixView<const float> row(d_weight.data(), 1, static_cast<int64_t>(d_weight.size()));
    MOE_ASSIGN_OR_RETURN(const auto on_host, Download(row, host_workspace, stream));
    d_weight = {on_host.data(), d_weight.size()};
  }
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> d_logits,
                       host_workspace.Matrix<float>(saved.tokens.rows(), weight_rows()));
  MOE_RETURN_IF_ERROR(gate_->Backward({.logits = saved.logits,
                                       .batch = saved.batch,
                                       .selection = saved.selection,
                                       .dropped = saved.routing.dropped,
                                       .d_weight = d_weight},
                                      d_logits, host_stream));
  if (saved.d_aux.data() != nullptr) {
    MOE_RETURN_IF_ERROR(AddTo<float>(d_logits, saved.d_aux, loss_scale, {}, host_stream));
  }
  if (!cuda) return d_logits;
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> on_device,
                       workspace.Matrix<float>(d_logits.rows(), d_logits.cols()));
  MOE_RETURN_IF_ERROR(
      stream.Upload(d_logits.data(), on_device.data(),
                    d_logits.rows() * d_logits.cols() * static_cast<int64_t>(sizeof(float))));
  return on_device;
}

template <typename T>
absl::Status Router<T>::MicroBatchBackward(int64_t begin, int64_t end, const RouterSaved<T>& saved,
                                           MatrixView<const float> d_logits,
                                           MatrixView<const float> weight, MatrixView<T> d_tokens,
                                           const RouterGradients& gradients, Workspace& workspace,
                                           Stream& stream) const {
  const WorkspaceScope scope(workspace);
  const MatrixView<const float> dy = RowRange(d_logits, begin, end);
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> dx,
                       workspace.Matrix<float>(end - begin, config_.hidden_size));
  MOE_RETURN_IF_ERROR((GemmInputGradient<float, float>(dy, weight, dx, workspace, stream)));
  const MatrixView<T> d_part = RowRange(d_tokens, begin, end);
  if (saved.jitter.data() == nullptr) {
    MOE_RETURN_IF_ERROR((AddRows<T, float>(d_part, dx, d_part, stream)));
  } else {
    MOE_RETURN_IF_ERROR(AddTo<T>(d_part, dx, 1.0f, RowRange(saved.jitter, begin, end), stream));
  }
  MOE_ASSIGN_OR_RETURN(const MatrixView<const float> x,
                       AsFloat<T>(RowRange(saved.tokens, begin, end), workspace, stream));
  MOE_RETURN_IF_ERROR(gradients.weight.Add(
      [&](absl::Span<float> out, Write write) {
        return GemmWeightGradient<float>(
            dy, x, MatrixView<float>(out.data(), weight_rows(), config_.hidden_size), write,
            workspace, stream);
      },
      workspace, stream));
  if (traits_.router_bias) {
    MOE_RETURN_IF_ERROR(
        gradients.bias.Add([&](absl::Span<float> out,
                               Write write) { return BiasGradient<float>(dy, out, write, stream); },
                           workspace, stream));
  }
  return EndScratch(stream);
}

template <typename T>
absl::Status Router<T>::Backward(absl::Span<const float> d_weight, const RouterSaved<T>& saved,
                                 MatrixView<const T> weight, float loss_scale,
                                 MatrixView<T> d_tokens, const RouterGradients& gradients,
                                 Workspace& workspace, Stream& stream, Workspace* host) const {
  constexpr absl::string_view kWhere = "Router::Backward";
  const int64_t hidden = config_.hidden_size;
  const int64_t rows = weight_rows();
  MOE_RETURN_IF_ERROR(CheckHost(kWhere, stream, host));
  MOE_RETURN_IF_ERROR(CheckMatrix(kWhere, "weight", weight, rows, hidden));
  MOE_RETURN_IF_ERROR(CheckMatrix(kWhere, "d_tokens", d_tokens, saved.tokens.rows(), hidden));
  if (d_weight.size() != saved.routing.weight.size() || gradients.weight.size() != rows * hidden ||
      (traits_.router_bias && gradients.bias.size() != rows)) {
    return absl::InvalidArgumentError(
        absl::StrCat(kWhere, ": d_weight holds ", d_weight.size(), ", the weight's gradient ",
                     gradients.weight.size(), ", the bias's ", gradients.bias.size(), ", expected ",
                     saved.routing.weight.size(), " (slots), ", rows * hidden, " and ",
                     traits_.router_bias ? rows : 0));
  }
  const WorkspaceScope scope(workspace);
  MOE_ASSIGN_OR_RETURN(const MatrixView<const float> d_logits,
                       LogitGradient(d_weight, saved, loss_scale, workspace, stream, host));
  MOE_ASSIGN_OR_RETURN(const MatrixView<const float> weight_f32,
                       AsFloat(weight, workspace, stream));
  for (size_t b = 0; b < NumMicroBatches(saved.batch); ++b) {
    const MicroBatch part = MicroBatchAt(saved.batch, b);
    if (part.tokens() == 0) continue;
    MOE_RETURN_IF_ERROR(MicroBatchBackward(part.begin, part.end, saved, d_logits, weight_f32,
                                           d_tokens, gradients, workspace, stream));
  }
  return EndScratch(stream);
}

template class Router<float>;
template class Router<BFloat16>;

}  // namespace moe
