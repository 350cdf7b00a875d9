// Which experts a token goes to, with what weights, and the gradient of the weights.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "kernels/base/rng.h"
#include "moe/cli/verify/reference_parts.h"

namespace moe::verify {
namespace {

// Compares as the definitions do, and records comparisons that float32 might decide otherwise.
class Decisions {
 public:
  explicit Decisions(std::string& undecided) : undecided_(undecided) {}

  // Called wherever a and b are compared: records whether their order is certain.
  void Check(const Bounded& a, const Bounded& b, const std::string& what) {
    const double gap = std::fabs(a.value - b.value);
    const double bound = a.error + b.error;
    // NaN and infinite bounds are undecided. A gap of 0 is a tie by construction.
    if (gap == 0 || gap > bound || !undecided_.empty()) return;
    undecided_ = absl::StrCat(what, ": a gap of ", gap, ", rounding bound ", bound);
  }

  // Ids 0 .. n-1 with the largest value first, ties to the lowest id. Every comparison among the
  // first `count` and with the next is checked.
  std::vector<int32_t> Largest(const std::vector<Bounded>& value, int64_t count,
                               const std::string& what) {
    std::vector<int32_t> order(value.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return value[a].value > value[b].value; });
    for (int64_t i = 0; i < count && i + 1 < static_cast<int64_t>(order.size()); ++i) {
      if (std::isinf(value[order[i + 1]].value)) continue;  // masked
      Check(value[order[i]], value[order[i + 1]], what);
    }
    order.resize(std::min<size_t>(order.size(), count));
    return order;
  }

 private:
  std::string& undecided_;
};

std::vector<Bounded> Product(const Grid<double>& weight, int64_t first_row, int64_t rows,
                             const double* x) {
  std::vector<Bounded> out;
  for (int64_t r = first_row; r < first_row + rows; ++r) {
    Sum sum;
    for (int64_t h = 0; h < weight.cols; ++h) sum.Add(Bounded(weight(r, h)) * x[h]);
    out.push_back(sum.Total());
  }
  return out;
}

// p = softmax(l) and logsumexp(l).
std::vector<Bounded> Softmax(const std::vector<Bounded>& l, Bounded* log_sum_exp) {
  const Bounded most = *std::max_element(
      l.begin(), l.end(), [](const Bounded& a, const Bounded& b) { return a.value < b.value; });
  std::vector<Bounded> p;
  Sum sum;
  for (const Bounded& v : l) {
    p.push_back(Exp(v - most));
    sum.Add(p.back());
  }
  const Bounded total = sum.Total();
  for (Bounded& v : p) v = v / total;
  if (log_sum_exp != nullptr) *log_sum_exp = most + Log(total);
  return p;
}

void Score(const ReferenceConfig& config, const LayerWeights<double>& weights, const double* x,
           ReferenceToken& token) {
  const int64_t outputs = config.outputs();
  token.logits = Product(weights.router, 0, outputs, x);
  if (config.gate.router_bias) {
    for (int64_t e = 0; e < outputs; ++e) {
      token.logits[e] = token.logits[e] + weights.router_bias(0, e);
    }
  }
  token.score = Softmax(token.logits, &token.log_sum_exp);
  if (config.gate.score == ScoreFunction::kSigmoid) {
    std::transform(token.logits.begin(), token.logits.end(), token.score.begin(), Sigmoid);
  }
  if (config.gate.selection == ReferenceSelection::kNoisyTopK) {
    token.width_logits = Product(weights.router, outputs, outputs, x);
  }
}

// -infinity outside the group_top_k groups worth most.
void MaskGroups(const ReferenceGate& gate, Decisions& decisions, const std::string& where,
                std::vector<Bounded>& value) {
  const int64_t size = static_cast<int64_t>(value.size()) / gate.groups;
  std::vector<Bounded> worth;
  for (int64_t g = 0; g < gate.groups; ++g) {
    std::vector<Bounded> mine(value.begin() + g * size, value.begin() + (g + 1) * size);
    std::sort(mine.begin(), mine.end(),
              [](const Bounded& a, const Bounded& b) { return a.value > b.value; });
    Sum sum;
    // The sum is continuous in the values: which of two close values is in it makes no difference.
    for (int64_t i = 0; i < std::min(gate.group_sum, size); ++i) sum.Add(mine[i]);
    worth.push_back(sum.Total());
  }
  const std::vector<int32_t> kept =
      decisions.Largest(worth, gate.group_top_k, absl::StrCat(where, ", groups"));
  for (int64_t g = 0; g < gate.groups; ++g) {
    if (std::find(kept.begin(), kept.end(), g) != kept.end()) continue;
    for (int64_t i = 0; i < size; ++i) {
      value[g * size + i] = Bounded(-std::numeric_limits<double>::infinity());
    }
  }
}

void AddNoise(const ReferenceConfig& config, const ReferenceBatch& batch, int64_t t,
              ReferenceToken& token) {
  const RandomKey key = {.seed = config.seed,
                         .purpose = RandomPurpose::kNoise,
                         .step = static_cast<uint64_t>(batch.step),
                         .item = static_cast<uint64_t>(t)};
  for (size_t e = 0; e < token.logits.size(); ++e) {
    const double z = static_cast<float>(Normal(key, static_cast<uint32_t>(e)));
    token.noise.push_back(z);
    token.noisy.push_back(token.logits[e] + (Softplus(token.width_logits[e]) + 0.01) * z);
  }
}

// The values whose order Sinkhorn selects by: column_e * exp(l_te - max_t), the columns scaled
// until they change by less than 1e-4, at most 100 times.
//
// Bounds: let every cost be known within a factor e^{+-d}. A half-step turns row (column) factors
// known within e^{+-c} into column (row) factors within e^{+-(c + d)}, so after n iterations the
// columns are within e^{+-2nd}: the error grows by 2d an iteration, not geometrically.
void AddSinkhornValues(const std::vector<ReferenceToken>& tokens, TokenRange range, int64_t outputs,
                       Decisions& decisions, std::vector<std::vector<Bounded>>& value) {
  const int64_t count = range.second - range.first;
  Grid<double> cost(count, outputs);
  double d = 0;
  for (int64_t t = 0; t < count; ++t) {
    const std::vector<Bounded>& l = tokens[range.first + t].logits;
    double most = l[0].value, error = 0;
    for (const Bounded& v : l) {
      most = std::max(most, v.value);
      error = std::max(error, v.error);
    }
    d = std::max(d, 2 * error + kUnit);
    for (int64_t e = 0; e < outputs; ++e) cost(t, e) = std::exp(l[e].value - most);
  }
  std::vector<double> column(outputs, 1.0);
  double known_within = 0;
  for (int i = 0; i < 100; ++i) {
    std::vector<double> sum(outputs);
    for (int64_t t = 0; t < count; ++t) {
      double row = 0;
      for (int64_t e = 0; e < outputs; ++e) row += column[e] * cost(t, e);
      for (int64_t e = 0; e < outputs; ++e) {
        sum[e] += cost(t, e) / (static_cast<double>(count) * row);
      }
    }
    double change = 0, change_error = 0;
    const double before = known_within;
    known_within += 2 * d;
    for (int64_t e = 0; e < outputs; ++e) {
      const double next = 1 / (static_cast<double>(outputs) * (sum[e] + 1e-8));
      change += std::fabs(next - column[e]) / static_cast<double>(outputs);
      change_error += (next * std::expm1(known_within) + column[e] * std::expm1(before)) /
                      static_cast<double>(outputs);
      column[e] = next;
    }
    // Once the change is noise, the number of iterations makes no difference: later ones change
    // nothing that the bound of the values does not cover.
    decisions.Check({change, change_error}, 1e-4, "Sinkhorn's last iteration");
    if (change <= 1e-4) break;
  }
  for (int64_t t = 0; t < count; ++t) {
    std::vector<Bounded>& mine = value[range.first + t];
    for (int64_t e = 0; e < outputs; ++e) {
      const double v = column[e] * cost(t, e);
      mine.push_back(Rounded(v, v * std::expm1(known_within + d)));
    }
  }
}

// SparseMixer's weights: a softmax over the experts not chosen before, and near:
// (m - l_e) / max(|l_e|, m) <= gate.near, m the chosen logit.
void ShareNearLogits(const ReferenceGate& gate, const std::string& where, Decisions& decisions,
                     ReferenceToken& token) {
  std::vector<int32_t> candidates(token.logits.size());
  std::iota(candidates.begin(), candidates.end(), 0);
  for (ReferenceSlot& slot : token.slots) {
    const Bounded& most = token.logits[slot.expert];
    std::vector<int32_t> near;
    std::vector<Bounded> logits;
    for (const int32_t e : candidates) {
      const Bounded& l = token.logits[e];
      const Bounded factor = {std::max(std::fabs(l.value), most.value),
                              std::max(l.error, most.error)};
      const Bounded distance = e == slot.expert ? Bounded(0) : (most - l) / factor;
      decisions.Check(distance, *gate.near, absl::StrCat(where, ", near logits"));
      if (distance.value > *gate.near) continue;
      near.push_back(e);
      logits.push_back(l);
    }
    logits = Softmax(logits, nullptr);
    slot.share.resize(token.logits.size());
    for (size_t i = 0; i < near.size(); ++i) slot.share[near[i]] = logits[i];
    slot.score = slot.share[slot.expert];
    std::erase(candidates, slot.expert);
  }
}

// Fills in the slots of tokens that choose their experts.
void ChooseExperts(const ReferenceConfig& config, const ReferenceState& state,
                   std::vector<std::vector<Bounded>>& value, std::vector<ReferenceToken>& tokens,
                   Decisions& decisions) {
  const ReferenceGate& gate = config.gate;
  for (size_t t = 0; t < tokens.size(); ++t) {
    ReferenceToken& token = tokens[t];
    const std::string where = absl::StrCat("token ", t);
    if (gate.selection == ReferenceSelection::kNoisyTopK) {
      value[t] = token.noisy;
    } else if (gate.selection == ReferenceSelection::kTopK) {
      value[t] = gate.select_by_logits ? token.logits : token.score;
      for (size_t e = 0; gate.expert_bias && e < value[t].size(); ++e) {
        value[t][e] = value[t][e] + state.expert_bias[e];
      }
      if (gate.groups > 0) MaskGroups(gate, decisions, where, value[t]);
    }
    // Noisy top-k's loss also depends on which is the first expert left out.
    const bool noisy = gate.selection == ReferenceSelection::kNoisyTopK;
    std::vector<int32_t> best = decisions.Largest(value[t], config.top_k + (noisy ? 1 : 0), where);
    best.resize(static_cast<size_t>(config.top_k));
    for (const int32_t e : best) token.slots.push_back({e, token.score[e]});
    if (gate.near.has_value()) ShareNearLogits(gate, where, decisions, token);
    if (!noisy) continue;
    std::vector<Bounded> selected;
    for (const ReferenceSlot& s : token.slots) selected.push_back(token.noisy[s.expert]);
    selected = Softmax(selected, nullptr);
    for (size_t j = 0; j < selected.size(); ++j) token.slots[j].score = selected[j];
  }
}

// The least C >= tokens * slots_per_token * factor / experts, at least 1 and at most `tokens`,
// where the factor is the shortest decimal that reads back as `factor`. Exact for factors of up to
// 20 decimal places.
int64_t Capacity(int64_t tokens, int64_t slots_per_token, int64_t experts, double factor) {
  if (tokens == 0 || factor >= static_cast<double>(experts)) return tokens;
  std::string decimal;
  int places = 0;
  do {
    decimal = absl::StrFormat("%.*f", places, factor);
  } while (std::stod(decimal) != factor && ++places <= 20);
  __int128 wanted = 0, room = experts;  // both times 10^places
  for (const char c : decimal) {
    if (c != '.') wanted = wanted * 10 + (c - '0');
  }
  wanted *= tokens * slots_per_token;
  for (int i = 0; i < places; ++i) room *= 10;
  int64_t capacity = 1;
  while (capacity < tokens && capacity * room < wanted) ++capacity;
  return capacity;
}

// Every expert takes the C tokens of the group that want it most.
void ChooseTokens(const ReferenceConfig& config, TokenRange range,
                  std::vector<ReferenceToken>& tokens, Decisions& decisions) {
  const int64_t count = range.second - range.first;
  const double factor = config.capacity_factor.value_or(static_cast<double>(config.top_k));
  const int64_t capacity = Capacity(count, 1, config.outputs(), factor);
  for (int32_t e = 0; e < config.outputs(); ++e) {
    std::vector<Bounded> p;
    for (int64_t t = range.first; t < range.second; ++t) p.push_back(tokens[t].score[e]);
    const std::string where = absl::StrCat("expert ", e, " of tokens from ", range.first);
    for (const int32_t t : decisions.Largest(p, capacity, where)) {
      tokens[range.first + t].slots.push_back({e, tokens[range.first + t].score[e]});
    }
  }
}

// Weights before any drop: scores, or scores over their sum + epsilon.
void Weigh(const ReferenceGate& gate, ReferenceToken& token) {
  Sum sum;
  for (const ReferenceSlot& s : token.slots) sum.Add(s.score);
  sum.Add(Bounded(gate.epsilon));
  for (ReferenceSlot& s : token.slots) {
    const Bounded share = gate.normalised ? s.score / sum.Total() : s.score;
    s.before = s.weight = share * gate.scale;
  }
}

// GShard in training: the second choice stays with probability min(1, 2 w2).
void DropSecondAtRandom(const ReferenceConfig& config, const ReferenceBatch& batch, int64_t t,
                        ReferenceToken& token, Decisions& decisions) {
  const RandomKey key = {.seed = config.seed,
                         .purpose = RandomPurpose::kSecondExpert,
                         .step = static_cast<uint64_t>(batch.step),
                         .item = static_cast<uint64_t>(t)};
  const Bounded twice = token.slots[1].weight * 2.0;
  decisions.Check(twice, Uniform(key), absl::StrCat("token ", t, ", second choice"));
  if (Uniform(key) < twice.value) return;
  token.slots.resize(1);
  Weigh(config.gate, token);
}

// Marks slots over capacity in one token group.
void DropOverCapacity(const ReferenceConfig& config, TokenRange range,
                      std::vector<ReferenceToken>& tokens, Decisions& decisions) {
  const int64_t capacity =
      Capacity(range.second - range.first, config.top_k, config.experts, *config.capacity_factor);
  for (int64_t e = 0; e < config.experts; ++e) {
    std::vector<ReferenceSlot*>
        wanting;  // slot-major: first choices of all tokens, then second ...
    std::vector<Bounded> weight;
    for (int64_t j = 0; j < config.outputs(); ++j) {
      for (int64_t t = range.first; t < range.second; ++t) {
        if (j >= static_cast<int64_t>(tokens[t].slots.size())) continue;
        if (tokens[t].slots[j].expert == e) wanting.push_back(&tokens[t].slots[j]);
      }
    }
    if (static_cast<int64_t>(wanting.size()) <= capacity) continue;
    if (!config.drop_by_position) {  // ties go to the lowest token, whatever its choice
      wanting.clear();
      for (int64_t t = range.first; t < range.second; ++t) {
        for (ReferenceSlot& s : tokens[t].slots) {
          if (s.expert == e) wanting.push_back(&s);
        }
      }
      std::vector<ReferenceSlot*> sorted;
      for (const ReferenceSlot* s : wanting) weight.push_back(s->before);
      for (const int32_t i : decisions.Largest(weight, static_cast<int64_t>(weight.size()),
                                               absl::StrCat("capacity of expert ", e))) {
        sorted.push_back(wanting[i]);
      }
      wanting = sorted;
    }
    for (size_t i = capacity; i < wanting.size(); ++i) wanting[i]->dropped = true;
  }
}

// Weights after drops.
void Reweigh(const ReferenceGate& gate, ReferenceToken& token) {
  Sum kept;
  for (const ReferenceSlot& s : token.slots) {
    if (!s.dropped) kept.Add(s.score);
  }
  for (ReferenceSlot& s : token.slots) {
    if (s.dropped) {
      s.weight = 0;
    } else if (gate.sum_over_kept) {
      s.weight = s.score / kept.Total();
    }
  }
}

}  // namespace

std::vector<TokenRange> GroupsOf(const ReferenceBatch& batch, TokenRange micro_batch,
                                 int64_t token_group) {
  const auto [begin, end] = micro_batch;
  std::vector<TokenRange> groups;
  if (begin == end) return groups;
  if (token_group == 0) return {micro_batch};
  if (token_group > 0) {
    for (int64_t t = begin; t < end; t += token_group) groups.emplace_back(t, t + token_group);
    return groups;
  }
  for (size_t s = 0; s + 1 < batch.sequence_offsets.size(); ++s) {
    const int64_t first = batch.sequence_offsets[s], last = batch.sequence_offsets[s + 1];
    if (first >= begin && last <= end && first < last) groups.emplace_back(first, last);
  }
  return groups;
}

std::vector<ReferenceToken> RouteReference(const ReferenceInput& in, const Grid<double>& seen,
                                           std::string& undecided) {
  const auto& [config, weights, state, batch] = in;
  Decisions decisions(undecided);
  std::vector<ReferenceToken> tokens(seen.rows);
  for (int64_t t = 0; t < seen.rows; ++t) {
    Score(config, weights, &seen(t, 0), tokens[t]);
    if (config.gate.selection == ReferenceSelection::kNoisyTopK) {
      AddNoise(config, batch, t, tokens[t]);
    }
  }
  std::vector<TokenRange> groups;
  for (size_t b = 0; b + 1 < batch.micro_batch_offsets.size(); ++b) {
    const TokenRange range = {batch.micro_batch_offsets[b], batch.micro_batch_offsets[b + 1]};
    for (const TokenRange& g : GroupsOf(batch, range, config.token_group)) groups.push_back(g);
  }
  const bool by_expert = config.gate.selection == ReferenceSelection::kExpertChoice;
  std::vector<std::vector<Bounded>> value(tokens.size());
  for (const TokenRange& g : groups) {
    if (by_expert) ChooseTokens(config, g, tokens, decisions);
    if (config.gate.selection == ReferenceSelection::kSinkhorn) {
      AddSinkhornValues(tokens, g, config.outputs(), decisions, value);
    }
  }
  if (!by_expert) ChooseExperts(config, state, value, tokens, decisions);
  for (int64_t t = 0; t < seen.rows; ++t) {
    Weigh(config.gate, tokens[t]);
    if (config.gate.random_second) DropSecondAtRandom(config, batch, t, tokens[t], decisions);
  }
  if (config.capacity_factor.has_value() && !by_expert) {
    for (const TokenRange& g : groups) DropOverCapacity(config, g, tokens, decisions);
    for (ReferenceToken& token : tokens) Reweigh(config.gate, token);
  }
  return tokens;
}

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
