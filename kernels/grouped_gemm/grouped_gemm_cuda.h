// Arguments of the CUDA paths of grouped_gemm.h. Internal: plain C++ between grouped_gemm.cc
// (Abseil) and the .cu files (nvcc, no Abseil).
#ifndef MOE_KERNELS_GROUPED_GEMM_GROUPED_GEMM_CUDA_H_
#define MOE_KERNELS_GROUPED_GEMM_GROUPED_GEMM_CUDA_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"
#include "kernels/grouped_gemm/gemm_problem.h"

namespace moe::gemm {

// Matrices of one shape at equal distances in memory: those of a tensor [count, rows, cols].
template <typename T>
struct MatrixSlab {
  MatrixView<T> first;
  int64_t count = 0;
  int64_t distance = 0;  // between matrices, in elements

  MOE_HOST_DEVICE MatrixView<T> operator[](int64_t g) const {
    return {first.data() + g * distance, first.rows(), first.cols(), first.stride()};
  }
};

// A leaf of a tree (GemmTree) that is not empty, and what its sum is added to.
struct TreeLeaf {
  static constexpr int kMaxLefts = 4;
  static_assert(1 << kMaxLefts == kMaxTreeLeaves);

  // Its terms, in order: part p has those of the reduced index from begin[p] on that are terms
  // [first[p], first[p + 1]) of the leaf, none where there are fewer parts.
  int parts = 0;  // 0: the product is no leaf
  int64_t begin[GemmTree::kMaxParts] = {};
  int64_t first[GemmTree::kMaxParts + 1] = {};
  // The left siblings of the leaf and of each node that ends with it, one after the other: the sum
  // becomes left + sum. [N, cols], dense; the last may be the product's output.
  int lefts = 0;
  const float* left[kMaxLefts] = {};
};

// GroupedGemm (weight [cols, depth], kTransposed) and GroupedGemmInputGradient (weight
// [depth, cols], kPlain): out rows of group g = in rows of group g * weight[g].
//
// Group g owns rows [offsets[g], offsets[g + 1]). Offsets are device memory and read by the kernel,
// without a host wait. They may end before N (a buffer larger than needed); rows after the last
// group are not touched. Offsets that descend or leave [0, N] give wrong results, but no access out
// of bounds. Without offsets there is one group, of all rows.
//
// `weight` is device memory: one slab, whatever the number of groups.
template <typename T, typename TOut = T>
struct CudaGroupedGemm {
  MatrixView<const T> in;            // [N, depth]
  const int64_t* offsets = nullptr;  // [groups + 1]
  MatrixSlab<const T> weight;
  Layout weight_layout = Layout::kTransposed;
  MatrixView<TOut> out;  // [N, cols]
  // RunWgmma: device memory [kTakenWords] that it writes: how many tiles clusters have taken after
  // their first, then the numbers that a cluster's blocks pass on.
  unsigned* taken = nullptr;
  int spare = 0;  // RunWgmma: multiprocessors left free (SpareMultiprocessors)
  // RunFma, RunMma: the terms of a leaf alone, and `out` a node of its tree. Each part begins with
  // 16 terms of its own in RunMma.
  TreeLeaf leaf = {};
};

// A block is at most 6 tiles ahead of the other one of its cluster: the stages of a ring are 4.
constexpr int kPassedTiles = 8, kMostClusters = 128;
constexpr int64_t kTakenWords = 1 + kPassedTiles * kMostClusters;

// Destination of one weight's gradient. TSum: float, or int64_t, the integers of an exact grid
// (exact_sum.h).
template <typename TSum>
struct GradientSum {
  TSum* sum;              // [O, K]
  Write write;            // for the first partial
  int64_t first_segment;  // first segment of the weight

  // For exact sums alone.
  double inverse_unit = 0;
  int64_t limit = 0;           // most magnitude of a partial
  GridTally* tally = nullptr;  // added to
};

// AddWeightGradients: sums[g] (+)= dy^T x over the rows of its segments, from first_segment on;
// exact sums add one partial for each segment that has rows.
template <typename T, typename TSum>
struct CudaWeightGradients {
  MatrixView<const T> dy;   // [N, O]
  MatrixView<const T> x;    // [N, K]
  const int64_t* segments;  // device memory: first row of each, ascending, then the end of the last
  int64_t each;
  const GradientSum<TSum>* sums;  // [count], device memory
  int64_t count;
  int spare = 0;  // RunWgmma: multiprocessors left free (SpareMultiprocessors)
};

// Float32, with the bits of the CPU.
//
// Both enqueue on `stream` and return the launch error alone. Chains of fmaf and their sums: the
// bits of gemm::Reference.
cudaError_t RunFma(const CudaGroupedGemm<float>& gemm, cudaStream_t stream);
template <typename TSum>
cudaError_t RunFma(const CudaWeightGradients<float, TSum>& gradients, cudaStream_t stream);

// 16-bit types on tensor cores (mma.sync, sm_80 and later).
//
// Both enqueue on `stream` and return the launch error alone. Float32 accumulation: an element adds
// its terms in ascending order of the reduced index, 16 at a time, products exact. The tensor core
// determines the order and the rounding within 16, so that bits differ from the CPU's, within
// (depth + 1) * 2^-23 of the sum of magnitudes. As on the CPU an element's bits depend on its own
// row and column alone: neither on the number of rows, nor on other groups. T: BFloat16 or Float16;
// TOut: float or T.
//
// Asynchronous copies of 16 bytes fetch rows that all begin at a multiple of 16 bytes; others are
// read element by element, with the same bits.
template <typename T, typename TOut>
cudaError_t RunMma(const CudaGroupedGemm<T, TOut>& gemm, cudaStream_t stream);
template <typename T, typename TSum>
cudaError_t RunMma(const CudaWeightGradients<T, TSum>& gradients, cudaStream_t stream);

// Hopper GPUs (compute capability 9.0) alone: wgmma, with operands fetched by bulk copies. The
// contract and order of RunMma, 16 terms at a time; the rounding within 16 is wgmma's, so that bits
// may differ from RunMma's. T: BFloat16 or Float16.
template <typename T>
cudaError_t RunWgmma(const CudaGroupedGemm<T>& gemm, cudaStream_t stream);
template <typename T, typename TSum>
cudaError_t RunWgmma(const CudaWeightGradients<T, TSum>& gradients, cudaStream_t stream);
// Whether the current device is a Hopper GPU and its copy engine can read the operands: there are
// terms, rows and weights begin at multiples of 16 bytes, and each weight begins at least one row
// after the previous one. Does not depend on the number of rows.
template <typename T>
bool TakesWgmma(const CudaGroupedGemm<T>& gemm);
// Likewise: there are rows of dy and x, which begin at multiples of 16 bytes. Does not depend on
// the segments.
template <typename T, typename TSum>
bool TakesWgmma(const CudaWeightGradients<T, TSum>& gradients);

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GROUPED_GEMM_CUDA_H_
