// The gradient of combine weights by the logits.
#include "moe/cli/verify/reference_parts.h"

namespace moe::verify {

void AddGateGradient(const ReferenceConfig& config, const ReferenceToken& token,
                     const std::vector<Bounded>& d_weight, Sum* d_logits) {
  const ReferenceGate& gate = config.gate;
  const size_t k = token.slots.size();
  std::vector<Bounded> dw(k), d_score(k);
  for (size_t j = 0; j < k; ++j) dw[j] = token.slots[j].dropped ? Bounded(0) : d_weight[j];
  const int64_t outputs = config.outputs();

  if (gate.selection == ReferenceSelection::kNoisyTopK) {  // w = softmax(h of the selected)
    Sum mean;
    for (size_t j = 0; j < k; ++j) mean.Add(token.slots[j].score * dw[j]);
    for (size_t j = 0; j < k; ++j) {
      const int32_t e = token.slots[j].expert;
      const Bounded dh = token.slots[j].score * (dw[j] - mean.Total());
      d_logits[e].Add(dh);
      d_logits[outputs + e].Add(dh * token.noise[e] * Sigmoid(token.width_logits[e]));
    }
    return;
  }

  if (gate.near.has_value()) {  // dw_j / dl_e = w_j ([e = c_j] - share_e)
    for (size_t j = 0; j < k; ++j) {
      const ReferenceSlot& slot = token.slots[j];
      for (int64_t e = 0; e < outputs; ++e) {
        const Bounded chosen = e == slot.expert ? 1.0 : 0.0;
        d_logits[e].Add(dw[j] * slot.score * (chosen - slot.share[e]));
      }
    }
    return;
  }

  // w = u / S, S = sum_m u_m + epsilon over the slots that it holds:
  // du_j = (dw_j - sum_m u_m dw_m / S) / S.
  Sum total, dot;
  total.Add(Bounded(gate.epsilon));
  const auto counts = [&](size_t j) {
    return !gate.sum_over_kept || !token.slots[j].dropped;
  };
  for (size_t j = 0; j < k; ++j) {
    if (!counts(j)) continue;
    total.Add(token.slots[j].score);
    dot.Add(token.slots[j].score * dw[j]);
  }
  for (size_t j = 0; j < k; ++j) {
    if (!gate.normalised) {
      d_score[j] = dw[j];
    } else if (counts(j)) {
      const Bounded s = total.Total();
      d_score[j] = (dw[j] - dot.Total() / s) / s;
    }
    d_score[j] = d_score[j] * gate.scale;
  }
  if (gate.score == ScoreFunction::kSigmoid) {
    for (size_t j = 0; j < k; ++j) {
      const int32_t e = token.slots[j].expert;
      const Bounded s = token.score[e];
      d_logits[e].Add(s * (Bounded(1) - s) * d_score[j]);
    }
    return;
  }
  // dl_e = p_e (dp_e - sum_i p_i dp_i)
  std::vector<Bounded> dp(outputs);
  Sum mean;
  for (size_t j = 0; j < k; ++j) {
    dp[token.slots[j].expert] = d_score[j];
    mean.Add(token.score[token.slots[j].expert] * d_score[j]);
  }
  for (int64_t e = 0; e < outputs; ++e) {
    d_logits[e].Add(token.score[e] * (dp[e] - mean.Total()));
  }
}

}  // namespace moe::verify
