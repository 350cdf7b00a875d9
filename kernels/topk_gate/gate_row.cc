#include "kernels/topk_gate/gate_row.h"

#include <algorithm>
#include <cstddef>

namespace moe {

void Normalise(absl::Span<float> u, float epsilon) {
  float sum = 0;
  for (const float value : u) sum += value;
  sum += epsilon;
  if (sum == 0) return;
  for (float& value : u) value /= sum;
}

void NormaliseBackward(const TokenWeightGradient& token, SumOver sum_over, float epsilon) {
  const auto counts = [&](size_t j) {
    return sum_over == SumOver::kSelected || token.dropped[j] == 0;
  };
  double sum = 0;
  double dot = 0;
  for (size_t j = 0; j < token.score.size(); ++j) {
    if (!counts(j)) continue;
    sum += static_cast<double>(token.score[j]);
    dot += static_cast<double>(token.score[j]) * static_cast<double>(token.d_weight[j]);
  }
  sum += static_cast<double>(epsilon);
  for (size_t j = 0; j < token.score.size(); ++j) {
    const bool flows = counts(j) && sum != 0;
    token.d_score[j] = flows ? (static_cast<double>(token.d_weight[j]) - dot / sum) / sum : 0.0;
  }
}

void ScoreBackward(ScoreFunction function, absl::Span<const float> score,
                   absl::Span<const int32_t> expert, absl::Span<const double> d_score,
                   float* d_logits) {
  const auto s = [&](size_t j) {
    return static_cast<double>(score[static_cast<size_t>(expert[j])]);
  };
  if (function == ScoreFunction::kSigmoid) {
    std::fill_n(d_logits, score.size(), 0.0f);
    for (size_t j = 0; j < expert.size(); ++j) {
      d_logits[expert[j]] = static_cast<float>(s(j) * (1 - s(j)) * d_score[j]);
    }
    return;
  }
  double mean = 0;
  for (size_t j = 0; j < expert.size(); ++j) mean += s(j) * d_score[j];
  for (size_t e = 0; e < score.size(); ++e) {
    d_logits[e] = static_cast<float>(static_cast<double>(score[e]) * -mean);
  }
  for (size_t j = 0; j < expert.size(); ++j) {
    d_logits[expert[j]] = static_cast<float>(s(j) * (d_score[j] - mean));
  }
}

}  // namespace moe
