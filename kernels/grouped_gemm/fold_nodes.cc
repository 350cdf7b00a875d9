#include "kernels/grouped_gemm/fold_nodes.h"

#include <algorithm>
#include <array>
#include <type_traits>

#include <absl/strings/str_cat.h>

#include "kernels/base/parallel.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "kernels/grouped_gemm/gemm_dot_avx512.h"

namespace moe {
namespace {

// Additions in the order in which a tree makes them: node `left` becomes left + right.
struct Folds {
  struct Step {
    int left, right;
  };
  std::array<Step, kMaxTreeLeaves> step;
  int count = 0;
  int root = -1;  // -1: there are no nodes
};

// Appends the additions that make the node over leaves [first, last); its index, -1 if it is empty.
int Append(absl::Span<const TreeNode> at, int first, int last, Folds& folds) {
  for (size_t i = 0; i < at.size(); ++i) {
    if (at[i].first == first && at[i].last == last) return static_cast<int>(i);
  }
  if (last - first == 1) return -1;
  const int middle = (first + last) / 2;
  const int left = Append(at, first, middle, folds), right = Append(at, middle, last, folds);
  if (left < 0 || right < 0) return std::max(left, right);
  folds.step[folds.count++] = {left, right};
  return left;
}

constexpr int64_t kFoldColumns = 64;  // of all nodes together they fit the first cache

template <typename T>
void FoldRow(const Folds& folds, absl::Span<const MatrixView<const float>> nodes, int64_t row,
             T* out, int64_t cols) {
  float sum[kMaxTreeLeaves][kFoldColumns];
  for (int64_t begin = 0; begin < cols; begin += kFoldColumns) {
    const int64_t count = std::min(kFoldColumns, cols - begin);
    for (size_t i = 0; i < nodes.size(); ++i) {
      std::copy_n(nodes[i].row(row) + begin, count, sum[i]);
    }
    for (int s = 0; s < folds.count; ++s) {
      float* const left = sum[folds.step[s].left];
      const float* const right = sum[folds.step[s].right];
      for (int64_t j = 0; j < count; ++j) left[j] = left[j] + right[j];
    }
    for (int64_t j = 0; j < count; ++j) out[begin + j] = static_cast<T>(sum[folds.root][j]);
  }
}

}  // namespace

template <typename T>
absl::Status FoldNodes(int leaves, absl::Span<const TreeNode> at,
                       absl::Span<const MatrixView<const float>> nodes, MatrixView<T> out,
                       Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckCpu("FoldNodes", stream));
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
  Folds folds;
  if (fits) folds.root = Append(at, 0, leaves, folds);
  if (!fits || folds.count + 1 < static_cast<int>(at.size())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "FoldNodes: ", at.size(), " nodes that are not ascending subtrees of ", leaves, " leaves"));
  }
  return stream.Enqueue([=, &threads = stream.threads()] {
    threads.For(out.rows(), RowGrain(out.cols()), [&](int64_t begin, int64_t end) {
      const gemm::FlushSubnormals flush(std::is_same_v<T, BFloat16>);
      for (int64_t row = begin; row < end; ++row) {
        if (folds.root < 0) {
          std::fill_n(out.row(row), out.cols(), T(0.0f));
        } else {
          FoldRow(folds, nodes, row, out.row(row), out.cols());
        }
      }
    });
    return absl::OkStatus();
  });
}

#define MOE_INSTANTIATE(T)                                                                  \
  template absl::Status FoldNodes(int, absl::Span<const TreeNode>,                          \
                                  absl::Span<const MatrixView<const float>>, MatrixView<T>, \
                                  Stream&);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
