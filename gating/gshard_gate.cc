// GShard, arXiv:2006.16668, algorithm 1: the two largest p, weighed by g / (sum of the g that are
// kept). With random_second_expert, in training, the second choice of weight g2 / (g1 + g2) = w is
// kept with probability min(1, 2 w); what is not kept is no slot: it takes no place in an expert's
// capacity.
#include "gating/builtin_gates.h"
#include "gating/token_choice_gate.h"
#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

class GshardGate final : public TokenChoiceGate {
 public:
  explicit GshardGate(const RouterConfig& config)
      : TokenChoiceGate({.top_k = 2}),
        random_second_(config.random_second_expert),
        seed_(config.seed),
        layer_(config.layer) {}

  GateTraits traits() const override {
    GateTraits traits = TokenChoiceGate::traits();
    traits.balance_choices = 1;  // the losses see first choices only
    return traits;
  }

  absl::StatusOr<GateSelection> Select(const GateInput& input, Workspace& workspace,
                                       Stream& stream) const override {
    MOE_ASSIGN_OR_RETURN(const GateSelection both,
                         TokenChoiceGate::Select(input, workspace, stream));
    if (!random_second_ || input.batch.mode != Mode::kTraining) return both;
    MOE_RETURN_IF_ERROR(stream.Synchronize());
    return WithoutSomeSecondChoices(input.batch, both, workspace);
  }

  absl::Status Reweigh(const GateSelection& selection, absl::Span<const uint8_t> dropped,
                       Stream& stream) const override {
    return stream.Enqueue([selection, dropped] {
      for (size_t t = 0; t + 1 < selection.slot_offset.size(); ++t) {
        const auto first = static_cast<size_t>(selection.slot_offset[t]);
        if (selection.slot_offset[t + 1] - selection.slot_offset[t] < 2) continue;
        // One of the two is kept: g / g. Where its g underflowed to 0 it stays 0.
        if (dropped[first] == dropped[first + 1]) continue;
        const size_t kept = dropped[first] != 0 ? first + 1 : first;
        Normalise(selection.weight.subspan(kept, 1));
      }
      return absl::OkStatus();
    });
  }

 private:
  void Weigh(absl::Span<float> weight) const override { Normalise(weight); }
  void WeighBackward(const TokenWeightGradient& token) const override {
    NormaliseBackward(token, SumOver::kKept);
  }

  absl::StatusOr<GateSelection> WithoutSomeSecondChoices(const Batch& batch,
                                                         const GateSelection& both,
                                                         Workspace& workspace) const {
    const int64_t tokens = both.score.rows();
    const int64_t outputs = both.score.cols();
    MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> offset, workspace.Array<int64_t>(tokens + 1));
    MOE_ASSIGN_OR_RETURN(const absl::Span<int32_t> expert, workspace.Array<int32_t>(2 * tokens));
    MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> count, workspace.Array<int64_t>(outputs));
    std::fill(count.begin(), count.end(), int64_t{0});
    size_t slots = 0;
    const auto keep = [&](size_t slot) {
      expert[slots] = both.expert[slot];
      both.weight[slots] = both.weight[slot];
      ++count[expert[slots++]];
    };
    for (size_t t = 0; t < static_cast<size_t>(tokens); ++t) {
      offset[t] = static_cast<int64_t>(slots);
      const auto first = 2 * t;
      const RandomKey key = {.seed = seed_,
                             .purpose = RandomPurpose::kSecondExpert,
                             .layer = layer_,
                             .step = static_cast<uint64_t>(batch.step),
                             .item = static_cast<uint64_t>(batch.first_global_token) + t};
      const bool both_kept = Uniform(key) < 2 * static_cast<double>(both.weight[first + 1]);
      keep(first);
      if (both_kept) {
        keep(first + 1);
      } else {
        Normalise(both.weight.subspan(slots - 1, 1));
      }
    }
    offset[tokens] = static_cast<int64_t>(slots);
    GateSelection kept = both;
    kept.slot_offset = offset;
    kept.expert = expert.first(slots);
    kept.weight = both.weight.first(slots);
    kept.count = count;
    return kept;
  }

  const bool random_second_;
  const uint64_t seed_;
  const uint32_t layer_;
};

}  // namespace

GateDefinition GshardGateDefinition() {
  return {.name = "gshard",
          .only_top_k = 2,
          .options = kGateRandomSecond | kGateZeroExperts,
          .make = [](const RouterConfig& config) {
            return std::make_unique<GshardGate>(config);
          }};
}

}  // namespace moe
