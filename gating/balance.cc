#include "gating/balance.h"

#include <algorithm>

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

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

// sums[i] = sum of probs[t, i] over tokens [begin, end), ascending.
void SumProbs(MatrixView<const float> probs, int64_t begin, int64_t end, absl::Span<double> sums) {
  std::fill(sums.begin(), sums.end(), 0.0);
  for (int64_t t = begin; t < end; ++t) {
    const float* const row = probs.row(t);
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += static_cast<double>(row[i]);
  }
}

// d_logits[t, i] += p_ti * (by_prob[i] - sum_j p_tj * by_prob[j]).
void AddSoftmaxGradient(MatrixView<const float> probs, int64_t begin, int64_t end,
                        absl::Span<const double> by_prob, MatrixView<float> d_logits) {
  for (int64_t t = begin; t < end; ++t) {
    const float* const p = probs.row(t);
    float* const d = d_logits.row(t);
    double mean = 0;
    for (size_t i = 0; i < by_prob.size(); ++i) mean += static_cast<double>(p[i]) * by_prob[i];
    for (size_t i = 0; i < by_prob.size(); ++i) {
      d[i] += static_cast<float>(static_cast<double>(p[i]) * (by_prob[i] - mean));
    }
  }
}

}  // namespace

absl::Status AddLoadBalanceLoss(const BalanceInput& input, const TokenGroups& groups, float coeff,
                                double* loss, MatrixView<float> d_logits, Workspace& workspace) {
  const WorkspaceScope scope(workspace);
  const int64_t experts = input.probs.cols();
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
      CountChoices(input, begin, end, counts);
      SumProbs(input.probs, begin, end, sums);
      double product = 0;
      for (size_t i = 0; i < sums.size(); ++i) product += sums[i] * static_cast<double>(counts[i]);
      micro_batch_loss += scale * product;
      if (d_logits.data() == nullptr) continue;
      for (size_t i = 0; i < sums.size(); ++i) sums[i] = scale * static_cast<double>(counts[i]);
      AddSoftmaxGradient(input.probs, begin, end, sums, d_logits);
    }
    *loss += micro_batch_loss;
  }
  return absl::OkStatus();
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
