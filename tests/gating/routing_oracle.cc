#include "tests/gating/routing_oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

namespace moe::oracle {
namespace {

using Row = std::vector<double>;
using Range = std::pair<int64_t, int64_t>;

double LogSumExp(const Row& l) {
  const double max = *std::max_element(l.begin(), l.end());
  double sum = 0;
  for (const double x : l) sum += std::exp(x - max);
  return max + std::log(sum);
}

Row Softmax(const Row& l) {
  const double lse = LogSumExp(l);
  Row p;
  for (const double x : l) p.push_back(std::exp(x - lse));
  return p;
}

double Sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

// The experts' logits: noisy-topk has a second set behind them.
Row ExpertLogits(const RoutingSpec& spec, const Row& l) {
  return {l.begin(), l.begin() + spec.experts};
}

Row Scores(const RoutingSpec& spec, const Row& l) {
  if (!spec.sigmoid) return Softmax(ExpertLogits(spec, l));
  Row s;
  for (const double x : ExpertLogits(spec, l)) s.push_back(Sigmoid(x));
  return s;
}

// p of the load-balance loss.
Row Probabilities(const RoutingSpec& spec, const Row& l) {
  Row p = Scores(spec, l);
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& x : p) x /= sum;
  return p;
}

// All ids, best first: larger value, then lower id.
std::vector<int> Ranked(const Row& l) {
  std::vector<int> ids(l.size());
  for (size_t e = 0; e < l.size(); ++e) ids[e] = static_cast<int>(e);
  std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) {
    return l[static_cast<size_t>(a)] > l[static_cast<size_t>(b)];
  });
  return ids;
}

// What each group of experts is worth.
Row GroupWorth(const RoutingSpec& spec, const Row& value) {
  Row worth;
  const auto size = value.size() / static_cast<size_t>(spec.groups);
  for (size_t g = 0; g < static_cast<size_t>(spec.groups); ++g) {
    Row sorted(value.begin() + static_cast<int64_t>(g * size),
               value.begin() + static_cast<int64_t>((g + 1) * size));
    std::sort(sorted.rbegin(), sorted.rend());
    sorted.resize(std::min(sorted.size(), static_cast<size_t>(spec.group_sum)));
    worth.push_back(std::accumulate(sorted.begin(), sorted.end(), 0.0));
  }
  return worth;
}

// h of noisy top-k.
Row NoisyLogits(const RoutingSpec& spec, const RoutingInput& input, size_t t) {
  const Row& l = input.logits[t];
  Row h = ExpertLogits(spec, l);
  for (size_t e = 0; e < h.size() && input.training; ++e) {
    const double width = std::log1p(std::exp(l[h.size() + e])) + 0.01;
    h[e] += input.noise[t][e] * width;
  }
  return h;
}

// Columns scaled so that rows and columns of exp(l) sum alike.
std::vector<Row> Sinkhorn(const RoutingSpec& spec, const RoutingInput& input, Range unit) {
  std::vector<Row> cost;
  for (int64_t t = unit.first; t < unit.second; ++t) {
    Row c = ExpertLogits(spec, input.logits[static_cast<size_t>(t)]);
    for (double& x : c) x = std::exp(x);
    cost.push_back(c);
  }
  Row column(static_cast<size_t>(spec.experts), 1.0);
  for (double change = 1; change > 1e-4;) {
    Row sum(column.size(), 0.0);
    for (const Row& c : cost) {
      double row = 0;
      for (size_t e = 0; e < c.size(); ++e) row += c[e] * column[e];
      for (size_t e = 0; e < c.size(); ++e) {
        sum[e] += c[e] / row / static_cast<double>(cost.size());
      }
    }
    change = 0;
    for (size_t e = 0; e < column.size(); ++e) {
      const double next = 1 / (static_cast<double>(column.size()) * (sum[e] + 1e-8));
      change += std::fabs(next - column[e]) / static_cast<double>(column.size());
      column[e] = next;
    }
  }
  for (Row& c : cost) {
    for (size_t e = 0; e < c.size(); ++e) c[e] *= column[e];
  }
  return cost;
}

// What selection compares, before groups are masked.
Row SelectionValues(const RoutingSpec& spec, const RoutingInput& input, size_t t) {
  if (spec.gate == "noisy-topk") return NoisyLogits(spec, input, t);
  const bool by_score = spec.groups > 0 || !input.expert_bias.empty();
  if (!by_score) return ExpertLogits(spec, input.logits[t]);
  Row value = Scores(spec, input.logits[t]);
  for (size_t e = 0; e < value.size(); ++e) {
    value[e] += input.expert_bias.empty() ? 0 : input.expert_bias[e];
  }
  return value;
}

Row Masked(const RoutingSpec& spec, Row value) {
  if (spec.groups == 0) return value;
  const std::vector<int> best = Ranked(GroupWorth(spec, value));
  const size_t size = value.size() / static_cast<size_t>(spec.groups);
  for (size_t rank = static_cast<size_t>(spec.group_top_k); rank < best.size(); ++rank) {
    const size_t first = static_cast<size_t>(best[rank]) * size;
    std::fill_n(value.begin() + static_cast<int64_t>(first), size,
                -std::numeric_limits<double>::infinity());
  }
  return value;
}

// (m - l_e) / max(|l_e|, m) of the experts that SparseMixer has not chosen before choice j, whose
// logit is m; the others are infinitely far.
Row DistancesFrom(const std::vector<int>& expert, size_t j, const Row& l) {
  Row distance;
  const double m = l[static_cast<size_t>(expert[j])];
  for (const double x : l) distance.push_back((m - x) / std::max(std::fabs(x), m));
  for (size_t i = 0; i < j; ++i) {
    distance[static_cast<size_t>(expert[i])] = std::numeric_limits<double>::infinity();
  }
  return distance;
}

// Of choice j, by SparseMixer: its share in the softmax over the logits near it.
double ShareOfNear(const RoutingSpec& spec, const std::vector<int>& expert, size_t j,
                   const Row& l) {
  const Row distance = DistancesFrom(expert, j, l);
  Row near = l;
  for (size_t e = 0; e < l.size(); ++e) {
    if (distance[e] > 2 * spec.router_jitter) near[e] = -std::numeric_limits<double>::infinity();
  }
  return Softmax(near)[static_cast<size_t>(expert[j])];
}

TokenRouting Choose(const RoutingSpec& spec, const RoutingInput& input, size_t t,
                    const Row& value) {
  Row score = Scores(spec, input.logits[t]);
  if (spec.gate == "noisy-topk") score = Softmax(value);
  TokenRouting token;
  token.expert = Ranked(value);
  token.expert.resize(static_cast<size_t>(spec.top_k));
  double selected = 0;
  for (const int e : token.expert) selected += score[static_cast<size_t>(e)];
  for (const int e : token.expert) {
    const double s = score[static_cast<size_t>(e)];
    token.weight.push_back(spec.scale * s / (spec.normalised ? selected + spec.epsilon : 1.0));
  }
  for (size_t j = 0; j < token.expert.size() && spec.gate == "sparsemixer"; ++j) {
    token.weight[j] = ShareOfNear(spec, token.expert, j, input.logits[t]);
  }
  if (spec.gate == "gshard" && input.training && !input.second_draw.empty() &&
      input.second_draw[t] >= 2 * token.weight[1]) {
    token.expert.pop_back();
    token.weight = {1};
  }
  token.dropped.assign(token.expert.size(), false);
  token.unlimited_weight = token.weight;
  return token;
}

std::vector<Range> UnitsOfMicroBatch(Unit unit, const RoutingSpec& spec, const RoutingInput& input,
                                     Range micro_batch);
std::vector<Range> MicroBatches(const RoutingInput& input);

// Each expert takes its tokens, in every unit.
std::vector<TokenRouting> ExpertsChoose(const RoutingSpec& spec, const RoutingInput& input) {
  std::vector<TokenRouting> tokens(input.logits.size());
  const double factor = spec.capacity_factor > 0 ? spec.capacity_factor : spec.top_k;
  for (size_t e = 0; e < static_cast<size_t>(spec.experts); ++e) {
    for (const Range& part : MicroBatches(input)) {
      for (const Range& unit : UnitsOfMicroBatch(spec.capacity_unit, spec, input, part)) {
        Row column;
        for (int64_t t = unit.first; t < unit.second; ++t) {
          column.push_back(Softmax(input.logits[static_cast<size_t>(t)])[e]);
        }
        const auto room = static_cast<size_t>(
            std::ceil(static_cast<double>(column.size()) * factor / spec.experts));
        const std::vector<int> order = Ranked(column);
        for (size_t i = 0; i < std::min(room, order.size()); ++i) {
          TokenRouting& token = tokens[static_cast<size_t>(unit.first + order[i])];
          token.expert.push_back(static_cast<int>(e));
          token.weight.push_back(column[static_cast<size_t>(order[i])]);
          token.dropped.push_back(false);
        }
      }
    }
  }
  return tokens;
}

std::vector<TokenRouting> ChooseAll(const RoutingSpec& spec, const RoutingInput& input) {
  if (spec.gate == "expert-choice") return ExpertsChoose(spec, input);
  std::vector<Row> value;
  for (size_t t = 0; t < input.logits.size(); ++t) {
    value.push_back(Masked(spec, SelectionValues(spec, input, t)));
  }
  if (spec.gate == "sinkhorn" && input.training) {
    for (const Range& part : MicroBatches(input)) {
      for (const Range& unit : UnitsOfMicroBatch(spec.capacity_unit, spec, input, part)) {
        const std::vector<Row> scaled = Sinkhorn(spec, input, unit);
        std::copy(scaled.begin(), scaled.end(), value.begin() + unit.first);
      }
    }
  }
  std::vector<TokenRouting> tokens;
  for (size_t t = 0; t < value.size(); ++t) tokens.push_back(Choose(spec, input, t, value[t]));
  return tokens;
}

std::vector<Range> UnitsOfMicroBatch(Unit unit, const RoutingSpec& spec, const RoutingInput& input,
                                     Range micro_batch) {
  std::vector<Range> units;
  const auto [begin, end] = micro_batch;
  if (unit == Unit::kMicroBatch && begin < end) units.emplace_back(begin, end);
  if (unit == Unit::kBlock) {
    for (int64_t t = begin; t < end; t += spec.block) units.emplace_back(t, t + spec.block);
  }
  if (unit == Unit::kSequence) {
    for (size_t s = 0; s + 1 < input.sequence_offsets.size(); ++s) {
      const Range sequence = {input.sequence_offsets[s], input.sequence_offsets[s + 1]};
      const bool inside = sequence.first >= begin && sequence.second <= end;
      if (inside && sequence.first < sequence.second) units.push_back(sequence);
    }
  }
  return units;
}

std::vector<Range> MicroBatches(const RoutingInput& input) {
  std::vector<Range> parts;
  for (size_t b = 0; b + 1 < input.micro_batch_offsets.size(); ++b) {
    parts.emplace_back(input.micro_batch_offsets[b], input.micro_batch_offsets[b + 1]);
  }
  return parts;
}

struct Slot {
  int64_t token;
  size_t choice;
};

// The slots of a unit that want expert e, the ones to keep first.
std::map<int, std::vector<Slot>> Queues(const RoutingSpec& spec,
                                        const std::vector<TokenRouting>& tokens, Range unit) {
  std::map<int, std::vector<Slot>> queues;
  for (size_t c = 0; c < static_cast<size_t>(spec.top_k); ++c) {
    for (int64_t t = unit.first; t < unit.second; ++t) {
      const std::vector<int>& expert = tokens[static_cast<size_t>(t)].expert;
      const bool routed = c < expert.size() && expert[c] < spec.experts - spec.zero_experts;
      if (routed) queues[expert[c]].push_back({t, c});
    }
  }
  if (spec.drop == Drop::kByPosition) return queues;
  const auto weight = [&](const Slot& s) {
    return tokens[static_cast<size_t>(s.token)].unlimited_weight[s.choice];
  };
  for (auto& [e, queue] : queues) {
    std::sort(queue.begin(), queue.end(), [&](const Slot& a, const Slot& b) {
      return weight(a) != weight(b) ? weight(a) > weight(b) : a.token < b.token;
    });
  }
  return queues;
}

size_t Capacity(const RoutingSpec& spec, Range unit) {
  const auto tokens = static_cast<double>(unit.second - unit.first);
  return static_cast<size_t>(
      std::ceil(tokens * spec.top_k * spec.capacity_factor / (spec.experts - spec.zero_experts)));
}

void DropInUnit(const RoutingSpec& spec, Range unit, std::vector<TokenRouting>& tokens) {
  for (const auto& [e, queue] : Queues(spec, tokens, unit)) {
    for (size_t i = Capacity(spec, unit); i < queue.size(); ++i) {
      TokenRouting& token = tokens[static_cast<size_t>(queue[i].token)];
      token.dropped[queue[i].choice] = true;
      token.weight[queue[i].choice] = 0;
    }
  }
}

// GShard divides by the sum over what is kept.
void RenormaliseKept(TokenRouting& token, const Row& l) {
  const Row p = Softmax(l);
  double kept = 0;
  for (size_t j = 0; j < token.expert.size(); ++j) {
    if (!token.dropped[j]) kept += p[static_cast<size_t>(token.expert[j])];
  }
  for (size_t j = 0; j < token.expert.size(); ++j) {
    token.weight[j] = token.dropped[j] ? 0 : p[static_cast<size_t>(token.expert[j])] / kept;
  }
}

// alpha * E / (k T^2) * sum_i (sum_t p_ti) c_i
double BalanceLoss(const RoutingSpec& spec, const RoutingInput& input,
                   const std::vector<TokenRouting>& tokens, Range unit) {
  const size_t counted = spec.gate == "gshard" ? 1 : static_cast<size_t>(spec.top_k);
  Row p_sum(static_cast<size_t>(spec.experts), 0.0);
  Row count(static_cast<size_t>(spec.experts), 0.0);
  for (int64_t t = unit.first; t < unit.second; ++t) {
    const Row p = Probabilities(spec, input.logits[static_cast<size_t>(t)]);
    for (size_t i = 0; i < p.size(); ++i) p_sum[i] += p[i];
    for (size_t j = 0; j < counted; ++j) {
      count[static_cast<size_t>(tokens[static_cast<size_t>(t)].expert[j])] += 1;
    }
  }
  const auto n = static_cast<double>(unit.second - unit.first);
  for (size_t i = 0; i < count.size() && !input.expert_share.empty(); ++i) {
    count[i] = input.expert_share[i] * n * static_cast<double>(counted);
  }
  double sum = 0;
  for (size_t i = 0; i < count.size(); ++i) sum += p_sum[i] * count[i];
  return spec.aux_coeff * spec.experts / (static_cast<double>(counted) * n * n) * sum;
}

// Squared coefficient of variation.
double SquaredVariation(const Row& v) {
  const auto n = static_cast<double>(v.size());
  const double mean = std::accumulate(v.begin(), v.end(), 0.0) / n;
  double variance = 0;
  for (const double x : v) variance += (x - mean) * (x - mean) / (n - 1);
  return variance / (mean * mean + 1e-10);
}

// alpha * (CV^2(importance) + CV^2(load)) of noisy top-k.
double VariationLoss(const RoutingSpec& spec, const RoutingInput& input,
                     const std::vector<TokenRouting>& tokens, Range unit) {
  const auto experts = static_cast<size_t>(spec.experts);
  Row importance(experts, 0.0), load(experts, 0.0);
  for (auto t = static_cast<size_t>(unit.first); t < static_cast<size_t>(unit.second); ++t) {
    const TokenRouting& token = tokens[t];
    for (size_t j = 0; j < token.expert.size(); ++j) {
      importance[static_cast<size_t>(token.expert[j])] += token.unlimited_weight[j];
    }
    const Row h = NoisyLogits(spec, input, t);
    const std::vector<int> order = Ranked(h);
    for (size_t e = 0; e < experts; ++e) {
      const auto k = static_cast<size_t>(spec.top_k);
      const bool in = std::find(order.begin(), order.begin() + spec.top_k, static_cast<int>(e)) !=
                      order.begin() + spec.top_k;
      if (!input.training || k == experts) {
        load[e] += in ? 1 : 0;
        continue;
      }
      const double threshold = h[static_cast<size_t>(order[in ? k : k - 1])];
      const double width = std::log1p(std::exp(input.logits[t][experts + e])) + 0.01;
      load[e] += 0.5 * std::erfc(-(input.logits[t][e] - threshold) / width / std::sqrt(2.0));
    }
  }
  return spec.aux_coeff * (SquaredVariation(importance) + SquaredVariation(load));
}

double AuxLoss(const RoutingSpec& spec, const RoutingInput& input,
               const std::vector<TokenRouting>& tokens, Range unit) {
  if (spec.gate == "noisy-topk") return VariationLoss(spec, input, tokens, unit);
  const bool none = spec.gate == "expert-choice" || spec.gate == "sinkhorn";
  return none || spec.aux_coeff == 0 ? 0 : BalanceLoss(spec, input, tokens, unit);
}

}  // namespace

RoutingSpec RuleOf(const std::string& gate, int top_k) {
  RoutingSpec spec = {.gate = gate, .top_k = top_k};
  spec.sigmoid = gate == "deepseek-v3" || gate == "llama4" || (gate == "sinkhorn" && top_k == 1);
  for (const char* name :
       {"gshard", "mixtral", "qwen3", "deepseek-v3", "gpt-oss", "noisy-topk", "topk"}) {
    if (gate == name) spec.normalised = true;
  }
  spec.group_sum = gate == "deepseek-v3" ? 2 : 1;
  spec.epsilon = gate == "deepseek-v3" ? 1e-20 : 0;
  return spec;
}

RoutingResult Route(const RoutingSpec& spec, const RoutingInput& input) {
  RoutingResult result;
  result.token = ChooseAll(spec, input);
  for (const Range& part : MicroBatches(input)) {
    if (spec.capacity_factor > 0 && spec.gate != "expert-choice") {
      for (const Range& unit : UnitsOfMicroBatch(spec.capacity_unit, spec, input, part)) {
        DropInUnit(spec, unit, result.token);
      }
    }
    const auto units = UnitsOfMicroBatch(spec.balance_unit, spec, input, part);
    for (const Range& unit : units) {
      result.aux_loss +=
          AuxLoss(spec, input, result.token, unit) / static_cast<double>(units.size());
    }
    for (int64_t t = part.first; t < part.second; ++t) {
      const double lse = LogSumExp(ExpertLogits(spec, input.logits[static_cast<size_t>(t)]));
      result.z_loss += spec.z_coeff * lse * lse / static_cast<double>(part.second - part.first);
    }
  }
  if (spec.gate == "gshard") {
    for (size_t t = 0; t < result.token.size(); ++t) {
      RenormaliseKept(result.token[t], input.logits[t]);
    }
  }
  return result;
}

double DecisionMargin(const RoutingSpec& spec, const RoutingInput& input) {
  double margin = std::numeric_limits<double>::infinity();
  const auto gap = [&](const Row& value, size_t last) {
    const std::vector<int> ids = Ranked(value);
    for (size_t j = 0; j < std::min(last, value.size() - 1); ++j) {
      const double above = value[static_cast<size_t>(ids[j])];
      const double below = value[static_cast<size_t>(ids[j + 1])];
      if (std::isfinite(below)) margin = std::min(margin, above - below);
    }
  };
  const bool limits_itself = spec.gate == "expert-choice";
  for (size_t t = 0; t < input.logits.size() && !limits_itself; ++t) {
    const Row value = SelectionValues(spec, input, t);
    gap(Masked(spec, value), static_cast<size_t>(spec.top_k));
    if (spec.groups > 0) gap(GroupWorth(spec, value), static_cast<size_t>(spec.group_top_k));
    const std::vector<int> ids = Ranked(value);
    for (size_t j = 0; j < 2 && spec.gate == "sparsemixer"; ++j) {
      for (const double distance : DistancesFrom(ids, j, value)) {
        margin = std::min(margin, std::fabs(distance - 2 * spec.router_jitter));
      }
    }
  }
  if (limits_itself || spec.capacity_factor == 0 || spec.drop == Drop::kByPosition) return margin;
  const std::vector<TokenRouting> tokens = ChooseAll(spec, input);
  for (const Range& part : MicroBatches(input)) {
    for (const Range& unit : UnitsOfMicroBatch(spec.capacity_unit, spec, input, part)) {
      const size_t capacity = Capacity(spec, unit);
      for (const auto& [e, queue] : Queues(spec, tokens, unit)) {
        if (queue.size() <= capacity) continue;
        const auto weight = [&](size_t i) {
          return tokens[static_cast<size_t>(queue[i].token)].unlimited_weight[queue[i].choice];
        };
        // A weight of 1, which no other expert shares, is 1 in float32, too.
        if (spec.gate == "sparsemixer" && weight(capacity) == 1) continue;
        margin = std::min(margin, weight(capacity - 1) - weight(capacity));
      }
    }
  }
  return margin;
}

}  // namespace moe::oracle
