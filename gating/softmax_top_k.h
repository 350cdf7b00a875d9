// The frame of the softmax gates: selection by the k largest logits, one file per weighing.
#ifndef MOE_GATING_SOFTMAX_TOP_K_H_
#define MOE_GATING_SOFTMAX_TOP_K_H_

#include <cstdint>
#include <memory>

#include <absl/types/span.h>

#include "gating/gate.h"

namespace moe {

// One token's selected slots in backward: in [K], out [K].
struct TokenWeightGradient {
  absl::Span<const float> prob;       // p at the selected experts
  absl::Span<const uint8_t> dropped;  // 1 = over capacity
  absl::Span<const float> d_weight;   // gradient by the combine weights; 0 where dropped
  absl::Span<double> d_prob;          // out: gradient by p at the selected experts
};

// Selects by the kernel TopKGate; a subclass says what the selected probabilities become.
class SoftmaxTopKGate : public Gate {
 public:
  absl::StatusOr<GateSelection> Select(MatrixView<const float> logits, const Batch& batch,
                                       Workspace& workspace, Stream& stream) const final;
  absl::Status Backward(const GateGradientInput& input, MatrixView<float> d_logits,
                        Stream& stream) const final;
  int32_t balance_choices() const override { return top_k_; }

 protected:
  explicit SoftmaxTopKGate(int32_t top_k) : top_k_(top_k) {}
  int32_t top_k() const { return top_k_; }

 private:
  // One token: selected probabilities [K] in, combine weights out, in place.
  virtual void Weigh(absl::Span<float> weight) const = 0;
  // One token: the gradient of Weigh (after Reweigh).
  virtual void WeighBackward(const TokenWeightGradient& token) const = 0;

  const int32_t top_k_;
};

// w_j = u_j / S, S = sum_j u_j, in place. Where every u is 0 (underflow), w is 0.
void Normalise(absl::Span<float> u);

// d_prob_j = (dw_j - sum_m w_m dw_m) / S. kSelected: S, w and j range over every slot. kKept: over
// those that are not dropped; d_prob is 0 for the others.
enum class SumOver : uint8_t { kSelected, kKept };
void NormaliseBackward(const TokenWeightGradient& token, SumOver sum_over);

std::unique_ptr<const Gate> MakeSwitchGate(const RouterConfig& config);
std::unique_ptr<const Gate> MakeGshardGate(const RouterConfig& config);
std::unique_ptr<const Gate> MakeMixtralGate(const RouterConfig& config);
std::unique_ptr<const Gate> MakeOlmoeGate(const RouterConfig& config);
std::unique_ptr<const Gate> MakeQwen3Gate(const RouterConfig& config);

}  // namespace moe

#endif  // MOE_GATING_SOFTMAX_TOP_K_H_
