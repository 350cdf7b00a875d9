#include "tests/routing_oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
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

// All expert ids, best first: larger logit, then lower id.
std::vector<int> Ranked(const Row& l) {
  std::vector<int> ids(l.size());
  for (size_t e = 0; e < l.size(); ++e) ids[e] = static_cast<int>(e);
  std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) {
    return l[static_cast<size_t>(a)] > l[static_cast<size_t>(b)];
  });
  return ids;
}

TokenRouting Choose(const RoutingSpec& spec, const Row& l) {
  const Row p = Softmax(l);
  TokenRouting token;
  token.expert = Ranked(l);
  token.expert.resize(static_cast<size_t>(spec.top_k));
  double selected = 0;
  for (const int e : token.expert) selected += p[static_cast<size_t>(e)];
  const bool normalised = spec.gate == "gshard" || spec.gate == "mixtral" || spec.gate == "qwen3";
  for (const int e : token.expert) {
    token.weight.push_back(p[static_cast<size_t>(e)] / (normalised ? selected : 1.0));
  }
  token.dropped.assign(token.expert.size(), false);
  token.unlimited_weight = token.weight;
  return token;
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
  for (int choice = 0; choice < spec.top_k; ++choice) {
    for (int64_t t = unit.first; t < unit.second; ++t) {
      const auto c = static_cast<size_t>(choice);
      queues[tokens[static_cast<size_t>(t)].expert[c]].push_back({t, c});
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
  return static_cast<size_t>(std::ceil(tokens * spec.top_k * spec.capacity_factor / spec.experts));
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
    const Row p = Softmax(input.logits[static_cast<size_t>(t)]);
    for (size_t i = 0; i < p.size(); ++i) p_sum[i] += p[i];
    for (size_t j = 0; j < counted; ++j) {
      count[static_cast<size_t>(tokens[static_cast<size_t>(t)].expert[j])] += 1;
    }
  }
  double sum = 0;
  for (size_t i = 0; i < count.size(); ++i) sum += p_sum[i] * count[i];
  const auto n = static_cast<double>(unit.second - unit.first);
  return spec.aux_coeff * spec.experts / (static_cast<double>(counted) * n * n) * sum;
}

// The micro-batch as an input of its own: nothing in routing crosses it.
RoutingInput OneMicroBatch(const RoutingInput& input, Range part) {
  RoutingInput own = {.micro_batch_offsets = {0, part.second - part.first}};
  own.logits = {input.logits.begin() + part.first, input.logits.begin() + part.second};
  for (const int64_t s : input.sequence_offsets) {
    if (s >= part.first && s <= part.second) own.sequence_offsets.push_back(s - part.first);
  }
  return own;
}

}  // namespace

RoutingResult Route(const RoutingSpec& spec, const RoutingInput& input) {
  RoutingResult result;
  for (const Row& l : input.logits) result.token.push_back(Choose(spec, l));
  for (const Range& part : MicroBatches(input)) {
    if (spec.capacity_factor > 0) {
      for (const Range& unit : UnitsOfMicroBatch(spec.capacity_unit, spec, input, part)) {
        DropInUnit(spec, unit, result.token);
      }
    }
    const auto units = UnitsOfMicroBatch(spec.balance_unit, spec, input, part);
    for (const Range& unit : units) {
      result.aux_loss +=
          BalanceLoss(spec, input, result.token, unit) / static_cast<double>(units.size());
    }
    for (int64_t t = part.first; t < part.second; ++t) {
      const double lse = LogSumExp(input.logits[static_cast<size_t>(t)]);
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

std::vector<Row> LogitGradient(const RoutingSpec& spec, const RoutingInput& input,
                               const std::vector<Row>& d_weight, double step) {
  std::vector<Row> gradient = input.logits;
  for (const Range& part : MicroBatches(input)) {
    RoutingInput moved = OneMicroBatch(input, part);
    const auto objective = [&] {
      const RoutingResult r = Route(spec, moved);
      double sum = r.aux_loss + r.z_loss;
      for (size_t t = 0; t < r.token.size(); ++t) {
        const Row& d = d_weight[static_cast<size_t>(part.first) + t];
        for (size_t j = 0; j < d.size(); ++j) sum += d[j] * r.token[t].weight[j];
      }
      return sum;
    };
    for (size_t t = 0; t < moved.logits.size(); ++t) {
      for (size_t e = 0; e < moved.logits[t].size(); ++e) {
        const double at = moved.logits[t][e];
        moved.logits[t][e] = at + step;
        const double above = objective();
        moved.logits[t][e] = at - step;
        const double below = objective();
        moved.logits[t][e] = at;
        gradient[static_cast<size_t>(part.first) + t][e] = (above - below) / (2 * step);
      }
    }
  }
  return gradient;
}

double DecisionMargin(const RoutingSpec& spec, const RoutingInput& input) {
  double margin = std::numeric_limits<double>::infinity();
  std::vector<TokenRouting> tokens;
  for (const Row& l : input.logits) {
    tokens.push_back(Choose(spec, l));
    const std::vector<int> ids = Ranked(l);
    const size_t ranks = std::min(static_cast<size_t>(spec.top_k), l.size() - 1);
    for (size_t j = 0; j < ranks; ++j) {
      const double gap = l[static_cast<size_t>(ids[j])] - l[static_cast<size_t>(ids[j + 1])];
      margin = std::min(margin, gap);
    }
  }
  if (spec.capacity_factor == 0 || spec.drop == Drop::kByPosition) return margin;
  for (const Range& part : MicroBatches(input)) {
    for (const Range& unit : UnitsOfMicroBatch(spec.capacity_unit, spec, input, part)) {
      const size_t capacity = Capacity(spec, unit);
      for (const auto& [e, queue] : Queues(spec, tokens, unit)) {
        if (queue.size() <= capacity) continue;
        const auto weight = [&](size_t i) {
          return tokens[static_cast<size_t>(queue[i].token)].unlimited_weight[queue[i].choice];
        };
        margin = std::min(margin, weight(capacity - 1) - weight(capacity));
      }
    }
  }
  return margin;
}

}  // namespace moe::oracle
