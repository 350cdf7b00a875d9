#include <type_traits>

#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_tensor.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/grouped_gemm/gemm_tiles_cuda.h"
#include "kernels/grouped_gemm/grouped_gemm_cuda.h"

namespace moe::gemm {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// A block owns 128 x 128 elements of the output, each of its 2 x 2 warps 64 x 64: 128 registers of
// sums a thread. Smaller tiles of a warp would read more of shared memory than tensor cores leave
// time for. Two blocks fit a multiprocessor: 255 registers a thread, and 48 KiB, the most that
// needs no leave from the driver.
constexpr int kTile = 128, kTileDepth = 32, kStages = 3;
constexpr int kThreads = 128, kBlocks = 2;
constexpr int kWarpTile = 64, kWarpsAcross = kTile / kWarpTile;
constexpr int kFragment = 16;                     // rows and columns of mma.sync, depth of a step
constexpr int kRowTiles = kWarpTile / kFragment;  // of a warp
constexpr int kColTiles = kWarpTile / 8;          // mma.sync makes 8 columns
constexpr int kChunk = 8;                         // elements
constexpr int kTileChunks = kTile * kTileDepth / kChunk;

using Sums = float[kRowTiles][kColTiles][4];

// How a tile of an operand lies in memory, global or shared: with the depth along its rows
// (128 rows of 4 chunks) or down its columns (32 rows of 16 chunks).
template <bool kDepthAlongRows>
struct OperandTile {
  static constexpr bool kAlongRows = kDepthAlongRows;
  static constexpr int kRowChunks = (kDepthAlongRows ? kTileDepth : kTile) / kChunk;

  // Where a chunk lies in shared memory.
  MOE_HOST_DEVICE static constexpr int Place(int row, int chunk) {
    const int mixed = kDepthAlongRows ? chunk ^ row / 2 % 4 : chunk ^ row % 8;
    return row * kRowChunks + mixed;
  }

  // The row and the chunk of it that are the i-th of this thread's.
  __device__ static int OwnRow(int i) {
    return static_cast<int>(threadIdx.x) / kRowChunks + i * (kThreads / kRowChunks);
  }
  __device__ static int OwnChunk() { return static_cast<int>(threadIdx.x) % kRowChunks; }

  // The four 8 x 8 matrices of elements [outer, + 16) x [depth, + 16) of the tile. This lane names
  // a row of the one at (outer_half, depth_half).
  __device__ static void LoadFragment(const Chunk* tile, int outer, int depth, int outer_half,
                                      int depth_half, uint32_t (&fragment)[4]) {
    const int row_in_matrix = static_cast<int>(threadIdx.x) % 8;
    outer += outer_half * 8;
    depth += depth_half * 8;
    if constexpr (kDepthAlongRows) {
      LoadMatrices(tile + Place(outer + row_in_matrix, depth / kChunk), fragment);
    } else {
      LoadMatricesTransposed(tile + Place(depth + row_in_matrix, outer / kChunk), fragment);
    }
  }
};

// Whether the eight chunks that ldmatrix reads at once, neighbouring rows of a column, lie in eight
// different groups of four banks, and likewise those that eight neighbouring threads write.
template <typename Operand>
constexpr bool BanksDiffer() {
  for (int first = 0; first < kTileChunks; first += 8) {
    unsigned read = 0, written = 0;
    for (int i = 0; i < 8; ++i) {
      const int row = first / 8 % (kTileChunks / Operand::kRowChunks / 8) * 8 + i;
      const int column = first / 8 / (kTileChunks / Operand::kRowChunks / 8);
      read |= 1u << Operand::Place(row, column) % 8;
      const int index = first + i;
      written |= 1u << Operand::Place(index / Operand::kRowChunks, index % Operand::kRowChunks) % 8;
    }
    if (read != 0xff || written != 0xff) return false;
  }
  return true;
}
static_assert(BanksDiffer<OperandTile<true>>() && BanksDiffer<OperandTile<false>>());

// Whether every row begins at a multiple of `bytes`.
template <typename T>
__device__ bool RowsAlignedTo(MatrixView<T> m, int bytes) {
  return (reinterpret_cast<uintptr_t>(m.data()) | static_cast<uintptr_t>(m.stride()) * sizeof(T)) %
             bytes ==
         0;
}

// Fetches the tiles of an operand that begin at `outer`, in ascending depth.
template <typename Operand, typename T>
class OperandFetch {
 public:
  __device__ OperandFetch(MatrixView<const T> m, int64_t outer)
      : m_(m),
        outer_(outer),
        aligned_(RowsAlignedTo(m, kVectorBytes)),
        whole_(aligned_ && m.rows() > 0 && m.cols() > 0 && (kAlongRows || m.cols() % kChunk == 0)) {
    if (!whole_) return;
    MOE_UNROLL
    for (int i = 0; i < kOwnChunks; ++i) {
      const int64_t row = Operand::OwnRow(i), column = int64_t{Operand::OwnChunk()} * kChunk;
      from_[i] =
          m.data() + (kAlongRows ? Min(outer + row, m.rows() - 1) * m.stride() + column
                                 : row * m.stride() + Min(outer + column, m.cols() - kChunk));
    }
  }

  // The tile at `depth`, of which `depth_left` remain. Beyond the matrix: zeros in the depth, which
  // every sum has terms of; else anything, since it only reaches sums that nobody stores.
  __device__ void operator()(int64_t depth, int64_t depth_left, Chunk* tile, AsyncCopies& copies) {
    if (!whole_ || depth_left < kTileDepth) {
      FetchPart(depth, tile, copies);
      return;
    }
    MOE_UNROLL
    for (int i = 0; i < kOwnChunks; ++i) {
      copies.Copy(PlaceIn(tile, i), from_[i], kVectorBytes);
      from_[i] += kAlongRows ? kTileDepth : kTileDepth * m_.stride();
    }
  }

 private:
  static constexpr bool kAlongRows = Operand::kAlongRows;
  static constexpr int kOwnChunks = kTileChunks / kThreads;

  __device__ static Chunk* PlaceIn(Chunk* tile, int i) {
    return tile + Operand::Place(Operand::OwnRow(i), Operand::OwnChunk());
  }

  // Zeros beyond the matrix.
  __device__ void FetchPart(int64_t depth, Chunk* tile, AsyncCopies& copies) const {
    const int64_t first_row = kAlongRows ? outer_ : depth;
    const int64_t column = (kAlongRows ? depth : outer_) + Operand::OwnChunk() * kChunk;
    MOE_NO_UNROLL
    for (int i = 0; i < kOwnChunks; ++i) {
      const int64_t row = first_row + Operand::OwnRow(i);
      const int64_t left = row < m_.rows() ? m_.cols() - column : 0;
      const int valid = left <= 0 ? 0 : left < kChunk ? static_cast<int>(left) : kChunk;
      const T* const from = m_.data() + (valid == 0 ? 0 : row * m_.stride() + column);
      if (aligned_) {
        copies.Copy(PlaceIn(tile, i), from, valid * static_cast<int>(sizeof(T)));
      } else {
        *PlaceIn(tile, i) = SingleLoads(from, valid);
      }
    }
  }

  __device__ static Chunk SingleLoads(const T* from, int valid) {
    Chunk chunk = {};
    MOE_UNROLL
    for (int i = 0; i < kChunk; ++i) {
      if (i < valid) chunk.word[i / 2] |= static_cast<uint32_t>(from[i].bits) << i % 2 * 16;
    }
    return chunk;
  }

  const MatrixView<const T> m_;
  const int64_t outer_;
  const bool aligned_, whole_;  // copies of 16 bytes reach every row; and of all chunks in a row
  const T* from_[kOwnChunks];   // in the next tile
};

// The tiles of both operands in shared memory, kStages of them, one of which is computed with while
// the others are under way.
template <typename Groups>
class Pipeline {
 public:
  using A = OperandTile<Groups::kALayout == Layout::kPlain>;
  using B = OperandTile<Groups::kBLayout == Layout::kTransposed>;
  using T = typename Groups::T;
  using Product = Tile<T, typename Groups::TOut>;

  __device__ Pipeline(const Product& tile, Chunk* shared)
      : shared_(shared),
        depth_(Groups::kALayout == Layout::kPlain ? tile.a.cols() : tile.a.rows()),
        fetch_a_(tile.a, tile.row),
        fetch_b_(tile.b, tile.col) {}

  // Adds all terms, in ascending depth.
  __device__ void Sum(Sums& sums) {
    for (int s = 0; s < kStages - 1; ++s) Fetch(int64_t{s} * kTileDepth, s);
    int stage = 0;
    for (int64_t depth = 0; depth < depth_; depth += kTileDepth) {
      copies_.Wait<kStages - 2>();
      __syncthreads();  // the stage has arrived for all, and all are through with the one before
      Fetch(depth + (kStages - 1) * kTileDepth, (stage + kStages - 1) % kStages);
      AddProducts(stage, sums);
      stage = (stage + 1) % kStages;
    }
  }

 private:
  __device__ Chunk* StageOf(int stage) { return shared_ + stage * 2 * kTileChunks; }

  // One group of copies, also beyond the depth: what Wait() counts.
  __device__ void Fetch(int64_t depth, int stage) {
    if (depth < depth_) {
      fetch_a_(depth, depth_ - depth, StageOf(stage), copies_);
      fetch_b_(depth, depth_ - depth, StageOf(stage) + kTileChunks, copies_);
    }
    copies_.Commit();
  }

  __device__ void AddProducts(int stage, Sums& sums) {
    const Chunk* const a_tile = StageOf(stage);
    const Chunk* const b_tile = a_tile + kTileChunks;
    const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
    const int row = warp / kWarpsAcross * kWarpTile, col = warp % kWarpsAcross * kWarpTile;
    const int matrix = static_cast<int>(threadIdx.x) % kWarpLanes / 8;
    MOE_UNROLL
    for (int depth = 0; depth < kTileDepth; depth += kFragment) {
      uint32_t a[kRowTiles][4], b[kColTiles / 2][4];
      MOE_UNROLL
      for (int i = 0; i < kRowTiles; ++i) {
        A::LoadFragment(a_tile, row + i * kFragment, depth, matrix % 2, matrix / 2, a[i]);
      }
      MOE_UNROLL
      for (int j = 0; j < kColTiles / 2; ++j) {
        B::LoadFragment(b_tile, col + j * kFragment, depth, matrix / 2, matrix % 2, b[j]);
      }
      MOE_UNROLL
      for (int i = 0; i < kRowTiles; ++i) {
        MOE_UNROLL
        for (int j = 0; j < kColTiles; ++j) {
          const uint32_t pair[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
          MultiplyAdd<T>(sums[i][j], a[i], pair);
        }
      }
    }
  }

  Chunk* const shared_;
  const int64_t depth_;
  OperandFetch<A, T> fetch_a_;
  OperandFetch<B, T> fetch_b_;
  AsyncCopies copies_;
};

// f(row, column, first sum, second sum) for the pairs of neighbouring columns that this thread has
// sums of, as far as they lie in `tile`. The second column may lie beyond it.
template <typename Product, typename Function>
__device__ void ForPairs(const Product& tile, Sums& sums, Function f) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int64_t first_row = tile.row + warp / kWarpsAcross * kWarpTile + lane / 4;
  const int64_t first_col = tile.col + warp % kWarpsAcross * kWarpTile + lane % 4 * 2;
  MOE_UNROLL
  for (int i = 0; i < kRowTiles; ++i) {
    MOE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int64_t row = first_row + i * kFragment + half * 8;
      if (row >= tile.c.rows()) continue;
      MOE_UNROLL
      for (int j = 0; j < kColTiles; ++j) {
        const int64_t col = first_col + j * 8;
        if (col < tile.c.cols()) f(row, col, sums[i][j][half * 2], sums[i][j][half * 2 + 1]);
      }
    }
  }
}

template <typename Groups>
__global__ void __launch_bounds__(kThreads, kBlocks) MmaKernel(const Groups groups) {
  using TOut = typename Groups::TOut;
  MOE_SHARED_ARRAY(Chunk, shared, kStages * 2 * kTileChunks);
  Tile<typename Groups::T, TOut> tile;
  if (!groups.Find(kTile, kTile, tile)) return;
  Sums sums = {};
  const auto& c = tile.c;
  if (groups.write == Write::kAdd) {
    ForPairs(tile, sums, [&](int64_t row, int64_t col, float& first, float& second) {
      first = static_cast<float>(c(row, col));
      if (col + 1 < c.cols()) second = static_cast<float>(c(row, col + 1));
    });
  }
  Pipeline<Groups>(tile, shared).Sum(sums);
  const bool pairs = RowsAlignedTo(c, 2 * sizeof(TOut));
  ForPairs(tile, sums, [&](int64_t row, int64_t col, float first, float second) {
    if (pairs && col + 1 < c.cols()) {
      Store(Elements<TOut, 2>{{TOut(first), TOut(second)}}, &c(row, col));
      return;
    }
    c(row, col) = TOut(first);
    if (col + 1 < c.cols()) c(row, col + 1) = TOut(second);
  });
}

template <typename Problem>
cudaError_t Run(const Problem& problem, cudaStream_t stream) {
  return LaunchGroups(problem, [&](const auto& groups) {
    using Groups = std::decay_t<decltype(groups)>;
    return LaunchTiles<Groups>(&MmaKernel<Groups>, groups, kTile, kTile, kThreads, stream);
  });
}

}  // namespace

template <typename T, typename TOut>
cudaError_t RunMma(const CudaGroupedGemm<T, TOut>& gemm, cudaStream_t stream) {
  return Run(gemm, stream);
}
template <typename T>
cudaError_t RunMma(const CudaWeightGradient<T>& gradient, cudaStream_t stream) {
  return Run(gradient, stream);
}

#define MOE_INSTANTIATE(T)                                                     \
  template cudaError_t RunMma(const CudaGroupedGemm<T, T>&, cudaStream_t);     \
  template cudaError_t RunMma(const CudaGroupedGemm<T, float>&, cudaStream_t); \
  template cudaError_t RunMma(const CudaWeightGradient<T>&, cudaStream_t);
MOE_INSTANTIATE(BFloat16)
MOE_INSTANTIATE(Float16)
#undef MOE_INSTANTIATE

}  // namespace moe::gemm
