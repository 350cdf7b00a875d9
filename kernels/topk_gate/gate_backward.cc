#include "kernels/topk_gate/gate_backward.h"

#include <algorithm>

#include <absl/container/inlined_vector.h>

#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/topk_gate/gate_rows.h"
#include "kernels/topk_gate/topk_gate_cuda.h"

namespace moe {
namespace {

constexpr char kGateBackward[] = "GateBackward";
constexpr size_t kMostInlineSlots = 16;  // slots of a token; above, scratch is on the heap

// The gradient of SelectExperts' weights for one token.
void WeightsBackward(const GateRule& rule, const TokenWeightGradient& token) {
  if (rule.weights == GateWeights::kNormalised) {
    NormaliseBackward(token, SumOver::kSelected, rule.epsilon);
  } else {
    std::copy(token.d_weight.begin(), token.d_weight.end(), token.d_score.begin());
  }
  for (double& value : token.d_score) value *= static_cast<double>(rule.scale);
}

absl::Status CheckArguments(const GateGradient& in, MatrixView<float> d_logits) {
  const int64_t tokens = in.score.rows();
  const auto slots = static_cast<int64_t>(in.expert.size());
  MOE_RETURN_IF_ERROR(CheckShape(kGateBackward, "score", in.score, tokens, in.score.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kGateBackward, "d_logits", d_logits, tokens, in.score.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kGateBackward, "slot_offset", in.slot_offset.size(), tokens + 1));
  MOE_RETURN_IF_ERROR(CheckLength(kGateBackward, "dropped", in.dropped.size(), slots));
  return CheckLength(kGateBackward, "d_weight", in.d_weight.size(), slots);
}

}  // namespace

void GateBackwardRows(ScoreFunction function, const GateGradient& in, int64_t begin, int64_t end,
                      absl::FunctionRef<void(const TokenWeightGradient&)> weigh_backward,
                      MatrixView<float> d_logits) {
  const auto most = static_cast<size_t>(in.top_k);
  absl::InlinedVector<float, kMostInlineSlots> score(most), kept_d_weight(most);
  absl::InlinedVector<double, kMostInlineSlots> d_score(most);
  for (int64_t t = begin; t < end; ++t) {
    const auto first = static_cast<size_t>(in.slot_offset[static_cast<size_t>(t)]);
    const size_t k = static_cast<size_t>(in.slot_offset[static_cast<size_t>(t) + 1]) - first;
    const absl::Span<const int32_t> expert = in.expert.subspan(first, k);
    const absl::Span<const uint8_t> dropped = in.dropped.subspan(first, k);
    for (size_t j = 0; j < k; ++j) {
      score[j] = in.score(t, expert[j]);
      kept_d_weight[j] = dropped[j] != 0 ? 0.0f : in.d_weight[first + j];
    }
    const absl::Span<double> by_score = absl::MakeSpan(d_score).first(k);
    weigh_backward({.score = absl::MakeConstSpan(score).first(k),
                    .dropped = dropped,
                    .d_weight = absl::MakeConstSpan(kept_d_weight).first(k),
                    .d_score = by_score});
    ScoreBackward(function, {in.score.row(t), static_cast<size_t>(in.score.cols())}, expert,
                  by_score, d_logits.row(t));
  }
}

absl::Status GateBackward(const GateRule& rule, const GateGradient& in, MatrixView<float> d_logits,
                          Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckArguments(in, d_logits));
  if (IsCuda(stream)) {
    MOE_RETURN_IF_ERROR(CheckCudaLimit(kGateBackward, "top_k", in.top_k, topk_gate::kMaxSlots));
    return LaunchOn(kGateBackward, stream, [&](auto cuda) {
      return topk_gate::Run(
          topk_gate::CudaGateGradient{rule, in.score, in.slot_offset.data(), in.expert.data(),
                                      in.dropped.data(), in.d_weight.data(), d_logits},
          cuda);
    });
  }
  return stream.Enqueue([rule, in, d_logits, &threads = stream.threads()] {
    threads.For(in.score.rows(), kGateRowsPerTask, [&](int64_t begin, int64_t end) {
      GateBackwardRows(
          rule.score, in, begin, end,
          [&](const TokenWeightGradient& token) { WeightsBackward(rule, token); }, d_logits);
    });
    return absl::OkStatus();
  });
}

}  // namespace moe
