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

#include "gating/routing.h"
#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"
#include "kernels/exact_sum/grad_accumulator.h"

namespace moe {

enum class DropPolicy : uint8_t { kProbability, kPosition };
enum class LoadBalancing : uint8_t { kNone, kAuxLoss, kSeqAuxLoss };

// The unit over which capacity and load balance are defined; never "the tokens of a rank".
// Zero: the micro-batch. -1: the sequence. N > 0: blocks of N tokens within a micro-batch (N must
// divide every micro-batch's length).
struct TokenGroup {
  int64_t tokens = 0;
};

struct RouterConfig {
  std::string gate = "mixtral";           // switch, gshard, mixtral, olmoe, qwen3
  int32_t num_experts = 0;                // E
  int32_t top_k = 2;                      // K (1 for switch, 2 for gshard)
  int64_t hidden_size = 0;                // H
  std::optional<double> capacity_factor;  // empty = dropless
  DropPolicy drop_policy = DropPolicy::kProbability;
  bool pad_to_capacity = false;
  TokenGroup token_group;
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

// What backward needs; views into the workspace given to Forward.
template <typename T>
struct RouterSaved {
  MatrixView<const T> tokens;      // [T, H]
  MatrixView<const float> logits;  // [T, E]
  MatrixView<const float> probs;   // [T, E] softmax(logits)
  Routing routing;
  Batch batch;              // its spans are copied into the workspace
  MatrixView<float> d_aux;  // [T, E] gradient of the losses by the logits
};

// A softmax top-k router. Stateless but for its configuration; the weight [E, H] float32 is the
// caller's parameter. Logits are float32 whatever T is.
template <typename T>
class Router {
 public:
  static absl::StatusOr<std::unique_ptr<Router>> Create(const RouterConfig& config);
  const RouterConfig& config() const { return config_; }

  // tokens [T, H], weight [E, H] in T. `saved` may be null in evaluation.
  // Ties: lowest expert id; between tokens the lowest token. Same bits for a token whatever else
  // the call carries, apart from capacity and losses, which are defined per token group.
  absl::StatusOr<Routing> Forward(MatrixView<const T> tokens, MatrixView<const T> weight,
                                  const Batch& batch, Workspace& workspace, Stream& stream,
                                  RouterSaved<T>* saved, RouterStats* stats) const;

  // From d_weight [slots] (gradient by the combine weights): adds to d_tokens [T, H] and adds one
  // partial per micro-batch to d_router_weight [E * H]. The losses' own gradient, scaled by
  // loss_scale, is included: the result is the gradient of (model loss + aux + z).
  absl::Status Backward(absl::Span<const float> d_weight, const RouterSaved<T>& saved,
                        MatrixView<const T> weight, float loss_scale, MatrixView<T> d_tokens,
                        const GradAccumulator& d_router_weight, Workspace& workspace,
                        Stream& stream) const;

 private:
  explicit Router(const RouterConfig& config) : config_(config) {}
  const RouterConfig config_;
};

}  // namespace moe

#endif  // MOE_GATING_ROUTER_H_
