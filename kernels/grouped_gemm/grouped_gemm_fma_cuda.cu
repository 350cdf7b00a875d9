#include <type_traits>

#include <math.h>

#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
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

// A tile of either operand in shared memory. Four elements more in a row than it needs spread the
// writes of a tile that is turned over banks, and keep rows aligned.
struct alignas(kVectorBytes) SharedTile {
  float at[kTileDepth][kTile + 4];
};

// The tile that begins at (outer, depth); zeros beyond the matrix. Neighbouring threads read
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

// f(row, column, sum) for this thread's elements that lie in c.
template <typename Function>
__device__ void ForOwned(const Tile<float, float>& tile, float (&sums)[kOwned][kOwned],
                         Function f) {
  const int64_t first_row = tile.row + threadIdx.x / kThreadsAcross * kOwned;
  const int64_t first_col = tile.col + threadIdx.x % kThreadsAcross * kOwned;
  for (int i = 0; i < kOwned; ++i) {
    for (int j = 0; j < kOwned; ++j) {
      const int64_t row = first_row + i, col = first_col + j;
      if (row < tile.c.rows() && col < tile.c.cols()) f(row, col, sums[i][j]);
    }
  }
}

template <typename Groups>
__global__ void __launch_bounds__(kThreads, kBlocks) FmaKernel(const Groups groups) {
  constexpr bool kPlainA = Groups::kALayout == Layout::kPlain;
  constexpr bool kPlainB = Groups::kBLayout == Layout::kPlain;
  MOE_SHARED_ARRAY(SharedTile, shared, 2);
  auto& [a_tile, b_tile] = shared;
  Tile<float, float> tile;
  if (!groups.Find(kTile, kTile, tile)) return;
  float sums[kOwned][kOwned] = {}, chains[kOwned][kOwned] = {};
  bool added = groups.write == Write::kAdd;  // something is in sums
  if (added) {
    ForOwned(tile, sums, [&](int64_t row, int64_t col, float& sum) { sum = tile.c(row, col); });
  }
  const int64_t depth = kPlainA ? tile.a.cols() : tile.a.rows();
  for (int64_t done = 0; done < depth; done += kTileDepth) {
    Fetch<kPlainA>(tile.a, tile.row, done, a_tile);
    Fetch<!kPlainB>(tile.b, tile.col, done, b_tile);
    __syncthreads();
    // Not a term more than there are: fmaf(0, 0, -0) is +0.
    const int terms = static_cast<int>(depth - done < kTileDepth ? depth - done : kTileDepth);
    for (int d = 0; d < terms; ++d) {
      const auto a = Load<kOwned>(&a_tile.at[d][threadIdx.x / kThreadsAcross * kOwned]);
      const auto b = Load<kOwned>(&b_tile.at[d][threadIdx.x % kThreadsAcross * kOwned]);
      for (int i = 0; i < kOwned; ++i) {
        for (int j = 0; j < kOwned; ++j) chains[i][j] = fmaf(a.at[i], b.at[j], chains[i][j]);
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
  ForOwned(tile, sums, [&](int64_t row, int64_t col, float sum) { tile.c(row, col) = sum; });
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
cudaError_t RunFma(const CudaWeightGradient<float>& gradient, cudaStream_t stream) {
  return Run(gradient, stream);
}

}  // namespace moe::gemm
