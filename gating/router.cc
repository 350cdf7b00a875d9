#include "gating/router.h"

#include <algorithm>
#include <optional>
#include <type_traits>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/device_arrays.h"
#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "kernels/bias/bias.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/grouped_gemm/weight_gradient.h"

namespace moe {
namespace {

constexpr int64_t kJitteredPerTask = 64;
constexpr int64_t kTokensPerUpload = 256;  // of jitter

template <typename T>
absl::Status CheckMatrix(absl::string_view where, absl::string_view what, MatrixView<T> matrix,
                         int64_t rows, int64_t cols) {
  if (matrix.rows() == rows && matrix.cols() == cols) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(where, ": ", what, " is [", matrix.rows(), ", ",
                                                 matrix.cols(), "], expected [", rows, ", ", cols,
                                                 "]"));
}

absl::Status CheckHost(absl::string_view where, const Stream& stream, const Workspace* host) {
  if (!IsCuda(stream) || host != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(where, ": a stream of a CUDA device without a workspace of the host"));
}

// kInvalidArgument if a micro-batch has tokens, but not config.micro_batch_tokens of them.
absl::Status CheckMicroBatchLengths(const RouterConfig& config, const Batch& batch) {
  if (config.micro_batch_tokens == 0) return absl::OkStatus();
  const absl::Span<const int64_t> offsets = batch.micro_batch_offsets;
  for (size_t b = 0; b + 1 < offsets.size(); ++b) {
    const int64_t tokens = offsets[b + 1] - offsets[b];
    if (tokens != 0 && tokens != config.micro_batch_tokens) {
      return absl::InvalidArgumentError(
          absl::StrCat("Router::Forward: micro-batch ", b, " has ", tokens, " tokens, expected ",
                       config.micro_batch_tokens, " (micro_batch_tokens) or none"));
    }
  }
  return absl::OkStatus();
}

// Before workspace memory that `stream` works on is given back: what takes it next on a CUDA device
// is work of the same stream, later.
absl::Status EndScratch(Stream& stream) {
  return IsCuda(stream) ? absl::OkStatus() : stream.Synchronize();
}

// visit(begin, end) for the tokens of every micro-batch that has some.
template <typename Visit>
absl::Status ForEachMicroBatch(const Batch& batch, Visit visit) {
  const absl::Span<const int64_t> offsets = batch.micro_batch_offsets;
  for (size_t b = 0; b + 1 < offsets.size(); ++b) {
    if (offsets[b] < offsets[b + 1]) MOE_RETURN_IF_ERROR(visit(offsets[b], offsets[b + 1]));
  }
  return absl::OkStatus();
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

// factor[t, h] = 1 + epsilon * U(-1, 1). `key` is the first row's.
void JitterFactors(const RandomKey& key, float epsilon, MatrixView<float> factor,
                   ThreadPool& threads) {
  threads.For(factor.rows(), kJitteredPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      RandomKey token = key;
      token.item += static_cast<uint64_t>(t);
      for (int64_t h = 0; h < factor.cols(); ++h) {
        const double u = 2 * Uniform(token, static_cast<uint32_t>(h)) - 1;
        factor(t, h) = static_cast<float>(1 + u * static_cast<double>(epsilon));
      }
    }
  });
}

// The same in memory of the stream's device. The host makes all factors: for a CUDA device in
// parts, so that staging them takes little pinned memory.
absl::Status EnqueueJitterFactors(RandomKey key, float epsilon, MatrixView<float> factor,
                                  Workspace& host, Stream& stream) {
  ThreadPool& threads = stream.threads();
  if (!IsCuda(stream)) {
    return stream.Enqueue([=, &threads] {
      JitterFactors(key, epsilon, factor, threads);
      return absl::OkStatus();
    });
  }
  const WorkspaceScope scope(host);
  MOE_ASSIGN_OR_RETURN(
      const MatrixView<float> part,
      host.Matrix<float>(std::min(factor.rows(), kTokensPerUpload), factor.cols()));
  for (int64_t begin = 0; begin < factor.rows(); begin += kTokensPerUpload) {
    const auto made = RowRange(part, 0, std::min(factor.rows() - begin, kTokensPerUpload));
    JitterFactors(key, epsilon, made, threads);
    const auto bytes = static_cast<int64_t>(AllOf<float>(made).size() * sizeof(float));
    MOE_RETURN_IF_ERROR(stream.Upload(made.data(), factor.row(begin), bytes));
    key.item += static_cast<uint64_t>(kTokensPerUpload);
  }
  return absl::OkStatus();
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
absl::Status Router<T>::Jitter(RouterSaved<T>& saved, Workspace& workspace, Workspace& host,
                               Stream& stream) const {
  const MatrixView<const T> x = saved.tokens;
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> factor, workspace.Matrix<float>(x.rows(), x.cols()));
  MOE_ASSIGN_OR_RETURN(const MatrixView<T> jittered, workspace.Matrix<T>(x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(
      EnqueueJitterFactors({.seed = config_.seed,
                            .purpose = RandomPurpose::kJitter,
                            .layer = config_.layer,
                            .step = static_cast<uint64_t>(saved.batch.step),
                            .item = static_cast<uint64_t>(saved.batch.first_global_token)},
                           traits_.input_jitter, factor, host, stream));
  saved.tokens = jittered;
  saved.jitter = factor;
  return MultiplyRows<T>(x, factor, jittered, Write::kOverwrite, stream);
}

template <typename T>
absl::StatusOr<MatrixView<const float>> Router<T>::Logits(MatrixView<const T> tokens,
                                                          const RouterInputs<T>& inputs,
                                                          const Batch& batch, Workspace& workspace,
                                                          Stream& stream) const {
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> logits,
                       workspace.Matrix<float>(tokens.rows(), weight_rows()));
  MOE_RETURN_IF_ERROR(ForEachMicroBatch(batch, [&](int64_t begin, int64_t end) {
    return Gemm<T, float>(RowRange(tokens, begin, end), inputs.weight, RowRange(logits, begin, end),
                          workspace, stream);
  }));
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
                                           Workspace* host, RoutingFor reader) const {
  MOE_RETURN_IF_ERROR(CheckHost("Router::Forward", stream, host));
  MOE_RETURN_IF_ERROR(CheckInputs(tokens, inputs));
  const bool cuda = IsCuda(stream);
  Workspace& host_workspace = cuda ? *host : workspace;
  RouterSaved<T> s = {.tokens = tokens};
  MOE_ASSIGN_OR_RETURN(s.batch, CopyBatch(batch, tokens.rows(), host_workspace));
  MOE_RETURN_IF_ERROR(CheckMicroBatchLengths(config_, s.batch));
  if (traits_.input_jitter != 0 && batch.mode == Mode::kTraining) {
    MOE_RETURN_IF_ERROR(Jitter(s, workspace, host_workspace, stream));
  }
  MOE_ASSIGN_OR_RETURN(s.logits, Logits(s.tokens, inputs, s.batch, workspace, stream));
  const Gradient gradient = saved == nullptr ? Gradient::kNotWanted : Gradient::kWanted;
  if (GateRunsOn(stream)) {
    MOE_RETURN_IF_ERROR(
        Decide(inputs, gradient, workspace, host_workspace, stream, reader, s, stats));
  } else {
    const int64_t rows = s.logits.rows(), cols = s.logits.cols();
    MOE_ASSIGN_OR_RETURN(const auto logits, DownloadArray(AllOf(s.logits), *host, stream));
    MOE_RETURN_IF_ERROR(stream.Synchronize());
    s.logits = MatrixView<const float>(logits.data(), rows, cols);
    MOE_RETURN_IF_ERROR(Decide(inputs, gradient, *host, *host, *MakeInlineStream(&stream.threads()),
                               reader, s, stats));
    Routing& copy = s.on_device = s.routing;
    MOE_ASSIGN_OR_RETURN(copy.slot_offset, UploadArray(copy.slot_offset, workspace, stream));
    MOE_ASSIGN_OR_RETURN(copy.expert, UploadArray(copy.expert, workspace, stream));
    MOE_ASSIGN_OR_RETURN(copy.weight, UploadArray(copy.weight, workspace, stream));
    MOE_ASSIGN_OR_RETURN(copy.dropped, UploadArray(copy.dropped, workspace, stream));
  }
  if (saved != nullptr) *saved = s;
  return s.routing;
}

template <typename T>
absl::Status Router<T>::MicroBatchBackward(int64_t begin, int64_t end, const RouterSaved<T>& saved,
                                           MatrixView<const float> d_logits,
                                           MatrixView<const float> weight, MatrixView<T> d_tokens,
                                           const std::optional<RouterGradients>& gradients,
                                           Workspace& workspace, Stream& stream) const {
  const WorkspaceScope scope(workspace);
  const MatrixView<const float> dy = RowRange(d_logits, begin, end);
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> dx,
                       workspace.Matrix<float>(end - begin, config_.hidden_size));
  MOE_RETURN_IF_ERROR((GemmInputGradient<float, float>(dy, weight, dx, workspace, stream)));
  const MatrixView<T> d_part = RowRange(d_tokens, begin, end);
  if (saved.jitter.data() == nullptr) {
    MOE_RETURN_IF_ERROR((AddRows<T, float>(d_part, dx, d_part, stream)));
  } else {
    MOE_RETURN_IF_ERROR((MultiplyRows<T, float>(dx, RowRange(saved.jitter, begin, end), d_part,
                                                Write::kAdd, stream)));
  }
  if (!gradients.has_value()) return EndScratch(stream);
  MOE_ASSIGN_OR_RETURN(const MatrixView<const float> x,
                       AsFloat<T>(RowRange(saved.tokens, begin, end), workspace, stream));
  MOE_RETURN_IF_ERROR(AddWeightGradient<float>(dy, x, gradients->weight, workspace, stream));
  if (traits_.router_bias) {
    MOE_RETURN_IF_ERROR(gradients->bias.Add(
        [&](absl::Span<float> out, Write write) {
          return BiasGradient<float>(dy, out, write, stream);
        },
        workspace, stream));
  }
  return EndScratch(stream);
}

template <typename T>
absl::Status Router<T>::Backward(absl::Span<const float> d_weight, const RouterSaved<T>& saved,
                                 MatrixView<const T> weight, float loss_scale,
                                 MatrixView<T> d_tokens,
                                 const std::optional<RouterGradients>& gradients,
                                 Workspace& workspace, Stream& stream, Workspace* host) const {
  constexpr absl::string_view kWhere = "Router::Backward";
  const int64_t hidden = config_.hidden_size;
  const int64_t rows = weight_rows();
  MOE_RETURN_IF_ERROR(CheckHost(kWhere, stream, host));
  MOE_RETURN_IF_ERROR(CheckMatrix(kWhere, "weight", weight, rows, hidden));
  MOE_RETURN_IF_ERROR(CheckMatrix(kWhere, "d_tokens", d_tokens, saved.tokens.rows(), hidden));
  const int64_t bias_rows = traits_.router_bias ? rows : 0;
  const RouterGradients into = gradients.value_or(RouterGradients());
  const bool fits = !gradients.has_value() ||
                    (into.weight.size() == rows * hidden && into.bias.size() == bias_rows);
  if (d_weight.size() != saved.on_device.weight.size() || !fits) {
    return absl::InvalidArgumentError(absl::StrCat(
        kWhere, ": d_weight holds ", d_weight.size(), ", the weight's gradient ",
        into.weight.size(), ", the bias's ", into.bias.size(), ", expected ",
        saved.on_device.weight.size(), " (slots), ", rows * hidden, " and ", bias_rows));
  }
  const WorkspaceScope scope(workspace);
  std::optional<WorkspaceScope> host_scope;
  if (IsCuda(stream)) host_scope.emplace(*host);  // what is uploaded may change at once
  MOE_ASSIGN_OR_RETURN(const MatrixView<const float> d_logits,
                       LogitGradient(d_weight, saved, loss_scale, workspace, stream, host));
  MOE_ASSIGN_OR_RETURN(const MatrixView<const float> weight_f32,
                       AsFloat(weight, workspace, stream));
  MOE_RETURN_IF_ERROR(ForEachMicroBatch(saved.batch, [&](int64_t begin, int64_t end) {
    return MicroBatchBackward(begin, end, saved, d_logits, weight_f32, d_tokens, gradients,
                              workspace, stream);
  }));
  return EndScratch(stream);
}

template class Router<float>;
template class Router<BFloat16>;
template class Router<Float16>;

}  // namespace moe
