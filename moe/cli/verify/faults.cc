#include "moe/cli/verify/faults.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include <absl/strings/str_cat.h>

#include "gating/gate.h"
#include "kernels/base/status_macros.h"

namespace moe::verify {
namespace {

// A gate whose selection is tampered with; all else is the gate's own.
class FaultyGate final : public Gate {
 public:
  FaultyGate(std::unique_ptr<const Gate> gate, RouterConfig config, Fault fault)
      : gate_(std::move(gate)), config_(std::move(config)), fault_(fault) {}

  GateTraits traits() const override { return gate_->traits(); }
  absl::StatusOr<GateSelection> Select(const GateInput& input, Workspace& workspace,
                                       Stream& stream) const override {
    MOE_ASSIGN_OR_RETURN(GateSelection selection, gate_->Select(input, workspace, stream));
    MOE_RETURN_IF_ERROR(stream.Synchronize());
    MOE_ASSIGN_OR_RETURN(const auto expert,
                         workspace.Array<int32_t>(static_cast<int64_t>(selection.expert.size())));
    MOE_ASSIGN_OR_RETURN(const auto count,
                         workspace.Array<int64_t>(static_cast<int64_t>(selection.count.size())));
    std::copy(selection.expert.begin(), selection.expert.end(), expert.begin());
    for (int64_t t = 0; t < selection.score.rows(); ++t) {
      const int64_t first = selection.slot_offset[t];
      const int64_t slots = selection.slot_offset[t + 1] - first;
      Tamper(input, {.logits = input.logits.row(t),
                     .score = selection.score.row(t),
                     .experts = selection.score.cols(),
                     .expert = expert.subspan(first, slots),
                     .weight = selection.weight.subspan(first, slots)});
    }
    std::fill(count.begin(), count.end(), int64_t{0});
    for (const int32_t e : expert) ++count[e];
    selection.expert = expert;
    selection.count = count;
    return selection;
  }

  absl::Status Reweigh(const GateSelection& selection, absl::Span<const uint8_t> dropped,
                       Stream& stream) const override {
    return gate_->Reweigh(selection, dropped, stream);
  }
  absl::Status AddLosses(const GateInput& input, const GateSelection& selection, double* loss,
                         MatrixView<float> d_logits, Workspace& workspace) const override {
    return gate_->AddLosses(input, selection, loss, d_logits, workspace);
  }
  absl::Status Backward(const GateGradientInput& input, MatrixView<float> d_logits,
                        Stream& stream) const override {
    return gate_->Backward(input, d_logits, stream);
  }

 private:
  struct Token {
    const float* logits;
    const float* score;
    int64_t experts;
    absl::Span<int32_t> expert;
    absl::Span<float> weight;
  };
  void Tamper(const GateInput& input, const Token& token) const {
    if (fault_ == Fault::kUnstableTie) return TakeHighestOfTies(token);
    if (fault_ == Fault::kGroupMaskZero) return MaskByZero(input, token);
    std::vector<float> biased(token.score, token.score + token.experts);
    for (size_t e = 0; e < biased.size(); ++e) biased[e] += input.expert_bias[e];
    Weigh(token, biased);
  }

  void TakeHighestOfTies(const Token& token) const {
    for (int32_t& chosen : token.expert) {
      for (auto e = static_cast<int32_t>(token.experts) - 1; e > chosen; --e) {
        const bool tie = token.logits[e] == token.logits[chosen];
        if (!tie || std::count(token.expert.begin(), token.expert.end(), e) != 0) continue;
        chosen = e;
        break;
      }
    }
  }

  void MaskByZero(const GateInput& input, const Token& token) const {
    const int64_t size = token.experts / config_.num_groups;
    std::vector<float> value(token.score, token.score + token.experts);
    for (size_t e = 0; e < value.size(); ++e) value[e] += input.expert_bias[e];
    std::vector<std::pair<float, int64_t>> worth;  // negative, so that the least is the best
    for (int64_t g = 0; g < config_.num_groups; ++g) {
      std::vector<float> mine(value.begin() + g * size, value.begin() + (g + 1) * size);
      std::sort(mine.rbegin(), mine.rend());
      worth.emplace_back(
          -std::accumulate(mine.begin(), mine.begin() + std::min<int64_t>(2, size), 0.0f), g);
    }
    std::sort(worth.begin(), worth.end());
    for (size_t i = config_.group_top_k; i < worth.size(); ++i) {
      std::fill_n(value.begin() + worth[i].second * size, size, 0.0f);
    }
    std::vector<int32_t> order(value.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return value[a] > value[b]; });
    std::copy_n(order.begin(), token.expert.size(), token.expert.begin());
    Weigh(token, absl::MakeConstSpan(token.score, token.experts));
  }

  // weight = value of the selected, normalised as the gate says, times the factor
  void Weigh(const Token& token, absl::Span<const float> value) const {
    float sum = 0;
    for (const int32_t e : token.expert) sum += value[e];
    const bool normalised = config_.norm_topk_prob.value_or(config_.gate == "deepseek-v3");
    for (size_t j = 0; j < token.expert.size(); ++j) {
      const float share = normalised ? value[token.expert[j]] / sum : value[token.expert[j]];
      token.weight[j] = share * config_.scaling_factor;
    }
  }

  const std::unique_ptr<const Gate> gate_;
  const RouterConfig config_;
  const Fault fault_;
};

bool LivesInGate(Fault fault) {
  return fault == Fault::kUnstableTie || fault == Fault::kBiasedWeights ||
         fault == Fault::kGroupMaskZero;
}

const char* NameOf(Fault fault) {
  for (const FaultInfo& info : Faults()) {
    if (info.fault == fault) return info.name;
  }
  return "none";
}

}  // namespace

absl::Span<const FaultInfo> Faults() {
  static constexpr FaultInfo kFaults[] = {
      {Fault::kGradientScaleByEp, "gradient-scale-by-ep", "mixtral"},
      {Fault::kRankLocalBalance, "rank-local-balance", "mixtral"},
      {Fault::kShuffledFloatSum, "shuffled-float-sum", "mixtral"},
      {Fault::kUnstableTie, "unstable-tie", "mixtral"},
      {Fault::kStaleCount, "stale-count", "deepseek-v3"},
      {Fault::kBiasedWeights, "biased-weights", "deepseek-v3"},
      {Fault::kGroupMaskZero, "group-mask-zero", "deepseek-v3"},
      {Fault::kTreeOrder, "tree-order", "deepseek-v3", true},
      {Fault::kLostMicroBatch, "lost-micro-batch", "deepseek-v3", true}};
  return kFaults;
}

absl::Status CheckFault(const MoeLayerConfig& config, Fault fault) {
  const RouterConfig& router = config.router;
  const GateTraits traits = FindGate(router.gate)->make(router)->traits();
  const auto need = [&](bool holds, absl::string_view what) {
    if (holds) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("fault ", NameOf(fault), " with gate '",
                                                   router.gate, "' changes nothing, expected ",
                                                   what));
  };
  const bool bias = traits.expert_bias;
  switch (fault) {
    case Fault::kNone:
    case Fault::kGradientScaleByEp:
    case Fault::kShuffledFloatSum:
    case Fault::kTreeOrder:
    case Fault::kLostMicroBatch:
      return absl::OkStatus();
    case Fault::kRankLocalBalance:
      return need(router.aux_loss_coeff != 0 && router.load_balancing != LoadBalancing::kNone &&
                      !traits.limits_itself && router.micro_batch_tokens == 0,
                  "a balance loss, without padding or blocks of tokens");
    case Fault::kUnstableTie:
      return need(traits.score == ScoreFunction::kSoftmax && !bias && router.num_groups == 0 &&
                      traits.logit_sets == 1 && !traits.limits_itself && router.num_experts >= 3 &&
                      router.top_k < router.num_experts,
                  "a gate that selects by logits, such as mixtral, and more experts than choices");
    case Fault::kStaleCount:
      return need(bias && router.bias_update_rate != 0, "an expert bias, as deepseek-v3 has");
    case Fault::kBiasedWeights:
      return need(bias, "an expert bias, as deepseek-v3 has");
    case Fault::kGroupMaskZero:
      return need(bias && router.num_groups > 0, "an expert bias and groups of experts");
  }
  return absl::OkStatus();
}

absl::StatusOr<MoeLayerConfig> WithFault(const MoeLayerConfig& config, Fault fault) {
  if (!LivesInGate(fault)) return config;
  const GateDefinition* const inner = FindGate(config.router.gate);
  GateDefinition faulty = *inner;
  faulty.name = absl::StrCat(inner->name, "+", NameOf(fault));
  faulty.make = [inner, fault](const RouterConfig& router) {
    RouterConfig original = router;
    original.gate = inner->name;
    return std::make_unique<FaultyGate>(inner->make(original), original, fault);
  };
  MoeLayerConfig result = config;
  result.router.gate = faulty.name;
  const absl::Status status = RegisterGate(std::move(faulty));
  if (!status.ok() && !absl::IsAlreadyExists(status)) return status;
  return result;
}

}  // namespace moe::verify
