#include "kernels/grouped_gemm/packed_weights.h"

#include <algorithm>
#include <type_traits>

#include <absl/strings/str_cat.h>

#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/grouped_gemm/gemm_blocks.h"
#include "kernels/grouped_gemm/gemm_problem.h"
#include "kernels/grouped_gemm/gemm_task.h"

namespace moe {
namespace {

int64_t StripCount(int64_t cols, int64_t strip_cols) {
  return (cols + strip_cols - 1) / strip_cols;
}

// Strips hold the pairs of the whole depth.
template <typename T>
absl::Status CheckPairs(absl::string_view function, const GemmTree& tree, BFloat16Order order) {
  const TreeCut& cut = tree.cut;
  if (!cut.IsTree() || order == BFloat16Order::kTile) return absl::OkStatus();
  const int64_t depth = tree.Begin(tree.parts);
  for (int part = 0; part < tree.parts; ++part) {
    for (int s = 0; s < cut.leaves; ++s) {
      const int64_t begin = tree.Begin(part) + tree.Times(part) * cut.Begin(s);
      if (begin % gemm::kStepsPerWord<T> == 0 || begin == depth) continue;
      return absl::InvalidArgumentError(absl::StrCat(function, ": a leaf begins at ", begin,
                                                     " of packed bfloat16, expected even"));
    }
  }
  return absl::OkStatus();
}

template <typename T, typename TOut>
absl::Status Forward(absl::string_view function, MatrixView<const T> x,
                     absl::Span<const int64_t> offsets, absl::Span<const PackedWeights<T>> weight,
                     int64_t version, MatrixView<TOut> y, Workspace& workspace, Stream& stream,
                     GemmTree tree) {
  MOE_RETURN_IF_ERROR(CheckCpu(function, stream));
  MOE_RETURN_IF_ERROR(CheckShape(function, "x", x, y.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(function, "y", y, x.rows(), y.cols()));
  MOE_RETURN_IF_ERROR(CheckGroups(function, "weights", offsets, weight.size(), x.rows()));
  for (const PackedWeights<T>& w : weight) {
    MOE_RETURN_IF_ERROR(w.Check(function, y.cols(), x.cols(), version, tree));
    if (w.order() == weight.front().order()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(function, ": weights packed for two orders of bfloat16"));
  }
  const BFloat16Order order = weight.empty() ? BFloat16Order::kDot : weight.front().order();
  MOE_RETURN_IF_ERROR(gemm::CheckTree(function, tree, x.cols()));
  MOE_RETURN_IF_ERROR(CheckPairs<T>(function, tree, order));
  const Workspace::Mark mark = workspace.mark();
  const auto groups = static_cast<int64_t>(weight.size());
  MOE_ASSIGN_OR_RETURN(const auto problems, (workspace.Array<gemm::Problem<T, TOut>>(groups)));
  for (size_t g = 0; g < weight.size(); ++g) {
    problems[g] = {.a = RowRange(x, offsets[g], offsets[g + 1]),
                   .b = weight[g].strips(),
                   .c = RowRange(y, offsets[g], offsets[g + 1]),
                   .b_layout = gemm::Layout::kStrips,
                   .order = order,
                   .tree = tree};
  }
  return gemm::Run<T, TOut>(problems, mark, workspace, stream);
}

}  // namespace

template <typename T>
absl::StatusOr<PackedWeights<T>> PackedWeights<T>::Create(int64_t out_features, int64_t in_features,
                                                          BFloat16Order order,
                                                          const GemmTree& tree) {
  if (out_features < 0 || in_features < 0) {
    return absl::InvalidArgumentError(absl::StrCat("PackedWeights: [", out_features, ", ",
                                                   in_features, "], expected no negative size"));
  }
  PackedWeights packed;
  packed.out_features_ = out_features;
  packed.in_features_ = in_features;
  if (std::is_same_v<T, BFloat16> && order == BFloat16Order::kTile) {
    MOE_RETURN_IF_ERROR(gemm::CheckTree("PackedWeights", tree, in_features));
    packed.order_ = order;
    packed.tree_ = tree;
  }
  packed.strip_cols_ = packed.is_tiles() ? gemm::kStripSide : gemm::StripCols();
  const int64_t elements = StripCount(out_features, packed.strip_cols_) * packed.strip_elements();
  MOE_ASSIGN_OR_RETURN(packed.strips_, Buffer::Allocate(elements * static_cast<int64_t>(sizeof(T)),
                                                        CpuMemory(), "PackedWeights"));
  return packed;
}

template <typename T>
int64_t PackedWeights<T>::strip_elements() const {
  return strip_cols_ * (is_tiles() ? gemm::TreeSteps(tree_, in_features_) * gemm::kTerms
                                   : gemm::StripSteps<T>(in_features_));
}

template <typename T>
absl::Status PackedWeights<T>::Pack(MatrixView<const T> weight, int64_t version, Stream& stream) {
  constexpr char kFunction[] = "PackedWeights::Pack";
  MOE_RETURN_IF_ERROR(CheckCpu(kFunction, stream));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "weight", weight, out_features_, in_features_));
  if (version < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(kFunction, ": version ", version, ", expected one of 0 or more"));
  }
  if (!is_tiles() && strip_cols_ != gemm::StripCols()) {
    return absl::InvalidArgumentError(
        absl::StrCat(kFunction, ": created for other SIMD instructions"));
  }
  MOE_RETURN_IF_ERROR(
      stream.Enqueue([this, weight, to = strips_.span<T>().data(), &threads = stream.threads()] {
        const int64_t cols = strip_cols_, elements = strip_elements();
        threads.For(StripCount(weight.rows(), cols), 1, [&](int64_t begin, int64_t end) {
          for (int64_t s = begin; s < end; ++s) {
            const auto rows = RowRange(weight, s * cols, std::min((s + 1) * cols, weight.rows()));
            if constexpr (std::is_same_v<T, BFloat16>) {
              if (is_tiles()) {
                gemm::PackTileStrip(rows, tree_, to + s * elements);
                continue;
              }
            }
            gemm::PackStrip(rows, to + s * elements);
          }
        });
        return absl::OkStatus();
      }));
  version_ = version;
  return absl::OkStatus();
}

template <typename T>
absl::Status PackedWeights<T>::Check(absl::string_view function, int64_t out_features,
                                     int64_t in_features, int64_t version,
                                     const GemmTree& tree) const {
  if (out_features_ != out_features || in_features_ != in_features) {
    return absl::InvalidArgumentError(
        absl::StrCat(function, ": a packed weight is [", out_features_, ", ", in_features_,
                     "], expected [", out_features, ", ", in_features, "]"));
  }
  if (version_ == kNeverPacked || version_ != version) {
    return absl::InvalidArgumentError(
        absl::StrCat(function, ": a weight is packed at version ", version_, ", expected ", version,
                     version_ == kNeverPacked ? " (call Pack first)" : ""));
  }
  if (is_tiles()) {
    if (tree == tree_) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(function, ": a weight is packed for a tree of ", tree_.cut.leaves,
                     " leaves over ", tree_.cut.extent, ", expected that of the product, ",
                     tree.cut.leaves, " over ", tree.cut.extent));
  }
  if (strip_cols_ == gemm::StripCols()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(function, ": a weight is packed for other SIMD instructions"));
}

template <typename T>
MatrixView<const T> PackedWeights<T>::strips() const {
  const int64_t row = is_tiles() ? gemm::kStripSide * gemm::kTerms : strip_cols_;
  return {strips_.span<const T>().data(),
          row == 0 ? 0 : StripCount(out_features_, strip_cols_) * strip_elements() / row, row};
}

template <typename T>
absl::Status GroupedGemm(MatrixView<const T> x, absl::Span<const int64_t> offsets,
                         absl::Span<const PackedWeights<T>> weight, int64_t version,
                         MatrixView<T> y, Workspace& workspace, Stream& stream, GemmTree tree) {
  return Forward<T, T>("GroupedGemm", x, offsets, weight, version, y, workspace, stream, tree);
}

template <typename T, typename TOut>
absl::Status Gemm(MatrixView<const T> x, const PackedWeights<T>& weight, int64_t version,
                  MatrixView<TOut> y, Workspace& workspace, Stream& stream, GemmTree tree) {
  const int64_t offsets[] = {0, x.rows()};
  return Forward<T, TOut>("Gemm", x, offsets, {&weight, 1}, version, y, workspace, stream, tree);
}

#define MOE_INSTANTIATE(T)                                                                      \
  template class PackedWeights<T>;                                                              \
  template absl::Status GroupedGemm(MatrixView<const T>, absl::Span<const int64_t>,             \
                                    absl::Span<const PackedWeights<T>>, int64_t, MatrixView<T>, \
                                    Workspace&, Stream&, GemmTree);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE
#define MOE_INSTANTIATE(T, TOut)                                                    \
  template absl::Status Gemm(MatrixView<const T>, const PackedWeights<T>&, int64_t, \
                             MatrixView<TOut>, Workspace&, Stream&, GemmTree);
MOE_FOR_PRODUCTS(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
