// From tokens to a routing: logits, gate, capacity, losses; forward and backward.
#ifndef MOE_GATING_ROUTER_H_
#define MOE_GATING_ROUTER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "gating/capacity.h"
#include "gating/routing.h"
#include "gating/token_groups.h"
#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"
#include "kernels/exact_sum/grad_accumulator.h"

namespace moe {

class Gate;

// The unit of the load-balance loss: the token group, or the sequence whatever the group is.
enum class LoadBalancing : uint8_t { kNone, kAuxLoss, kSeqAuxLoss };

struct RouterConfig {
  std::string gate = "mixtral";           // switch, gshard, mixtral, olmoe, qwen3
  int32_t num_experts = 0;                // E
  int32_t top_k = 2;                      // K (1 for switch, 2 for gshard)
  int64_t hidden_size = 0;                // H
  std::optional<double> capacity_factor;  // empty = dropless
  DropPolicy drop_policy = DropPolicy::kProbability;
  bool pad_to_capacity = false;
  TokenGroup token_group;
  // Length of every micro-batch; 0 = they may differ. Needed to pad: a rank without a micro-batch
  // must know the same number of rows as the others.
  int64_t micro_batch_tokens = 0;
  LoadBalancing load_balancing = LoadBalancing::kAuxLoss;
  float aux_loss_coeff = 0.0f;
  float z_loss_coeff = 0.0f;
};

// kInvalidArgument naming field, value and the nearest valid choice.
absl::Status ValidateRouterConfig(const RouterConfig& config);

// Load measures and losses of one call, over the tokens of this rank.
struct RouterStats {
  double aux_loss = 0;  // sum over micro-batches of the load-balance loss, coefficient in
  double z_loss = 0;    // likewise
  std::vector<int64_t> expert_count;  // [E] slots routed to each expert, dropped ones included
  int64_t dropped_slots = 0;
};

// What backward needs; views into the workspace given to Forward (`tokens`: the caller's memory).
template <typename T>
struct RouterSaved {
  MatrixView<const T> tokens;      // [T, H]
  MatrixView<const float> logits;  // [T, E]
  MatrixView<const float> probs;   // [T, E] softmax(logits)
  Routing routing;
  Batch batch;                    // its spans are copied into the workspace
  MatrixView<const float> d_aux;  // [T, E] gradient of the losses by the logits; empty = no losses
};

// A softmax top-k router. Stateless but for its configuration, so threads may share one; the weight
// [E, H] is the caller's parameter. Logits are float32 whatever T is (float or BFloat16).
// On the CPU both calls return when their results are there.
template <typename T>
class Router {
 public:
  static absl::StatusOr<std::unique_ptr<Router>> Create(const RouterConfig& config);
  ~Router();
  const RouterConfig& config() const { return config_; }

  // tokens [T, H], weight [E, H] in T. `saved` and `stats` may be null; the losses and their
  // gradients do not depend on batch.mode.
  // Ties: lowest expert id; between tokens the lowest token. Same bits for a token whatever else
  // the call carries, apart from capacity and losses, which are defined per token group.
  // An empty batch.sequence_offsets stands for one sequence of all tokens.
  // Errors: kInvalidArgument for shapes, for offsets that do not fit the tokens or the token
  // group, for a micro-batch that is not micro_batch_tokens long; kUnimplemented on CUDA.
  absl::StatusOr<Routing> Forward(MatrixView<const T> tokens, MatrixView<const T> weight,
                                  const Batch& batch, Workspace& workspace, Stream& stream,
                                  RouterSaved<T>* saved, RouterStats* stats) const;

  // From d_weight [slots] (gradient by the combine weights; not read where dropped): adds to
  // d_tokens [T, H], float32 product, one rounding; adds one float32 partial per micro-batch that
  // has tokens to d_router_weight [E * H]. The losses' own gradient, scaled by loss_scale, is
  // included: the result is the gradient of (model loss + aux + z), d_weight carrying the scale.
  absl::Status Backward(absl::Span<const float> d_weight, const RouterSaved<T>& saved,
                        MatrixView<const T> weight, float loss_scale, MatrixView<T> d_tokens,
                        const GradAccumulator& d_router_weight, Workspace& workspace,
                        Stream& stream) const;

 private:
  Router(const RouterConfig& config, std::unique_ptr<const Gate> gate);

  absl::StatusOr<MatrixView<const float>> Logits(MatrixView<const T> tokens,
                                                 MatrixView<const T> weight, const Batch& batch,
                                                 Workspace& workspace, Stream& stream) const;

  const RouterConfig config_;
  const std::unique_ptr<const Gate> gate_;
};

}  // namespace moe

#endif  // MOE_GATING_ROUTER_H_
