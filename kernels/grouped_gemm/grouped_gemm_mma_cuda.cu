#include <type_traits>

#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_tensor.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/exact_sum/exact_term_cuda.h"
#include "kernels/grouped_gemm/gemm_tiles_cuda.h"
#include "kernels/grouped_gemm/grouped_gemm_cuda.h"

namespace moe::gemm {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// A block owns 128 x 128 elements of the output and uses 48 KiB of shared memory, the most that
// needs no opt-in.
constexpr int kTile = 128, kTileDepth = 32, kStages = 3;
constexpr int kWarpRows = 64;
constexpr int kFragment = 16;                     // rows and columns of mma.sync, depth of a step
constexpr int kRowTiles = kWarpRows / kFragment;  // row fragments of a warp
constexpr int kChunk = 8;                         // elements
constexpr int kTileChunks = kTile * kTileDepth / kChunk;

// The warps of a block: two rows of kAcross.
template <int kAcross>
struct Warps {
  static constexpr int kThreads = kTile / kWarpRows * kAcross * kWarpLanes;
  static constexpr int kCols = kTile / kAcross;  // columns of a warp
  static constexpr int kColTiles = kCols / 8;    // mma.sync computes 8 columns
  template <typename Sum>
  using Sums = Sum[kRowTiles][kColTiles][4];
};
// Warps of 64 x 64: 128 registers of sums a thread. Smaller warp tiles would read more from shared
// memory than tensor cores leave time for. Two blocks fit a multiprocessor.
using WideWarps = Warps<2>;
constexpr int kBlocks = 2;
// Warps of 64 x 32, the same number on a multiprocessor, in one block: 64 registers of sums a
// thread, and 128 of integers.
using ExactWarps = Warps<4>;

// Memory layout of an operand's tile, global or shared: the depth runs along its rows (128 rows of
// 4 chunks) or down its columns (32 rows of 16 chunks).
template <bool kDepthAlongRows>
struct OperandTile {
  static constexpr bool kAlongRows = kDepthAlongRows;
  static constexpr int kRowChunks = (kDepthAlongRows ? kTileDepth : kTile) / kChunk;

  // Index of a chunk in shared memory.
  MOE_HOST_DEVICE static constexpr int Place(int row, int chunk) {
    const int mixed = kDepthAlongRows ? chunk ^ row / 2 % 4 : chunk ^ row % 8;
    return row * kRowChunks + mixed;
  }

  // The row and chunk of this thread's i-th copy, with kThreads threads.
  template <int kThreads>
  __device__ static int OwnRow(int i) {
    return static_cast<int>(threadIdx.x) / kRowChunks + i * (kThreads / kRowChunks);
  }
  __device__ static int OwnChunk() { return static_cast<int>(threadIdx.x) % kRowChunks; }

  // Loads the four 8 x 8 matrices of elements [outer, + 16) x [depth, + 16) of the tile. This lane
  // passes the address of a row of the one at (outer_half, depth_half).
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

// Whether the eight chunks that ldmatrix reads at once, neighbouring rows of a column, are in eight
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

// Fetches the tiles of an operand that begin at `outer`, in ascending depth, by kThreads threads.
template <typename Operand, typename T, int kThreads>
class OperandFetch {
 public:
  // `begins_aligned`: whether all parts of the depth begin at multiples of kChunk.
  __device__ OperandFetch(MatrixView<const T> m, int64_t outer, bool begins_aligned)
      : m_(m),
        outer_(outer),
        aligned_(RowsAlignedTo(m, kVectorBytes) && (!kAlongRows || begins_aligned)),
        whole_(aligned_ && m.rows() > 0 && m.cols() > 0 && (kAlongRows || m.cols() % kChunk == 0)) {
    if (!whole_) return;
    MOE_UNROLL
    for (int i = 0; i < kOwnChunks; ++i) {
      const int64_t row = OwnRow(i), column = int64_t{Operand::OwnChunk()} * kChunk;
      from_[i] =
          m.data() + (kAlongRows ? Min(outer + row, m.rows() - 1) * m.stride() + column
                                 : row * m.stride() + Min(outer + column, m.cols() - kChunk));
    }
  }

  // Goes on `depth` further on.
  __device__ void Skip(int64_t depth) {
    if (whole_) Advance(depth);
  }

  // Fetches the next tile: the first of the remaining `left` of the depth up to `end`. Beyond the
  // depth it reads zeros, since every sum includes the whole tile depth. Beyond the matrix it reads
  // anything, since only sums that are not stored depend on it.
  __device__ void operator()(int64_t left, int64_t end, Chunk* tile, AsyncCopies& copies) {
    if (!whole_ || left < kTileDepth) {
      FetchPart(left, end, tile, copies);
      if (whole_) Advance(left);
      return;
    }
    MOE_UNROLL
    for (int i = 0; i < kOwnChunks; ++i) {
      copies.Copy(PlaceIn(tile, i), from_[i], kVectorBytes);
    }
    Advance(kTileDepth);
  }

 private:
  static constexpr bool kAlongRows = Operand::kAlongRows;
  static constexpr int kOwnChunks = kTileChunks / kThreads;

  __device__ static int OwnRow(int i) { return Operand::template OwnRow<kThreads>(i); }
  __device__ static Chunk* PlaceIn(Chunk* tile, int i) {
    return tile + Operand::Place(OwnRow(i), Operand::OwnChunk());
  }

  __device__ void Advance(int64_t depth) {
    MOE_UNROLL
    for (int i = 0; i < kOwnChunks; ++i) from_[i] += kAlongRows ? depth : depth * m_.stride();
  }

  // Reads zeros beyond the depth and the matrix.
  __device__ void FetchPart(int64_t left, int64_t end, Chunk* tile, AsyncCopies& copies) const {
    const int64_t depth = end - left;
    const int64_t first_row = kAlongRows ? outer_ : depth;
    const int64_t end_row = kAlongRows ? m_.rows() : end;
    const int64_t column = (kAlongRows ? depth : outer_) + Operand::OwnChunk() * kChunk;
    const int64_t end_column = kAlongRows ? end : m_.cols();
    MOE_NO_UNROLL
    for (int i = 0; i < kOwnChunks; ++i) {
      const int64_t row = first_row + OwnRow(i);
      const int64_t there = row < end_row ? end_column - column : 0;
      const int valid = there <= 0 ? 0 : there < kChunk ? static_cast<int>(there) : kChunk;
      const T* const from = m_.data() + (valid == 0 ? 0 : row * m_.stride() + column);
      if (aligned_) {
        copies.Copy(PlaceIn(tile, i), from, valid * static_cast<int>(sizeof(T)));
      } else {
        *PlaceIn(tile, i) = SingleLoads(from, valid);
      }
    }
  }

  const MatrixView<const T> m_;
  const int64_t outer_;
  // whether 16-byte copies work for every row, and for all chunks of a row
  const bool aligned_, whole_;
  const T* from_[kOwnChunks];  // addresses in the next tile
};

// Tiles of both operands in shared memory, kStages of them: one is used while the others are in
// flight, including those of the next segment, or of a leaf's next part. No tile has rows of two.
template <typename Groups, typename Cuts, int kAcross>
class Pipeline {
 public:
  using A = OperandTile<Groups::kALayout == Layout::kPlain>;
  using B = OperandTile<Groups::kBLayout == Layout::kTransposed>;
  using T = typename Groups::T;
  using Product = Tile<T, typename Groups::TOut>;
  using Block = Warps<kAcross>;
  using Sums = typename Block::template Sums<float>;

  __device__ Pipeline(const Product& tile, const Cuts& cuts, Chunk* shared)
      : shared_(shared),
        cuts_(cuts),
        end_(cuts.End(0)),
        left_(end_),
        fetch_a_(tile.a, tile.row, BeginsAligned(cuts)),
        fetch_b_(tile.b, tile.col, BeginsAligned(cuts)) {
    if constexpr (Cuts::kHasParts) SkipTo(cuts.Begin(0), 0);
    for (int s = 0; s < kStages - 1; ++s) Fetch(s);
  }

  // Adds the terms of the next segment, of `depth`, in ascending order.
  __device__ void Sum(int64_t depth, Sums& sums) {
    for (; depth > 0; depth -= kTileDepth) {
      copies_.Wait<kStages - 2>();
      // the stage has arrived for all threads, and all have finished the previous one
      __syncthreads();
      Fetch((stage_ + kStages - 1) % kStages);
      AddProducts(stage_, sums);
      stage_ = (stage_ + 1) % kStages;
    }
  }

 private:
  __device__ static bool BeginsAligned(const Cuts& cuts) {
    if constexpr (Cuts::kHasParts) return cuts.AlignedTo(kChunk);
    return true;
  }
  // Goes on at `begin`, from `end` on.
  __device__ void SkipTo(int64_t begin, int64_t end) {
    fetch_a_.Skip(begin - end);
    fetch_b_.Skip(begin - end);
    left_ = end_ - begin;
  }

  __device__ Chunk* StageOf(int stage) { return shared_ + stage * 2 * kTileChunks; }

  // Commits one group of copies, also beyond the depth, because Wait() counts groups.
  __device__ void Fetch(int stage) {
    while (left_ <= 0 && cut_ + 1 < cuts_.count()) {
      const int64_t end = end_;
      end_ = cuts_.End(++cut_);
      if constexpr (Cuts::kHasParts) {
        SkipTo(cuts_.Begin(cut_), end);
      } else {
        left_ = end_ - end;
      }
    }
    if (left_ > 0) {
      fetch_a_(left_, end_, StageOf(stage), copies_);
      fetch_b_(left_, end_, StageOf(stage) + kTileChunks, copies_);
      left_ -= kTileDepth;
    }
    copies_.Commit();
  }

  __device__ void AddProducts(int stage, Sums& sums) {
    constexpr int kColTiles = Block::kColTiles;
    const Chunk* const a_tile = StageOf(stage);
    const Chunk* const b_tile = a_tile + kTileChunks;
    const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
    const int row = warp / kAcross * kWarpRows, col = warp % kAcross * Block::kCols;
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
  const Cuts cuts_;
  int stage_ = 0;       // the next stage to compute
  int cut_ = 0;         // the segment being copied
  int64_t end_, left_;  // its end, and its depth not yet fetched
  OperandFetch<A, T, Block::kThreads> fetch_a_;
  OperandFetch<B, T, Block::kThreads> fetch_b_;
  AsyncCopies copies_;
};

// f(row, column, i, j, k) for the pairs of neighbouring columns within `tile` whose sums [i][j][k]
// and [i][j][k + 1] this thread owns. The second column may be beyond the tile.
template <int kAcross, typename Product, typename Function>
__device__ void ForPairs(const Product& tile, Function f) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int64_t first_row = tile.row + warp / kAcross * kWarpRows + lane / 4;
  const int64_t first_col = tile.col + warp % kAcross * Warps<kAcross>::kCols + lane % 4 * 2;
  MOE_UNROLL
  for (int i = 0; i < kRowTiles; ++i) {
    MOE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int64_t row = first_row + i * kFragment + half * 8;
      if (row >= tile.c.rows()) continue;
      MOE_UNROLL
      for (int j = 0; j < Warps<kAcross>::kColTiles; ++j) {
        const int64_t col = first_col + j * 8;
        if (col < tile.c.cols()) f(row, col, i, j, half * 2);
      }
    }
  }
}

// Initial sums of a tile: the old values, if it adds to them.
template <int kAcross, typename Product, typename Sums>
__device__ void LoadSums(const Product& tile, Sums& sums) {
  using Sum = std::remove_all_extents_t<Sums>;
  const auto& c = tile.c;
  if (tile.write != Write::kAdd) return;
  ForPairs<kAcross>(tile, [&](int64_t row, int64_t col, int i, int j, int k) {
    sums[i][j][k] = static_cast<Sum>(c(row, col));
    if (col + 1 < c.cols()) sums[i][j][k + 1] = static_cast<Sum>(c(row, col + 1));
  });
}
template <int kAcross, typename Product, typename Sums>
__device__ void StoreSums(const Product& tile, const Sums& sums) {
  using TOut = std::remove_reference_t<decltype(*tile.c.data())>;
  const auto& c = tile.c;
  const bool pairs = RowsAlignedTo(c, 2 * sizeof(TOut));
  ForPairs<kAcross>(tile, [&](int64_t row, int64_t col, int i, int j, int k) {
    const Elements<TOut, 2> pair = {{TOut(sums[i][j][k]), TOut(sums[i][j][k + 1])}};
    if (pairs && col + 1 < c.cols()) {
      Store(pair, &c(row, col));
      return;
    }
    c(row, col) = pair.at[0];
    if (col + 1 < c.cols()) c(row, col + 1) = pair.at[1];
  });
}

template <typename Groups>
__global__ void __launch_bounds__(WideWarps::kThreads, kBlocks) MmaKernel(const Groups groups) {
  MOE_SHARED_ARRAY(Chunk, shared, kStages * 2 * kTileChunks);
  Tile<typename Groups::T, typename Groups::TOut> tile;
  if (!groups.Find(kTile, kTile, tile)) return;
  const int64_t depth = Groups::kALayout == Layout::kPlain ? tile.a.cols() : tile.a.rows();
  WideWarps::Sums<float> sums = {};
  LoadSums<2>(tile, sums);
  Pipeline<Groups, WholeDepth, 2>(tile, {depth}, shared).Sum(depth, sums);
  StoreSums<2>(tile, sums);
}

// A node of a tree that ends with a leaf.
template <typename Groups>
__global__ void __launch_bounds__(WideWarps::kThreads, kBlocks)
    MmaLeafKernel(const __grid_constant__ Groups groups) {
  MOE_SHARED_ARRAY(Chunk, shared, kStages * 2 * kTileChunks);
  Tile<typename Groups::T, typename Groups::TOut> tile;
  if (!groups.Find(kTile, kTile, tile)) return;
  const LeafParts parts = {&groups.leaf};
  WideWarps::Sums<float> sums = {};
  Pipeline<Groups, LeafParts, 2> pipeline(tile, parts, shared);
  MOE_NO_UNROLL
  for (int part = 0; part < parts.count(); ++part) pipeline.Sum(parts.Terms(part), sums);
  ForLefts(groups.leaf, tile, [&](MatrixView<const float> left) {
    ForPairs<2>(tile, [&](int64_t row, int64_t col, int i, int j, int k) {
      sums[i][j][k] = left(row, col) + sums[i][j][k];
      if (col + 1 < left.cols()) sums[i][j][k + 1] = left(row, col + 1) + sums[i][j][k + 1];
    });
  });
  StoreSums<2>(tile, sums);
}

// Integers of all segments stay in registers.
template <typename Groups>
__global__ void __launch_bounds__(ExactWarps::kThreads, 1) ExactMmaKernel(const Groups groups) {
  MOE_SHARED_ARRAY(Chunk, shared, kStages * 2 * kTileChunks);
  Tile<typename Groups::T, int64_t> tile;
  const GradientSum<int64_t>* const found = groups.Find(kTile, kTile, tile);
  if (found == nullptr) return;
  const GradientSum<int64_t>& grad = *found;
  const Segments segments = groups.Of(grad);
  Pipeline<Groups, Segments, 4> pipeline(tile, segments, shared);
  ExactWarps::Sums<int64_t> totals = {};
  LoadSums<4>(tile, totals);
  segments.ForEach([&](int64_t begin, int64_t end) {
    ExactWarps::Sums<float> sums = {};
    pipeline.Sum(end - begin, sums);
    const double inverse_unit = grad.inverse_unit;
    const int64_t limit = grad.limit;
    exact_sum::ThreadTally tally;
    ForPairs<4>(tile, [&](int64_t, int64_t col, int i, int j, int k) {
      const auto add = [&](int at) {
        totals[i][j][at] += exact_sum::ExactTerm(sums[i][j][at], inverse_unit, limit, tally);
      };
      add(k);
      if (col + 1 < tile.c.cols()) add(k + 1);
    });
    exact_sum::AddTally(tally, grad.tally);
  });
  StoreSums<4>(tile, totals);
}

template <typename Problem>
cudaError_t Run(const Problem& problem, cudaStream_t stream) {
  return LaunchGroups(problem, [&](const auto& groups) {
    using Groups = std::decay_t<decltype(groups)>;
    if constexpr (std::is_same_v<typename Groups::TOut, int64_t>) {
      return LaunchTiles<Groups>(&ExactMmaKernel<Groups>, groups, kTile, kTile,
                                 ExactWarps::kThreads, stream);
    } else if constexpr (Groups::kIsLeaf) {
      return LaunchTiles<Groups>(&MmaLeafKernel<Groups>, groups, kTile, kTile, WideWarps::kThreads,
                                 stream);
    } else {
      return LaunchTiles<Groups>(&MmaKernel<Groups>, groups, kTile, kTile, WideWarps::kThreads,
                                 stream);
    }
  });
}

}  // namespace

template <typename T, typename TOut>
cudaError_t RunMma(const CudaGroupedGemm<T, TOut>& gemm, cudaStream_t stream) {
  return Run(gemm, stream);
}
template <typename T, typename TSum>
cudaError_t RunMma(const CudaWeightGradients<T, TSum>& gradients, cudaStream_t stream) {
  return Run(gradients, stream);
}

#define MOE_INSTANTIATE(T)                                                         \
  template cudaError_t RunMma(const CudaGroupedGemm<T, T>&, cudaStream_t);         \
  template cudaError_t RunMma(const CudaGroupedGemm<T, float>&, cudaStream_t);     \
  template cudaError_t RunMma(const CudaWeightGradients<T, float>&, cudaStream_t); \
  template cudaError_t RunMma(const CudaWeightGradients<T, int64_t>&, cudaStream_t);
MOE_INSTANTIATE(BFloat16)
MOE_INSTANTIATE(Float16)
#undef MOE_INSTANTIATE

}  // namespace moe::gemm
