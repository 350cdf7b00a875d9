#include "kernels/grouped_gemm/grouped_gemm.h"

#include <iterator>
#include <type_traits>

#include <absl/strings/str_cat.h>

#include "kernels/base/device_arrays.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/grouped_gemm/gemm_cublas.h"
#include "kernels/grouped_gemm/gemm_problem.h"
#include "kernels/grouped_gemm/gemm_task.h"
#include "kernels/grouped_gemm/grouped_gemm_cuda.h"

namespace moe {
namespace {

using gemm::Layout;
using gemm::Problem;

// Groups of rows of `a` and `c`, cut by the offsets, times weight[g].
template <typename T, typename TOut>
struct GroupProducts {
  MatrixView<const T> a;
  GroupOffsets offsets;
  absl::Span<const MatrixView<const T>> weight;
  Layout weight_layout;
  MatrixView<TOut> c;
  BFloat16Order order;
  GemmTree tree;

  // The problem of group g. Offsets must be known to the host.
  Problem<T, TOut> operator[](size_t g) const {
    const int64_t begin = offsets.host()[g], end = offsets.host()[g + 1];
    return {.a = RowRange(a, begin, end),
            .b = weight[g],
            .c = RowRange(c, begin, end),
            .b_layout = weight_layout,
            .order = order,
            .tree = tree};
  }
};

template <typename T, typename TOut>
absl::Status RunOnCpu(const GroupProducts<T, TOut>& products, Workspace& workspace,
                      Stream& stream) {
  const Workspace::Mark mark = workspace.mark();
  const size_t groups = products.weight.size();
  MOE_ASSIGN_OR_RETURN(const auto problems,
                       (workspace.Array<Problem<T, TOut>>(static_cast<int64_t>(groups))));
  for (size_t g = 0; g < groups; ++g) problems[g] = products[g];
  return gemm::Run<T, TOut>(problems, mark, workspace, stream);
}

// Runs `problem`, a struct of grouped_gemm_cuda.h, on a stream of a CUDA device: chains of fmaf for
// float32, tensor cores for 16-bit types. The choice does not depend on the number of rows, on
// which a row's bits would then depend. Leaves of trees never go to wgmma, whose copies depend on
// where rows begin: ranks that hold parts of an index begin their rows elsewhere than one rank.
template <typename T, typename Problem>
absl::Status LaunchKernel(absl::string_view function, const Problem& problem, Stream& stream) {
  return LaunchOn(function, stream, [&](auto cuda) {
    if constexpr (std::is_same_v<T, float>) {
      return gemm::RunFma(problem, cuda);
    } else {
      if constexpr (std::is_same_v<Problem, gemm::CudaGroupedGemm<T>>) {
        if (problem.leaf.parts == 0 && gemm::TakesWgmma(problem)) {
          return gemm::RunWgmma(problem, cuda);
        }
      }
      return gemm::RunMma(problem, cuda);
    }
  });
}

// The offsets in memory of the stream's device, copied to `workspace` if needed; nullptr if all
// rows are one group, which kernels interpret that way.
absl::StatusOr<const int64_t*> OffsetsOnDevice(const GroupOffsets& offsets, Workspace& workspace,
                                               Stream& stream) {
  if (!offsets.device().empty()) return offsets.device().data();
  if (offsets.size() <= 2) return nullptr;
  MOE_ASSIGN_OR_RETURN(const auto device, UploadArray(offsets.host(), workspace, stream));
  return device.data();
}

// The weights of all groups, which the kernels read as one slab.
template <typename T>
absl::StatusOr<gemm::MatrixSlab<const T>> SlabOf(absl::string_view function,
                                                 absl::Span<const MatrixView<const T>> weight) {
  gemm::MatrixSlab<const T> slab;
  if (weight.empty()) return slab;
  slab = {weight[0], std::ssize(weight)};
  if (weight.size() > 1) slab.distance = weight[1].data() - weight[0].data();
  for (size_t g = 0; g < weight.size(); ++g) {
    if (weight[g].data() == slab[static_cast<int64_t>(g)].data() &&
        weight[g].stride() == slab.first.stride()) {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat(function, ": weight ", g, " is elsewhere than ", slab.distance,
                     " elements after the one before, with rows ", slab.first.stride(),
                     " apart: expected one slab on a CUDA device (ParameterStore::AddSlab)"));
  }
  return slab;
}

// Leaf s, which is not empty, without what it is added to.
gemm::TreeLeaf LeafOf(const GemmTree& tree, int s) {
  gemm::TreeLeaf leaf = {.parts = tree.parts};
  const int64_t begin = tree.cut.Begin(s), end = tree.cut.Begin(s + 1);
  for (int part = 0; part < GemmTree::kMaxParts; ++part) {
    const bool there = part < tree.parts;
    const int64_t times = there ? tree.Times(part) : 0;
    leaf.begin[part] = there ? tree.Begin(part) + times * begin : 0;
    leaf.first[part + 1] = leaf.first[part] + times * (end - begin);
  }
  return leaf;
}

// `product` as a tree: a launch for each leaf that is not empty, which ends with the nodes that the
// leaf completes. The nodes that wait for their right siblings are in memory of `workspace`.
template <typename T, typename TOut>
absl::Status LaunchTree(absl::string_view function, const GemmTree& tree,
                        const gemm::CudaGroupedGemm<T, TOut>& product, Workspace& workspace,
                        Stream& stream) {
  const TreeCut& cut = tree.cut;
  const int64_t rows = product.out.rows(), cols = product.out.cols();
  float* waiting[gemm::TreeLeaf::kMaxLefts] = {};
  int count = 0;
  for (int s = 0; s < cut.leaves; ++s) {
    if (cut.Begin(s) == cut.Begin(s + 1)) continue;
    gemm::TreeLeaf leaf = LeafOf(tree, s);
    leaf.lefts = cut.Folds(s, 1, cut.leaves);
    for (int i = 0; i < leaf.lefts; ++i) leaf.left[i] = waiting[--count];
    if (cut.Begin(s + 1) == cut.Begin(cut.leaves)) {
      gemm::CudaGroupedGemm<T, TOut> root = product;
      root.leaf = leaf;
      return LaunchKernel<T>(function, root, stream);
    }
    if (waiting[count] == nullptr) {
      MOE_ASSIGN_OR_RETURN(const auto memory, workspace.Array<float>(rows * cols));
      waiting[count] = memory.data();
    }
    const MatrixView<float> out(waiting[count++], rows, cols);
    MOE_RETURN_IF_ERROR(
        LaunchKernel<T>(function,
                        gemm::CudaGroupedGemm<T, float>{.in = product.in,
                                                        .offsets = product.offsets,
                                                        .weight = product.weight,
                                                        .weight_layout = product.weight_layout,
                                                        .out = out,
                                                        .leaf = leaf},
                        stream));
  }
  return LaunchKernel<T>(function, product, stream);  // no terms: zeros
}

// `in`, `out`: the names of a and c in errors.
template <typename T, typename TOut>
absl::Status Enqueue(absl::string_view function, absl::string_view in, absl::string_view out,
                     const GroupProducts<T, TOut>& products, Workspace& workspace, Stream& stream,
                     const GemmOptions& options) {
  const auto& [a, offsets, weight, weight_layout, c, order, tree] = products;
  const bool forward = weight_layout == Layout::kTransposed;
  MOE_RETURN_IF_ERROR(CheckShape(function, in, a, c.rows(), a.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(function, out, c, a.rows(), c.cols()));
  MOE_RETURN_IF_ERROR(CheckGroups(function, "weights", offsets, weight.size(), a.rows()));
  for (const MatrixView<const T>& w : weight) {
    MOE_RETURN_IF_ERROR(CheckShape(function, "weight", w, forward ? c.cols() : a.cols(),
                                   forward ? a.cols() : c.cols()));
  }
  MOE_RETURN_IF_ERROR(gemm::CheckTree(function, tree, a.cols()));
  if (!IsCuda(stream)) return RunOnCpu(products, workspace, stream);
  MOE_ASSIGN_OR_RETURN(const bool takes_cublas,
                       TakesCublas<T>(function, options, weight.size(), a.cols()));
  if (takes_cublas && !tree.cut.IsTree()) {
    if (!offsets.known_to_host()) {
      return absl::InvalidArgumentError(
          absl::StrCat(function, ": cuBLAS multiplies, expected offsets that the host knows"));
    }
    for (size_t g = 0; g < weight.size(); ++g) {
      MOE_RETURN_IF_ERROR(options.cublas->Multiply(function, products[g], stream));
    }
    return absl::OkStatus();
  }
  MOE_ASSIGN_OR_RETURN(const auto slab, SlabOf(function, weight));
  MOE_ASSIGN_OR_RETURN(const int64_t* const device_offsets,
                       OffsetsOnDevice(offsets, workspace, stream));
  MOE_ASSIGN_OR_RETURN(const auto taken, workspace.Array<unsigned>(gemm::kTakenWords));
  const gemm::CudaGroupedGemm<T, TOut> product = {
      a, device_offsets, slab, weight_layout, c, taken.data(), options.spare_multiprocessors()};
  if (tree.cut.IsTree()) return LaunchTree(function, tree, product, workspace, stream);
  return LaunchKernel<T>(function, product, stream);
}

}  // namespace

absl::Status gemm::CheckTree(absl::string_view function, const GemmTree& tree, int64_t depth) {
  const int leaves = tree.cut.leaves;
  const int64_t extent = tree.cut.extent, item = tree.cut.item;
  if (!IsTreeLeaves(leaves)) {
    return absl::InvalidArgumentError(
        absl::StrCat(function, ": a tree of ", leaves, " leaves, expected 1, 2, 4, 8 or 16"));
  }
  if (!tree.cut.IsTree()) return absl::OkStatus();
  if (tree.parts >= 1 && tree.parts <= GemmTree::kMaxParts && item >= 1 && extent >= 0 &&
      tree.first_times >= 1 && tree.Begin(tree.parts) == depth) {
    return absl::OkStatus();
  }
  const std::string times =
      tree.first_times == 1 ? "" : absl::StrCat(", the first ", tree.first_times, " times,");
  return absl::InvalidArgumentError(
      absl::StrCat(function, ": a tree over ", tree.parts, " parts of ", extent, times,
                   " in items of ", item, ", expected 1 to ", GemmTree::kMaxParts, " parts, ",
                   depth, " in all, in items of 1 or more"));
}

template <typename T, typename TOut>
absl::Status GroupedGemm(MatrixView<const T> x, const GroupOffsets& offsets,
                         absl::Span<const MatrixView<const T>> weight, MatrixView<TOut> y,
                         Workspace& workspace, Stream& stream, GemmOptions options, GemmTree tree) {
  return Enqueue<T, TOut>(
      "GroupedGemm", "x", "y",
      {x, offsets, weight, Layout::kTransposed, y, options.bfloat16_order, tree}, workspace, stream,
      options);
}

template <typename T, typename TOut>
absl::Status GroupedGemmInputGradient(MatrixView<const T> dy, const GroupOffsets& offsets,
                                      absl::Span<const MatrixView<const T>> weight,
                                      MatrixView<TOut> dx, Workspace& workspace, Stream& stream,
                                      GemmOptions options, GemmTree tree) {
  return Enqueue<T, TOut>("GroupedGemmInputGradient", "dy", "dx",
                          {dy, offsets, weight, Layout::kPlain, dx, options.bfloat16_order, tree},
                          workspace, stream, options);
}

template <typename T, typename TOut>
absl::Status Gemm(MatrixView<const T> x, MatrixView<const T> weight, MatrixView<TOut> y,
                  Workspace& workspace, Stream& stream, GemmOptions options, GemmTree tree) {
  const int64_t offsets[] = {0, x.rows()};
  return Enqueue<T, TOut>(
      "Gemm", "x", "y",
      {x, offsets, {&weight, 1}, Layout::kTransposed, y, options.bfloat16_order, tree}, workspace,
      stream, options);
}

template <typename T, typename TOut>
absl::Status GemmInputGradient(MatrixView<const T> dy, MatrixView<const T> weight,
                               MatrixView<TOut> dx, Workspace& workspace, Stream& stream,
                               GemmOptions options, GemmTree tree) {
  const int64_t offsets[] = {0, dy.rows()};
  return Enqueue<T, TOut>(
      "GemmInputGradient", "dy", "dx",
      {dy, offsets, {&weight, 1}, Layout::kPlain, dx, options.bfloat16_order, tree}, workspace,
      stream, options);
}

#define MOE_INSTANTIATE(T, TOut)                                                             \
  template absl::Status GroupedGemm(MatrixView<const T>, const GroupOffsets&,                \
                                    absl::Span<const MatrixView<const T>>, MatrixView<TOut>, \
                                    Workspace&, Stream&, GemmOptions, GemmTree);             \
  template decltype(GroupedGemmInputGradient<T, TOut>) GroupedGemmInputGradient<T, TOut>;    \
  template absl::Status Gemm(MatrixView<const T>, MatrixView<const T>, MatrixView<TOut>,     \
                             Workspace&, Stream&, GemmOptions, GemmTree);                    \
  template decltype(GemmInputGradient<T, TOut>) GemmInputGradient<T, TOut>;
MOE_FOR_PRODUCTS(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
