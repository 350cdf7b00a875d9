#include "kernels/norm/rms_norm.h"

#include <algorithm>
#include <cmath>

#include <absl/status/statusor.h>
#include <absl/strings/str_cat.h>

#include "kernels/base/fixed_dot.h"
#include "kernels/base/highway_targets.h"
#include "kernels/base/parallel.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/norm/rms_norm_op.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/norm/rms_norm.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::rms_norm {
namespace HWY_NAMESPACE {
namespace {

using namespace moe::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): this target's lanes

template <typename T>
void Normalize(const T* x, const float* weight, float rstd, int64_t n, T* y) {
  const auto scale = hn::Set(FloatTag(), rstd);
  ForLanes(n, [&](int64_t i, auto lanes) MOE_LANES {
    lanes.Store(hn::Mul(hn::Mul(lanes.Load(x + i), scale), lanes.Load(weight + i)), y + i);
  });
}

// sum_i (dy[i] * weight[i]) * x[i] in the order of FixedDot.
template <typename T>
HWY_INLINE float WeightedDot(const T* dy, const float* weight, const T* x, int64_t n) {
  return FixedSumOf(n, [&](int64_t i, auto lanes, FloatLanes sum) MOE_LANES {
    return hn::MulAdd(hn::Mul(lanes.Load(dy + i), lanes.Load(weight + i)), lanes.Load(x + i), sum);
  });
}

// Sums::sums of row t with a weight.
template <typename T>
void NodeDot(const Sums<T>& s, int64_t t) {
  LeafFold fold;
  for (int i = 0; i < s.leaves.count; ++i) {
    const int64_t begin = s.leaves.begin[i];
    s.sums[t] = fold.Add(i, WeightedDot(s.dy.row(t) + begin, s.weight + begin, s.x.row(t) + begin,
                                        s.leaves.begin[i + 1] - begin));
  }
}

// dx of row t: rstd * (dy * weight - x * slope) (+ dx)
template <typename T>
void InputGradient(const Backward<T>& b, int64_t t) {
  const int64_t n = b.groups.cols;
  const T *const x = b.groups.Row(b.x, t), *const dy = b.groups.Row(b.dy, t);
  T* const dx = b.groups.Row(b.dx, t);
  const bool own = b.nodes.leaves == 0;
  const float dot = own ? WeightedDot(dy, b.weight, x, n) : b.nodes.Sum(t);
  const auto all = static_cast<float>(own ? n : b.nodes.cols);
  const auto slope = hn::Set(FloatTag(), b.rstd[t] * b.rstd[t] * (dot / all));
  const auto rstd = hn::Set(FloatTag(), b.rstd[t]);
  const bool add = b.write_dx == Write::kAdd;
  ForLanes(n, [&](int64_t i, auto lanes) MOE_LANES {
    const auto scaled = hn::Mul(lanes.Load(dy + i), lanes.Load(b.weight + i));
    auto d = hn::Mul(rstd, hn::NegMulAdd(lanes.Load(x + i), slope, scaled));
    if (add) d = hn::Add(lanes.Load(dx + i), d);
    lanes.Store(d, dx + i);
  });
}

// Columns of d_weight at a time: few enough for their sums to stay in cache over all rows.
constexpr int64_t kColumns = 64;

// Columns [begin, end), at most kColumns, of
// d_weight[h] (+)= sum_t (dy[t, h] * x[t, h]) * rstd[t], t ascending.
template <typename T>
void WeightColumns(const Backward<T>& b, int64_t begin, int64_t end) {
  const int64_t n = end - begin;
  float sum[kColumns] = {};
  for (int64_t t = 0; t < b.rows(); ++t) {
    const T *const x = b.groups.Row(b.x, t) + begin, *const dy = b.groups.Row(b.dy, t) + begin;
    const auto scale = hn::Set(FloatTag(), b.rstd[t]);
    ForLanes(n, [&](int64_t i, auto lanes) MOE_LANES {
      const auto product = hn::Mul(lanes.Load(dy + i), lanes.Load(x + i));
      StoreLanes(hn::MulAdd(product, scale, LoadLanes(sum + i)), sum + i);
    });
  }
  float* const d_weight = b.d_weight + begin;
  for (int64_t i = 0; i < n; ++i) {
    d_weight[i] = b.write_d_weight == Write::kAdd ? d_weight[i] + sum[i] : sum[i];
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe::rms_norm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::rms_norm {

template <typename T>
void Run(const Sums<T>& s, ThreadPool& threads) {
  threads.For(s.x.rows(), RowGrain(s.x.cols()), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (s.weight != nullptr) {
        MOE_SIMD(NodeDot<T>)(s, t);
        continue;
      }
      LeafFold fold;
      for (int i = 0; i < s.leaves.count; ++i) {
        const T* const x = s.x.row(t) + s.leaves.begin[i];
        s.sums[t] = fold.Add(i, FixedDot(x, x, s.leaves.begin[i + 1] - s.leaves.begin[i]));
      }
    }
  });
}

template <typename T>
void Run(const Forward<T>& f, ThreadPool& threads) {
  const int64_t cols = f.groups.cols;
  if (cols == 0) return;
  const bool own = f.nodes.leaves == 0;
  const auto all = static_cast<float>(own ? cols : f.nodes.cols);
  threads.For(f.rows(), RowGrain(cols), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* const x = f.groups.Row(f.x, t);
      const float squares = own ? FixedDot(x, x, cols) : f.nodes.Sum(t);
      f.rstd[t] = 1.0f / std::sqrt(squares / all + f.epsilon);
      MOE_SIMD(Normalize<T>)(x, f.weight, f.rstd[t], cols, f.groups.Row(f.y, t));
    }
  });
}

template <typename T>
void Run(const Backward<T>& b, ThreadPool& threads) {
  // Threads share the weight's columns, so that every element adds its tokens in ascending order.
  threads.For(b.groups.cols, HWY_NAMESPACE::kColumns, [&](int64_t begin, int64_t end) {
    MOE_SIMD(WeightColumns<T>)(b, begin, end);
  });
  threads.For(b.rows(), RowGrain(b.groups.cols), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) MOE_SIMD(InputGradient<T>)(b, t);
  });
}

}  // namespace moe::rms_norm

namespace moe {
namespace {

// Number of groups of the weight's length in the columns; 1 if they are not a multiple, which
// CheckShape of the weight then refuses.
rms_norm::Groups GroupsOf(int64_t cols, size_t weight) {
  const auto length = static_cast<int64_t>(weight);
  const bool several = length > 0 && cols % length == 0;
  return {several ? cols / length : 1, several ? length : cols};
}

absl::StatusOr<rms_norm::Leaves> LeavesOf(const char* function, const RowTree& node, int64_t cols) {
  rms_norm::Leaves leaves = {.count = node.leaves};
  std::copy(node.begin.begin(), node.begin.end(), leaves.begin);
  if (IsTreeLeaves(node.leaves) && leaves.begin[0] == 0 && leaves.begin[node.leaves] == cols &&
      std::is_sorted(leaves.begin, leaves.begin + node.leaves + 1)) {
    return leaves;
  }
  return absl::InvalidArgumentError(absl::StrCat(function, ": ", node.leaves,
                                                 " leaves, expected 1, 2, 4, 8 or 16 from 0 to ",
                                                 cols, " columns"));
}

// kInvalidArgument unless every node is at a leaf of its own, of rows of one group.
absl::StatusOr<rms_norm::Nodes> NodesOf(const char* function, const RowTree& tree, int64_t rows,
                                        int64_t groups) {
  rms_norm::Nodes nodes = {.leaves = tree.leaves, .cols = tree.cols};
  if (tree.leaves == 0) return nodes;
  nodes.count = static_cast<int>(tree.nodes.rows());
  nodes.sums = tree.nodes;
  std::copy(tree.first_leaf.begin(), tree.first_leaf.end(), nodes.first_leaf);
  bool good = IsTreeLeaves(tree.leaves) && nodes.count <= tree.leaves && groups == 1;
  for (int j = 0; good && j < nodes.count; ++j) {
    good = nodes.first_leaf[j] > (j == 0 ? -1 : nodes.first_leaf[j - 1]) &&
           nodes.first_leaf[j] < tree.leaves;
  }
  if (!good) {
    return absl::InvalidArgumentError(
        absl::StrCat(function, ": ", tree.nodes.rows(), " nodes of a tree of ", tree.leaves,
                     " leaves and ", groups, " groups, expected ascending ones and one group"));
  }
  MOE_RETURN_IF_ERROR(CheckShape(function, "nodes", tree.nodes, nodes.count, rows));
  return nodes;
}

}  // namespace

template <typename T>
absl::Status RmsNormSquares(MatrixView<const T> x, const RowTree& node, absl::Span<float> sums,
                            Stream& stream) {
  constexpr const char* kFunction = "RmsNormSquares";
  MOE_ASSIGN_OR_RETURN(const auto leaves, LeavesOf(kFunction, node, x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "sums", sums.size(), x.rows()));
  return RunOp(kFunction, rms_norm::Sums<T>{leaves, x, nullptr, {}, sums.data()}, stream);
}

template <typename T>
absl::Status RmsNormDots(MatrixView<const T> x, absl::Span<const float> weight,
                         MatrixView<const T> dy, const RowTree& node, absl::Span<float> sums,
                         Stream& stream) {
  constexpr const char* kFunction = "RmsNormDots";
  MOE_ASSIGN_OR_RETURN(const auto leaves, LeavesOf(kFunction, node, x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "weight", weight.size(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "dy", dy, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "sums", sums.size(), x.rows()));
  return RunOp(kFunction, rms_norm::Sums<T>{leaves, x, weight.data(), dy, sums.data()}, stream);
}

template <typename T>
absl::Status RmsNorm(MatrixView<const T> x, absl::Span<const float> weight, float epsilon,
                     MatrixView<T> y, absl::Span<float> rstd, Stream& stream, const RowTree& tree) {
  constexpr const char* kFunction = "RmsNorm";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "x", x, x.rows(), x.cols()));
  const rms_norm::Groups groups = GroupsOf(x.cols(), weight.size());
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "weight", weight.size(), groups.cols));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "y", y, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "rstd", rstd.size(), x.rows() * groups.count));
  MOE_ASSIGN_OR_RETURN(const auto nodes, NodesOf(kFunction, tree, x.rows(), groups.count));
  return RunOp(kFunction,
               rms_norm::Forward<T>{groups, x, weight.data(), epsilon, y, rstd.data(), nodes},
               stream);
}

template <typename T>
absl::Status RmsNormBackward(MatrixView<const T> x, absl::Span<const float> weight,
                             absl::Span<const float> rstd, MatrixView<const T> dy, MatrixView<T> dx,
                             Write write_dx, absl::Span<float> d_weight, Write write_d_weight,
                             Stream& stream, const RowTree& tree) {
  constexpr const char* kFunction = "RmsNormBackward";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "x", x, x.rows(), x.cols()));
  const rms_norm::Groups groups = GroupsOf(x.cols(), weight.size());
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "weight", weight.size(), groups.cols));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "rstd", rstd.size(), x.rows() * groups.count));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "dy", dy, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "dx", dx, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "d_weight", d_weight.size(), groups.cols));
  MOE_ASSIGN_OR_RETURN(const auto nodes, NodesOf(kFunction, tree, x.rows(), groups.count));
  return RunOp(kFunction,
               rms_norm::Backward<T>{groups, x, weight.data(), rstd.data(), dy, dx, write_dx,
                                     d_weight.data(), write_d_weight, nodes},
               stream);
}

MOE_INSTANTIATE_FOR_STORAGE(RmsNormSquares)
MOE_INSTANTIATE_FOR_STORAGE(RmsNormDots)
MOE_INSTANTIATE_FOR_STORAGE(RmsNorm)
MOE_INSTANTIATE_FOR_STORAGE(RmsNormBackward)

}  // namespace moe
#endif  // HWY_ONCE
