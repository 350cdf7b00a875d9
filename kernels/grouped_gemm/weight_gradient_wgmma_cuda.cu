#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/base/cuda_hopper.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_tensor_map.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/exact_sum/exact_term_cuda.h"
#include "kernels/grouped_gemm/gemm_ring_cuda.h"
#include "kernels/grouped_gemm/gemm_tiles_cuda.h"
#include "kernels/grouped_gemm/grouped_gemm_cuda.h"

namespace moe::gemm {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// A tile is 128 rows of a weight (columns of dy) by kCols of its columns (those of x), 64 rows for
// each of two warpgroups. Wide tiles read less: 128 sums a thread. Narrow ones leave room for the
// integers of several segments: 64 sums and 128 registers of totals.
constexpr int kWide = 256, kNarrow = 128;
constexpr int kRingBytes = 192 << 10;
template <int kCols>
struct Shape {
  static constexpr int kBoxes = kConsumers + kCols / kBoxSize;  // of dy, then of x
  static constexpr int kStageBytes = kBoxes * kBoxBytes;
  static constexpr int kStages = kRingBytes / kStageBytes;
  using Stage = gemm::Stage<kStages>;
};

template <typename TSum>
struct Arguments {
  TensorMap dy, x;
  const int64_t* segments;
  int64_t each;
  const GradientSum<TSum>* sums;
  int count;
  int out, in;  // columns of dy and of x
};

// The segments of a weight that have rows, one after the other. For float32 sums all rows of the
// weight are one segment.
template <typename TSum>
class Cuts {
 public:
  __device__ Cuts(const int64_t* segments, int64_t each)
      : next_(segments),
        left_(kOne ? 1 : static_cast<int>(each)),
        step_(kOne ? static_cast<int>(each) : 1) {}

  __device__ bool Next() {
    while (left_-- > 0) {
      const int64_t begin = next_[0], end = next_[step_];
      next_ += step_;
      if (begin >= end) continue;
      row = static_cast<int>(begin);
      rows = static_cast<int>(end - begin);
      return true;
    }
    return false;
  }

  int row = 0;   // the segment's first one, among the rows of all weights
  int rows = 0;  // of the segment

 private:
  static constexpr bool kOne = std::is_same_v<TSum, float>;
  const int64_t* next_;
  int left_;
  const int step_;
};

// The tiles of one block, one after the other. Neighbouring blocks share rows of dy and x. Weights
// without rows to which nothing is added have no tiles.
template <typename TSum, int kCols>
class GradientTiles {
 public:
  __device__ explicit GradientTiles(const Arguments<TSum>& arguments)
      : arguments_(arguments),
        row_tiles_(static_cast<unsigned>(TilesOf(arguments.out, kRingRows))),
        tiles_(row_tiles_ * static_cast<unsigned>(TilesOf(arguments.in, kCols))),
        next_(blockIdx.x) {}

  __device__ bool Next() {
    for (; weight_ < arguments_.count; ++weight_) {
      grad = arguments_.sums + weight_;
      const int64_t* const rows = Rows();
      if (grad->write == Write::kAdd && rows[0] == rows[arguments_.each]) continue;
      if (next_ < tiles_) {
        row = static_cast<int>(next_ % row_tiles_) * kRingRows;
        col = static_cast<int>(next_ / row_tiles_) * kCols;
        next_ += gridDim.x;
        return true;
      }
      next_ -= tiles_;
    }
    return false;
  }

  __device__ Cuts<TSum> Segments() const { return {Rows(), arguments_.each}; }
  __device__ MatrixView<TSum> Sums() const { return {grad->sum, arguments_.out, arguments_.in}; }

  const GradientSum<TSum>* grad = nullptr;
  int row = 0, col = 0;  // of the weight

 private:
  __device__ const int64_t* Rows() const { return arguments_.segments + grad->first_segment; }

  const Arguments<TSum>& arguments_;
  const unsigned row_tiles_, tiles_;  // of a weight
  int weight_ = 0;
  unsigned next_;  // relative to the first tile of `weight_`
};

// One thread copies the stages of all tiles as they become free. The last stage of a segment also
// has rows after it.
template <typename TSum, int kCols>
__device__ void Produce(const Arguments<TSum>& arguments, const Ring& ring) {
  using Of = Shape<kCols>;
  typename Of::Stage stage;
  for (GradientTiles<TSum, kCols> tile(arguments); tile.Next();) {
    for (Cuts<TSum> segment = tile.Segments(); segment.Next();) {
      for (int done = 0; done < segment.rows; done += kRingDepth) {
        ring.empty[stage.index].Wait(stage.parity ^ 1);
        TransactionBarrier& full = ring.full[stage.index];
        unsigned char* const to = ring.tiles + stage.index * Of::kStageBytes;
        full.ArriveExpecting(Of::kStageBytes);
        MOE_UNROLL
        for (int box = 0; box < Of::kBoxes; ++box) {
          const bool of_dy = box < kConsumers;
          const int col =
              of_dy ? tile.row + box * kBoxSize : tile.col + (box - kConsumers) * kBoxSize;
          CopyTile(of_dy ? arguments.dy : arguments.x, col, segment.row + done, 0,
                   to + box * kBoxBytes, full);
        }
        stage.Advance();
      }
    }
  }
}

// Makes the steps of a stage from `first` on zeros in both operands: there are rows of what follows
// the segment, and a NaN there times zero would not be zero. Called by all threads that multiply;
// returns once all see it. kBoxes: of the stage.
template <int kBoxes>
__device__ __forceinline__ void ClearSteps(unsigned char* stage, int first,
                                           TransactionBarrier& cleared, uint32_t& parity) {
  constexpr int kChunks = kTileRowBytes / kVectorBytes;
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroupThreads;
  MOE_NO_UNROLL
  for (int i = thread; i < (kRingDepth - first) * kBoxes * kChunks;
       i += kConsumers * kWarpgroupThreads) {
    const int step = first + i / (kBoxes * kChunks), chunk = i % (kBoxes * kChunks);
    StoreShared(Elements<uint32_t, 4>{},
                reinterpret_cast<uint32_t*>(stage + chunk / kChunks * kBoxBytes +
                                            step * kTileRowBytes + chunk % kChunks * kVectorBytes));
  }
  FenceAsyncProxy();
  __syncwarp();
  if (threadIdx.x % kWarpLanes == 0) cleared.Arrive();
  cleared.Wait(parity);
  parity ^= 1;
}

// What a thread that multiplies keeps from segment to segment.
template <typename T, int kCols>
class Multiplier {
 public:
  __device__ Multiplier(const Ring& ring, TransactionBarrier& cleared)
      : ring_(ring),
        cleared_(cleared),
        half_(static_cast<int>(threadIdx.x) / kWarpgroupThreads - 1),
        releases_(threadIdx.x % kWarpLanes == 0) {}

  // Adds the terms of the next segment, in ascending order, 16 at a time from its first row on;
  // `rows` may be 0. Inlined, because sums of pending products cannot pass through a call.
  __device__ __forceinline__ void AddSegment(int rows, float (&sums)[kCols / 2]) {
    KeepSums(sums);  // or the compiler loads and stores some as integers, which the loop would copy
    int before = 0;
    MOE_NO_UNROLL
    for (int left = rows; left > 0; left -= kRingDepth) {
      ring_.full[stage_.index].Wait(stage_.parity);
      unsigned char* const tiles = ring_.tiles + stage_.index * Of::kStageBytes;
      if (left < kRingDepth) ClearSteps<Of::kBoxes>(tiles, left, cleared_, cleared_parity_);
      FenceSums(sums);
      MOE_UNROLL
      for (int k = 0; k < kRingDepth; k += kProductDepth) {
        const unsigned char* const steps = tiles + k * kTileRowBytes;
        AddProduct<T, kCols, Major::kRow, Major::kRow>(
            sums, OperandAt(steps + half_ * kBoxBytes, kBoxBytes),
            OperandAt(steps + kConsumers * kBoxBytes, kBoxBytes), true);
      }
      CommitProducts();
      WaitForProducts<1>(sums);  // those of the previous stage
      if (left < rows) Release(before);
      before = stage_.index;
      stage_.Advance();
    }
    WaitForProducts<0>(sums);
    if (rows > 0) Release(before);
  }

  // Sums of the elements of c, and zeros.
  __device__ __forceinline__ void Load(MatrixView<float> c, int row, int col,
                                       float (&sums)[kCols / 2]) const {
    const int first_row = row + OwnRow(), first_col = col + OwnCol();
    MOE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float* const at = c.data() + (first_row + half * 8) * c.stride() + first_col;
      const int cols = first_row + half * 8 < c.rows() ? static_cast<int>(c.cols()) - first_col : 0;
      MOE_UNROLL
      for (int j = 0; j < kCols / 8; ++j) {
        sums[4 * j + 2 * half] = LoadIf(j * 8 < cols, at + j * 8);
        sums[4 * j + 2 * half + 1] = LoadIf(j * 8 + 1 < cols, at + j * 8 + 1);
      }
    }
  }

  // Sums of what is beyond c become zeros, which no exact sum or tally notices.
  __device__ __forceinline__ void ClearBeyond(MatrixView<int64_t> c, int row, int col,
                                              float (&sums)[kCols / 2]) const {
    const int rows = static_cast<int>(c.rows()) - row - OwnRow();
    const int cols = static_cast<int>(c.cols()) - col - OwnCol();
    MOE_UNROLL
    for (int i = 0; i < kCols / 2; ++i) {
      const bool inside = i / 2 % 2 * 8 < rows && i / 4 * 8 + i % 2 < cols;
      sums[i] = inside ? sums[i] : 0.0f;
    }
  }

  // f(address of an element of c, i, whether the element after it is in c, too) for the pairs of
  // neighbouring elements of the tile whose sums first + i and first + i + 1 < first + kSums this
  // thread owns. Both are constants, multiples of 4.
  template <int kSums, typename TSum, typename Function>
  __device__ __forceinline__ void ForPairs(MatrixView<TSum> c, int row, int col, int first,
                                           Function f) const {
    const int first_row = row + OwnRow(), first_col = col + OwnCol();
    const int cols = static_cast<int>(c.cols()) - first_col;
    MOE_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (first_row + half * 8 >= c.rows()) continue;
      TSum* const at = c.row(first_row + half * 8) + first_col;
      MOE_UNROLL
      for (int i = 0; i < kSums; i += 4) {
        const int j = (first + i) / 4;
        if (j * 8 < cols) f(at + j * 8, i + 2 * half, j * 8 + 1 < cols);
      }
    }
  }

 private:
  using Of = Shape<kCols>;

  // Within the tile, of this thread's sum 0.
  __device__ int OwnRow() const {
    const int warp = static_cast<int>(threadIdx.x) / kWarpLanes % 4;
    return half_ * kProductRows + warp * 16 + static_cast<int>(threadIdx.x) % kWarpLanes / 4;
  }
  __device__ static int OwnCol() { return static_cast<int>(threadIdx.x) % 4 * 2; }

  __device__ void Release(int stage) const {
    if (releases_) ring_.empty[stage].Arrive();
  }

  const Ring& ring_;
  TransactionBarrier& cleared_;
  uint32_t cleared_parity_ = 0;
  const int half_;
  const bool releases_;
  typename Of::Stage stage_;
};

// The old values of kSums elements of a tile that this thread owns, from its sum `first` on.
template <int kSums, typename T, int kCols>
__device__ __forceinline__ void LoadTotals(const Multiplier<T, kCols>& multiplier,
                                           const GradientTiles<int64_t, kCols>& tile, int first,
                                           int64_t (&totals)[kSums]) {
  const auto load = [&](const int64_t* at, int i, bool second) {
    totals[i] = at[0];
    if (second) totals[i + 1] = at[1];
  };
  multiplier.template ForPairs<kSums>(tile.Sums(), tile.row, tile.col, first, load);
}
template <int kSums, typename T, typename TSum, int kCols>
__device__ __forceinline__ void StoreSums(const Multiplier<T, kCols>& multiplier,
                                          const GradientTiles<TSum, kCols>& tile, int first,
                                          const TSum (&sums)[kSums]) {
  const MatrixView<TSum> c = tile.Sums();
  const bool pairs = RowsAlignedTo(c, 2 * sizeof(TSum));
  const auto store = [&](TSum* at, int i, bool second) {
    if (pairs && second) {
      Store(Elements<TSum, 2>{{sums[i], sums[i + 1]}}, at);
      return;
    }
    at[0] = sums[i];
    if (second) at[1] = sums[i + 1];
  };
  multiplier.template ForPairs<kSums>(c, tile.row, tile.col, first, store);
}

template <Write kWrite, typename T, int kCols>
__device__ __forceinline__ void SumRows(Multiplier<T, kCols>& multiplier,
                                        const GradientTiles<float, kCols>& tile) {
  float sums[kCols / 2] = {};
  if constexpr (kWrite == Write::kAdd) multiplier.Load(tile.Sums(), tile.row, tile.col, sums);
  auto segment = tile.Segments();
  multiplier.AddSegment(segment.Next() ? segment.rows : 0, sums);
  StoreSums(multiplier, tile, 0, sums);
}
// Float32 sums of all rows. Old values and zeros have paths of their own: ptxas keeps products from
// overlapping if their sums may begin as either.
template <typename T, int kCols>
__device__ __forceinline__ void SumTile(Multiplier<T, kCols>& multiplier,
                                        const GradientTiles<float, kCols>& tile) {
  if (tile.grad->write == Write::kAdd) {
    SumRows<Write::kAdd>(multiplier, tile);
  } else {
    SumRows<Write::kOverwrite>(multiplier, tile);
  }
}

// Integers of all segments stay in registers.
template <typename T>
__device__ __forceinline__ void SumTile(Multiplier<T, kNarrow>& multiplier,
                                        const GradientTiles<int64_t, kNarrow>& tile) {
  const GradientSum<int64_t>& grad = *tile.grad;
  int64_t totals[kNarrow / 2] = {};
  if (grad.write == Write::kAdd) LoadTotals(multiplier, tile, 0, totals);
  for (auto segment = tile.Segments(); segment.Next();) {
    float sums[kNarrow / 2] = {};
    multiplier.AddSegment(segment.rows, sums);
    multiplier.ClearBeyond(tile.Sums(), tile.row, tile.col, sums);
    exact_sum::ThreadTally tally;
    exact_sum::AddExactTerms(sums, grad.inverse_unit, grad.limit, totals, tally);
    exact_sum::AddTally(tally, grad.tally);
  }
  StoreSums(multiplier, tile, 0, totals);
}

// Exact sums of one segment: few integers at a time pass through registers.
template <typename T>
__device__ __forceinline__ void SumTile(Multiplier<T, kWide>& multiplier,
                                        const GradientTiles<int64_t, kWide>& tile) {
  constexpr int kSums = 16;
  const GradientSum<int64_t>& grad = *tile.grad;
  float sums[kWide / 2] = {};
  auto segment = tile.Segments();
  multiplier.AddSegment(segment.Next() ? segment.rows : 0, sums);
  multiplier.ClearBeyond(tile.Sums(), tile.row, tile.col, sums);
  exact_sum::ThreadTally tally;
  MOE_UNROLL
  for (int first = 0; first < kWide / 2; first += kSums) {
    float partials[kSums];
    MOE_UNROLL
    for (int i = 0; i < kSums; ++i) partials[i] = sums[first + i];
    int64_t totals[kSums] = {};
    if (grad.write == Write::kAdd) LoadTotals(multiplier, tile, first, totals);
    exact_sum::AddExactTerms(partials, grad.inverse_unit, grad.limit, totals, tally);
    StoreSums(multiplier, tile, first, totals);
  }
  exact_sum::AddTally(tally, grad.tally);
}

// At most as many blocks as multiprocessors; each computes its tiles in turn.
template <typename T, typename TSum, int kCols>
__global__ void __launch_bounds__(kRingThreads, 1)
    WgmmaGradientKernel(const __grid_constant__ Arguments<TSum> arguments) {
  constexpr int kStages = Shape<kCols>::kStages;
  MOE_DYNAMIC_SHARED(tiles);
  MOE_SHARED_ARRAY(TransactionBarrier, full, kStages);
  MOE_SHARED_ARRAY(TransactionBarrier, empty, kStages);
  MOE_SHARED_ARRAY(TransactionBarrier, cleared, 1);
  const Ring ring = {tiles, full, empty};
  if (threadIdx.x == 0) {
    InitRing<kStages>(ring);
    cleared[0].Init(kConsumerWarps);
    FenceAsyncProxy();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroupThreads) {
    GiveRegistersBack<kCopyRegisters>();
    if (threadIdx.x == 0) Produce<TSum, kCols>(arguments, ring);
  } else {
    TakeRegisters<kProductRegisters>();
    Multiplier<T, kCols> multiplier(ring, cleared[0]);
    for (GradientTiles<TSum, kCols> tile(arguments); tile.Next();) {
      SumTile(multiplier, tile);
    }
  }
}

template <typename T, typename TSum, int kCols>
cudaError_t LaunchKernel(const Arguments<TSum>& arguments, int blocks, cudaStream_t stream) {
  return Launch(&WgmmaGradientKernel<T, TSum, kCols>,
                {dim3(static_cast<unsigned>(blocks)), dim3(kRingThreads), kRingBytes}, stream,
                arguments);
}

}  // namespace

template <typename T, typename TSum>
bool TakesWgmma(const CudaWeightGradients<T, TSum>& gradients) {
  return TakesBulkCopies(gradients.dy) && TakesBulkCopies(gradients.x) && gradients.dy.rows() > 0 &&
         IsHopper();
}

template <typename T, typename TSum>
cudaError_t RunWgmma(const CudaWeightGradients<T, TSum>& gradients, cudaStream_t stream) {
  const auto& [dy, x, segments, each, sums, count, spare] = gradients;
  if (dy.cols() == 0 || x.cols() == 0 || count == 0) return cudaSuccess;
  // Copies use 32-bit coordinates, up to one tile beyond the last element.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  for (const int64_t size : {dy.rows(), dy.cols(), x.cols(), each, count}) {
    if (size > kMost - kWide) return cudaErrorInvalidValue;
  }
  if (TilesOf(dy.cols(), kRingRows) * TilesOf(x.cols(), kNarrow) > kMost) {
    return cudaErrorInvalidConfiguration;
  }
  Arguments<TSum> arguments = {.dy = {},
                               .x = {},
                               .segments = segments,
                               .each = each,
                               .sums = sums,
                               .count = static_cast<int>(count),
                               .out = static_cast<int>(dy.cols()),
                               .in = static_cast<int>(x.cols())};
  cudaError_t error = EncodeMatrix(dy, kBoxSize, kRingDepth, arguments.dy);
  if (error == cudaSuccess) error = EncodeMatrix(x, kBoxSize, kRingDepth, arguments.x);
  if (error != cudaSuccess) return error;
  const int blocks = RingBlocks(spare);
  if constexpr (std::is_same_v<TSum, int64_t>) {
    // An element has the same bits in both.
    if (each > 1 || x.cols() <= kNarrow) {
      return LaunchKernel<T, TSum, kNarrow>(arguments, blocks, stream);
    }
  }
  return LaunchKernel<T, TSum, kWide>(arguments, blocks, stream);
}

#define MOE_INSTANTIATE(T)                                                           \
  template bool TakesWgmma(const CudaWeightGradients<T, float>&);                    \
  template bool TakesWgmma(const CudaWeightGradients<T, int64_t>&);                  \
  template cudaError_t RunWgmma(const CudaWeightGradients<T, float>&, cudaStream_t); \
  template cudaError_t RunWgmma(const CudaWeightGradients<T, int64_t>&, cudaStream_t);
MOE_INSTANTIATE(BFloat16)
MOE_INSTANTIATE(Float16)
#undef MOE_INSTANTIATE

}  // namespace moe::gemm
