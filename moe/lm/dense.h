// What the dense parts of the reference model share: timing, weight gradients, normalisation.
#ifndef MOE_MOE_LM_DENSE_H_
#define MOE_MOE_LM_DENSE_H_

#include <string>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/tensor_view.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/grouped_gemm/packed_weights.h"
#include "moe/layer/moe_layer.h"
#include "moe/run/context.h"
#include "moe/state/parameter.h"

namespace moe::lm {

// Runs `body` and counts its time in the compute stream as dense work; `name`, a literal, is what a
// time line calls it.
template <typename Body>
absl::Status TimedDense(const Context& context, const char* name, Body body) {
  return Timed(context, {.phase = Phase::kDense, .name = name}, *context.compute, body);
}

// The weight of a product, and a copy in the order of reading (packed_weights.h) where `packed`
// asks for one, made anew after each change: the same bits, at few rows twice as fast. CPU.
template <typename T>
class Projection {
 public:
  Projection() = default;
  Projection(Parameter* weight, bool packed) : weight_(weight), packed_(packed) {}

  Parameter& operator*() const { return *weight_; }
  Parameter* operator->() const { return weight_; }

  // y = x W^T.   x [T, K], W [O, K], y [T, O].
  template <typename TOut>
  absl::Status Forward(MatrixView<const T> x, MatrixView<TOut> y, const Context& context,
                       const GemmTree& tree = {}) const {
    Workspace& workspace = *context.workspace;
    Stream& stream = *context.compute;
    if (!packed_) {
      return Gemm<T, TOut>(x, weight_->view<T>(), y, workspace, stream, context.gemm, tree);
    }
    if (copy_.version() != weight_->version()) {
      MOE_ASSIGN_OR_RETURN(copy_,
                           PackedWeights<T>::Create(weight_->spec().rows, weight_->spec().cols));
      MOE_RETURN_IF_ERROR(copy_.Pack(weight_->view<T>(), weight_->version(), stream));
    }
    return Gemm<T, TOut>(x, copy_, weight_->version(), y, workspace, stream, tree);
  }

 private:
  Parameter* weight_ = nullptr;
  bool packed_ = false;
  mutable PackedWeights<T> copy_;
};

// What backward needs of one normalisation; views into the workspace.
template <typename T>
struct NormSaved {
  MatrixView<const T> x;   // [T, G H]
  MatrixView<T> y;         // [T, G H]
  absl::Span<float> rstd;  // [T G]
};

// RMSNorm with its weight "<name>" [H], which starts as ones; of every one of the G groups of H
// columns (heads) that x has.
template <typename T>
class Norm {
 public:
  static absl::StatusOr<Norm> Create(const std::string& name, int64_t hidden_size, float epsilon,
                                     ParameterStore& store);

  // saved.y = RMSNorm(x); takes memory for saved.y and saved.rstd.
  absl::Status Forward(MatrixView<const T> x, NormSaved<T>& saved, const Context& context) const;
  // The same into y, which becomes saved.y.
  absl::Status Forward(MatrixView<const T> x, MatrixView<T> y, NormSaved<T>& saved,
                       const Context& context) const;
  // dx (+)= gradient by x; the weight's partial is added and the weight marked ready. Without
  // tokens there is no partial.
  absl::Status Backward(const NormSaved<T>& saved, MatrixView<const T> dy, MatrixView<T> dx,
                        Write write_dx, GradientReady ready, const Context& context) const;

 private:
  Norm(Parameter* weight, float epsilon) : weight_(weight), epsilon_(epsilon) {}

  Parameter* weight_;
  float epsilon_;
};

}  // namespace moe::lm

#endif  // MOE_MOE_LM_DENSE_H_
