// Products by weights: y = x W^T + b, and the gradients by x, W and b.
#ifndef MOE_MOE_TENSOR_LINEAR_H_
#define MOE_MOE_TENSOR_LINEAR_H_

#include <cstdint>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/group_offsets.h"
#include "kernels/base/tensor_view.h"
#include "kernels/grouped_gemm/gemm_options.h"
#include "kernels/grouped_gemm/packed_weights.h"
#include "moe/run/context.h"
#include "moe/state/parameter.h"
#include "moe/tensor/gathered_rows.h"
#include "moe/tensor/tensor_share.h"

namespace moe {

// The order in which a product adds its terms, whose reduced index is that of the rows or of the
// columns of a weight. `parts`: the weight's canonical tensors. A tree of `leaves` where tensor
// parallelism would cut that index, which its ranks then share; else chains.
GemmTree TreeOf(absl::Span<const CanonicalTensor> parts, TensorAxis reduced, int leaves);

struct LinearSpec {
  std::vector<ParameterSpec> weights;  // [L], a slab (ParameterStore::AddSlab)
  bool biases = false;                 // a bias for each weight, which starts at 0
  // Forward reads packed copies of the weights (packed_weights.h), packed again after each change:
  // the same bits, faster the fewer rows a weight has, for as much memory again. CPU.
  bool pack = false;
  // Ranks that share the weights along the axis of their parts. The specs above are those of whole
  // weights.
  TensorShare share = {};
};

// Which rows of a product's operands belong to which weights; rows count from the first row that
// the call is given.
struct LinearRows {
  int first = 0, last = 1;    // weights [first, last)
  GroupOffsets offsets = {};  // [last - first + 1]; empty: all rows, of one weight
  // For weight gradients: S segments of each weight, [(last - first) S + 1]; empty: all rows are
  // the one segment of one weight. A bias behind a sum that tensor ranks share has the segments of
  // this rank's rows instead (own_rows.h); of one behind a sum of shared experts the first of their
  // ranks adds the partials of all rows.
  GroupOffsets segments = {};
  Site site = {};  // site of the exchanges where ranks share the weights
  // Where they share them, x and dy are all rows, and of a sum over an index that ranks share y or
  // dx is this rank's own: of gathered rows those that it has of weights [first, last); otherwise
  // of all rows [own[r], own[r + 1]) of rank r, or those of TensorShare::RowsOf without `own`.
  const GatheredRows* gathered = nullptr;
  absl::Span<const int64_t> own = {};
};

// L weights W [O, K] of one shape, each with its bias b [O] or none: their parameters, packed
// copies, and the order in which their products add. It decides where partial gradients add up and
// when a gradient is complete. Operands are memory of the compute stream's device, on which all
// work is enqueued; scratch comes from the context's workspaces and is given back. Move-only; one
// host thread at a time.
//
// Ranks that share the weights (LinearSpec::share) are all given all rows. A product whose reduced
// index is shared is collective over their group, and leaves each rank the rows that are its own:
// a rank sends 4 N O n bytes less what stays, n nodes a rank (tree_reduce_scatter.h). Any other
// product is of this rank's outputs alone, without an exchange. The bits are those of one rank.
// Errors of the products (grouped_gemm.h, weight_gradient.h).
template <typename T>
class Linear {
 public:
  // Adds the parameters to `store`: weights, then biases, which have their weights' names with
  // "bias" for "weight". Errors of ParameterStore::AddSlab.
  static absl::StatusOr<Linear> Create(const LinearSpec& spec, ParameterStore& store);
  // A product by a weight that another module owns (an output layer tied to the embedding). Tensor
  // parallelism would cut it as `cut_as`, whatever axis the owner has. WeightGradient then adds a
  // partial and leaves it to the owner to report the gradient as complete.
  static absl::StatusOr<Linear> Tied(Parameter& weight, const CanonicalTensor& cut_as, bool pack);

  // y = x W^T + b.   x [N, K], y [N, O]. TOut: T, or float of one weight without offsets.
  template <typename TOut>
  absl::Status Forward(const Context& context, const LinearRows& rows, MatrixView<const T> x,
                       MatrixView<TOut> y) const;
  // dx = dy W.   dy [N, O], dx [N, K].
  absl::Status InputGradient(const Context& context, const LinearRows& rows, MatrixView<const T> dy,
                             MatrixView<T> dx) const;
  // db += the sum of dy's rows and dW += dy^T x, a partial for each segment that has rows, followed
  // by `ready` of each bias and weight; without rows only `ready`. In fast numerics the segments of
  // a weight are one partial. Where sums travel in every round, one product and its `ready` for
  // each bucket in turn: at most two are open. Has no effect on frozen weights. Where cuBLAS
  // multiplies, the host must have the segments. Where the context leaves weight gradients for
  // later (Context::later), all of this is done then, but for `ready`, which nobody calls.
  absl::Status WeightGradient(const Context& context, const LinearRows& rows,
                              MatrixView<const T> dy, MatrixView<const T> x,
                              GradientReady ready) const;

  int64_t out_features() const { return weights_.front()->spec().rows; }
  absl::Span<Parameter* const> weights() const { return weights_; }
  absl::Span<Parameter* const> biases() const { return biases_; }  // empty without
  int64_t packed_bytes() const;                                    // 0 before the first forward

 private:
  Linear() = default;
  // Makes the copies, or packs them again if one of the weights has changed. The version that they
  // then have. Errors of PackedWeights.
  absl::StatusOr<int64_t> PackChanged(const Context& context) const;
  // Forward without biases: all rows by one weight, or each weight's rows by it.
  template <typename TOut>
  absl::Status OneProduct(const Context& context, int weight, MatrixView<const T> x,
                          MatrixView<TOut> y) const;
  // y = x W^T, or x W with `reduced` kRows, whose reduced index ranks share: this rank's own rows
  // of the sum.
  absl::Status SumOverRanks(const Context& context, TensorAxis reduced, const LinearRows& rows,
                            MatrixView<const T> x, MatrixView<T> y) const;
  // Whether ranks share the index that a product reduces.
  bool SharesSum(TensorAxis reduced) const {
    return share_.cut() && !cut_as_.empty() && cut_as_.front().axis == reduced;
  }
  absl::Status GroupedProduct(const Context& context, const LinearRows& rows, MatrixView<const T> x,
                              MatrixView<T> y) const;
  absl::Status Defer(const Context& context, LinearRows rows, MatrixView<const T> dy,
                     MatrixView<const T> x) const;
  // WeightGradient of weights whose sums are open at one time, and of biases.
  static absl::Status AddRun(const Context& context, absl::Span<Parameter* const> weights,
                             const GroupOffsets& segments, MatrixView<const T> dy,
                             MatrixView<const T> x);
  static absl::Status AddBiasGradients(const Context& context, absl::Span<Parameter* const> biases,
                                       const GroupOffsets& segments, MatrixView<const T> dy,
                                       GradientReady ready);

  std::vector<Parameter*> weights_, biases_;
  mutable std::vector<PackedWeights<T>> packed_;  // kept from call to call; none without
  std::vector<CanonicalTensor> cut_as_;           // how tensor parallelism would cut each weight
  TensorShare share_;
  bool tied_ = false;
};

}  // namespace moe

#endif  // MOE_MOE_TENSOR_LINEAR_H_
