// GShard, arXiv:2006.16668, algorithm 1, without the random second choice: the two largest p,
// weighed by g / (sum of the g that capacity keeps).
#include "gating/router.h"
#include "gating/softmax_top_k.h"

namespace moe {
namespace {

class GshardGate final : public SoftmaxTopKGate {
 public:
  GshardGate() : SoftmaxTopKGate(2) {}

  // The losses see first choices only.
  int32_t balance_choices() const override { return 1; }

  absl::Status Reweigh(const GateSelection& selection, absl::Span<const uint8_t> dropped,
                       Stream& stream) const override {
    return stream.Enqueue([selection, dropped] {
      for (size_t first = 0; first < dropped.size(); first += 2) {
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
};

}  // namespace

std::unique_ptr<const Gate> MakeGshardGate(const RouterConfig& /*config*/) {
  return std::make_unique<GshardGate>();
}

}  // namespace moe
