// Expert choice, arXiv:2202.09368, section 3.2: in every token group each expert takes the
// C = ceil(T_g * c / E) tokens with the largest p[:, e]; weight p. c is the capacity factor, the
// mean number of experts of a token, and k where no factor is given. A token has 0 .. E slots, in
// ascending expert id. Nothing is dropped and no balance loss is needed; but whether a token is
// taken depends on later tokens of its group, so a language model sees its own future.
#include <algorithm>

#include <absl/container/inlined_vector.h>

#include "gating/builtin_gates.h"
#include "gating/token_choice_gate.h"
#include "kernels/base/status_macros.h"
#include "kernels/topk_gate/gate_row.h"
#include "kernels/topk_gate/select_experts.h"

namespace moe {
namespace {

// Scratch for a token that more experts than this take comes from the heap.
constexpr size_t kMostInlineSlots = 256;

// chosen[t, e] = 1 for the `capacity` tokens of [begin, end) with the largest p of expert e; equal
// ones: the lowest token; a NaN is the smallest. `order`: scratch for as many tokens.
void ChooseTokens(MatrixView<const float> probs, int64_t begin, int64_t end, int64_t e,
                  int64_t capacity, absl::Span<int64_t> order, MatrixView<uint8_t> chosen) {
  order = order.first(static_cast<size_t>(end - begin));
  for (int64_t t = begin; t < end; ++t) order[t - begin] = t;
  const auto before = [&](int64_t a, int64_t b) {
    return RanksBefore(probs(a, e), a, probs(b, e), b);
  };
  if (capacity < end - begin) {
    std::nth_element(order.begin(), order.begin() + capacity, order.end(), before);
  }
  for (int64_t i = 0; i < std::min(capacity, end - begin); ++i) {
    chosen(order[i], e) = 1;
  }
}

class ExpertChoiceGate final : public Gate {
 public:
  explicit ExpertChoiceGate(double tokens_factor) : tokens_factor_(tokens_factor) {}

  GateTraits traits() const override { return {.limits_itself = true}; }

  absl::StatusOr<GateSelection> Select(const GateInput& input, Workspace& workspace,
                                       Stream& stream) const override;
  absl::Status Backward(const GateGradientInput& input, MatrixView<float> d_logits,
                        Stream& stream) const override;

 private:
  // chosen[t, e] = 1 where expert e takes token t in its token group, else 0.
  absl::Status ChooseInGroups(MatrixView<const float> probs, absl::Span<const int64_t> groups,
                              MatrixView<uint8_t> chosen, Workspace& workspace,
                              ThreadPool& threads) const;

  const double tokens_factor_;
};

absl::Status ExpertChoiceGate::ChooseInGroups(MatrixView<const float> probs,
                                              absl::Span<const int64_t> groups,
                                              MatrixView<uint8_t> chosen, Workspace& workspace,
                                              ThreadPool& threads) const {
  const int64_t experts = probs.cols();
  for (int64_t t = 0; t < probs.rows(); ++t) std::fill_n(chosen.row(t), experts, uint8_t{0});
  int64_t longest = 0;
  for (size_t g = 0; g + 1 < groups.size(); ++g) {
    longest = std::max(longest, groups[g + 1] - groups[g]);
  }
  const WorkspaceScope scope(workspace);
  MOE_ASSIGN_OR_RETURN(const MatrixView<int64_t> order,
                       workspace.Matrix<int64_t>(experts, longest));
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> capacity,
                       workspace.Array<int64_t>(static_cast<int64_t>(groups.size())));
  for (size_t g = 0; g + 1 < groups.size(); ++g) {
    capacity[g] =
        ExpertCapacity(groups[g + 1] - groups[g], 1, static_cast<int32_t>(experts), tokens_factor_);
  }
  threads.For(experts, 1, [&](int64_t first, int64_t last) {
    for (int64_t e = first; e < last; ++e) {
      for (size_t g = 0; g + 1 < groups.size(); ++g) {
        ChooseTokens(probs, groups[g], groups[g + 1], e, capacity[g],
                     {order.row(e), static_cast<size_t>(longest)}, chosen);
      }
    }
  });
  return absl::OkStatus();
}

absl::StatusOr<GateSelection> ExpertChoiceGate::Select(const GateInput& input, Workspace& workspace,
                                                       Stream& stream) const {
  const int64_t tokens = input.logits.rows();
  const int64_t experts = input.logits.cols();
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> probs, workspace.Matrix<float>(tokens, experts));
  MOE_ASSIGN_OR_RETURN(const absl::Span<float> log_sum_exp, workspace.Array<float>(tokens));
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> offset, workspace.Array<int64_t>(tokens + 1));
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> count, workspace.Array<int64_t>(experts));
  MOE_ASSIGN_OR_RETURN(const MatrixView<uint8_t> chosen,
                       workspace.Matrix<uint8_t>(tokens, experts));
  MOE_ASSIGN_OR_RETURN(const MatrixView<int32_t> best, workspace.Matrix<int32_t>(tokens, 1));
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> best_prob, workspace.Matrix<float>(tokens, 1));
  MOE_RETURN_IF_ERROR(SelectExperts({}, {.logits = input.logits},
                                    {.score = probs,
                                     .expert = best,
                                     .weight = best_prob,
                                     .log_sum_exp = log_sum_exp,
                                     .count = count},
                                    stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());  // the host counts slots
  MOE_RETURN_IF_ERROR(
      ChooseInGroups(probs, input.groups.offsets, chosen, workspace, stream.threads()));

  std::fill(count.begin(), count.end(), int64_t{0});
  offset[0] = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t mine = std::count(chosen.row(t), chosen.row(t) + experts, uint8_t{1});
    offset[t + 1] = offset[t] + mine;
  }
  MOE_ASSIGN_OR_RETURN(const absl::Span<int32_t> expert, workspace.Array<int32_t>(offset.back()));
  MOE_ASSIGN_OR_RETURN(const absl::Span<float> weight, workspace.Array<float>(offset.back()));
  size_t slot = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t e = 0; e < experts; ++e) {
      if (chosen(t, e) == 0) continue;
      expert[slot] = static_cast<int32_t>(e);
      weight[slot++] = probs(t, e);
      ++count[e];
    }
  }
  return GateSelection{.slot_offset = offset,
                       .expert = expert,
                       .weight = weight,
                       .count = count,
                       .score = probs,
                       .log_sum_exp = log_sum_exp};
}

absl::Status ExpertChoiceGate::Backward(const GateGradientInput& input, MatrixView<float> d_logits,
                                        Stream& stream) const {
  return stream.Enqueue([selection = input.selection, d_weight = input.d_weight, d_logits] {
    absl::InlinedVector<double, kMostInlineSlots> d_prob;
    for (int64_t t = 0; t < d_logits.rows(); ++t) {
      const auto first = static_cast<size_t>(selection.slot_offset[t]);
      const auto last = static_cast<size_t>(selection.slot_offset[t + 1]);
      d_prob.assign(d_weight.begin() + static_cast<int64_t>(first),
                    d_weight.begin() + static_cast<int64_t>(last));
      ScoreBackward(ScoreFunction::kSoftmax,
                    {selection.score.row(t), static_cast<size_t>(selection.score.cols())},
                    selection.expert.subspan(first, last - first), d_prob, d_logits.row(t));
    }
    return absl::OkStatus();
  });
}

}  // namespace

GateDefinition ExpertChoiceGateDefinition() {
  return {.name = "expert-choice", .make = [](const RouterConfig& config) {
            return std::make_unique<ExpertChoiceGate>(
                config.capacity_factor.value_or(static_cast<double>(config.top_k)));
          }};
}

}  // namespace moe
