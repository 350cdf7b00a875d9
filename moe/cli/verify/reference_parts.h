// The parts of RunReference. Internal.
#ifndef MOE_MOE_CLI_VERIFY_REFERENCE_PARTS_H_
#define MOE_MOE_CLI_VERIFY_REFERENCE_PARTS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "moe/cli/verify/bounded.h"
#include "moe/cli/verify/reference.h"

namespace moe::verify {

// What RunReference is passed.
struct ReferenceInput {
  const ReferenceConfig& config;
  const LayerWeights<double>& weights;
  const ReferenceState& state;
  const ReferenceBatch& batch;
};

// One (token, expert) choice.
struct ReferenceSlot {
  int32_t expert = 0;
  Bounded score;   // the weight's numerator
  Bounded before;  // weight before any drop
  Bounded weight;  // 0 where dropped
  bool dropped = false;
  std::vector<Bounded> share;  // SparseMixer: [outputs] of the choice's own softmax
};

struct ReferenceToken {
  std::vector<Bounded> logits, score;  // [outputs]
  Bounded log_sum_exp;
  std::vector<Bounded> width_logits, noisy;  // noisy top-k: r and h
  std::vector<double> noise;                 // noisy top-k: z
  std::vector<ReferenceSlot> slots;          // in choice order
};

using TokenRange = std::pair<int64_t, int64_t>;

// The token groups of micro-batch [begin, end); none is empty.
std::vector<TokenRange> GroupsOf(const ReferenceBatch& batch, TokenRange micro_batch,
                                 int64_t token_group);

// Logits, scores, slots and weights of all tokens. `seen` [tokens, H]: the router's input.
std::vector<ReferenceToken> RouteReference(const ReferenceInput& in, const Grid<double>& seen,
                                           std::string& undecided);

// d_logits row of one token += the gradient through its combine weights. d_weight: by slot.
void AddGateGradient(const ReferenceConfig& config, const ReferenceToken& token,
                     const std::vector<Bounded>& d_weight, Sum* d_logits);

// The losses aux and z of micro-batch [begin, end), and their gradient.
struct ReferenceLoss {
  Bounded aux, z;
};
ReferenceLoss AddLossGradients(const ReferenceInput& in, TokenRange micro_batch,
                               const std::vector<ReferenceToken>& tokens, Grid<Sum>& d_logits);

}  // namespace moe::verify

#endif  // MOE_MOE_CLI_VERIFY_REFERENCE_PARTS_H_
