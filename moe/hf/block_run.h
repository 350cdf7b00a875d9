// One MoE layer of a public model, run over ranks, forward and backward.
#ifndef MOE_MOE_HF_BLOCK_RUN_H_
#define MOE_MOE_HF_BLOCK_RUN_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "comm/communicator.h"
#include "kernels/base/dtype.h"
#include "moe/context.h"
#include "moe/hf/hf_weights.h"
#include "moe/io/safetensors.h"
#include "moe/trace_export.h"

namespace moe::hf {

// Tokens are cut into blocks of this many, the last one shorter, of which every rank takes a
// contiguous, balanced range: 16 blocks, or more of 64 tokens. The size depends on the number of
// tokens alone, not on the ranks, so in layout-invariant numerics neither do the results.
int64_t BlockTokens(int64_t tokens);

// Tensors [tokens, H] of open files.
struct BlockInput {
  CheckpointTensor x = {};
  CheckpointTensor dy = {};  // file nullptr: forward alone
};

// Tensor `name` of `file`, which must be [tokens, hidden] of F32, F16, BF16 or F64; empty `tokens`:
// any number. kDataLoss "<file>: tensor '<name>': what is, what was expected".
absl::StatusOr<CheckpointTensor> FindTokens(const SafetensorsFile& file, absl::string_view name,
                                            std::optional<int64_t> tokens, int64_t hidden);

struct BlockRunOptions {
  DeviceKind device = DeviceKind::kCpu;
  int expert_parallel_size = 1;
  DType dtype = DType::kFloat32;  // of activations and weights; or kBFloat16, kFloat16
  Numerics numerics = Numerics::kLayoutInvariant;
  int threads = 1;             // of this rank
  TraceSink* trace = nullptr;  // where rank 0 writes the time line; of all ranks or of none
};

// On rank 0 all tokens, in order; on others nothing but the times.
struct BlockResult {
  int64_t tokens = 0;
  std::vector<float> y;               // [tokens, H]
  std::vector<float> dx;              // [tokens, H]; empty without dy
  std::vector<int64_t> expert_ids;    // [tokens, K] in order of choice; -1: fewer than K
  std::vector<float> expert_weights;  // [tokens, K] combine weights
  std::vector<float> router_logits;   // [tokens, E]
  LayerGradients gradients;           // sums over tokens; no tensors without dy
  double forward_seconds = 0;         // of the slowest rank
  double backward_seconds = 0;
  int64_t trace_left_out = 0;  // events of the time line that did not fit, over all ranks
};

// y_t = sum_j w_tj Expert_{e_tj}(x_t) (+ the shared expert's output), as moe_layer.h has it, in
// evaluation mode; with dy also dx and d(sum_t <dy_t, y_t>) / d(weight) for every trained weight.
// `weights` and `input` must outlive the result, and may be shared by ranks that are threads.
//
// Weight gradients in layout-invariant numerics are sums on an exact grid (exact_sum.h). Where one
// of unit 2^-50 could not hold them, or took more of a tensor than float32's rounding, the whole is
// run again with the smallest unit that holds its largest term: about 2^-62 of that, times the
// blocks. A tensor that lies so far below that the grid still takes 1e-6 of it is named in a
// warning.
//
// Collective over `world`, blocks. kDataLoss: a router's logit or expert bias that is not finite,
// naming layer and expert; gradients that are not finite. Other
// errors: of Session::Create, MoeLayer and the communicator.
absl::StatusOr<BlockResult> RunBlock(const LayerWeights& weights, const BlockInput& input,
                                     const BlockRunOptions& options,
                                     std::unique_ptr<Communicator> world);

}  // namespace moe::hf

#endif  // MOE_MOE_HF_BLOCK_RUN_H_
