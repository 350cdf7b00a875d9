#include "kernels/grouped_gemm/fold_nodes.h"

#include <algorithm>
#include <type_traits>

#include <absl/strings/str_cat.h>

#include "kernels/base/parallel.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "kernels/grouped_gemm/fold_nodes_op.h"
#include "kernels/grouped_gemm/gemm_dot_avx512.h"

namespace moe {
namespace fold {
namespace {

constexpr int64_t kColumns = 64;  // of all nodes together they fit the first cache

template <typename T>
void FoldRow(const Fold<T>& fold, int64_t row) {
  float sum[kMaxTreeLeaves][kColumns];
  T* const out = fold.out.row(row);
  const int64_t cols = fold.out.cols();
  for (int64_t begin = 0; begin < cols; begin += kColumns) {
    const int64_t columns = std::min(kColumns, cols - begin);
    int waiting = 0;
    for (int i = 0; i < fold.count; ++i) {
      std::copy_n(fold.node[i].data + row * fold.node[i].stride + begin, columns, sum[waiting++]);
      for (int n = 0; n < fold.folds[i]; ++n) {
        const float* const last = sum[--waiting];
        float* const to = sum[waiting - 1];
        for (int64_t j = 0; j < columns; ++j) to[j] = to[j] + last[j];
      }
    }
    for (int64_t j = 0; j < columns; ++j) out[begin + j] = static_cast<T>(sum[0][j]);
  }
}

// Adds the additions that make the node over leaves [first, last) to fold.folds; the last of the
// nodes in it, -1 if it is empty. Counts in `found` nodes that are subtrees.
template <typename T>
int Append(absl::Span<const TreeNode> at, int first, int last, Fold<T>& fold, int& found) {
  for (size_t i = 0; i < at.size(); ++i) {
    if (at[i].first == first && at[i].last == last) return ++found, static_cast<int>(i);
  }
  if (last - first == 1) return -1;
  const int middle = (first + last) / 2;
  const int left = Append(at, first, middle, fold, found);
  const int right = Append(at, middle, last, fold, found);
  if (left >= 0 && right >= 0) ++fold.folds[right];
  return std::max(left, right);
}

}  // namespace

template <typename T>
void Run(const Fold<T>& fold, ThreadPool& threads) {
  threads.For(fold.out.rows(), RowGrain(fold.out.cols()), [&](int64_t begin, int64_t end) {
    const gemm::FlushSubnormals flush(std::is_same_v<T, BFloat16>);
    for (int64_t row = begin; row < end; ++row) {
      if (fold.count == 0) {
        std::fill_n(fold.out.row(row), fold.out.cols(), T(0.0f));
      } else {
        FoldRow(fold, row);
      }
    }
  });
}

}  // namespace fold

template <typename T>
absl::Status FoldNodes(int leaves, absl::Span<const TreeNode> at,
                       absl::Span<const MatrixView<const float>> nodes, MatrixView<T> out,
                       Stream& stream) {
  MOE_RETURN_IF_ERROR(
      CheckLength("FoldNodes", "nodes", nodes.size(), static_cast<int64_t>(at.size())));
  for (const MatrixView<const float>& node : nodes) {
    MOE_RETURN_IF_ERROR(CheckShape("FoldNodes", "node", node, out.rows(), out.cols()));
  }
  int last = 0;
  bool fits = IsTreeLeaves(leaves);
  for (const TreeNode& node : at) {
    fits = fits && last <= node.first && node.first < node.last && node.last <= leaves;
    last = node.last;
  }
  fold::Fold<T> fold = {.count = static_cast<int>(at.size()), .out = out};
  int found = 0;
  if (fits) fold::Append(at, 0, leaves, fold, found);
  if (!fits || found < fold.count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "FoldNodes: ", at.size(), " nodes that are not ascending subtrees of ", leaves, " leaves"));
  }
  for (size_t i = 0; i < nodes.size(); ++i) {
    fold.node[i] = {nodes[i].data(), nodes[i].stride()};
  }
  return RunOp("FoldNodes", fold, stream);
}

#define MOE_INSTANTIATE(T)                                                                  \
  template absl::Status FoldNodes(int, absl::Span<const TreeNode>,                          \
                                  absl::Span<const MatrixView<const float>>, MatrixView<T>, \
                                  Stream&);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
