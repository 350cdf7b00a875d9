#include "gating/token_choice_gate.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/topk_gate/sigmoid_scores.h"
#include "kernels/topk_gate/topk_gate.h"
#include "kernels/topk_gate/topk_select.h"

namespace moe {
namespace {

// Tokens that one task takes.
constexpr int64_t kTokensPerTask = 512;
constexpr float kMasked = -std::numeric_limits<float>::infinity();

absl::Span<const float> RowOf(MatrixView<const float> matrix, int64_t t) {
  return {matrix.row(t), static_cast<size_t>(matrix.cols())};
}

// Masks one token's values outside its group_top_k best groups.
class GroupMask {
 public:
  GroupMask(const TokenChoiceRule& rule, int64_t experts)
      : rule_(rule),
        size_(experts / rule.num_groups),
        worth_(static_cast<size_t>(rule.num_groups)),
        sorted_(static_cast<size_t>(size_)) {}

  void Apply(float* value) {
    for (size_t g = 0; g < worth_.size(); ++g) worth_[g] = WorthOf(Group(value, g));
    for (size_t g = 0; g < worth_.size(); ++g) {
      if (GroupsBefore(g) < rule_.group_top_k) continue;
      std::fill_n(Group(value, g), size_, kMasked);
    }
  }

 private:
  float* Group(float* value, size_t g) const { return value + static_cast<int64_t>(g) * size_; }

  // The sum of the group_sum largest values, largest first; a NaN is worth nothing.
  float WorthOf(const float* group) {
    std::transform(group, group + size_, sorted_.begin(),
                   [](float v) { return std::isnan(v) ? kMasked : v; });
    const auto most = std::min<int64_t>(rule_.group_sum, size_);
    std::partial_sort(sorted_.begin(), sorted_.begin() + most, sorted_.end(), std::greater<>());
    float sum = 0;
    for (int64_t i = 0; i < most; ++i) sum += sorted_[static_cast<size_t>(i)];
    return sum;
  }

  // Groups worth more than g, or as much with a lower id.
  int32_t GroupsBefore(size_t g) const {
    int32_t before = 0;
    for (size_t other = 0; other < worth_.size(); ++other) {
      if (worth_[other] > worth_[g] || (worth_[other] == worth_[g] && other < g)) ++before;
    }
    return before;
  }

  const TokenChoiceRule& rule_;
  const int64_t size_;
  std::vector<float> worth_, sorted_;
};

// What TopKGate writes beside the ids, where another kernel has selected: the scores at the ids, and
// how often each was selected.
absl::Status TakeSelected(MatrixView<const float> score, MatrixView<const int32_t> expert,
                          MatrixView<float> weight, absl::Span<int64_t> count, Stream& stream) {
  return stream.Enqueue([score, expert, weight, count, &threads = stream.threads()] {
    threads.For(expert.rows(), kTokensPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t j = 0; j < expert.cols(); ++j) weight(t, j) = score(t, expert(t, j));
      }
    });
    std::fill(count.begin(), count.end(), int64_t{0});
    for (int64_t t = 0; t < expert.rows(); ++t) {
      for (int64_t j = 0; j < expert.cols(); ++j) ++count[static_cast<size_t>(expert(t, j))];
    }
    return absl::OkStatus();
  });
}

}  // namespace

GateTraits TokenChoiceGate::traits() const {
  return {.expert_bias = rule_.expert_bias, .score = rule_.score, .balance_choices = rule_.top_k};
}

absl::Status TokenChoiceGate::FillValues(const GateInput& input, MatrixView<const float> score,
                                         MatrixView<float> value, Stream& stream) const {
  return stream.Enqueue(
      [this, score, value, bias = input.expert_bias, &threads = stream.threads()] {
        threads.For(score.rows(), kTokensPerTask, [&](int64_t begin, int64_t end) {
          std::optional<GroupMask> mask;
          if (rule_.num_groups > 0) mask.emplace(rule_, score.cols());
          for (int64_t t = begin; t < end; ++t) {
            for (int64_t e = 0; e < score.cols(); ++e) {
              value(t, e) = score(t, e) + (bias.empty() ? 0.0f : bias[static_cast<size_t>(e)]);
            }
            if (mask.has_value()) mask->Apply(value.row(t));
          }
        });
        return absl::OkStatus();
      });
}

// Scores of all experts; ids of the selected ones, their scores in `weight`, and their counts.
absl::Status TokenChoiceGate::Score(const GateInput& input, MatrixView<float> score,
                                    MatrixView<int32_t> expert, MatrixView<float> weight,
                                    absl::Span<float> log_sum_exp, absl::Span<int64_t> count,
                                    Workspace& workspace, Stream& stream) const {
  if (rule_.score == ScoreFunction::kSoftmax) {
    const TopKGateOutput out = {.probs = score,
                                .expert = expert,
                                .value = weight,
                                .log_sum_exp = log_sum_exp,
                                .count = count};
    MOE_RETURN_IF_ERROR(TopKGate(input.logits, out, stream));
    if (SelectsByLogits()) return absl::OkStatus();  // the kernel has done it all
  } else {
    MOE_RETURN_IF_ERROR(SigmoidScores(input.logits, score, log_sum_exp, stream));
  }
  if (SelectsByLogits()) {
    MOE_RETURN_IF_ERROR(TopKSelect(input.logits, expert, stream));
    return TakeSelected(score, expert, weight, count, stream);
  }
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> value,
                       workspace.Matrix<float>(score.rows(), score.cols()));
  MOE_RETURN_IF_ERROR(FillValues(input, score, value, stream));
  MOE_RETURN_IF_ERROR(TopKSelect(value, expert, stream));
  return TakeSelected(score, expert, weight, count, stream);
}

absl::StatusOr<GateSelection> TokenChoiceGate::Select(const GateInput& input, Workspace& workspace,
                                                      Stream& stream) const {
  const int64_t tokens = input.logits.rows();
  const int64_t experts = input.logits.cols();
  const int64_t slots = tokens * rule_.top_k;
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> offset, workspace.Array<int64_t>(tokens + 1));
  MOE_ASSIGN_OR_RETURN(const MatrixView<int32_t> expert,
                       workspace.Matrix<int32_t>(tokens, rule_.top_k));
  MOE_ASSIGN_OR_RETURN(const absl::Span<float> weight, workspace.Array<float>(slots));
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> score, workspace.Matrix<float>(tokens, experts));
  MOE_ASSIGN_OR_RETURN(const absl::Span<float> log_sum_exp, workspace.Array<float>(tokens));
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> count, workspace.Array<int64_t>(experts));

  MOE_RETURN_IF_ERROR(Score(input, score, expert,
                            MatrixView<float>(weight.data(), tokens, rule_.top_k), log_sum_exp,
                            count, workspace, stream));
  MOE_RETURN_IF_ERROR(stream.Enqueue([this, weight, tokens, offset, &threads = stream.threads()] {
    const auto k = static_cast<size_t>(rule_.top_k);
    threads.For(tokens, kTokensPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        Weigh(weight.subspan(static_cast<size_t>(t) * k, k));
      }
    });
    for (size_t t = 0; t < offset.size(); ++t) offset[t] = static_cast<int64_t>(t * k);
    return absl::OkStatus();
  }));
  return GateSelection{.slot_offset = offset,
                       .expert = {expert.data(), weight.size()},
                       .weight = weight,
                       .count = count,
                       .score = score,
                       .log_sum_exp = log_sum_exp};
}

absl::Status TokenChoiceGate::Backward(const GateGradientInput& input, MatrixView<float> d_logits,
                                       Stream& stream) const {
  // Captured by value: the task may run after this call.
  return stream.Enqueue([this, selection = input.selection, all_dropped = input.dropped,
                         d_weight = input.d_weight, d_logits, &threads = stream.threads()] {
    threads.For(selection.score.rows(), kTokensPerTask, [&](int64_t begin, int64_t end) {
      const auto most = static_cast<size_t>(rule_.top_k);
      std::vector<float> score(most);
      std::vector<float> kept_d_weight(most);
      std::vector<double> d_score(most);
      for (int64_t t = begin; t < end; ++t) {
        const auto first = static_cast<size_t>(selection.slot_offset[static_cast<size_t>(t)]);
        const size_t k =
            static_cast<size_t>(selection.slot_offset[static_cast<size_t>(t) + 1]) - first;
        const absl::Span<const int32_t> expert = selection.expert.subspan(first, k);
        const absl::Span<const uint8_t> dropped = all_dropped.subspan(first, k);
        for (size_t j = 0; j < k; ++j) {
          score[j] = selection.score(t, expert[j]);
          kept_d_weight[j] = dropped[j] != 0 ? 0.0f : d_weight[first + j];
        }
        const absl::Span<double> by_score = absl::MakeSpan(d_score).first(k);
        WeighBackward({.score = absl::MakeConstSpan(score).first(k),
                       .dropped = dropped,
                       .d_weight = absl::MakeConstSpan(kept_d_weight).first(k),
                       .d_score = by_score});
        ScoreBackward(rule_.score, RowOf(selection.score, t), expert, by_score, d_logits.row(t));
      }
    });
    return absl::OkStatus();
  });
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

void Normalise(absl::Span<float> u) {
  float sum = 0;
  for (const float value : u) sum += value;
  if (sum == 0) return;
  for (float& value : u) value /= sum;
}

void NormaliseBackward(const TokenWeightGradient& token, SumOver sum_over) {
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
  for (size_t j = 0; j < token.score.size(); ++j) {
    const bool flows = counts(j) && sum != 0;
    token.d_score[j] = flows ? (static_cast<double>(token.d_weight[j]) - dot / sum) / sum : 0.0;
  }
}

void ScaledTokenChoiceGate::Weigh(absl::Span<float> weight) const {
  if (normalised_) Normalise(weight);
  for (float& value : weight) value *= scale_;
}

void ScaledTokenChoiceGate::WeighBackward(const TokenWeightGradient& token) const {
  if (normalised_) {
    NormaliseBackward(token, SumOver::kSelected);
  } else {
    std::copy(token.d_weight.begin(), token.d_weight.end(), token.d_score.begin());
  }
  for (double& value : token.d_score) value *= static_cast<double>(scale_);
}

}  // namespace moe
