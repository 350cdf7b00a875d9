#include "gating/softmax_top_k.h"

#include <algorithm>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/topk_gate/topk_gate.h"

namespace moe {
namespace {

// Tokens that one task takes.
constexpr int64_t kTokensPerTask = 512;

// d_logits[e] = p_e * (d_p_e - sum_i p_i d_p_i), where d_p is 0 but at the selected experts.
void SoftmaxBackward(const float* probs, int64_t num_experts, absl::Span<const int32_t> expert,
                     absl::Span<const double> d_prob, float* d_logits) {
  double mean = 0;
  for (size_t j = 0; j < expert.size(); ++j) {
    mean += static_cast<double>(probs[expert[j]]) * d_prob[j];
  }
  for (int64_t e = 0; e < num_experts; ++e) {
    d_logits[e] = static_cast<float>(static_cast<double>(probs[e]) * -mean);
  }
  for (size_t j = 0; j < expert.size(); ++j) {
    d_logits[expert[j]] =
        static_cast<float>(static_cast<double>(probs[expert[j]]) * (d_prob[j] - mean));
  }
}

}  // namespace

absl::StatusOr<GateSelection> SoftmaxTopKGate::Select(MatrixView<const float> logits,
                                                      const Batch& /*batch*/, Workspace& workspace,
                                                      Stream& stream) const {
  const int64_t tokens = logits.rows();
  const int64_t experts = logits.cols();
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> offset, workspace.Array<int64_t>(tokens + 1));
  MOE_ASSIGN_OR_RETURN(const MatrixView<int32_t> expert, workspace.Matrix<int32_t>(tokens, top_k_));
  MOE_ASSIGN_OR_RETURN(const absl::Span<float> weight, workspace.Array<float>(tokens * top_k_));
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> probs, workspace.Matrix<float>(tokens, experts));
  MOE_ASSIGN_OR_RETURN(const absl::Span<float> log_sum_exp, workspace.Array<float>(tokens));
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> count, workspace.Array<int64_t>(experts));

  const TopKGateOutput out = {.probs = probs,
                              .expert = expert,
                              .value = MatrixView<float>(weight.data(), tokens, top_k_),
                              .log_sum_exp = log_sum_exp,
                              .count = count};
  MOE_RETURN_IF_ERROR(TopKGate(logits, out, stream));
  MOE_RETURN_IF_ERROR(stream.Enqueue([this, weight, offset, tokens, &threads = stream.threads()] {
    const auto k = static_cast<size_t>(top_k_);
    threads.For(tokens, kTokensPerTask, [&](int64_t begin, int64_t end) {
      for (auto t = static_cast<size_t>(begin); t < static_cast<size_t>(end); ++t) {
        Weigh(weight.subspan(t * k, k));
      }
    });
    for (size_t t = 0; t < offset.size(); ++t) offset[t] = static_cast<int64_t>(t * k);
    return absl::OkStatus();
  }));
  return GateSelection{.slot_offset = offset,
                       .expert = {expert.data(), weight.size()},
                       .weight = weight,
                       .count = count,
                       .probs = probs,
                       .log_sum_exp = log_sum_exp};
}

absl::Status SoftmaxTopKGate::Backward(const GateGradientInput& input, MatrixView<float> d_logits,
                                       Stream& stream) const {
  // Captured by value: the task may run after this call.
  return stream.Enqueue([this, probs = input.probs, routing = input.routing,
                         d_weight = input.d_weight, d_logits, &threads = stream.threads()] {
    const auto k = static_cast<size_t>(top_k_);
    threads.For(probs.rows(), kTokensPerTask, [&](int64_t begin, int64_t end) {
      std::vector<float> prob(k);
      std::vector<float> kept_d_weight(k);
      std::vector<double> d_prob(k);
      for (int64_t t = begin; t < end; ++t) {
        const size_t first = static_cast<size_t>(t) * k;
        const absl::Span<const int32_t> expert = routing.expert.subspan(first, k);
        const absl::Span<const uint8_t> dropped = routing.dropped.subspan(first, k);
        for (size_t j = 0; j < k; ++j) {
          prob[j] = probs(t, expert[j]);
          kept_d_weight[j] = dropped[j] != 0 ? 0.0f : d_weight[first + j];
        }
        WeighBackward({.prob = prob,
                       .dropped = dropped,
                       .d_weight = kept_d_weight,
                       .d_prob = absl::MakeSpan(d_prob)});
        SoftmaxBackward(probs.row(t), probs.cols(), expert, d_prob, d_logits.row(t));
      }
    });
    return absl::OkStatus();
  });
}

void Normalise(absl::Span<float> u) {
  float sum = 0;
  for (const float value : u) sum += value;
  if (sum == 0) return;
  for (float& value : u) value /= sum;
}

void NormaliseBackward(const TokenWeightGradient& token, SumOver sum_over) {
  const auto counts = [&](size_t j) {
    return sum_over == SumOver::kSelected || token.dropped[j] == 0;
  };
  double sum = 0;
  double dot = 0;
  for (size_t j = 0; j < token.prob.size(); ++j) {
    if (!counts(j)) continue;
    sum += static_cast<double>(token.prob[j]);
    dot += static_cast<double>(token.prob[j]) * static_cast<double>(token.d_weight[j]);
  }
  for (size_t j = 0; j < token.prob.size(); ++j) {
    const bool flows = counts(j) && sum != 0;
    token.d_prob[j] = flows ? (static_cast<double>(token.d_weight[j]) - dot / sum) / sum : 0.0;
  }
}

}  // namespace moe
