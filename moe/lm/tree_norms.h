// RMSNorm of all heads of q and of all heads of k, of rows whose columns ranks may hold apart.
#ifndef MOE_MOE_LM_TREE_NORMS_H_
#define MOE_MOE_LM_TREE_NORMS_H_

#include <cstdint>

#include <absl/status/statusor.h>

#include "kernels/base/tree_cut.h"
#include "kernels/norm/rms_norm.h"
#include "moe/lm/dense.h"
#include "moe/lm/transformer_config.h"
#include "moe/tensor/tensor_share.h"

namespace moe::lm {

// With several tensor leaves sums along a row are trees over the leaves of the heads, so that ranks
// that share these add up the same nodes: they exchange the sums of their nodes, 8 T bytes each for
// q and k together, and each has all of them.
template <typename T>
class TreeNorms {
 public:
  // config: of the whole model.
  TreeNorms(const TransformerConfig& config, const TensorShare& share);

  // Norms of q and of k, and what their forward leaves for backward.
  template <typename Saved>
  struct Norms {
    const Norm<T>* of[2];
    Saved* saved[2];
  };
  // x, y [T, this rank's columns of q, then of k]. Collective over the tensor group, as Backward;
  // takes scratch of the context's workspace, which the caller releases.
  absl::Status Forward(const Pass& pass, const Norms<NormSaved<T>>& norms, MatrixView<const T> x,
                       MatrixView<T> y) const;
  // dx: gradient by x. The weights have a partial of all rows, whose columns ranks hold apart.
  absl::Status Backward(const Pass& pass, const Norms<const NormSaved<T>>& norms,
                        MatrixView<const T> dy, MatrixView<T> dx, GradientReady ready) const;

 private:
  // Columns of q or of k.
  struct Part {
    int64_t width = 0;  // of a head of k and of the heads of q that share it
    int64_t begin = 0;  // column of a row of q and k at which this rank's begin
  };
  template <typename V>
  MatrixView<V> Of(size_t part, MatrixView<V> qk) const {
    const int64_t begin = parts_[part].begin;
    return ColumnRange(qk, begin, begin + heads_ * parts_[part].width);
  }
  // Sums of the nodes of all ranks, [nodes, 2 T] of q, then of k. add(part, node, first, end, sums)
  // enqueues those of a node of this rank, of columns [first, end) of the part's.
  template <typename Add>
  absl::StatusOr<MatrixView<const float>> Sums(const Pass& pass, int64_t rows, Add add) const;
  // The columns of a part that this rank has, with the nodes of `sums`.
  NormColumns ColumnsOf(size_t part, MatrixView<const float> sums) const;

  TensorShare share_;
  TreeCut cut_;         // of heads of k
  int64_t heads_ = 0;   // this rank's
  Part parts_[2] = {};  // q, k
  RowTree tree_;        // leaves, and the first one of each rank's nodes
  RankCounts nodes_;    // [R + 1] nodes before each rank's
};

}  // namespace moe::lm

#endif  // MOE_MOE_LM_TREE_NORMS_H_
