#include "gating/router.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include <absl/strings/str_cat.h>

#include "gating/balance.h"
#include "gating/gate.h"
#include "kernels/base/status_macros.h"
#include "kernels/grouped_gemm/grouped_gemm.h"

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

absl::Status CheckDevice(absl::string_view where, const Stream& stream) {
  if (stream.device().kind == DeviceKind::kCpu) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(where, ": CUDA"));
}

template <typename T>
MatrixView<T> Rows(MatrixView<T> matrix, int64_t begin, int64_t end) {
  return {matrix.data() + begin * matrix.stride(), end - begin, matrix.cols(), matrix.stride()};
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
    MOE_RETURN_IF_ERROR(stream.Enqueue([matrix, copy, &threads = stream.threads()] {
      threads.For(matrix.rows(), kTokensPerTask, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          for (int64_t c = 0; c < matrix.cols(); ++c) copy(r, c) = static_cast<float>(matrix(r, c));
        }
      });
      return absl::OkStatus();
    }));
    return copy;
  }
}

// out += term in float32, rounded to T once.
template <typename T>
absl::Status AddTo(MatrixView<T> out, MatrixView<const float> term, float scale, Stream& stream) {
  return stream.Enqueue([out, term, scale, &threads = stream.threads()] {
    threads.For(out.rows(), kTokensPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        for (int64_t c = 0; c < out.cols(); ++c) {
          out(r, c) = static_cast<T>(static_cast<float>(out(r, c)) + scale * term(r, c));
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
int64_t PaddedRows(const RouterConfig& config) {
  if (!config.pad_to_capacity) return 0;
  const int64_t group =
      config.token_group.tokens > 0 ? config.token_group.tokens : config.micro_batch_tokens;
  return config.micro_batch_tokens / group *
         ExpertCapacity(group, config.top_k, config.num_experts, *config.capacity_factor);
}

// Marks and unweights the slots that are over capacity; returns how many.
absl::StatusOr<int64_t> ApplyCapacity(const RouterConfig& config, const Gate& gate,
                                      const GateSelection& selection, const TokenGroups& groups,
                                      absl::Span<uint8_t> dropped, Workspace& workspace,
                                      Stream& stream) {
  if (!config.capacity_factor.has_value()) {
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

struct RouterLosses {
  double aux = 0;
  double z = 0;
  MatrixView<const float> d_logits;  // [T, E]; empty = no losses, or not wanted
};

enum class Gradient : bool { kNotWanted, kWanted };

absl::StatusOr<RouterLosses> ComputeLosses(const RouterConfig& config, const Gate& gate,
                                           const GateSelection& selection,
                                           const TokenGroups& groups, const Batch& batch,
                                           Gradient gradient, Workspace& workspace) {
  const bool balance =
      config.load_balancing != LoadBalancing::kNone && config.aux_loss_coeff != 0.0f;
  const bool z = config.z_loss_coeff != 0.0f;
  RouterLosses losses;
  if (!balance && !z) return losses;
  MatrixView<float> d_logits;
  if (gradient == Gradient::kWanted) {
    MOE_ASSIGN_OR_RETURN(d_logits,
                         workspace.Matrix<float>(selection.probs.rows(), selection.probs.cols()));
    std::fill_n(d_logits.data(), d_logits.rows() * d_logits.cols(), 0.0f);
  }
  if (balance) {
    TokenGroups units = groups;
    if (config.load_balancing == LoadBalancing::kSeqAuxLoss) {
      MOE_ASSIGN_OR_RETURN(units, MakeTokenGroups({TokenGroup::kSequence}, batch, workspace));
    }
    const BalanceInput input = {.probs = selection.probs,
                                .slot_offset = selection.slot_offset,
                                .expert = selection.expert,
                                .choices = gate.balance_choices()};
    MOE_RETURN_IF_ERROR(
        AddLoadBalanceLoss(input, units, config.aux_loss_coeff, &losses.aux, d_logits, workspace));
  }
  if (z) {
    AddZLoss(selection.probs, selection.log_sum_exp, batch.micro_batch_offsets, config.z_loss_coeff,
             &losses.z, d_logits);
  }
  losses.d_logits = d_logits;
  return losses;
}

}  // namespace

template <typename T>
Router<T>::Router(const RouterConfig& config, std::unique_ptr<const Gate> gate)
    : config_(config), gate_(std::move(gate)) {}

template <typename T>
Router<T>::~Router() = default;

template <typename T>
absl::StatusOr<std::unique_ptr<Router<T>>> Router<T>::Create(const RouterConfig& config) {
  MOE_RETURN_IF_ERROR(ValidateRouterConfig(config));
  return std::unique_ptr<Router<T>>(new Router(config, FindGate(config.gate)->make(config)));
}

template <typename T>
absl::StatusOr<MatrixView<const float>> Router<T>::Logits(MatrixView<const T> tokens,
                                                          MatrixView<const T> weight,
                                                          const Batch& batch, Workspace& workspace,
                                                          Stream& stream) const {
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> logits,
                       workspace.Matrix<float>(tokens.rows(), weight.rows()));
  for (size_t b = 0; b < NumMicroBatches(batch); ++b) {
    const MicroBatch part = MicroBatchAt(batch, b);
    if (part.tokens() == 0) continue;
    MOE_RETURN_IF_ERROR((Gemm<T, float>(Rows(tokens, part.begin, part.end), weight,
                                        Rows(logits, part.begin, part.end), workspace, stream)));
  }
  return logits;
}

template <typename T>
absl::StatusOr<Routing> Router<T>::Forward(MatrixView<const T> tokens, MatrixView<const T> weight,
                                           const Batch& batch, Workspace& workspace, Stream& stream,
                                           RouterSaved<T>* saved, RouterStats* stats) const {
  constexpr absl::string_view kWhere = "Router::Forward";
  MOE_RETURN_IF_ERROR(CheckDevice(kWhere, stream));
  MOE_RETURN_IF_ERROR(CheckMatrix(kWhere, "tokens", tokens, tokens.rows(), config_.hidden_size));
  MOE_RETURN_IF_ERROR(
      CheckMatrix(kWhere, "weight", weight, config_.num_experts, config_.hidden_size));
  MOE_ASSIGN_OR_RETURN(const Batch own_batch, CopyBatch(batch, tokens.rows(), workspace));
  MOE_RETURN_IF_ERROR(CheckMicroBatchLengths(config_, own_batch));
  MOE_ASSIGN_OR_RETURN(const TokenGroups groups,
                       MakeTokenGroups(config_.token_group, own_batch, workspace));

  MOE_ASSIGN_OR_RETURN(const MatrixView<const float> logits,
                       Logits(tokens, weight, own_batch, workspace, stream));
  MOE_ASSIGN_OR_RETURN(const GateSelection selection,
                       gate_->Select(logits, own_batch, workspace, stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());  // from here on the host reads the selection

  MOE_ASSIGN_OR_RETURN(const absl::Span<uint8_t> dropped,
                       workspace.Array<uint8_t>(static_cast<int64_t>(selection.expert.size())));
  MOE_ASSIGN_OR_RETURN(
      const int64_t dropped_slots,
      ApplyCapacity(config_, *gate_, selection, groups, dropped, workspace, stream));
  MOE_ASSIGN_OR_RETURN(
      const RouterLosses losses,
      ComputeLosses(config_, *gate_, selection, groups, own_batch,
                    saved == nullptr ? Gradient::kNotWanted : Gradient::kWanted, workspace));

  const Routing routing = {.slot_offset = selection.slot_offset,
                           .expert = selection.expert,
                           .weight = selection.weight,
                           .dropped = dropped,
                           .num_experts = config_.num_experts,
                           .num_routed_experts = config_.num_experts,
                           .padded_rows = PaddedRows(config_)};
  if (saved != nullptr) {
    *saved = {.tokens = tokens,
              .logits = logits,
              .probs = selection.probs,
              .routing = routing,
              .batch = own_batch,
              .d_aux = losses.d_logits};
  }
  if (stats != nullptr) {
    stats->aux_loss = losses.aux;
    stats->z_loss = losses.z;
    stats->expert_count.assign(selection.count.begin(), selection.count.end());
    stats->dropped_slots = dropped_slots;
  }
  return routing;
}

template <typename T>
absl::Status Router<T>::Backward(absl::Span<const float> d_weight, const RouterSaved<T>& saved,
                                 MatrixView<const T> weight, float loss_scale,
                                 MatrixView<T> d_tokens, const GradAccumulator& d_router_weight,
                                 Workspace& workspace, Stream& stream) const {
  constexpr absl::string_view kWhere = "Router::Backward";
  const int64_t hidden = config_.hidden_size;
  const int64_t experts = config_.num_experts;
  MOE_RETURN_IF_ERROR(CheckDevice(kWhere, stream));
  MOE_RETURN_IF_ERROR(CheckMatrix(kWhere, "weight", weight, experts, hidden));
  MOE_RETURN_IF_ERROR(CheckMatrix(kWhere, "d_tokens", d_tokens, saved.tokens.rows(), hidden));
  if (d_weight.size() != saved.routing.weight.size() ||
      d_router_weight.size() != experts * hidden) {
    return absl::InvalidArgumentError(absl::StrCat(kWhere, ": d_weight holds ", d_weight.size(),
                                                   " and d_router_weight ", d_router_weight.size(),
                                                   ", expected ", saved.routing.weight.size(),
                                                   " (slots) and ", experts * hidden, " (E * H)"));
  }
  const WorkspaceScope scope(workspace);
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> d_logits,
                       workspace.Matrix<float>(saved.tokens.rows(), experts));
  MOE_RETURN_IF_ERROR(gate_->Backward({.logits = saved.logits,
                                       .probs = saved.probs,
                                       .routing = saved.routing,
                                       .d_weight = d_weight},
                                      d_logits, stream));
  if (saved.d_aux.data() != nullptr) {
    MOE_RETURN_IF_ERROR(AddTo(d_logits, saved.d_aux, loss_scale, stream));
  }
  MOE_ASSIGN_OR_RETURN(const MatrixView<const float> weight_f32,
                       AsFloat(weight, workspace, stream));
  for (size_t b = 0; b < NumMicroBatches(saved.batch); ++b) {
    const MicroBatch part = MicroBatchAt(saved.batch, b);
    if (part.tokens() == 0) continue;
    const WorkspaceScope part_scope(workspace);
    const MatrixView<const float> dy = Rows(d_logits, part.begin, part.end);
    MOE_ASSIGN_OR_RETURN(const MatrixView<float> dx,
                         workspace.Matrix<float>(part.tokens(), hidden));
    MOE_RETURN_IF_ERROR((GemmInputGradient<float, float>(dy, weight_f32, dx, workspace, stream)));
    MOE_RETURN_IF_ERROR(AddTo<T>(Rows(d_tokens, part.begin, part.end), dx, 1.0f, stream));
    MOE_ASSIGN_OR_RETURN(const MatrixView<const float> x,
                         AsFloat<T>(Rows(saved.tokens, part.begin, part.end), workspace, stream));
    MOE_RETURN_IF_ERROR(d_router_weight.Add(
        [&](absl::Span<float> out, Write write) {
          return GemmWeightGradient<float>(dy, x, MatrixView<float>(out.data(), experts, hidden),
                                           write, workspace, stream);
        },
        workspace, stream));
    MOE_RETURN_IF_ERROR(stream.Synchronize());  // the scratch of this micro-batch ends here
  }
  return stream.Synchronize();
}

template class Router<float>;
template class Router<BFloat16>;

}  // namespace moe
