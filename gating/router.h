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

namespace moe {

enum class Gradient : bool { kNotWanted, kWanted };

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

// Who reads the routing of a call on a CUDA device: the host too, or the device alone, which saves
// the copies.
enum class RoutingFor : uint8_t { kHost, kDevice };

// What backward needs; views into the workspaces given to Forward (`tokens`: the caller's memory).
template <typename T>
struct RouterSaved {
  MatrixView<const T> tokens;      // [T, H] as the router saw them (jitter applied)
  MatrixView<const float> jitter;  // [T, H] factors; empty = none
  Routing routing;                 // of the host; its arrays may be empty for RoutingFor::kDevice
  Routing on_device;               // where the stream computes
  Batch batch;                     // its spans are copied into the workspace
  // Where the gate ran: the stream's device or the host.
  MatrixView<const float> logits;  // [T, logit_sets * E]
  GateSelection selection;
  absl::Span<const uint8_t> dropped;  // [slots] of the routing
  MatrixView<const float> d_aux;  // [T, logit_sets * E] gradient of the losses; empty = no losses
};

// Logits, the configured gate, capacity and losses. Stateless but for its configuration, so threads
// may share one; the parameters are the caller's. Logits are float32 whatever T is (float or
// a 16-bit type). On the CPU both calls return when their results are there.
//
// On a stream of a CUDA device the tokens, the weight, the bias, d_weight, d_tokens and gradients
// are memory of the device. Gates that run there (Gate::RunsOn) select, weigh and take the losses
// there, and capacity drops there; the host waits for the routing if it reads it. For other gates
// the logits come to the host, and the gradient by them goes back. Memory of the host is taken from
// the workspace given as `host`; expert_bias is the host's too.
template <typename T>
class Router {
 public:
  static absl::StatusOr<std::unique_ptr<Router>> Create(const RouterConfig& config);
  const RouterConfig& config() const { return config_; }
  const GateTraits& traits() const { return traits_; }
  // Rows of the weight: logit_sets * E.
  int64_t weight_rows() const { return int64_t{traits_.logit_sets} * config_.num_outputs(); }

  // tokens [T, H] in T. `saved` and `stats` may be null; the losses and their gradients do not
  // depend on batch.mode (noisy top-k's do: there is no noise in evaluation).
  // Ties: lowest expert id; between tokens the lowest token. Same bits for a token whatever else
  // the call carries, apart from capacity and losses, which are defined per token group.
  // An empty batch.sequence_offsets stands for one sequence of all tokens.
  // Errors: kInvalidArgument for shapes, for offsets that do not fit the tokens or the token
  // group, for a micro-batch that is not micro_batch_tokens long, or without `host` on CUDA.
  absl::StatusOr<Routing> Forward(MatrixView<const T> tokens, const RouterInputs<T>& inputs,
                                  const Batch& batch, Workspace& workspace, Stream& stream,
                                  RouterSaved<T>* saved, RouterStats* stats,
                                  Workspace* host = nullptr,
                                  RoutingFor reader = RoutingFor::kHost) const;

  // From d_weight [slots] (gradient by the combine weights; not read where dropped): adds to
  // d_tokens [T, H], float32 product, one rounding; adds one float32 partial per micro-batch that
  // has tokens to `gradients`. The losses' own gradient, scaled by loss_scale, is included: the
  // result is the gradient of (model loss + aux + z), d_weight carrying the scale. Without
  // `gradients` the router is frozen: d_tokens alone.
  absl::Status Backward(absl::Span<const float> d_weight, const RouterSaved<T>& saved,
                        MatrixView<const T> weight, float loss_scale, MatrixView<T> d_tokens,
                        const std::optional<RouterGradients>& gradients, Workspace& workspace,
                        Stream& stream, Workspace* host = nullptr) const;

 private:
  Router(const RouterConfig& config, std::unique_ptr<const Gate> gate);

  absl::Status CheckInputs(MatrixView<const T> tokens, const RouterInputs<T>& inputs) const;
  // Applies jitter to saved.tokens. The host makes the factors; a CUDA device gets them uploaded.
  absl::Status Jitter(RouterSaved<T>& saved, Workspace& workspace, Workspace& host,
                      Stream& stream) const;
  absl::StatusOr<MatrixView<const float>> Logits(MatrixView<const T> tokens,
                                                 const RouterInputs<T>& inputs, const Batch& batch,
                                                 Workspace& workspace, Stream& stream) const;
  bool GateRunsOn(const Stream& stream) const { return gate_->RunsOn(stream.device().kind); }
  // Gate, losses and capacity from saved.logits, all of the stream's device; fills in the rest of
  // `saved`. On a CUDA device the host waits where it reads the routing; on a CPU everything is
  // there, and `host` may be `workspace`.
  absl::Status Decide(const RouterInputs<T>& inputs, Gradient gradient, Workspace& workspace,
                      Workspace& host, Stream& stream, RoutingFor reader, RouterSaved<T>& saved,
                      RouterStats* stats) const;
  Routing RoutingOf(const GateSelection& selection, absl::Span<const uint8_t> dropped) const;
  // The gradient by the logits, of the gate and the losses, where `stream` computes.
  absl::StatusOr<MatrixView<const float>> LogitGradient(absl::Span<const float> d_weight,
                                                        const RouterSaved<T>& saved,
                                                        float loss_scale, Workspace& workspace,
                                                        Stream& stream, Workspace* host) const;
  absl::Status MicroBatchBackward(int64_t begin, int64_t end, const RouterSaved<T>& saved,
                                  MatrixView<const float> d_logits, MatrixView<const float> weight,
                                  MatrixView<T> d_tokens,
                                  const std::optional<RouterGradients>& gradients,
                                  Workspace& workspace, Stream& stream) const;

  const RouterConfig config_;
  const std::unique_ptr<const Gate> gate_;
  const GateTraits traits_;
};

}  // namespace moe

#endif  // MOE_GATING_ROUTER_H_
