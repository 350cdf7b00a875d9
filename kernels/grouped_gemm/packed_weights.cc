#include "kernels/grouped_gemm/packed_weights.h"

#include <algorithm>

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
absl::Status CheckPairs(absl::string_view function, const GemmTree& tree) {
  const TreeCut& cut = tree.cut;
  if (!cut.IsTree()) return absl::OkStatus();
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
    MOE_RETURN_IF_ERROR(w.Check(function, y.cols(), x.cols(), version));
  }
  MOE_RETURN_IF_ERROR(gemm::CheckTree(function, tree, x.cols()));
  MOE_RETURN_IF_ERROR(CheckPairs<T>(function, tree));
  const Workspace::Mark mark = workspace.mark();
  const auto groups = static_cast<int64_t>(weight.size());
  MOE_ASSIGN_OR_RETURN(const auto problems, (workspace.Array<gemm::Problem<T, TOut>>(groups)));
  for (size_t g = 0; g < weight.size(); ++g) {
    problems[g] = {.a = RowRange(x, offsets[g], offsets[g + 1]),
                   .b = weight[g].strips(),
                   .c = RowRange(y, offsets[g], offsets[g + 1]),
                   .b_layout = gemm::Layout::kStrips,
                   .tree = tree};
  }
  return gemm::Run<T, TOut>(problems, mark, workspace, stream);
}

}  // namespace

template <typename T>
absl::StatusOr<PackedWeights<T>> PackedWeights<T>::Create(int64_t out_features,
                                                          int64_t in_features) {
  if (out_features < 0 || in_features < 0) {
    return absl::InvalidArgumentError(absl::StrCat("PackedWeights: [", out_features, ", ",
                                                   in_features, "], expected no negative size"));
  }
  PackedWeights packed;
  packed.out_features_ = out_features;
  packed.in_features_ = in_features;
  packed.strip_cols_ = gemm::StripCols();
  const int64_t elements = StripCount(out_features, packed.strip_cols_) * packed.strip_cols_ *
                           gemm::StripSteps<T>(in_features);
  MOE_ASSIGN_OR_RETURN(packed.strips_, Buffer::Allocate(elements * static_cast<int64_t>(sizeof(T)),
                                                        CpuMemory(), "PackedWeights"));
  return packed;
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
  if (strip_cols_ != gemm::StripCols()) {
    return absl::InvalidArgumentError(
        absl::StrCat(kFunction, ": created for other SIMD instructions"));
  }
  MOE_RETURN_IF_ERROR(stream.Enqueue(
      [weight, to = strips_.span<T>().data(), cols = strip_cols_, &threads = stream.threads()] {
        threads.For(StripCount(weight.rows(), cols), 1, [&](int64_t begin, int64_t end) {
          for (int64_t s = begin; s < end; ++s) {
            gemm::PackStrip(RowRange(weight, s * cols, std::min((s + 1) * cols, weight.rows())),
                            to + s * cols * gemm::StripSteps<T>(weight.cols()));
          }
        });
        return absl::OkStatus();
      }));
  version_ = version;
  return absl::OkStatus();
}

template <typename T>
absl::Status PackedWeights<T>::Check(absl::string_view function, int64_t out_features,
                                     int64_t in_features, int64_t version) const {
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
  if (strip_cols_ == gemm::StripCols()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(function, ": a weight is packed for other SIMD instructions"));
}

template <typename T>
MatrixView<const T> PackedWeights<T>::strips() const {
  const auto data = strips_.span<const T>();
  return {data.data(), StripCount(out_features_, strip_cols_) * gemm::StripSteps<T>(in_features_),
          strip_cols_};
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
