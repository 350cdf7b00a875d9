// The matrix product to which every function of grouped_gemm.h reduces, as plain loops and as the
// packed CPU path. Internal: callers include grouped_gemm.h.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_PROBLEM_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_PROBLEM_H_

#include <cstdint>
#include <type_traits>

#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"
#include "kernels/exact_sum/exact_sum_cpu.h"
#include "kernels/grouped_gemm/gemm_options.h"

namespace moe::gemm {

// Words of a chain of multiply-adds (grouped_gemm.h): pairs of BFloat16, single terms of other
// types.
inline constexpr int64_t kChainWords = 128;

// Memory layout of an operand of the product c [rows, cols] = a [rows, depth] * b [depth, cols].
// Strips, for b alone, are packed weights: packed_weights.h has a picture.
enum class Layout : uint8_t { kPlain, kTransposed, kStrips };

// Destination of results as integers of an exact grid (exact_sum.h) instead of c: for each segment
// of the depth, in ascending order, sum += q(a * b over its steps); the first one as `write` says.
struct ExactSink {
  MatrixView<int64_t> sum;  // [rows, cols]
  SumWrite write = SumWrite::kAdd;
  absl::Span<const int64_t> segments;  // first step of each, and the depth; none is empty
  double inverse_unit = 0;
  int64_t limit = 0;           // most |q|
  GridTally* tally = nullptr;  // added to; nullptr: no sink

  bool used() const { return tally != nullptr; }
};

// c (+)= a * b. T: float, BFloat16 or Float16; TOut: float or T. kAdd needs TOut = float.
template <typename T, typename TOut>
struct Problem {
  MatrixView<const T> a;  // [rows, depth], transposed [depth, rows]
  // [depth, cols], transposed [cols, depth]; strips of W columns [ceil(cols / W) * depth, W],
  // the depth of BFloat16 filled up to an even number, or strips of tiles (gemm_tile_order.h).
  MatrixView<const T> b;
  MatrixView<TOut> c;  // [rows, cols]
  Layout a_layout = Layout::kPlain;
  Layout b_layout = Layout::kPlain;
  Write write = Write::kOverwrite;
  BFloat16Order order = BFloat16Order::kDot;  // if T is BFloat16
  GemmTree tree = {};                         // if it is one: CPU, a plain, kOverwrite
  ExactSink exact = {};  // CPU, TOut = float, kOverwrite; only the shape of c is used then

  int64_t depth() const { return a_layout == Layout::kPlain ? a.cols() : a.rows(); }
  bool is_tree() const { return tree.cut.IsTree(); }
  static constexpr bool kIsBFloat16 = std::is_same_v<T, BFloat16>;
  bool is_tile_order() const { return kIsBFloat16 && order == BFloat16Order::kTile; }
};

// instantiate(T, TOut) for all combinations.
#define MOE_FOR_PRODUCTS(instantiate)                                                    \
  instantiate(float, float) instantiate(BFloat16, float) instantiate(BFloat16, BFloat16) \
      instantiate(Float16, float) instantiate(Float16, Float16)

// The specification: for every element chains of std::fma and their sums, in the order that
// grouped_gemm.h defines, rounded once.
template <typename T, typename TOut>
void Reference(const Problem<T, TOut>& problem);

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_PROBLEM_H_
