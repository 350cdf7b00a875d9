// One mixture-of-experts layer in float64, in plain loops, forward and backward: products are
// compared with it.
//
// Written from the definitions (docs/routing.md and the papers named in the gates' files). Shares
// no code with gating/, kernels/ and moe/, but for what is input: random numbers and the words of a
// configuration. Rounding points of the product appear as Stored() and only widen the bounds.
#ifndef MOE_MOE_CLI_VERIFY_REFERENCE_H_
#define MOE_MOE_CLI_VERIFY_REFERENCE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gating/router_config.h"
#include "kernels/activation/activation_kind.h"
#include "moe/cli/verify/bounded.h"

namespace moe::verify {

// [rows, cols], row after row.
template <typename Number>
struct Grid {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<Number> data;

  Grid() = default;
  Grid(int64_t r, int64_t c) : rows(r), cols(c), data(static_cast<size_t>(r * c)) {}
  Number& operator()(int64_t r, int64_t c) { return data[static_cast<size_t>(r * cols + c)]; }
  const Number& operator()(int64_t r, int64_t c) const {
    return data[static_cast<size_t>(r * cols + c)];
  }
};

enum class ReferenceSelection : uint8_t { kTopK, kNoisyTopK, kSinkhorn, kExpertChoice };

// A gate, described by its mechanisms.
struct ReferenceGate {
  ReferenceSelection selection = ReferenceSelection::kTopK;
  ScoreFunction score = ScoreFunction::kSoftmax;
  bool select_by_logits = true;  // else by score + expert bias, within groups
  bool router_bias = false;
  bool expert_bias = false;
  int64_t groups = 0;
  int64_t group_top_k = 0;
  // The worth of a group is the sum of so many of its largest values.
  int64_t group_sum = 1;
  // Weights: the selected scores, or those over their sum; times scale.
  bool normalised = false;
  double epsilon = 0;          // normalised: added to that sum
  bool sum_over_kept = false;  // the sum leaves dropped slots out (GShard)
  // SparseMixer: weights by a softmax of each choice's own, over logits that are this near to it.
  std::optional<double> near;
  double scale = 1;
  bool weight_on_input = false;
  bool random_second = false;
  double jitter = 0;
  int64_t balance_choices = 0;  // slots of a token that the balance loss counts; 0 = no such loss
};

struct ReferenceConfig {
  int64_t experts = 0;
  int64_t zero_experts = 0;
  int64_t top_k = 1;
  int64_t hidden = 0;
  int64_t ffn = 0;
  int64_t shared_ffn = 0;  // 0 = no shared expert
  bool shared_gated = false;
  bool projection_biases = false;
  Activation activation = Activation::kSwiGlu;
  ReferenceGate gate;
  std::optional<double> capacity_factor;
  bool drop_by_position = false;
  int64_t token_group = 0;  // 0 the micro-batch, -1 the sequence, else tokens
  LoadBalancing balance = LoadBalancing::kNone;
  double aux_coeff = 0;
  double z_coeff = 0;
  double bias_update_rate = 0;
  uint64_t seed = 0;  // seed of random numbers
  Storage storage;    // type of activations
  int64_t outputs() const { return experts + zero_experts; }
  bool gated_activation() const {
    return activation != Activation::kRelu && activation != Activation::kRelu2;
  }
};

template <typename Number>
struct ExpertWeights {
  Grid<Number> gate_up;       // [2F, H], or [F, H] where the activation has no gate
  Grid<Number> gate_up_bias;  // [1, rows of gate_up]; empty = none
  Grid<Number> down;          // [H, F]
  Grid<Number> down_bias;     // [1, H]
};

template <typename Number>
struct LayerWeights {
  Grid<Number> router;                         // [logit sets * outputs, H]
  Grid<Number> router_bias;                    // [1, outputs]; empty = none
  std::vector<ExpertWeights<Number>> experts;  // [experts]
  ExpertWeights<Number> shared;                // empty grids = none
  Grid<Number> shared_gate;                    // [1, H]
};

// One step of a whole global batch. Values are exact in the storage type.
struct ReferenceBatch {
  std::vector<int64_t> micro_batch_offsets;  // [M + 1] tokens
  std::vector<int64_t> sequence_offsets;     // ascending; contains every micro-batch's ends
  Grid<double> x, dy;                        // [tokens, H]
  int64_t step = 0;
};

// State of the layer from earlier steps.
struct ReferenceState {
  std::vector<double> expert_bias;   // [outputs]; empty without
  std::vector<double> expert_share;  // [outputs]; empty before the first step
};

struct ReferenceResult {
  Grid<Bounded> y, dx;  // [tokens, H]
  LayerWeights<Bounded> gradients;
  std::vector<Bounded> aux_loss, z_loss;      // [M]
  std::vector<int64_t> expert_count;          // [outputs], dropped slots included
  std::vector<int64_t> dropped;               // [M] slots
  std::vector<std::vector<int32_t>> choices;  // [tokens] experts in choice order
  // Empty, or the first decision that float32 rounding may take the other way: what, where, how
  // close, how large the bound. Values that are equal here are equal in the product, too (ties by
  // construction), and go to the lowest id.
  std::string undecided;
};

// gradients are those of sum over micro-batches of (<y, dy> + aux + z).
ReferenceResult RunReference(const ReferenceConfig& config, const LayerWeights<double>& weights,
                             const ReferenceState& state, const ReferenceBatch& batch);

// b_i += rate * sign(mean(c) - c_i), and the shares c_i / sum c.
void EndReferenceStep(const ReferenceConfig& config, const std::vector<int64_t>& expert_count,
                      ReferenceState& state);

// `value` to the nearest that `storage` holds, ties to even. Numbers too large for it stay.
double RoundTo(const Storage& storage, double value);

}  // namespace moe::verify

#endif  // MOE_MOE_CLI_VERIFY_REFERENCE_H_
