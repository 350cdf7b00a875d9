#include <type_traits>

#include <math.h>

#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/exact_sum/exact_term_cuda.h"
#include "kernels/grouped_gemm/gemm_tiles_cuda.h"
#include "kernels/grouped_gemm/grouped_gemm_cuda.h"

namespace moe::gemm {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// A block owns 64 x 64 elements of the output, a thread 4 x 4 neighbours.
constexpr int kTile = 64, kTileDepth = 16, kOwned = 4;
constexpr int kThreadsAcross = kTile / kOwned;
constexpr int kThreads = kThreadsAcross * kThreadsAcross, kBlocks = 2;
static_assert(kChainWords % kTileDepth == 0);

// A tile of either operand in shared memory. Four extra elements a row spread the writes of a
// transposed tile over banks, and keep rows aligned.
struct alignas(kVectorBytes) SharedTile {
  float at[kTileDepth][kTile + 4];
};

// Loads the tile that begins at (outer, depth); zeros beyond the matrix. Neighbouring threads read
// neighbouring elements.
template <bool kDepthAlongRows>
__device__ void Fetch(MatrixView<const float> m, int64_t outer, int64_t depth, SharedTile& tile) {
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kTileDepth; i += kThreads) {
    const int o = kDepthAlongRows ? i / kTileDepth : i % kTile;
    const int d = kDepthAlongRows ? i % kTileDepth : i / kTile;
    const int64_t row = kDepthAlongRows ? outer + o : depth + d;
    const int64_t column = kDepthAlongRows ? depth + d : outer + o;
    tile.at[d][o] = row < m.rows() && column < m.cols() ? m(row, column) : 0.0f;
  }
}

// f(row, column, i, j) for this thread's elements [i][j] that are within c.
template <typename Product, typename Function>
__device__ void ForOwned(const Product& tile, Function f) {
  const int64_t first_row = tile.row + threadIdx.x / kThreadsAcross * kOwned;
  const int64_t first_col = tile.col + threadIdx.x % kThreadsAcross * kOwned;
  for (int i = 0; i < kOwned; ++i) {
    for (int j = 0; j < kOwned; ++j) {
      const int64_t row = first_row + i, col = first_col + j;
      if (row < tile.c.rows() && col < tile.c.cols()) f(row, col, i, j);
    }
  }
}

// Computes the terms of a * b for the tile that begins at (row, col): added to `sums` if `added`,
// else replacing them.
template <typename Groups>
__device__ void AddProducts(MatrixView<const float> a, MatrixView<const float> b, int64_t row,
                            int64_t col, SharedTile (&shared)[2], bool added,
                            float (&sums)[kOwned][kOwned]) {
  constexpr bool kPlainA = Groups::kALayout == Layout::kPlain;
  constexpr bool kPlainB = Groups::kBLayout == Layout::kPlain;
  auto& [a_tile, b_tile] = shared;
  float chains[kOwned][kOwned] = {};
  const int64_t depth = kPlainA ? a.cols() : a.rows();
  for (int64_t done = 0; done < depth; done += kTileDepth) {
    Fetch<kPlainA>(a, row, done, a_tile);
    Fetch<!kPlainB>(b, col, done, b_tile);
    __syncthreads();
    // No terms beyond the depth: fmaf(0, 0, -0) would be +0.
    const int terms = static_cast<int>(depth - done < kTileDepth ? depth - done : kTileDepth);
    for (int d = 0; d < terms; ++d) {
      const auto left = Load<kOwned>(&a_tile.at[d][threadIdx.x / kThreadsAcross * kOwned]);
      const auto right = Load<kOwned>(&b_tile.at[d][threadIdx.x % kThreadsAcross * kOwned]);
      for (int i = 0; i < kOwned; ++i) {
        for (int j = 0; j < kOwned; ++j) {
          chains[i][j] = fmaf(left.at[i], right.at[j], chains[i][j]);
        }
      }
    }
    __syncthreads();
    if ((done + kTileDepth) % kChainWords != 0 && done + kTileDepth < depth) continue;
    for (int i = 0; i < kOwned; ++i) {
      for (int j = 0; j < kOwned; ++j) {
        sums[i][j] = added ? sums[i][j] + chains[i][j] : chains[i][j];
        chains[i][j] = 0;
      }
    }
    added = true;
  }
}

template <typename Groups>
__global__ void __launch_bounds__(kThreads, kBlocks) FmaKernel(const Groups groups) {
  using TOut = typename Groups::TOut;
  MOE_SHARED_ARRAY(SharedTile, shared, 2);
  Tile<float, TOut> tile;
  const auto found = groups.Find(kTile, kTile, tile);
  if (!found) return;
  TOut sums[kOwned][kOwned] = {};
  if (tile.write == Write::kAdd) {
    ForOwned(tile, [&](int64_t row, int64_t col, int i, int j) { sums[i][j] = tile.c(row, col); });
  }
  if constexpr (std::is_same_v<TOut, float>) {
    AddProducts<Groups>(tile.a, tile.b, tile.row, tile.col, shared, tile.write == Write::kAdd,
                        sums);
  } else {
    groups.Of(*found).ForEach([&](int64_t begin, int64_t end) {
      float partial[kOwned][kOwned] = {};
      AddProducts<Groups>(RowRange(tile.a, begin, end), RowRange(tile.b, begin, end), tile.row,
                          tile.col, shared, /*added=*/false, partial);
      // of one segment: kept only after its products, to save registers
      exact_sum::ThreadTally tally;
      ForOwned(tile, [&](int64_t, int64_t, int i, int j) {
        sums[i][j] += exact_sum::ExactTerm(partial[i][j], found->inverse_unit, found->limit, tally);
      });
      exact_sum::AddTally(tally, found->tally);
    });
  }
  ForOwned(tile, [&](int64_t row, int64_t col, int i, int j) { tile.c(row, col) = sums[i][j]; });
}

template <typename Problem>
cudaError_t Run(const Problem& problem, cudaStream_t stream) {
  return LaunchGroups(problem, [&](const auto& groups) {
    using Groups = std::decay_t<decltype(groups)>;
    return LaunchTiles<Groups>(&FmaKernel<Groups>, groups, kTile, kTile, kThreads, stream);
  });
}

}  // namespace

cudaError_t RunFma(const CudaGroupedGemm<float>& gemm, cudaStream_t stream) {
  return Run(gemm, stream);
}
template <typename TSum>
cudaError_t RunFma(const CudaWeightGradients<float, TSum>& gradients, cudaStream_t stream) {
  return Run(gradients, stream);
}
template cudaError_t RunFma(const CudaWeightGradients<float, float>&, cudaStream_t);
template cudaError_t RunFma(const CudaWeightGradients<float, int64_t>&, cudaStream_t);

}  // namespace moe::gemm
