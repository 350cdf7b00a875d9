#include <type_traits>

#include <math.h>

#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_tensor.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/exact_sum/exact_term_cuda.h"
#include "kernels/grouped_gemm/gemm_operand_cuda.h"
#include "kernels/grouped_gemm/gemm_tiles_cuda.h"
#include "kernels/grouped_gemm/grouped_gemm_cuda.h"

namespace moe::gemm {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in
using namespace fma;        // NOLINT(google-build-using-namespace): of the operands

// A warp owns 32 x 64 elements of the output, a thread 8 x 8 of them. For a step of depth a warp
// issues 64 fmaf and reads 4 x 16 bytes a lane from shared memory. A Hopper multiprocessor issues
// four warps' fmaf a clock, and reads 128 bytes: 4 x 4 x 2 clocks for four warps, since two lanes
// share an address, of the 64 that their fmaf take. With 4 x 4 elements a thread it would read in
// all 16 of 16 clocks.
constexpr int kRowLanes = 4, kColLanes = 8;
constexpr int kWarpRows = kOwned * kRowLanes, kWarpCols = kOwned * kColLanes;
constexpr int kStages = 2;
static_assert(kChainWords % kTileDepth == 0);

// A block owns kTileRows x kTileCols elements. It computes kChainsAtOnce chains of theirs at once,
// each by its own warps: chains do not depend on each other, and their sums are in ascending order.
template <int kTileRows, int kTileCols, int kChainsAtOnce>
struct Shape {
  static constexpr int kRows = kTileRows, kCols = kTileCols, kChains = kChainsAtOnce;
  static constexpr int kChainThreads = kRows * kCols / (kOwned * kOwned);
  static constexpr int kThreads = kChains * kChainThreads;
  static constexpr int kBlocks = 256 / kThreads;  // of a multiprocessor: two warps a quarter
  // Every thread has the sums of some rows of those that it owns in a chain.
  static constexpr int kSumRows = kOwned / kChains;
};

// An input gradient has many outputs, and where it is a router's one chain: the second block of a
// multiprocessor multiplies while the first one begins or ends. The others may have few outputs: a
// router's weight gradient of 128 x 4096 is 128 tiles of 64 x 64, each for a whole multiprocessor.
template <typename Groups>
using ShapeOf =
    std::conditional_t<Groups::kALayout == Layout::kPlain && Groups::kBLayout == Layout::kPlain,
                       Shape<64, 128, 1>, Shape<64, 64, 4>>;

// One thread's part of the products of a block's tile.
template <typename Groups>
class Products {
 public:
  using Tiles = ShapeOf<Groups>;
  static constexpr int kChains = Tiles::kChains, kSumRows = Tiles::kSumRows;
  static constexpr bool kVectors = Groups::kBLayout == Layout::kPlain;
  using Depth = std::conditional_t<Groups::kIsLeaf, LeafParts, WholeDepth>;
  using A = Operand<Groups::kALayout == Layout::kPlain, Tiles::kRows, Tiles::kChainThreads,
                    kRowLanes, Depth>;
  using B = Operand<Groups::kBLayout == Layout::kTransposed, Tiles::kCols, Tiles::kChainThreads,
                    kColLanes, Depth>;
  // Sums of rows chain() * kSumRows ... of a thread's elements.
  template <typename T>
  using Sums = T[kSumRows][kOwned];

  struct Shared {
    Vector a[kStages][kChains][A::kTileChunks], b[kStages][kChains][B::kTileChunks];
    // Chains on their way to the threads that add them up; of one chain, nothing.
    Vector chains[2][kOwned * kOwned / kChunk][kChains > 1 ? Tiles::kChainThreads : 1];
  };

  __device__ Products(Shared& shared, int64_t row, int64_t col)
      : shared_(shared), row_(row), col_(col) {}

  // Calls f(address in c, i, j, number of neighbours) for the sums [i][j] and their neighbours that
  // are within c: of kChunk columns if kVectors and rows of c are aligned, else of one.
  template <typename T, typename Function>
  __device__ void ForSums(MatrixView<T> c, Function f) const {
    constexpr int kTogether = kVectors ? kChunk : 1;
    const bool vectors = RowsAlignedTo(c, kVectorBytes);
    MOE_UNROLL
    for (int i = 0; i < kSumRows; ++i) {
      const int64_t row = row_ + A::Outer(FirstRow(), RowLane(), chain() * kSumRows + i);
      if (row >= c.rows()) continue;
      MOE_UNROLL
      for (int j = 0; j < kOwned; j += kTogether) {
        const int64_t col = col_ + B::Outer(FirstCol(), ColLane(), j);
        T* const at = c.data() + row * c.stride() + col;
        if (vectors && col + kTogether <= c.cols()) {
          f(at, i, j, Width<kTogether>());
          continue;
        }
        MOE_UNROLL
        for (int n = 0; n < kTogether; ++n) {
          if (col + n < c.cols()) f(at + n, i, j + n, Width<1>());
        }
      }
    }
  }
  // Stores the sums in c.
  template <typename T>
  __device__ void Store(const Sums<T>& sums, MatrixView<T> c) const {
    ForSums(c, [&](T* to, int i, int j, auto width) {
      Elements<T, width.value> values;
      for (int n = 0; n < width.value; ++n) values.at[n] = sums[i][j + n];
      StoreElements(values, to);
    });
  }

  // Computes the terms of a * b: added to `sums` if `added`, else replacing them. May be called
  // again if kChains > 1: no thread reads a tile after the barriers of AddChains.
  __device__ void Add(MatrixView<const float> a, MatrixView<const float> b, const Depth& depth,
                      bool added, Sums<float>& sums) {
    int64_t left = depth.terms();
    if (left <= 0) return;
    const int64_t start = int64_t{chain()} * kChainWords;
    A a_operand(a, row_, start, thread(), depth);
    B b_operand(b, col_, start, thread(), depth);
    const bool idle = row_ + FirstRow() >= Rows(a) || col_ + FirstCol() >= Cols(b);
    AsyncCopies copies;
    const auto fetch = [&](int steps, int stage) {
      a_operand.Fetch(steps, shared_.a[stage][chain()], copies);
      b_operand.Fetch(steps, shared_.b[stage][chain()], copies);
      copies.Commit();
    };
    float chains[kOwned][kOwned] = {};
    int stage = 0;
    int steps = ChainSteps(left - start);  // of this thread's chain
    fetch(steps, stage);
    // `left`: from the first of the chains under way on, which has the most steps of them.
    for (; left > 0; left -= kChains * kChainWords) {
      const int next_steps = ChainSteps(left - kChains * kChainWords - start);
      const int most = ChainSteps(left);
      for (int step = 0; step < most; step += kTileDepth) {
        copies.Wait<0>();
        __syncthreads();  // the tile has arrived, and no thread reads the one before
        const bool ends = step + kTileDepth >= most;
        if (ends) {
          a_operand.Skip((kChains - 1) * kChainWords);
          b_operand.Skip((kChains - 1) * kChainWords);
        }
        fetch(ends ? next_steps : steps - step - kTileDepth, 1 - stage);
        if (!idle) Multiply(stage, steps - step, chains);
        stage = 1 - stage;
      }
      AddChains(left, chains, added, sums);
      added = true;
      steps = next_steps;
    }
  }

 private:
  // Which of the chains under way is this thread's, and its number among the chain's threads.
  __device__ static int chain() { return static_cast<int>(threadIdx.x) / Tiles::kChainThreads; }
  __device__ static int thread() { return static_cast<int>(threadIdx.x) % Tiles::kChainThreads; }
  // The steps of a chain, of `left` from its first on.
  __device__ static int ChainSteps(int64_t left) {
    return left < 0 ? 0 : static_cast<int>(Min(left, kChainWords));
  }
  // The warp's elements in the tile.
  __device__ static int FirstRow() {
    return thread() / kWarpLanes / (Tiles::kCols / kWarpCols) * kWarpRows;
  }
  __device__ static int FirstCol() {
    return thread() / kWarpLanes % (Tiles::kCols / kWarpCols) * kWarpCols;
  }
  // Lanes i and i ^ 1 share rows, i and i ^ 2 columns: two quarters of a warp that share each
  // address in one of these ways are read at once.
  __device__ static int RowLane() {
    const int lane = static_cast<int>(threadIdx.x);
    return lane / 2 % 2 + lane / 8 % 2 * 2;
  }
  __device__ static int ColLane() {
    const int lane = static_cast<int>(threadIdx.x);
    return lane % 2 + lane / 4 % 2 * 2 + lane / 16 % 2 * 4;
  }
  __device__ static int64_t Rows(MatrixView<const float> a) {
    return Groups::kALayout == Layout::kPlain ? a.rows() : a.cols();
  }
  __device__ static int64_t Cols(MatrixView<const float> b) {
    return Groups::kBLayout == Layout::kPlain ? b.cols() : b.rows();
  }

  // Adds the first `terms` steps of a tile to the chain; beyond the depth there are no terms, since
  // fmaf(0, 0, -0) would be +0.
  __device__ void Multiply(int stage, int terms, float (&chains)[kOwned][kOwned]) const {
    if (terms >= kTileDepth) {
      MOE_UNROLL
      for (int step = 0; step < kTileDepth; step += kChunk) Steps(stage, step, kChunk, chains);
      return;
    }
    MOE_NO_UNROLL
    for (int step = 0; step < terms; step += kChunk) {
      Steps(stage, step, terms - step, chains);
    }
  }

  __device__ void Steps(int stage, int step, int terms, float (&chains)[kOwned][kOwned]) const {
    float left[kChunk][kOwned], right[kChunk][kOwned];
    A::Read(shared_.a[stage][chain()], FirstRow(), RowLane(), step, left);
    B::Read(shared_.b[stage][chain()], FirstCol(), ColLane(), step, right);
    MOE_UNROLL
    for (int i = 0; i < kOwned; ++i) {
      MOE_UNROLL
      for (int s = 0; s < kChunk; ++s) {
        if (s >= terms) break;
        MOE_UNROLL
        for (int j = 0; j < kOwned; ++j) {
          chains[i][j] = fmaf(left[s][i], right[s][j], chains[i][j]);
        }
      }
    }
  }

  // Adds the chains under way to the sums, those of the `left` steps of depth, and clears them.
  __device__ void AddChains(int64_t left, float (&chains)[kOwned][kOwned], bool added,
                            Sums<float>& sums) {
    if constexpr (kChains == 1) {
      MOE_UNROLL
      for (int i = 0; i < kOwned; ++i) {
        MOE_UNROLL
        for (int j = 0; j < kOwned; ++j) {
          sums[i][j] = added ? sums[i][j] + chains[i][j] : chains[i][j];
        }
      }
    } else {
      constexpr int kRowVectors = kOwned / kChunk;
      MOE_NO_UNROLL
      for (int c = 0; c < kChains && c * kChainWords < left; ++c) {
        auto& shared = shared_.chains[c % 2];
        if (c == chain()) {
          MOE_UNROLL
          for (int v = 0; v < kOwned * kRowVectors; ++v) {
            Vector part;
            for (int j = 0; j < kChunk; ++j) {
              part.at[j] = chains[v / kRowVectors][v % kRowVectors * kChunk + j];
            }
            StoreShared(part, shared[v][thread()].at);
          }
        }
        __syncthreads();  // the other of the two buffers has been read, too
        MOE_UNROLL
        for (int v = 0; v < kSumRows * kRowVectors; ++v) {
          const Vector part =
              Load<kChunk>(shared[chain() * kSumRows * kRowVectors + v][thread()].at);
          MOE_UNROLL
          for (int j = 0; j < kChunk; ++j) {
            float& sum = sums[v / kRowVectors][v % kRowVectors * kChunk + j];
            sum = added ? sum + part.at[j] : part.at[j];
          }
        }
        added = true;
      }
    }
    MOE_UNROLL
    for (int i = 0; i < kOwned; ++i) {
      MOE_UNROLL
      for (int j = 0; j < kOwned; ++j) chains[i][j] = 0;
    }
  }

  Shared& shared_;
  int64_t row_, col_;
};

template <typename Groups>
__global__ void __launch_bounds__(ShapeOf<Groups>::kThreads, ShapeOf<Groups>::kBlocks)
    FmaKernel(const Groups groups) {
  using TOut = typename Groups::TOut;
  using Block = Products<Groups>;
  using Tiles = typename Block::Tiles;
  MOE_DYNAMIC_SHARED(memory);
  Tile<float, TOut> tile;
  const auto found = groups.Find(Tiles::kRows, Tiles::kCols, tile);
  if (!found) return;
  Block block(*reinterpret_cast<typename Block::Shared*>(memory), tile.row, tile.col);
  typename Block::template Sums<TOut> sums = {};
  if (tile.write == Write::kAdd) {
    block.ForSums(tile.c, [&](const TOut* from, int i, int j, auto width) {
      const auto old = LoadElements<width.value>(from);
      for (int n = 0; n < width.value; ++n) sums[i][j + n] = old.at[n];
    });
  }
  if constexpr (std::is_same_v<TOut, float>) {
    const WholeDepth depth = {Groups::kALayout == Layout::kPlain ? tile.a.cols() : tile.a.rows()};
    block.Add(tile.a, tile.b, depth, tile.write == Write::kAdd, sums);
  } else {
    groups.Of(*found).ForEach([&](int64_t begin, int64_t end) {
      typename Block::template Sums<float> partial = {};
      block.Add(RowRange(tile.a, begin, end), RowRange(tile.b, begin, end), {end - begin},
                /*added=*/false, partial);
      // of one segment: kept only after its products, to save registers
      exact_sum::ThreadTally tally;
      block.ForSums(tile.c, [&](const TOut*, int i, int j, auto width) {
        for (int n = 0; n < width.value; ++n) {
          sums[i][j + n] +=
              exact_sum::ExactTerm(partial[i][j + n], found->inverse_unit, found->limit, tally);
        }
      });
      exact_sum::AddTally(tally, found->tally);
    });
  }
  block.Store(sums, tile.c);
}

// A node of a tree that ends with a leaf.
template <typename Groups>
__global__ void __launch_bounds__(ShapeOf<Groups>::kThreads, ShapeOf<Groups>::kBlocks)
    FmaLeafKernel(const __grid_constant__ Groups groups) {
  using Block = Products<Groups>;
  MOE_DYNAMIC_SHARED(memory);
  Tile<float, float> tile;
  if (!groups.Find(Block::Tiles::kRows, Block::Tiles::kCols, tile)) return;
  Block block(*reinterpret_cast<typename Block::Shared*>(memory), tile.row, tile.col);
  typename Block::template Sums<float> sums = {};
  block.Add(tile.a, tile.b, {&groups.leaf}, /*added=*/false, sums);
  ForLefts(groups.leaf, tile, [&](MatrixView<const float> left) {
    block.ForSums(left, [&](const float* from, int i, int j, auto width) {
      const auto values = LoadElements<width.value>(from);
      for (int n = 0; n < width.value; ++n) sums[i][j + n] = values.at[n] + sums[i][j + n];
    });
  });
  block.Store(sums, tile.c);
}

template <typename Problem>
cudaError_t Run(const Problem& problem, cudaStream_t stream) {
  return LaunchGroups(problem, [&](const auto& groups) {
    using Groups = std::decay_t<decltype(groups)>;
    using Tiles = ShapeOf<Groups>;
    constexpr size_t kSharedBytes = sizeof(typename Products<Groups>::Shared);
    static_assert(kSharedBytes <= 99 << 10,
                  "the most that a block of any GPU since sm_80 may have");
    void (*kernel)(Groups) = nullptr;
    if constexpr (Groups::kIsLeaf) {
      kernel = &FmaLeafKernel<Groups>;
    } else {
      kernel = &FmaKernel<Groups>;
    }
    return LaunchTiles<Groups>(kernel, groups, Tiles::kRows, Tiles::kCols, Tiles::kThreads, stream,
                               kSharedBytes);
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
