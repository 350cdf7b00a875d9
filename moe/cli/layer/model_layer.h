// Runs one MoE layer with the weights of a public model over ranks, forward and backward.
#ifndef MOE_MOE_CLI_LAYER_MODEL_LAYER_H_
#define MOE_MOE_CLI_LAYER_MODEL_LAYER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "comm/communicator.h"
#include "moe/hf/hf_weights.h"
#include "moe/io/safetensors.h"
#include "moe/run/trace_export.h"
#include "moe/train/trainer.h"

namespace moe::cli {

// Tensors [tokens, H] of open files.
struct ModelLayerInput {
  CheckpointTensor x = {};
  CheckpointTensor dy = {};  // file nullptr: forward alone
};

// Tensor `name` of `file`, which must be [tokens, hidden] of F32, F16, BF16 or F64; empty `tokens`:
// any number. kDataLoss "<file>: tensor '<name>': what is, what was expected".
absl::StatusOr<CheckpointTensor> FindTokens(const SafetensorsFile& file, absl::string_view name,
                                            std::optional<int64_t> tokens, int64_t hidden);

struct ModelLayerOptions {
  TrainerOptions trainer = {};  // RunModelLayer sets micro_batches, unit_log2 and trace_capacity
  TraceSink* trace = nullptr;   // receives rank 0's timeline; set on all ranks or on none
};

// Results for all tokens in order, on rank 0; empty on other ranks.
struct ModelLayerResult {
  int64_t tokens = 0;
  std::vector<float> y;               // [tokens, H]
  std::vector<float> dx;              // [tokens, H]; empty without dy
  std::vector<int64_t> expert_ids;    // [tokens, K] in order of choice; -1: fewer than K
  std::vector<float> expert_weights;  // [tokens, K] combine weights
  std::vector<float> router_logits;   // [tokens, E]
  // Sums over tokens, with names and layouts of the checkpoint; empty without dy.
  struct Gradient {
    const hf::LayerTensor* of = nullptr;
    std::vector<float> values;
  };
  std::vector<Gradient> gradients;
  double forward_seconds = 0, backward_seconds = 0;  // the slowest rank's
  std::optional<BFloat16Order> bfloat16_order = {};  // Trainer::bfloat16_order
  int64_t trace_left_out = 0;  // events that did not fit in the timeline, over all ranks
};

// y = layer(x) in evaluation mode (moe/layer/moe_layer.h); with dy also dx and
// d(sum_t <dy_t, y_t>) / d(weight) for every trained weight. `weights` and `input` must outlive the
// result, and may be shared by ranks that are threads.
//
// Tokens are cut into blocks, one micro-batch each: 16 blocks, or more of 64 tokens. The cut
// depends on the number of tokens alone, so that in layout-invariant numerics results do not depend
// on the ranks. There weight gradients are sums on an exact grid (kernels/exact_sum/exact_sum.h).
// If a grid with unit 2^-50 cannot represent them, or loses more of a tensor than float32's
// rounding does, all tokens run again with the smallest unit that can represent the largest term:
// about 2^-62 of that term, times the blocks. A warning names each tensor that is so much smaller
// that the grid still loses 1e-6 of it.
//
// Collective over `world`, blocks. kDataLoss: a router's logit or expert bias that is not finite,
// naming layer and expert; gradients that are not finite. Other errors: those of Session::Create,
// MoeLayer and the communicator.
absl::StatusOr<ModelLayerResult> RunModelLayer(const hf::LayerWeights& weights,
                                               const ModelLayerInput& input,
                                               const ModelLayerOptions& options,
                                               std::unique_ptr<Communicator> world);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_LAYER_MODEL_LAYER_H_
