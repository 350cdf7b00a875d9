// Root-mean-square normalisation. Zhang and Sennrich (2019), arXiv:1910.07467.
#ifndef MOE_KERNELS_NORM_RMS_NORM_H_
#define MOE_KERNELS_NORM_RMS_NORM_H_

#include <array>
#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/tree_cut.h"

namespace moe {

// Sums along rows whose columns are the leaves of a tree (tree_cut.h), of which ranks may have some
// each: those of one node in RmsNormSquares and RmsNormDots, those of all nodes, none empty, in
// RmsNorm and RmsNormBackward. They are added as the tree does, left + right.
struct RowTree {
  int leaves = 0;  // a power of two; 0: a row has its own sum, in one piece
  // [leaves + 1] columns of the leaves, from 0.
  std::array<int64_t, kMaxTreeLeaves + 1> begin = {};
  MatrixView<const float> nodes = {};               // [N, T] sums of the nodes
  std::array<int, kMaxTreeLeaves> first_leaf = {};  // [N] of each node
  int64_t cols = 0;                                 // of the whole row
};

// sums[t] = sum_h x[t, h]^2 and sum_h dy[t, h] * weight[h] * x[t, h]. Each leaf is a sum as in
// RmsNorm; an empty one is 0.
//   x, dy [T, H], H = begin[leaves];  weight [H], sums [T] float32.
template <typename T>
absl::Status RmsNormSquares(MatrixView<const T> x, const RowTree& node, absl::Span<float> sums,
                            Stream& stream);
template <typename T>
absl::Status RmsNormDots(MatrixView<const T> x, absl::Span<const float> weight,
                         MatrixView<const T> dy, const RowTree& node, absl::Span<float> sums,
                         Stream& stream);

// y[t, h] = x[t, h] * rstd[t] * weight[h],  rstd[t] = 1 / sqrt(mean_h x[t, h]^2 + epsilon).
//   x, y [T, H];  weight [H] float32;  rstd [T] float32, kept for backward.
// x and y may also be [T, G * H], with G adjacent groups (heads of a query), each of which is
// normalised as a row: group g of row t is row t * G + g of the above, and has rstd[t * G + g].
// The sum of squares is float32 in the fixed order of CombineWeightGradient's dot product. With a
// tree, x and y are columns of rows of tree.cols, in one group, and it is that of tree.nodes.
template <typename T>
absl::Status RmsNorm(MatrixView<const T> x, absl::Span<const float> weight, float epsilon,
                     MatrixView<T> y, absl::Span<float> rstd, Stream& stream,
                     const RowTree& tree = {});

// dx (+)= gradient with respect to x; d_weight[h] (+)= sum_t dy[t, h] * x[t, h] * rstd[t], t
// ascending, float32.
//   dx [T, H] with kAdd adds to the residual stream's gradient (one rounding).
// Groups as above: d_weight sums over all of them, row by row. With a tree, its nodes are those of
// RmsNormDots.
template <typename T>
absl::Status RmsNormBackward(MatrixView<const T> x, absl::Span<const float> weight,
                             absl::Span<const float> rstd, MatrixView<const T> dy, MatrixView<T> dx,
                             Write write_dx, absl::Span<float> d_weight, Write write_d_weight,
                             Stream& stream, const RowTree& tree = {});

}  // namespace moe

#endif  // MOE_KERNELS_NORM_RMS_NORM_H_
