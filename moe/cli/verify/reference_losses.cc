// The router's losses, per micro-batch, and their gradients by the logits.
#include <algorithm>

#include "moe/cli/verify/reference_parts.h"

namespace moe::verify {
namespace {

// One token group and what its loss is multiplied with: coefficient / groups of the micro-batch.
struct Unit {
  TokenRange range;
  double scale = 0;
};

// p of the balance loss: softmax, or scores over their sum.
std::vector<Bounded> Probabilities(const ReferenceConfig& config, const ReferenceToken& token) {
  if (config.gate.score == ScoreFunction::kSoftmax) return token.score;
  Sum sum;
  for (const Bounded& s : token.score) sum.Add(s);
  std::vector<Bounded> p;
  for (const Bounded& s : token.score) p.push_back(s / sum.Total());
  return p;
}

// L = scale * E / (k T^2) * sum_i (sum_t p_ti) c_i; c is a constant.
Bounded BalanceLoss(const ReferenceConfig& config, const ReferenceState& state, const Unit& unit,
                    const std::vector<ReferenceToken>& tokens, Grid<Sum>& d_logits) {
  const int64_t outputs = config.outputs();
  const auto [begin, end] = unit.range;
  const auto count = static_cast<double>(end - begin);
  const auto choices = static_cast<double>(config.gate.balance_choices);
  std::vector<double> c(outputs);
  for (int64_t t = begin; t < end; ++t) {
    const auto most = std::min<size_t>(tokens[t].slots.size(), config.gate.balance_choices);
    for (size_t j = 0; j < most; ++j) c[tokens[t].slots[j].expert] += 1;
  }
  if (config.balance == LoadBalancing::kGlobalAuxLoss) {
    for (int64_t e = 0; e < outputs; ++e) {
      const double share =
          state.expert_share.empty() ? 1.0 / static_cast<double>(outputs) : state.expert_share[e];
      c[e] = share * choices * count;
    }
  }
  const double scale = unit.scale * static_cast<double>(outputs) / (choices * count * count);
  Sum loss;
  for (int64_t t = begin; t < end; ++t) {
    const std::vector<Bounded> p = Probabilities(config, tokens[t]);
    Sum mean;
    for (int64_t e = 0; e < outputs; ++e) {
      loss.Add(p[e] * (scale * c[e]));
      mean.Add(p[e] * (scale * c[e]));
    }
    for (int64_t e = 0; e < outputs; ++e) {
      Bounded d = p[e] * (Bounded(scale * c[e]) - mean.Total());
      if (config.gate.score == ScoreFunction::kSigmoid) d = d * (Bounded(1) - tokens[t].score[e]);
      d_logits(t, e).Add(d);
    }
  }
  return loss.Total();
}

Bounded ZLoss(const ReferenceConfig& config, TokenRange range,
              const std::vector<ReferenceToken>& tokens, Grid<Sum>& d_logits) {
  const double scale = config.z_coeff / static_cast<double>(range.second - range.first);
  Sum loss;
  for (int64_t t = range.first; t < range.second; ++t) {
    const Bounded lse = tokens[t].log_sum_exp;
    loss.Add(lse * lse * scale);
    for (int64_t e = 0; e < config.outputs(); ++e) {
      d_logits(t, e).Add(Exp(tokens[t].logits[e] - lse) * lse * (2 * scale));
    }
  }
  return loss.Total();
}

struct Variation {
  Bounded value;                // CV^2 = var / (mean^2 + 1e-10), var unbiased
  std::vector<Bounded> slopes;  // by every v_i
};

Variation SquaredVariation(const std::vector<Bounded>& v) {
  Variation result{.value = 0, .slopes = std::vector<Bounded>(v.size())};
  if (v.size() < 2) return result;
  const auto n = static_cast<double>(v.size());
  Sum mean_sum, variance_sum;
  for (const Bounded& x : v) mean_sum.Add(x * (1 / n));
  const Bounded mean = mean_sum.Total();
  for (const Bounded& x : v) variance_sum.Add((x - mean) * (x - mean) * (1 / (n - 1)));
  const Bounded variance = variance_sum.Total();
  const Bounded below = mean * mean + 1e-10;
  result.value = variance / below;
  for (size_t i = 0; i < v.size(); ++i) {
    result.slopes[i] =
        (v[i] - mean) * (2 / (n - 1)) / below - variance * mean * (2 / n) / (below * below);
  }
  return result;
}

bool Chosen(const ReferenceToken& token, int64_t e) {
  return std::any_of(token.slots.begin(), token.slots.end(),
                     [&](const ReferenceSlot& s) { return s.expert == e; });
}

// The expert whose h is the threshold of expert e: the k-th largest of the others.
int32_t ThresholdOf(const ReferenceToken& token, int64_t e) {
  if (!Chosen(token, e)) return token.slots.back().expert;
  int32_t best = -1;
  for (int32_t other = 0; other < static_cast<int32_t>(token.noisy.size()); ++other) {
    if (Chosen(token, other)) continue;
    if (best < 0 || token.noisy[other].value > token.noisy[best].value) best = other;
  }
  return best;
}

Bounded NoiseWidth(const ReferenceToken& token, int64_t e) {
  return Softplus(token.width_logits[e]) + 0.01;
}

// P(e is chosen | its noise is drawn again) = Phi(u), u = (l_e - h_threshold) / width.
Bounded Distance(const ReferenceToken& token, int64_t e) {
  return (token.logits[e] - token.noisy[ThresholdOf(token, e)]) / NoiseWidth(token, e);
}

// One token's part of the gradient, given the slopes of CV^2 by importance and by load. Without
// `by_load` the load is a count, which has no gradient.
void AddNoisyGradient(const ReferenceToken& token, double scale,
                      const std::vector<Bounded>& by_importance,
                      const std::vector<Bounded>* by_load, Sum* d_logits) {
  const auto outputs = static_cast<int64_t>(token.logits.size());
  std::vector<Sum> dh(outputs), dl(outputs), d_width(outputs);
  Sum mean;
  for (const ReferenceSlot& s : token.slots) mean.Add(s.before * by_importance[s.expert]);
  for (const ReferenceSlot& s : token.slots) {
    dh[s.expert].Add(s.before * (by_importance[s.expert] - mean.Total()));
  }
  for (int64_t e = 0; by_load != nullptr && e < outputs; ++e) {
    const Bounded u = Distance(token, e);
    const Bounded du = (*by_load)[e] * NormalDensity(u) / NoiseWidth(token, e);
    dl[e].Add(du);
    dh[ThresholdOf(token, e)].Add(-du);
    d_width[e].Add(-(du * u));
  }
  for (int64_t e = 0; e < outputs; ++e) {  // h = l + z * width(r)
    const Bounded h = dh[e].Total();
    d_logits[e].Add((dl[e].Total() + h) * scale);
    d_logits[outputs + e].Add((d_width[e].Total() + h * token.noise[e]) *
                              Sigmoid(token.width_logits[e]) * scale);
  }
}

// Noisy top-k: scale * (CV^2(importance) + CV^2(load)).
Bounded NoisyLoss(const ReferenceConfig& config, const Unit& unit,
                  const std::vector<ReferenceToken>& tokens, Grid<Sum>& d_logits) {
  const int64_t outputs = config.outputs();
  const bool smooth = config.top_k < outputs;
  std::vector<Sum> importance_sum(outputs), load_sum(outputs);
  for (int64_t t = unit.range.first; t < unit.range.second; ++t) {
    for (const ReferenceSlot& s : tokens[t].slots) {
      importance_sum[s.expert].Add(s.before);
      if (!smooth) load_sum[s.expert].Add(1);
    }
    for (int64_t e = 0; smooth && e < outputs; ++e) {
      load_sum[e].Add(NormalCdf(Distance(tokens[t], e)));
    }
  }
  std::vector<Bounded> importance, load;
  for (const Sum& s : importance_sum) importance.push_back(s.Total());
  for (const Sum& s : load_sum) load.push_back(s.Total());
  const Variation by_importance = SquaredVariation(importance);
  const Variation by_load = SquaredVariation(load);
  for (int64_t t = unit.range.first; t < unit.range.second; ++t) {
    AddNoisyGradient(tokens[t], unit.scale, by_importance.slopes,
                     smooth ? &by_load.slopes : nullptr, &d_logits(t, 0));
  }
  return (by_importance.value + by_load.value) * unit.scale;
}

}  // namespace

ReferenceLoss AddLossGradients(const ReferenceInput& in, TokenRange micro_batch,
                               const std::vector<ReferenceToken>& tokens, Grid<Sum>& d_logits) {
  const ReferenceConfig& config = in.config;
  ReferenceLoss loss;
  if (micro_batch.first == micro_batch.second) return loss;
  const bool noisy = config.gate.selection == ReferenceSelection::kNoisyTopK;
  const bool balanced = config.gate.balance_choices > 0;
  if (config.balance != LoadBalancing::kNone && config.aux_coeff != 0 && (noisy || balanced)) {
    int64_t group = config.token_group;
    if (!noisy && config.balance == LoadBalancing::kSeqAuxLoss) group = -1;
    if (!noisy && config.balance == LoadBalancing::kGlobalAuxLoss) group = 0;
    const std::vector<TokenRange> groups = GroupsOf(in.batch, micro_batch, group);
    Sum aux;
    for (const TokenRange& g : groups) {
      const Unit unit = {g, config.aux_coeff / static_cast<double>(groups.size())};
      aux.Add(noisy ? NoisyLoss(config, unit, tokens, d_logits)
                    : BalanceLoss(config, in.state, unit, tokens, d_logits));
    }
    loss.aux = aux.Total();
  }
  if (config.z_coeff != 0) loss.z = ZLoss(config, micro_batch, tokens, d_logits);
  return loss;
}

}  // namespace moe::verify
