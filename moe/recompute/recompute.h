// Less memory for more work: what a backward reads is made again just before it.
#ifndef MOE_MOE_RECOMPUTE_RECOMPUTE_H_
#define MOE_MOE_RECOMPUTE_RECOMPUTE_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "kernels/base/choice.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/workspace.h"
#include "moe/run/pass.h"
#include "moe/run/stash.h"
#include "moe/state/module.h"

namespace moe {

// What a model keeps of its layers from forward to backward: all that they need; that without its
// activations, the outputs of norms and of activation functions; or their inputs.
enum class Recompute : uint8_t { kNone, kActivations, kLayer };
inline constexpr Choice<Recompute> kRecomputeWords[] = {{"none", Recompute::kNone},
                                                        {"activations", Recompute::kActivations},
                                                        {"layer", Recompute::kLayer}};

constexpr bool KeepsActivations(Recompute recompute) {
  return recompute != Recompute::kActivations;
}

// The pass for work of a forward that makes activations: their memory is scratch if they are not
// kept.
inline Pass ActivationsPass(const Pass& pass, Recompute recompute) {
  return KeepsActivations(recompute) ? pass : pass.WithoutStash();
}

// Before a backward that reads activations: calls make(pass), the same work once more on what the
// forward kept, if they were not kept. Their memory is scratch of the backward.
template <typename Make>
absl::Status MakeAgain(const Pass& pass, Recompute recompute, Make make) {
  return KeepsActivations(recompute) ? absl::OkStatus() : make(pass.WithoutStash());
}

// A module that keeps its input alone. Its Forward runs `module` without a stash. Its Backward runs
// it again into a stash of context.stashes, and then backward: the same bits, for a forward more
// and the memory of one module in place of all. x stays until Backward, and y is not its memory.
// Collective as `module`, which is borrowed.
template <typename T>
class Recomputed final : public Module<T> {
 public:
  explicit Recomputed(Module<T>& module) : module_(module) {}

  absl::Span<Parameter* const> parameters() const override { return module_.parameters(); }

  absl::Status Forward(const Pass& pass, MatrixView<const T> x, MatrixView<T> y) override {
    if (pass.stash != nullptr) x_.Begin(pass.stash) = x;
    return module_.Forward(pass.WithoutStash(), x, y);
  }

  // kFailedPrecondition for a stash that has no Forward. pass.batch: that of the Forward.
  absl::Status Backward(const Pass& pass, MatrixView<const T> dy, MatrixView<T> dx,
                        GradientReady ready) override {
    const MatrixView<const T>* const x = pass.stash == nullptr ? nullptr : x_.Find(pass.stash);
    if (x == nullptr) {
      return absl::FailedPreconditionError(
          "Recompute: Backward with a stash that has no Forward, expected one");
    }
    const Context& context = pass.context;
    const WorkspaceScope scope(*context.workspace), host_scope(*context.host_workspace);
    MOE_ASSIGN_OR_RETURN(const auto y, context.workspace->Matrix<T>(x->rows(), x->cols()));
    const StashHandle stash = context.stashes->Take(StashUse::kModule);
    Pass again = pass;
    again.stash = stash.get();
    again.router_stats = {};
    again.counts = false;
    MOE_RETURN_IF_ERROR(module_.Forward(again, *x, y));
    MOE_RETURN_IF_ERROR(module_.Backward(again, dy, dx, ready));
    return JoinStreams(*context.compute, *context.exchange);
  }

 private:
  Module<T>& module_;
  PerStash<MatrixView<const T>> x_;
};

}  // namespace moe

#endif  // MOE_MOE_RECOMPUTE_RECOMPUTE_H_
