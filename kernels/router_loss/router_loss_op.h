// Arguments of both paths of router_loss.h, with pointers into one device's memory. Internal. Plain
// C++: .cu files include it.
#ifndef MOE_KERNELS_ROUTER_LOSS_ROUTER_LOSS_OP_H_
#define MOE_KERNELS_ROUTER_LOSS_ROUTER_LOSS_OP_H_

#include <cstdint>
#include <limits>

#include "kernels/base/cuda_types.h"
#include "kernels/base/tensor_view.h"
#include "kernels/topk_gate/gate_rule.h"

namespace moe::router_loss {

constexpr int64_t kBlockTokens = 256;

// An index i is stored as kFirstLogit - i: the maximum is the first index, and any is above 0.
constexpr int64_t kFirstLogit = std::numeric_limits<int64_t>::max();

// Tokens [0, T) in units (groups, micro-batches), which are cut into blocks of at most
// kBlockTokens.
struct TokenBlocks {
  int64_t units = 0;
  int64_t blocks = 0;
  const int64_t* begin = nullptr;        // [blocks + 1] tokens
  const int64_t* unit = nullptr;         // [blocks] the unit of a block
  const int64_t* first_block = nullptr;  // [units + 1]
};

// *sum += over the parts, ascending, of the sum of value[offset[part]] .. value[offset[part + 1]].
struct Fold {
  const double* value;
  const int64_t* offset;  // [parts + 1]
  int64_t parts;
  double* sum;
};

struct Balance {
  TokenBlocks groups;
  MatrixView<const float> score;
  ScoreFunction function;
  const int64_t* slot_offset;
  const int32_t* expert;
  int32_t choices;
  const double* expert_share;  // [E], or nullptr
  const double* scale;         // [groups] coeff * E / (k * T_g^2) / groups of the micro-batch
  MatrixView<float> d_logits;  // or an empty view

  // Scratch.
  double* block_sums;     // [blocks, E] of probabilities
  int32_t* block_counts;  // [blocks, E] of slots
  double* by_prob;        // [groups, E] G_i
  double* group_loss;     // [groups]
  Fold fold;              // sum of group_loss
};

struct Entropy {
  TokenBlocks blocks;
  MatrixView<const float> logits;
  MatrixView<const float> score;
  ScoreFunction function;
  const float* log_sum_exp;
  double* block_value;  // [blocks] scratch
  Fold fold;            // sum of block_value
  int64_t* bad_logit;   // z-loss: nullptr
};

struct ZLoss {
  Entropy input;               // its `function` determines how p is computed
  const double* scale;         // [micro-batches] coeff / T_b
  MatrixView<float> d_logits;  // or an empty view
};

// Load balance: a block counts the slots of its experts in shared memory.
constexpr int kMaxExperts = 1024;

// All enqueue on `stream` and return the launch error alone. All pointers are device memory. The
// bits are the CPU's, except where they depend on an exponential or a logarithm.
cudaError_t Run(const Balance& balance, cudaStream_t stream);
cudaError_t Run(const ZLoss& z, cudaStream_t stream);
cudaError_t Run(const Entropy& entropy, cudaStream_t stream);

}  // namespace moe::router_loss

#endif  // MOE_KERNELS_ROUTER_LOSS_ROUTER_LOSS_OP_H_
