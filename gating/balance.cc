#include "gating/balance.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr int64_t kTokensPerTask = 256;

// counts[i] = slots of tokens [begin, end) routed to expert i, within the first `choices` of each.
void CountChoices(const BalanceInput& input, int64_t begin, int64_t end,
                  absl::Span<int64_t> counts) {
  std::fill(counts.begin(), counts.end(), int64_t{0});
  for (int64_t t = begin; t < end; ++t) {
    const int64_t first = input.slot_offset[static_cast<size_t>(t)];
    const int64_t last =
        std::min(first + input.choices, input.slot_offset[static_cast<size_t>(t) + 1]);
    for (int64_t s = first; s < last; ++s) {
      ++counts[static_cast<size_t>(input.expert[static_cast<size_t>(s)])];
    }
  }
}

// p = scale * score for a token.
double ProbabilityScale(const float* score, size_t experts, ScoreFunction function) {
  if (function == ScoreFunction::kSoftmax) return 1;
  double sum = 0;
  for (size_t i = 0; i < experts; ++i) sum += static_cast<double>(score[i]);
  return sum == 0 ? 0 : 1 / sum;
}

// sums[i] = sum of p[t, i] over tokens [begin, end), ascending.
void SumProbs(const BalanceInput& input, int64_t begin, int64_t end, absl::Span<double> sums) {
  std::fill(sums.begin(), sums.end(), 0.0);
  for (int64_t t = begin; t < end; ++t) {
    const float* const row = input.score.row(t);
    const double scale = ProbabilityScale(row, sums.size(), input.function);
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += scale * static_cast<double>(row[i]);
  }
}

// d_logits[t, i] += p_ti * (by_prob[i] - sum_j p_tj * by_prob[j]), times 1 - score for a sigmoid.
void AddLogitGradient(const BalanceInput& input, int64_t begin, int64_t end,
                      absl::Span<const double> by_prob, MatrixView<float> d_logits) {
  const bool sigmoid = input.function == ScoreFunction::kSigmoid;
  for (int64_t t = begin; t < end; ++t) {
    const float* const score = input.score.row(t);
    const double scale = ProbabilityScale(score, by_prob.size(), input.function);
    float* const d = d_logits.row(t);
    double mean = 0;
    for (size_t i = 0; i < by_prob.size(); ++i) {
      mean += scale * static_cast<double>(score[i]) * by_prob[i];
    }
    for (size_t i = 0; i < by_prob.size(); ++i) {
      const auto s = static_cast<double>(score[i]);
      d[i] += static_cast<float>(scale * s * (by_prob[i] - mean) * (sigmoid ? 1 - s : 1));
    }
  }
}

double SoftmaxEntropy(const EntropyInput& input, int64_t t) {
  const float* const p = input.score.row(t);
  const float* const l = input.logits.row(t);
  const int64_t experts = input.score.cols();
  // Interleaved, so that the compiler may add eight at a time.
  constexpr int64_t kPartials = 8;
  double partial[kPartials] = {};
  const auto add = [&](int64_t e, int64_t i) {
    // p = 0 stands beside a logit of -infinity.
    partial[i] += p[e] != 0 ? static_cast<double>(p[e]) * static_cast<double>(l[e]) : 0.0;
  };
  const int64_t body = experts - experts % kPartials;
  for (int64_t e = 0; e < body; e += kPartials) {
    for (int64_t i = 0; i < kPartials; ++i) add(e + i, i);
  }
  for (int64_t e = body; e < experts; ++e) add(e, e - body);
  return static_cast<double>(input.log_sum_exp[static_cast<size_t>(t)]) -
         std::accumulate(std::begin(partial), std::end(partial), 0.0);
}

double SigmoidEntropy(const EntropyInput& input, int64_t t) {
  const float* const score = input.score.row(t);
  double sum = 0;
  double weighted = 0;
  for (int64_t e = 0; e < input.score.cols(); ++e) {
    const auto s = static_cast<double>(score[e]);
    sum += s;
    // The score is a float32: so may be its logarithm, at a third of the time.
    if (s != 0) weighted += s * static_cast<double>(std::log(score[e]));
  }
  return sum == 0 ? 0 : std::log(sum) - weighted / sum;
}

}  // namespace

absl::Status AddLoadBalanceLoss(const BalanceInput& input, const TokenGroups& groups, float coeff,
                                double* loss, MatrixView<float> d_logits, Workspace& workspace) {
  const WorkspaceScope scope(workspace);
  const int64_t experts = input.score.cols();
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> counts, workspace.Array<int64_t>(experts));
  MOE_ASSIGN_OR_RETURN(const absl::Span<double> sums, workspace.Array<double>(experts));
  for (size_t b = 0; b + 1 < groups.micro_batch.size(); ++b) {
    const int64_t first = groups.micro_batch[b];
    const int64_t last = groups.micro_batch[b + 1];
    double micro_batch_loss = 0;
    for (int64_t g = first; g < last; ++g) {
      const int64_t begin = groups.offsets[static_cast<size_t>(g)];
      const int64_t end = groups.offsets[static_cast<size_t>(g) + 1];
      const auto tokens = static_cast<double>(end - begin);
      const double scale = static_cast<double>(coeff) * static_cast<double>(experts) /
                           (input.choices * tokens * tokens) / static_cast<double>(last - first);
      if (input.expert_share.empty()) CountChoices(input, begin, end, counts);
      const auto count = [&](size_t i) {
        return input.expert_share.empty() ? static_cast<double>(counts[i])
                                          : input.expert_share[i] * input.choices * tokens;
      };
      SumProbs(input, begin, end, sums);
      double product = 0;
      for (size_t i = 0; i < sums.size(); ++i) product += sums[i] * count(i);
      micro_batch_loss += scale * product;
      if (d_logits.data() == nullptr) continue;
      for (size_t i = 0; i < sums.size(); ++i) sums[i] = scale * count(i);
      AddLogitGradient(input, begin, end, sums, d_logits);
    }
    *loss += micro_batch_loss;
  }
  return absl::OkStatus();
}

absl::StatusOr<double> EntropySum(const EntropyInput& input, Workspace& workspace,
                                  ThreadPool& threads) {
  const WorkspaceScope scope(workspace);
  const int64_t tokens = input.score.rows();
  MOE_ASSIGN_OR_RETURN(const absl::Span<double> entropy, workspace.Array<double>(tokens));
  const auto of_token = input.function == ScoreFunction::kSoftmax ? SoftmaxEntropy : SigmoidEntropy;
  threads.For(tokens, kTokensPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) entropy[static_cast<size_t>(t)] = of_token(input, t);
  });
  return std::accumulate(entropy.begin(), entropy.end(), 0.0);
}

void AddZLoss(MatrixView<const float> probs, absl::Span<const float> log_sum_exp,
              absl::Span<const int64_t> micro_batch_offsets, float coeff, double* loss,
              MatrixView<float> d_logits) {
  for (size_t b = 0; b + 1 < micro_batch_offsets.size(); ++b) {
    const int64_t begin = micro_batch_offsets[b];
    const int64_t end = micro_batch_offsets[b + 1];
    if (begin == end) continue;
    const double scale = static_cast<double>(coeff) / static_cast<double>(end - begin);
    double sum = 0;
    for (int64_t t = begin; t < end; ++t) {
      const double lse = log_sum_exp[static_cast<size_t>(t)];
      sum += lse * lse;
      if (d_logits.data() == nullptr) continue;
      const double by_lse = 2 * scale * lse;
      const float* const p = probs.row(t);
      float* const d = d_logits.row(t);
      for (int64_t i = 0; i < probs.cols(); ++i) {
        d[i] += static_cast<float>(by_lse * static_cast<double>(p[i]));
      }
    }
    *loss += scale * sum;
  }
}

}  // namespace moe
