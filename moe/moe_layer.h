// The mixture-of-experts layer: gate, dispatch, experts, combine; forward and backward.
#ifndef MOE_MOE_MOE_LAYER_H_
#define MOE_MOE_MOE_LAYER_H_

#include <cstdint>
#include <memory>
#include <string>

#include <absl/functional/function_ref.h>
#include <absl/status/statusor.h>

#include "dispatch/dispatch_plan.h"
#include "dispatch/dispatcher.h"
#include "gating/router.h"
#include "moe/context.h"
#include "moe/experts.h"
#include "moe/parameter.h"

namespace moe {

struct MoeLayerConfig {
  RouterConfig router;          // num_experts, top_k, hidden_size, gate, capacity, losses
  int64_t ffn_hidden_size = 0;  // F of one expert
  int64_t shared_expert_ffn_hidden_size = 0;  // 0 = no shared expert
  Activation activation = Activation::kSwiGlu;
  double init_std = 0.02;       // router, gate and up projections
  double down_init_std = 0.02;  // down projections
  DispatcherOptions dispatcher;
  int overlap_degree = 1;  // d; above 1 needs Context::exchange to be a queue of its own
};

// State that Forward leaves for Backward: views into the workspace of the round.
template <typename T>
struct MoeLayerSaved {
  MatrixView<const T> x;
  RouterSaved<T> router;
  std::shared_ptr<const DispatchPlan> plan;  // shared with tasks still in the exchange stream
  ExpertsSaved<T> experts, shared;
  MatrixView<T> home_rows;  // [return_rows, H] expert outputs as they came home, unweighted
};

// Called when the gradient of a parameter is complete for this round.
using GradientReady = absl::FunctionRef<absl::Status(Parameter&)>;

// y_t = sum over choices j of weight_tj * Expert_{e_tj}(x_t)  (+ SharedExpert(x_t)).
//
// Collective over the expert-parallel group of the context's mesh: every rank calls Forward (and
// Backward) for every round, with zero tokens if it has none. Saved state and scratch live in the
// context's workspace until the caller releases it.
// T is float or BFloat16. Thread use: one thread per rank.
template <typename T>
class MoeLayer {
 public:
  // Adds the layer's parameters ("<prefix>gate.weight", "<prefix>experts.E.…",
  // "<prefix>shared_expert.…") to `store`. Collective. kInvalidArgument names the bad field.
  static absl::StatusOr<std::unique_ptr<MoeLayer>> Create(const MoeLayerConfig& config,
                                                          const std::string& prefix,
                                                          ParameterStore& store,
                                                          const Context& context);

  // x, y [T, H]. `saved` is needed for Backward and may be null in evaluation. Messages of failed
  // waits name the layer and step that the mesh's phase holds.
  absl::Status Forward(MatrixView<const T> x, const Batch& batch, MatrixView<T> y,
                       MoeLayerSaved<T>* saved, RouterStats* stats);

  // dx [T, H] overwritten. Parameter gradients are added to their accumulators. loss_scale
  // multiplies the gradient of the router's own losses (dy carries it already).
  absl::Status Backward(MatrixView<const T> dy, MoeLayerSaved<T>& saved, float loss_scale,
                        MatrixView<T> dx, GradientReady ready);

  const MoeLayerConfig& config() const { return config_; }
  const ExpertPlacement& placement() const { return placement_; }
  // What travelled so far, in bytes.
  const ExchangeBytes& exchange_bytes() const { return dispatcher_->bytes(); }

 private:
  MoeLayer(const MoeLayerConfig& config, const Context& context)
      : config_(config),
        context_(context),
        placement_(config.router.num_experts, context.mesh->expert_parallel().size()) {}

  // Chunk by chunk: send(c) on the exchange stream, compute(first, last) on local experts once the
  // chunk is here, receive(c) on the exchange stream. All sends are enqueued first.
  template <typename Send, typename Compute, typename Receive>
  absl::Status ExchangeAroundExperts(const DispatchPlan& plan, Phase send_phase,
                                     Phase receive_phase, Send send, Compute compute,
                                     Receive receive);
  absl::StatusOr<absl::Span<const int64_t>> SharedOffsets(int64_t tokens);
  absl::Status SharedForward(MatrixView<const T> x, MatrixView<T> y, MoeLayerSaved<T>& saved);
  absl::Status SharedBackward(MatrixView<const T> dy, MoeLayerSaved<T>& saved, MatrixView<T> dx);

  const MoeLayerConfig config_;
  const Context context_;
  const ExpertPlacement placement_;
  std::unique_ptr<Router<T>> router_;
  std::unique_ptr<Dispatcher<T>> dispatcher_;
  std::unique_ptr<Experts<T>> experts_, shared_;
  Parameter* router_weight_ = nullptr;
};

}  // namespace moe

#endif  // MOE_MOE_MOE_LAYER_H_
