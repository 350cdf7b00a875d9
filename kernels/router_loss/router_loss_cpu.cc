#include "kernels/router_loss/router_loss_cpu.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/fixed_dot.h"

namespace moe::router_loss {
namespace {

// f(block, its first token, the token after its last).
template <typename Function>
void ForBlocks(const TokenBlocks& blocks, ThreadPool& threads, Function f) {
  threads.For(blocks.blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) f(b, blocks.begin[b], blocks.begin[b + 1]);
  });
}

void AddParts(const Fold& fold) {
  for (int64_t part = 0; part < fold.parts; ++part) {
    const int64_t begin = fold.offset[part];
    *fold.sum +=
        WideSum(fold.offset[part + 1] - begin, [&](int64_t i) { return fold.value[begin + i]; });
  }
}

// p = scale * score for a token.
double ProbabilityScale(const float* score, int64_t experts, ScoreFunction function) {
  if (function == ScoreFunction::kSoftmax) return 1;
  const double sum = WideSum(experts, [&](int64_t e) { return static_cast<double>(score[e]); });
  return sum == 0 ? 0 : 1 / sum;
}

void SumBlock(const Balance& b, int64_t block, int64_t begin, int64_t end) {
  const int64_t experts = b.score.cols();
  double* const sums = b.block_sums + block * experts;
  int32_t* const counts = b.block_counts + block * experts;
  std::fill_n(sums, experts, 0.0);
  std::fill_n(counts, experts, 0);
  for (int64_t t = begin; t < end; ++t) {
    const float* const row = b.score.row(t);
    const double scale = ProbabilityScale(row, experts, b.function);
    for (int64_t e = 0; e < experts; ++e) sums[e] += scale * static_cast<double>(row[e]);
    if (b.expert_share != nullptr) continue;
    const int64_t last = std::min(b.slot_offset[t] + b.choices, b.slot_offset[t + 1]);
    for (int64_t s = b.slot_offset[t]; s < last; ++s) ++counts[b.expert[s]];
  }
}

// The sums of the group's first block become those of the group, times its counts.
void FoldGroup(const Balance& b, int64_t group) {
  const int64_t experts = b.score.cols();
  const int64_t first = b.groups.first_block[group], last = b.groups.first_block[group + 1];
  const auto tokens = static_cast<double>(b.groups.begin[last] - b.groups.begin[first]);
  double* const product = b.block_sums + first * experts;
  for (int64_t e = 0; e < experts; ++e) {
    int64_t slots = 0;
    for (int64_t block = first; block < last; ++block) slots += b.block_counts[block * experts + e];
    double sum = product[e];
    for (int64_t block = first + 1; block < last; ++block) sum += b.block_sums[block * experts + e];
    const double count = b.expert_share == nullptr ? static_cast<double>(slots)
                                                   : b.expert_share[e] * b.choices * tokens;
    product[e] = sum * count;
    b.by_prob[group * experts + e] = b.scale[group] * count;
  }
  b.group_loss[group] = b.scale[group] * WideSum(experts, [&](int64_t e) { return product[e]; });
}

// d_logits[t, e] += p_te * (G_e - sum_j p_tj G_j), times 1 - score for a sigmoid.
void AddGradient(const Balance& b, const double* by_prob, int64_t begin, int64_t end) {
  const int64_t experts = b.score.cols();
  const bool sigmoid = b.function == ScoreFunction::kSigmoid;
  for (int64_t t = begin; t < end; ++t) {
    const float* const score = b.score.row(t);
    const double scale = ProbabilityScale(score, experts, b.function);
    const double mean = WideSum(
        experts, [&](int64_t e) { return scale * static_cast<double>(score[e]) * by_prob[e]; });
    float* const d = b.d_logits.row(t);
    for (int64_t e = 0; e < experts; ++e) {
      const auto s = static_cast<double>(score[e]);
      d[e] += static_cast<float>(scale * s * (by_prob[e] - mean) * (sigmoid ? 1 - s : 1));
    }
  }
}

// 0; NaN where a logit beyond the scores is not finite.
double BeyondScores(const Entropy& entropy, int64_t t) {
  const float* const l = entropy.logits.row(t) + entropy.score.cols();
  return WideSum(entropy.logits.cols() - entropy.score.cols(),
                 [&](int64_t i) { return 0 * static_cast<double>(l[i]); });
}

double SoftmaxEntropy(const Entropy& entropy, int64_t t) {
  const float* const p = entropy.score.row(t);
  const float* const l = entropy.logits.row(t);
  // A logit of p = 0 matters where it is not finite: NaN.
  const int64_t experts = entropy.score.cols();
  const double mean = WideSum(
      experts, [&](int64_t e) { return static_cast<double>(p[e]) * static_cast<double>(l[e]); });
  return static_cast<double>(entropy.log_sum_exp[t]) - (mean + BeyondScores(entropy, t));
}

double SigmoidEntropy(const Entropy& entropy, int64_t t) {
  const float* const score = entropy.score.row(t);
  const float* const l = entropy.logits.row(t);
  const int64_t experts = entropy.score.cols();
  const double sum = WideSum(experts, [&](int64_t e) { return static_cast<double>(score[e]); });
  // The score is a float32: so may be its logarithm, at a third of the time.
  const double weighted = WideSum(experts, [&](int64_t e) {
    const auto none = static_cast<double>(0 * l[e]);  // NaN for a logit that is not finite
    return score[e] != 0
               ? static_cast<double>(score[e]) * static_cast<double>(std::log(score[e])) + none
               : none;
  });
  return (sum == 0 ? weighted : std::log(sum) - weighted / sum) + BeyondScores(entropy, t);
}

void FindBadLogit(MatrixView<const float> logits, int64_t& bad_logit) {
  for (int64_t i = 0; i < logits.rows() * logits.cols(); ++i) {
    if (std::isfinite(logits(i / logits.cols(), i % logits.cols()))) continue;
    bad_logit = kFirstLogit - i;
    return;
  }
}

// d_logits[t, :] += by_lse * softmax of the logits.
void AddLogSumExpGradient(const ZLoss& z, int64_t t, double by_lse) {
  const Entropy& in = z.input;
  const float* const score = in.score.row(t);
  const float* const logits = in.function == ScoreFunction::kSigmoid ? in.logits.row(t) : nullptr;
  const auto lse = static_cast<double>(in.log_sum_exp[t]);
  float* const d = z.d_logits.row(t);
  for (int64_t e = 0; e < in.score.cols(); ++e) {
    const float p = logits == nullptr
                        ? score[e]
                        : static_cast<float>(std::exp(static_cast<double>(logits[e]) - lse));
    d[e] += static_cast<float>(by_lse * static_cast<double>(p));
  }
}

}  // namespace

TokenBlocks HostBlocks::view() const {
  return {.units = static_cast<int64_t>(first_block.size()) - 1,
          .blocks = static_cast<int64_t>(unit.size()),
          .begin = begin.data(),
          .unit = unit.data(),
          .first_block = first_block.data()};
}

HostBlocks CutIntoBlocks(absl::Span<const int64_t> offsets) {
  HostBlocks cut = {.first_block = {0}};
  for (size_t u = 0; u + 1 < offsets.size(); ++u) {
    for (int64_t t = offsets[u]; t < offsets[u + 1]; t += kBlockTokens) {
      cut.begin.push_back(t);
      cut.unit.push_back(static_cast<int64_t>(u));
    }
    cut.first_block.push_back(static_cast<int64_t>(cut.unit.size()));
  }
  cut.begin.push_back(offsets.back());
  return cut;
}

void Run(const Balance& balance, ThreadPool& threads) {
  ForBlocks(balance.groups, threads, [&](int64_t block, int64_t begin, int64_t end) {
    SumBlock(balance, block, begin, end);
  });
  for (int64_t g = 0; g < balance.groups.units; ++g) FoldGroup(balance, g);
  AddParts(balance.fold);
  if (balance.d_logits.data() == nullptr) return;
  ForBlocks(balance.groups, threads, [&](int64_t block, int64_t begin, int64_t end) {
    AddGradient(balance, balance.by_prob + balance.groups.unit[block] * balance.score.cols(), begin,
                end);
  });
}

void Run(const ZLoss& z, ThreadPool& threads) {
  ForBlocks(z.input.blocks, threads, [&](int64_t block, int64_t begin, int64_t end) {
    const double scale = z.scale[z.input.blocks.unit[block]];
    z.input.block_value[block] = scale * WideSum(end - begin, [&](int64_t i) {
                                   const auto lse =
                                       static_cast<double>(z.input.log_sum_exp[begin + i]);
                                   return lse * lse;
                                 });
    if (z.d_logits.data() == nullptr) return;
    for (int64_t t = begin; t < end; ++t) {
      AddLogSumExpGradient(z, t, 2 * scale * static_cast<double>(z.input.log_sum_exp[t]));
    }
  });
  AddParts(z.input.fold);
}

void Run(const Entropy& entropy, ThreadPool& threads) {
  const auto of_token =
      entropy.function == ScoreFunction::kSoftmax ? SoftmaxEntropy : SigmoidEntropy;
  ForBlocks(entropy.blocks, threads, [&](int64_t block, int64_t begin, int64_t end) {
    entropy.block_value[block] =
        WideSum(end - begin, [&](int64_t i) { return of_token(entropy, begin + i); });
  });
  AddParts(entropy.fold);
  if (!std::isfinite(*entropy.fold.sum)) FindBadLogit(entropy.logits, *entropy.bad_logit);
}

}  // namespace moe::router_loss
