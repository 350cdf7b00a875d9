// The mixture-of-experts layer: gate, dispatch, experts, combine; forward and backward.
#ifndef MOE_MOE_LAYER_MOE_LAYER_H_
#define MOE_MOE_LAYER_MOE_LAYER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/statusor.h>

#include "dispatch/dispatch_plan.h"
#include "dispatch/dispatcher.h"
#include "gating/router.h"
#include "moe/layer/experts.h"
#include "moe/layer/shared_expert.h"
#include "moe/run/context.h"
#include "moe/run/pass.h"
#include "moe/run/row_subset.h"
#include "moe/run/stash.h"
#include "moe/state/module.h"
#include "moe/state/parameter.h"
#include "moe/tensor/own_rows.h"
#include "moe/tensor/tensor_share.h"

namespace moe {

struct MoeLayerConfig {
  RouterConfig router = {};     // num_experts, top_k, hidden_size, gate, capacity, losses
  int64_t ffn_hidden_size = 0;  // F of one expert
  int64_t shared_expert_ffn_hidden_size = 0;  // 0 = no shared expert
  bool gated_shared_expert = false;           // scale the shared expert's output by sigmoid(w . x)
  ActivationFunction activation = Activation::kSwiGlu;
  bool projection_biases = false;  // routed experts' projections add a bias
  // false: frozen (ParameterSpec::trainable); the gradient by x is unaffected. train_experts
  // includes the shared expert. Both false, with 16-bit types: the layer for inference.
  bool train_router = true, train_experts = true;
  double init_std = 0.02;       // router, gate and up projections
  double down_init_std = 0.02;  // down projections
  // For inference on the CPU: ExpertsConfig::pack_weights, also of the shared expert.
  bool pack_weights = false;
  bool keep_hidden = true;  // ExpertsConfig::keep_hidden, also of the shared expert
  DispatcherOptions dispatcher = {};
  int overlap_degree = 1;  // d; above 1 requires Context::exchange to be a queue of its own
};

// y_t = sum over choices j of weight_tj * Expert_{e_tj}(x_t)  (+ SharedExpert(x_t)); gates that
// weigh the input: sum of Expert_{e_tj}(weight_tj * x_t). An identity expert returns x_t, which is
// added at home, before the outputs of other experts, without an exchange.
//
// Ranks of a tensor group divide the rows of a micro-batch: x and y are a rank's own (own_rows.h),
// and T is their number. They gather the logits of all rows and decide about all of them alike,
// since capacity and losses are of a micro-batch; each dispatches its own rows.
//
// Collective over the expert-parallel group of the context's mesh: every rank calls Forward (and
// Backward) for every round, with zero tokens if it has none. Forward leaves what Backward needs in
// the pass's stash, and neither leaves anything in the context's workspaces. Passes in several
// stashes may come in any order, the same on every rank. T is float, BFloat16 or Float16. Thread
// use: one thread of a rank at a time.
template <typename T>
class MoeLayer final : public Module<T> {
 public:
  // Adds the layer's parameters to `store`: "<prefix>gate.weight" (gates with a router bias also
  // "<prefix>gate.bias", with an expert bias "<prefix>gate.e_score_correction_bias", not trained),
  // "<prefix>experts.E.…", "<prefix>shared_expert.…". Collective. kInvalidArgument names the bad
  // field.
  static absl::StatusOr<std::unique_ptr<MoeLayer>> Create(const MoeLayerConfig& config,
                                                          const std::string& prefix,
                                                          ParameterStore& store,
                                                          const Context& context);

  // x, y [T, H], memory of the context's device, null only without rows; `pass.batch` refers to
  // memory of the host; that of a tensor group is of all its rows and has their offsets and mask.
  // pass.stash is needed for Backward, at most one Forward of this layer in each, and null in
  // evaluation. y overlaps no memory of x, which Backward reads; without a stash y may be x itself,
  // unless the layer has identity experts. kInvalidArgument otherwise.
  // Rows that pass.batch.padding_mask calls padding are not read, and y is 0 there; all else has
  // the bits of a call without them, but that with context.tensor_leaves above 1 the segments of
  // what tensor ranks hold whole are those of all rows. A mask costs a copy of the other rows of x,
  // kept for Backward, and one of their y; without padding it costs nothing.
  // kFailedPrecondition with a stash for weights whose parts are borrowed apart. Messages of failed
  // waits name the layer and step of `pass.site`. kDataLoss, naming layer and expert: an expert
  // bias or, with router_stats, a router's logit that is not finite; on a CUDA device
  // RouterStats::Wait returns the error for the logit, since the host does not wait for it here.
  // kDataLoss on a CPU also for an expert's output or y (CheckFinite); a Backward notes what is not
  // finite in context.non_finite instead.
  //
  // When Forward or Backward fails, nothing reads or writes their arguments any more: work in the
  // streams has ended, for which the mesh is aborted unless the arguments were at fault.
  absl::Status Forward(const Pass& pass, MatrixView<const T> x, MatrixView<T> y) override;

  // dx [T, H] is overwritten, with 0 in rows of padding, of which dy is not read. dx overlaps no
  // memory of x, and may be dy itself where the layer has neither a shared expert nor identity
  // experts (otherwise kInvalidArgument). Parameter gradients are added to their accumulators.
  // pass.d_loss: the gradient of the whole loss by the router's own, RouterStats::loss() of the
  // Forward: 1 where it is a term of the loss, 0 where it is not, times the loss scale, as dy.
  // pass.batch is not read: that of the Forward applies. kFailedPrecondition, with the reason,
  // unless pass.stash has a Forward of this layer and no Backward yet, and trained parameters have
  // accumulators (GradientReducer::Begin).
  absl::Status Backward(const Pass& pass, MatrixView<const T> dy, MatrixView<T> dx,
                        GradientReady ready) override;

  // For a caller that did not keep the x of a Forward, before its Backward: `x` has the same values
  // in other memory, which stays until then. Errors of Backward; kInvalidArgument for other shapes.
  absl::Status MoveInput(const Pass& pass, MatrixView<const T> x);

  // What the router decided in the Forward that `stash` has of this layer, of the rows that are not
  // padding, in memory of the stash and of x; nullptr: it has none.
  const RouterSaved<T>* routed(const Stash& stash) const {
    const Saved* const saved = saved_.Find(&stash);
    return saved == nullptr ? nullptr : &saved->router;
  }

  // Updates the router from the load of a whole optimiser step. expert_count [E]: slots over all
  // ranks and micro-batches, the integer sums of RouterStats::expert_count, and therefore the same
  // on every rank. Moves the expert bias, b_i += gamma * sign(mean(c) - c_i), and stores the shares
  // that kGlobalAuxLoss compares the next step with. Local; to be called once per optimiser step,
  // never after evaluation. kInvalidArgument if the size is wrong.
  absl::Status EndStep(absl::Span<const int64_t> expert_count);
  // State that EndStep stores for the global balance loss of the next step: "….gate.expert_share",
  // [1, E].
  ModuleState router_share();

  // From now on every Forward adds to slots [E of the routed experts] the number of slots of each,
  // without those that capacity dropped. Borrowed; empty = stop counting.
  void CountSlots(absl::Span<int64_t> slots) { counted_slots_ = slots; }

  const MoeLayerConfig& config() const { return config_; }
  // Parameters that Create added on this rank, in the store's order, trained or not.
  absl::Span<Parameter* const> parameters() const override { return parameters_; }
  const ExpertPlacement& placement() const { return placement_; }
  // Bytes of the copies of weights that MoeLayerConfig::pack_weights keeps on this rank from the
  // first forward on.
  int64_t packed_bytes() const {
    return experts_->packed_bytes() + (shared_ != nullptr ? shared_->packed_bytes() : 0);
  }
  // Bytes exchanged so far.
  const ExchangeBytes& exchange_bytes() const { return dispatcher_->bytes(); }

 private:
  // What Backward needs of one Forward, in memory that its pass keeps.
  struct Saved {
    // The last pass that ended: a Backward overwrites parts of what the Forward kept.
    enum class Ended : uint8_t { kNone, kForward, kBackward } ended = Ended::kNone;
    MatrixView<const T> given;  // x as it was passed
    RowSubset tokens;  // its rows that are not padding; whole() is 0 where all of them are tokens
    MatrixView<const T> x;  // the tokens
    RouterSaved<T> router;
    OwnRows rows;  // x among the tokens of its tensor group
    // With padding: [B S + 1] of x, as moe::SegmentsOf cuts the rows with it. Else empty.
    absl::Span<const int64_t> segments;
    Routing own;  // the slots of x on the device
    std::optional<DispatchPlan> plan;
    std::optional<GatheredRows> gathered;  // where ranks share experts
    ExpertsSaved<T> experts;
    SharedExpertSaved<T> shared;
    MatrixView<T> home_rows;  // [return_rows, H] expert outputs as received at home
    // [own slots] the token of each slot of an identity expert; -1 for other slots. Empty = no
    // identity experts.
    absl::Span<const int32_t> identity_row;
  };
  // Gradients by y, by the combine weights [own slots] and by x.
  struct HomeGradients {
    MatrixView<const T> dy;
    absl::Span<float> d_weight;
    MatrixView<T> dx;
    absl::Span<const int64_t> segments;  // of their rows (moe::SegmentsOf)
  };

  MoeLayer(const MoeLayerConfig& config, const Context& context)
      : config_(config),
        placement_(config.router.num_experts, context.mesh->size(MeshGroup::kExpert)),
        share_(ShareOf(context)),
        experts_share_(ShareOf(context, MeshGroup::kExpertTensor)) {}

  // The plan that ExchangeAroundExperts follows, and the Work of its three parts.
  struct ExchangeWork {
    const DispatchPlan& plan;
    Work send, compute, receive;
  };
  // Chunk by chunk: send(call) on the exchange stream, compute(first, last) on local experts once
  // the chunk is here, receive(call) on the exchange stream. All sends are enqueued first.
  template <typename Send, typename Compute, typename Receive>
  absl::Status ExchangeAroundExperts(const Pass& pass, ExchangeWork work, Send send,
                                     Compute compute, Receive receive);
  // Forward and Backward around the rows of padding.
  absl::Status ForwardTokens(const Pass& pass, MatrixView<T> y, Saved& saved);
  absl::Status BackwardTokens(const Pass& pass, MatrixView<const T> dy, Saved& saved,
                              MatrixView<T> dx, GradientReady ready);
  // The batch without its rows of padding; fills in saved.tokens, rows and segments.
  absl::StatusOr<Batch> TakePaddingOut(const Pass& pass, Saved& saved) const;
  absl::Status ForwardRows(const Pass& pass, MatrixView<const T> x, MatrixView<T> y, Saved& saved);
  absl::Status BackwardRows(const Pass& pass, MatrixView<const T> dy, Saved& saved,
                            MatrixView<T> dx, GradientReady ready);
  absl::Status CheckForward(const Pass& pass, MatrixView<const T> x, MatrixView<const T> y) const;
  // What `pass` has of its Forward, for a Backward.
  absl::StatusOr<Saved*> SavedOf(const Pass& pass) const;
  absl::Status CheckBackward(MatrixView<const T> dy, const Saved& saved,
                             MatrixView<const T> dx) const;
  absl::Status AddRouterParameters(const std::string& prefix, ParameterStore& store);
  RouterInputs<T> router_inputs() const;
  absl::Status Route(const Pass& pass, Saved& saved);
  absl::Status CountSlots(const Pass& pass, const Saved& saved);
  // Whether plans are made in the device's memory. With one rank the host would not receive the
  // counts, which it needs for identity experts and calls of cuBLAS.
  bool CanPlanOnDevice(const Context& context) const;
  // Fills in saved.own; the routing of these slots to plan by, in memory of whoever plans.
  absl::StatusOr<Routing> TakeOwnSlots(const Pass& pass, Saved& saved) const;
  // Every rank of the tensor group receives the logits, or the values by slot, of others' rows.
  absl::Status GatherLogits(const Pass& pass, const Saved& saved) const;
  absl::Status GatherSlots(const Pass& pass, const Saved& saved, absl::Span<float> values) const;
  // Fills in saved.identity_row by the routing of own slots in memory of the host.
  absl::Status FindIdentities(const Pass& pass, const Routing& own, Saved& saved) const;
  // The plan's segments; one for each tensor group and micro-batch, unless rows are gathered.
  absl::StatusOr<GroupOffsets> SegmentsOf(const DispatchPlan& plan, Workspace& host) const;
  // Fills in saved.gathered where ranks share experts.
  absl::Status GatherCounts(const Pass& pass, Saved& saved) const;
  absl::StatusOr<DispatchPlan> MakePlan(const Routing& routing,
                                        absl::Span<const int64_t> micro_batch_offsets,
                                        const Pass& pass);
  // The share of y that needs no exchange: shared and identity experts. Overwrites y and returns
  // kAdd; where the layer has neither, leaves y alone and returns kOverwrite.
  absl::StatusOr<Write> HomeForward(const Pass& pass, MatrixView<T> y, Saved& saved);
  absl::Status HomeBackward(const Pass& pass, const HomeGradients& gradients, Saved& saved,
                            GradientReady ready);

  const MoeLayerConfig config_;
  const ExpertPlacement placement_;
  const TensorShare share_, experts_share_;  // of a tensor and of an expert-tensor group
  std::unique_ptr<Router<T>> router_;
  std::unique_ptr<Dispatcher<T>> dispatcher_;
  bool plans_on_device_ = false;
  std::unique_ptr<Experts<T>> experts_;
  std::unique_ptr<SharedExpert<T>> shared_;
  Parameter* router_weight_ = nullptr;
  Parameter* router_bias_ = nullptr;  // gates with a router bias
  Parameter* expert_bias_ = nullptr;  // gates with an expert bias
  std::string prefix_;                // prefix of the parameters' names
  std::vector<Parameter*> parameters_;
  std::vector<double> expert_share_;  // [E] shares of the last step; empty before the first
  absl::Span<int64_t> counted_slots_;
  PerStash<Saved> saved_;
};

}  // namespace moe

#endif  // MOE_MOE_LAYER_MOE_LAYER_H_
