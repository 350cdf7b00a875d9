// Which experts a token goes to, with what weights, and the gradient of the weights.
#include <algorithm>
#include <numeric>

#include <absl/strings/str_cat.h>

#include "kernels/base/rng.h"
#include "moe/cli/verify/reference_parts.h"

namespace moe::verify {
namespace {

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
    // The sum is a continuous function of the values: which of two near ones is in it is no matter.
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
    // Noisy top-k's loss also tells the first expert left out from the next.
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

int64_t Capacity(int64_t tokens, int64_t slots_per_token, int64_t experts, double factor) {
  const double c = std::ceil(static_cast<double>(tokens * slots_per_token) * factor /
                             static_cast<double>(experts));
  return static_cast<int64_t>(std::min(c, static_cast<double>(tokens)));
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

// Marks what is over capacity in one token group.
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

std::vector<ReferenceToken> RouteReference(const ReferenceConfig& config,
                                           const LayerWeights<double>& weights,
                                           const ReferenceState& state, const ReferenceBatch& batch,
                                           const Grid<double>& seen, std::string& undecided) {
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

}  // namespace moe::verify
