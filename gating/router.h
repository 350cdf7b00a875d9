// From tokens to a routing: logits, gate, capacity, losses; forward and backward.
#ifndef MOE_GATING_ROUTER_H_
#define MOE_GATING_ROUTER_H_

#include <cstdint>
#include <memory>
#include <optional>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "gating/gate.h"
#include "gating/router_config.h"
#include "gating/router_stats.h"
#include "gating/routing.h"
#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"
#include "kernels/exact_sum/grad_accumulator.h"
#include "kernels/grouped_gemm/gemm_options.h"

namespace moe {

// The router's parameters and state; borrowed. E = config.num_outputs().
template <typename T>
struct RouterInputs {
  MatrixView<const T> weight = {};    // [logit_sets * E, H]
  absl::Span<const float> bias = {};  // [logit_sets * E] of the logits; gates with router_bias
  absl::Span<const float> expert_bias = {};  // [E] of the selection; gates with expert_bias
  // [E] share of the slots of the last step, over all ranks and micro-batches, that went to each
  // expert: for kGlobalAuxLoss. Empty = 1 / E each (before the first step).
  absl::Span<const double> expert_share = {};
};

// Where Backward adds gradients.
struct RouterGradients {
  GradAccumulator weight;  // [logit_sets * E * H]
  GradAccumulator bias;    // [logit_sets * E]; gates with router_bias
};

// Arguments of Backward; borrowed.
template <typename T>
struct RouterBackwardCall {
  absl::Span<const float> d_weight = {};  // [slots] by the combine weights; not read where dropped
  MatrixView<const T> weight = {};        // the router's
  float loss_scale = 1;                   // d_weight carries it
  MatrixView<T> d_tokens = {};            // of the tokens, [T, H]
  // [S + 1] the tokens in segments, each of which has a partial; empty: one for each micro-batch.
  absl::Span<const int64_t> segments = {};
  std::optional<RouterGradients> gradients = {};  // empty: the router is frozen
  Workspace& workspace;
  Workspace& host;
  Stream& stream;
};

// The reader of the routing of a call on a CUDA device: the host too, or the device alone, which
// saves the copies.
enum class RoutingFor : uint8_t { kHost, kDevice };

// A call's arguments; borrowed.
template <typename T>
struct RouterCall {
  MatrixView<const T> tokens = {};  // [T, H]
  // Tokens [first_token, first_token + T) of the batch, where it has more, batch_tokens. The caller
  // then writes the logits of the others into saved.logits between Logits and Decide, which decides
  // about all tokens of the batch, and Backward is given d_weight of all.
  int64_t first_token = 0, batch_tokens = -1;  // -1: the batch has these T
  RouterInputs<T> inputs = {};
  // An empty sequence_offsets stands for one sequence of all tokens.
  Batch batch = {};
  Workspace& workspace;  // memory of the stream's device
  Workspace& host;       // memory of the host: on a CPU `workspace` will do
  Stream& stream;
  RoutingFor reader = RoutingFor::kHost;
  BFloat16Order bfloat16_order = BFloat16Order::kDot;  // of the logits' product
};

// What backward needs; views into the workspaces of the call (`tokens`: the caller's memory, unless
// jitter is applied).
template <typename T>
struct RouterSaved {
  MatrixView<const T> tokens;      // [T, H] as the router saw them (jitter applied)
  int64_t first_token = 0;         // of these in the batch
  MatrixView<const float> jitter;  // [T, H] factors; empty = none
  Routing routing;    // in memory of the host; arrays may be empty for RoutingFor::kDevice
  Routing on_device;  // in memory where the stream computes
  Batch batch;        // its spans are copied into the workspace
  // Where the gate ran: the stream's device or the host.
  MatrixView<float> logits;  // [batch tokens, logit_sets * E]; not written after Decide
  GateSelection selection;
  absl::Span<const uint8_t> dropped;  // [slots] of the routing
  MatrixView<const float> d_aux;      // as the logits: gradient of the losses; empty = no losses
};

// Logits, the configured gate, capacity and losses. Stateless but for its configuration, so threads
// may share one; the parameters are the caller's. Logits are float32 whatever T is (float or
// a 16-bit type). On the CPU calls return when their results are there.
//
// On a stream of a CUDA device the tokens, the weight, the bias, d_weight, d_tokens and gradients
// are memory of the device; expert_bias is the host's. Gates that run there (Gate::RunsOn) select,
// weigh and take the losses there, and capacity drops there; the host waits for the routing if it
// reads it. For other gates the logits come to the host, and the gradient by them goes back.
template <typename T>
class Router {
 public:
  static absl::StatusOr<std::unique_ptr<Router>> Create(const RouterConfig& config);
  const RouterConfig& config() const { return config_; }
  const GateTraits& traits() const { return traits_; }
  // Rows of the weight: logit_sets * E.
  int64_t weight_rows() const { return int64_t{traits_.logit_sets} * config_.num_outputs(); }

  // Overwrites `saved` with the tokens, jittered in training if the gate does so, and their logits.
  // kInvalidArgument for shapes, for offsets that do not fit the tokens, for a micro-batch that is
  // not micro_batch_tokens long.
  absl::Status Logits(const RouterCall<T>& call, RouterSaved<T>& saved) const;

  // After Logits, with the same call: the experts of every token. Fills in the rest of `saved`;
  // `stats` may be null. The losses and their gradients do not depend on batch.mode (noisy top-k's
  // do: there is no noise in evaluation). Ties: lowest expert id; between tokens the lowest token.
  // Same bits for a token whatever else the call carries, apart from capacity and losses, which are
  // defined per token group. kInvalidArgument for offsets that do not fit the token group.
  absl::Status Decide(const RouterCall<T>& call, RouterSaved<T>& saved, RouterStats* stats) const;

  // Adds to d_tokens, float32 product, one rounding; adds one float32 partial per segment that has
  // tokens to `gradients`. The losses' own gradient, scaled by loss_scale, is included: the
  // result is the gradient of (model loss + aux + z).
  absl::Status Backward(const RouterBackwardCall<T>& call, const RouterSaved<T>& saved) const;

 private:
  struct TokenRange {
    int64_t begin = 0, end = 0;
  };

  Router(const RouterConfig& config, std::unique_ptr<const Gate> gate);

  absl::Status CheckInputs(const RouterCall<T>& call) const;
  absl::Status CheckBackward(const RouterBackwardCall<T>& call, const RouterSaved<T>& saved) const;
  // visit(range) for the tokens of every part that has some; offsets: of the parts.
  template <typename Visit>
  static absl::Status ForEachPart(absl::Span<const int64_t> offsets, Visit visit);
  // Applies jitter to saved.tokens. The host makes the factors; for a CUDA device it uploads them.
  absl::Status Jitter(const RouterCall<T>& call, RouterSaved<T>& saved) const;
  bool GateRunsOn(const Stream& stream) const { return gate_->RunsOn(stream.device().kind); }
  // Decide from saved.logits of the stream's device. On a CUDA device the host waits where it reads
  // the routing; on a CPU everything is there when it returns.
  absl::Status DecideOn(const RouterCall<T>& call, RouterSaved<T>& saved, RouterStats* stats) const;
  Routing RoutingOf(const GateSelection& selection, absl::Span<const uint8_t> dropped) const;
  // The gradient by the logits, of the gate and the losses, where the stream computes.
  absl::StatusOr<MatrixView<const float>> LogitGradient(const RouterBackwardCall<T>& call,
                                                        const RouterSaved<T>& saved) const;
  // d_logits: those of the tokens. weight: the router's, as float32.
  absl::Status SegmentBackward(const RouterBackwardCall<T>& call, const RouterSaved<T>& saved,
                               MatrixView<const float> d_logits, MatrixView<const float> weight,
                               TokenRange range) const;

  const RouterConfig config_;
  const std::unique_ptr<const Gate> gate_;
  const GateTraits traits_;
};

}  // namespace moe

#endif  // MOE_GATING_ROUTER_H_
