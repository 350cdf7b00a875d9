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
constexpr int64_t kTokensPerUpload = 256;  // tokens whose jitter is uploaded at once

template <typename T>
absl::Status CheckMatrix(absl::string_view where, absl::string_view what, MatrixView<T> matrix,
                         int64_t rows, int64_t cols) {
  if (matrix.rows() == rows && matrix.cols() == cols) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(where, ": ", what, " is [", matrix.rows(), ", ",
                                                 matrix.cols(), "], expected [", rows, ", ", cols,
                                                 "]"));
}

// kInvalidArgument if a micro-batch has tokens, but not config.micro_batch_tokens of them.
absl::Status CheckMicroBatchLengths(const RouterConfig& config, const Batch& batch) {
  if (config.micro_batch_tokens == 0) return absl::OkStatus();
  const absl::Span<const int64_t> offsets = batch.micro_batch_offsets;
  for (size_t b = 0; b + 1 < offsets.size(); ++b) {
    const int64_t tokens = offsets[b + 1] - offsets[b];
    if (tokens != 0 && tokens != config.micro_batch_tokens) {
      return absl::InvalidArgumentError(
          absl::StrCat("Router::Logits: micro-batch ", b, " has ", tokens, " tokens, expected ",
                       config.micro_batch_tokens, " (micro_batch_tokens) or none"));
    }
  }
  return absl::OkStatus();
}

// Called before workspace memory that `stream` works on is given back: on a CUDA device its next
// user is work of the same stream, later.
absl::Status EndScratch(Stream& stream) {
  return IsCuda(stream) ? absl::OkStatus() : stream.Synchronize();
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
    const auto bytes = static_cast<int64_t>(AllOf(made).size() * sizeof(float));
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
template <typename Visit>
absl::Status Router<T>::ForEachPart(absl::Span<const int64_t> offsets, Visit visit) {
  for (size_t p = 0; p + 1 < offsets.size(); ++p) {
    const TokenRange range = {offsets[p], offsets[p + 1]};
    if (range.begin < range.end) MOE_RETURN_IF_ERROR(visit(range));
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status Router<T>::CheckInputs(const RouterCall<T>& call) const {
  constexpr absl::string_view kWhere = "Router::Logits";
  const RouterInputs<T>& inputs = call.inputs;
  MOE_RETURN_IF_ERROR(
      CheckMatrix(kWhere, "tokens", call.tokens, call.tokens.rows(), config_.hidden_size));
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
absl::Status Router<T>::Jitter(const RouterCall<T>& call, RouterSaved<T>& saved) const {
  const MatrixView<const T> x = saved.tokens;
  Workspace& workspace = call.workspace;
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> factor, workspace.Matrix<float>(x.rows(), x.cols()));
  MOE_ASSIGN_OR_RETURN(const MatrixView<T> jittered, workspace.Matrix<T>(x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(EnqueueJitterFactors(
      {.seed = config_.seed,
       .purpose = RandomPurpose::kJitter,
       .layer = config_.layer,
       .step = static_cast<uint64_t>(saved.batch.step),
       .item = static_cast<uint64_t>(saved.batch.first_global_token + saved.first_token)},
      traits_.input_jitter, factor, call.host, call.stream));
  saved.tokens = jittered;
  saved.jitter = factor;
  return MultiplyRows<T>(x, factor, jittered, Write::kOverwrite, call.stream);
}

template <typename T>
absl::Status Router<T>::Logits(const RouterCall<T>& call, RouterSaved<T>& saved) const {
  MOE_RETURN_IF_ERROR(CheckInputs(call));
  const int64_t tokens = call.tokens.rows();
  const int64_t all = call.batch_tokens < 0 ? tokens : call.batch_tokens;
  Workspace& workspace = call.workspace;
  saved = {.tokens = call.tokens, .first_token = call.first_token};
  MOE_ASSIGN_OR_RETURN(saved.batch, CopyBatch(call.batch, all, call.host));
  MOE_RETURN_IF_ERROR(CheckMicroBatchLengths(config_, saved.batch));
  if (traits_.input_jitter != 0 && call.batch.mode == Mode::kTraining) {
    MOE_RETURN_IF_ERROR(Jitter(call, saved));
  }
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> logits, workspace.Matrix<float>(all, weight_rows()));
  const auto own = RowRange(logits, call.first_token, call.first_token + tokens);
  const auto product = [&](TokenRange range) {
    return Gemm<T, float>(RowRange(saved.tokens, range.begin, range.end), call.inputs.weight,
                          RowRange(own, range.begin, range.end), workspace, call.stream,
                          {.bfloat16_order = call.bfloat16_order});
  };
  MOE_RETURN_IF_ERROR(all == tokens ? ForEachPart(saved.batch.micro_batch_offsets, product)
                                    : product({0, tokens}));
  if (traits_.router_bias) {
    const int64_t ends[] = {0, tokens};
    MOE_RETURN_IF_ERROR(AddBias<float>(own, ends, {call.inputs.bias}, call.stream));
  }
  saved.logits = logits;
  return absl::OkStatus();
}

template <typename T>
absl::Status Router<T>::Decide(const RouterCall<T>& call, RouterSaved<T>& saved,
                               RouterStats* stats) const {
  Stream& stream = call.stream;
  if (GateRunsOn(stream)) return DecideOn(call, saved, stats);
  const int64_t rows = saved.logits.rows(), cols = saved.logits.cols();
  MOE_ASSIGN_OR_RETURN(const auto logits,
                       DownloadArray(AllOf<const float>(saved.logits), call.host, stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  saved.logits = MatrixView<float>(logits.data(), rows, cols);
  const std::unique_ptr<Stream> host_stream = MakeInlineStream(&stream.threads());
  MOE_RETURN_IF_ERROR(DecideOn(
      {.inputs = call.inputs, .workspace = call.host, .host = call.host, .stream = *host_stream},
      saved, stats));
  Routing& copy = saved.on_device = saved.routing;
  Workspace& workspace = call.workspace;
  MOE_ASSIGN_OR_RETURN(copy.slot_offset, UploadArray(copy.slot_offset, workspace, stream));
  MOE_ASSIGN_OR_RETURN(copy.expert, UploadArray(copy.expert, workspace, stream));
  MOE_ASSIGN_OR_RETURN(copy.weight, UploadArray(copy.weight, workspace, stream));
  MOE_ASSIGN_OR_RETURN(copy.dropped, UploadArray(copy.dropped, workspace, stream));
  return absl::OkStatus();
}

template <typename T>
absl::Status Router<T>::SegmentBackward(const RouterBackwardCall<T>& call,
                                        const RouterSaved<T>& saved,
                                        MatrixView<const float> d_logits,
                                        MatrixView<const float> weight, TokenRange range) const {
  Workspace& workspace = call.workspace;
  Stream& stream = call.stream;
  const auto part_of = [range](auto rows) {
    return RowRange(rows, range.begin, range.end);
  };
  const WorkspaceScope scope(workspace);
  const MatrixView<const float> dy = part_of(d_logits);
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> dx,
                       workspace.Matrix<float>(range.end - range.begin, config_.hidden_size));
  MOE_RETURN_IF_ERROR((GemmInputGradient<float, float>(dy, weight, dx, workspace, stream)));
  const MatrixView<T> d_part = part_of(call.d_tokens);
  if (saved.jitter.data() == nullptr) {
    MOE_RETURN_IF_ERROR((AddRows<T, float>(d_part, dx, d_part, stream)));
  } else {
    MOE_RETURN_IF_ERROR(
        (MultiplyRows<T, float>(dx, part_of(saved.jitter), d_part, Write::kAdd, stream)));
  }
  if (!call.gradients.has_value()) return EndScratch(stream);
  MOE_ASSIGN_OR_RETURN(const MatrixView<const float> x,
                       AsFloat<T>(part_of(saved.tokens), workspace, stream));
  MOE_RETURN_IF_ERROR(AddWeightGradient<float>(dy, x, call.gradients->weight, workspace, stream));
  if (traits_.router_bias) {
    MOE_RETURN_IF_ERROR(call.gradients->bias.Add(
        [&](absl::Span<float> out, Write write) {
          return BiasGradient<float>(dy, out, write, stream);
        },
        workspace, stream));
  }
  return EndScratch(stream);
}

template <typename T>
absl::Status Router<T>::CheckBackward(const RouterBackwardCall<T>& call,
                                      const RouterSaved<T>& saved) const {
  constexpr absl::string_view kWhere = "Router::Backward";
  const int64_t hidden = config_.hidden_size;
  const int64_t rows = weight_rows();
  MOE_RETURN_IF_ERROR(CheckMatrix(kWhere, "weight", call.weight, rows, hidden));
  MOE_RETURN_IF_ERROR(CheckMatrix(kWhere, "d_tokens", call.d_tokens, saved.tokens.rows(), hidden));
  const int64_t bias_rows = traits_.router_bias ? rows : 0;
  const RouterGradients into = call.gradients.value_or(RouterGradients());
  const bool fits = !call.gradients.has_value() ||
                    (into.weight.size() == rows * hidden && into.bias.size() == bias_rows);
  if (call.d_weight.size() == saved.on_device.weight.size() && fits) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(kWhere, ": d_weight holds ", call.d_weight.size(), ", the weight's gradient ",
                   into.weight.size(), ", the bias's ", into.bias.size(), ", expected ",
                   saved.on_device.weight.size(), " (slots), ", rows * hidden, " and ", bias_rows));
}

template <typename T>
absl::Status Router<T>::Backward(const RouterBackwardCall<T>& call,
                                 const RouterSaved<T>& saved) const {
  MOE_RETURN_IF_ERROR(CheckBackward(call, saved));
  const WorkspaceScope scope(call.workspace);
  std::optional<WorkspaceScope> host_scope;
  if (IsCuda(call.stream)) host_scope.emplace(call.host);  // what is uploaded may change at once
  MOE_ASSIGN_OR_RETURN(const MatrixView<const float> d_logits, LogitGradient(call, saved));
  MOE_ASSIGN_OR_RETURN(const MatrixView<const float> weight,
                       AsFloat(call.weight, call.workspace, call.stream));
  const auto own = RowRange(d_logits, saved.first_token, saved.first_token + saved.tokens.rows());
  const auto segments = call.segments.empty() ? saved.batch.micro_batch_offsets : call.segments;
  MOE_RETURN_IF_ERROR(ForEachPart(segments, [&](TokenRange range) {
    return SegmentBackward(call, saved, own, weight, range);
  }));
  return EndScratch(call.stream);
}

template class Router<float>;
template class Router<BFloat16>;
template class Router<Float16>;

}  // namespace moe
