// Attention of 16-bit types on tensor cores: what the lanes of a warp compute together. Device
// code.
//
// A block owns kRows rows of scores (queries; for d_k and d_v keys), a warp kRowSquares * 16 of
// them. It processes their columns kCols at a time. Scores are made of squares of 16 x 16. Lane
// 4g + t of a warp holds rows g and g + 8 of each square, columns 2t, 2t + 1, 2t + 8 and 2t + 9:
// the layout of mma.sync's results, and of its operands in the next product.
#ifndef MOE_KERNELS_ATTENTION_ATTENTION_MMA_TILE_CUDA_H_
#define MOE_KERNELS_ATTENTION_ATTENTION_MMA_TILE_CUDA_H_

#include <cstdint>
#include <type_traits>

#include <math.h>

#include "kernels/attention/sequences_cuda.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_tensor.h"
#include "kernels/base/cuda_vector.h"

namespace moe::attention {

using cuda::Chunk;

constexpr int kSquare = 16;
constexpr int kChunkColumns = 8;
constexpr float kLog2E = 1.44269504088896341f;

__device__ inline int LaneInWarp() {
  return static_cast<int>(threadIdx.x) % cuda::kWarpLanes;
}

// 2^x, within 4 roundings of float32; 0 where the result is subnormal.
__device__ inline float Exp2(float x) {
#if defined(__CUDACC__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// Causal masks by squares: row square m, column square j of a tile. AllSeen, for tiles without
// hidden scores, costs no tests.
struct AllSeen {
  static constexpr bool kAll = true;
  __device__ constexpr bool Any(int) const { return true; }
  __device__ constexpr bool Hidden(int, int) const { return false; }
  __device__ constexpr bool Sees(int, int, int) const { return true; }
};
template <bool kRowsAreKeys>
struct Causal {
  static constexpr bool kAll = false;
  int diagonal;  // the column square that holds the tokens of row square 0
  int squares;   // column squares of a tile

  // Whether any of `row_squares` row squares sees a part of the tile.
  __device__ bool Any(int row_squares) const {
    return kRowsAreKeys ? diagonal < squares : diagonal + row_squares > 0;
  }
  // The row square whose diagonal square is column square j.
  __device__ int RowSquare(int j) const { return j - diagonal; }
  __device__ bool Hidden(int m, int j) const {
    return kRowsAreKeys ? j < diagonal + m : j > diagonal + m;
  }
  // One bit for each column of a diagonal square that row `row` of it sees.
  __device__ static uint32_t SeenOnDiagonal(int row) {
    return kRowsAreKeys ? ~0u << row : (2u << row) - 1;
  }
  // Whether row `row` of row square m sees column `column` of the tile.
  __device__ bool Sees(int m, int row, int column) const {
    const int own = (diagonal + m) * kSquare + row;
    return kRowsAreKeys ? column >= own : column <= own;
  }
};

// Bits 15 and 31 of a pair: whether its halves are finite.
template <typename T>
__device__ inline uint32_t Finite(uint32_t pair) {
  constexpr uint32_t kExponents = std::is_same_v<T, BFloat16> ? 0x7f807f80 : 0x7c007c00;
  return ((~pair & kExponents) + 0x7fff7fff) & 0x80008000;
}

// kDepth: columns of a head in shared memory; those beyond the head's own are zeros.
template <typename T, int kDepth, int kWarps, int kRowSquares_, int kCols_>
struct MmaBlock {
  static constexpr int kThreads = kWarps * cuda::kWarpLanes;
  static constexpr int kRowSquares = kRowSquares_, kCols = kCols_;
  static constexpr int kWarpRows = kRowSquares * kSquare;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kColSquares = kCols / kSquare;
  // Chunks of a row in shared memory. One chunk pads each row, so that the eight that ldmatrix
  // reads together fall into different groups of four banks, and addresses differ by constants.
  static constexpr int kChunks = kDepth / kChunkColumns, kStride = kChunks + 1;
  static constexpr int kRowChunks = kRows * kStride;  // chunks of a block's rows
  static constexpr int kColChunks = kCols * kStride;  // chunks of a tile's columns
  static_assert(kRows % kCols == 0 && kCols % kWarpRows == 0);

  using Scores = float[kRowSquares][2 * kColSquares][4];
  using Weights = uint32_t[kRowSquares][kColSquares][4];
  template <int kColumns>
  using Sums = float[kRowSquares][kColumns / 8][4];

  // The first of the warp's rows. It comes from a shuffle, so that ptxas knows it to be the same in
  // all lanes. Recomputing it, rather than keeping it, saves a register.
  __device__ static int OwnRow() {
    return __shfl_sync(cuda::kAllLanes, static_cast<int>(threadIdx.x), 0) / cuda::kWarpLanes *
           kWarpRows;
  }

  // Begins to copy rows [first, first + kCount) of a head; zeros beyond its rows and columns.
  template <int kCount>
  __device__ static void Fetch(MatrixView<const T> rows, int64_t first, Chunk* to,
                               cuda::AsyncCopies& copies) {
    constexpr int kStep = kThreads / kChunks;
    static_assert(kThreads % kChunks == 0 && kCount % kStep == 0);
    const int chunk = static_cast<int>(threadIdx.x) % kChunks;
    const int own = static_cast<int>(threadIdx.x) / kChunks;
    const int count = static_cast<int>(cuda::Min<int64_t>(kCount, rows.rows() - first));
    const int64_t column = chunk * kChunkColumns;
    const int there = static_cast<int>(cuda::Min<int64_t>(kChunkColumns, rows.cols() - column));
    const int valid = there < 0 ? 0 : there;
    const T* from = rows.data() + (first + own) * rows.stride() + column;
    const int64_t step = kStep * rows.stride();
    Chunk* const at = to + own * kStride + chunk;
    if (cuda::RowsAlignedTo(rows, cuda::kVectorBytes)) {
      MOE_UNROLL
      for (int r = 0; r < kCount; r += kStep, from += step) {
        copies.Copy(at + r * kStride, from,
                    r + own < count ? valid * static_cast<int>(sizeof(T)) : 0);
      }
    } else {
      MOE_NO_UNROLL
      for (int r = 0; r < kCount; r += kStep, from += step) {
        at[r * kStride] = cuda::SingleLoads(from, r + own < count ? valid : 0);
      }
    }
  }

  // scores = rows * cols^T for the squares that are not hidden; 0 in the others.
  template <typename Mask>
  __device__ static void Products(const Chunk* rows, const Chunk* cols, Mask mask, Scores& scores) {
    MOE_UNROLL
    for (int m = 0; m < kRowSquares; ++m) {
      MOE_UNROLL
      for (int n = 0; n < 2 * kColSquares; ++n) {
        for (float& score : scores[m][n]) score = 0;
      }
    }
    const int matrix = LaneInWarp() / 8, first = OwnRow();
    const auto add = [&](int depth) {
      uint32_t a[kRowSquares][4];
      MOE_UNROLL
      for (int m = 0; m < kRowSquares; ++m) {
        cuda::LoadMatrices(MatrixRow(rows, first + m * kSquare, depth, matrix % 2, matrix / 2),
                           a[m]);
      }
      MOE_UNROLL
      for (int j = 0; j < kColSquares; ++j) {
        if (mask.Hidden(0, j) && mask.Hidden(kRowSquares - 1, j)) continue;
        uint32_t b[4];
        cuda::LoadMatrices(MatrixRow(cols, j * kSquare, depth, matrix / 2, matrix % 2), b);
        MOE_UNROLL
        for (int m = 0; m < kRowSquares; ++m) {
          cuda::MultiplyAdd<T>(scores[m][2 * j], a[m], {b[0], b[1]});
          cuda::MultiplyAdd<T>(scores[m][2 * j + 1], a[m], {b[2], b[3]});
        }
      }
    };
    if constexpr (Mask::kAll) {
      MOE_UNROLL
      for (int depth = 0; depth < kDepth; depth += kSquare) add(depth);
    } else {  // rare, so short code
      MOE_NO_UNROLL
      for (int depth = 0; depth < kDepth; depth += kSquare) add(depth);
    }
  }

  // Calls f(score index m, n, e, whether its row sees its column) for all scores of the lane.
  template <typename Mask, typename Function>
  __device__ static void ForScores(Mask mask, Function f) {
    const int row = LaneInWarp() / 4, column = LaneInWarp() % 4 * 2;
    MOE_UNROLL
    for (int n = 0; n < 2 * kColSquares; ++n) {
      MOE_UNROLL
      for (int m = 0; m < kRowSquares; ++m) {
        MOE_UNROLL
        for (int e = 0; e < 4; ++e) {
          f(m, n, e, mask.Sees(m, row + e / 2 * 8, n * 8 + column + e % 2));
        }
      }
    }
  }

  __device__ static void Round(const Scores& scores, Weights& weights) {
    MOE_UNROLL
    for (int m = 0; m < kRowSquares; ++m) {
      MOE_UNROLL
      for (int j = 0; j < kColSquares; ++j) {
        MOE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float* const pair = scores[m][2 * j + i / 2] + i % 2 * 2;
          weights[m][j][i] = cuda::RoundedPair<T>(pair[0], pair[1]);
        }
      }
    }
  }

  // sums += weights * the first kColumns columns of cols, for the columns that rows see. On the
  // diagonal the weights of hidden columns are 0. Infinities and NaNs there are replaced by 0 as
  // well, since 0 times one would be NaN. Rows that do see such a value become NaN.
  template <int kColumns, typename Mask>
  __device__ static void AddWeighted(const Weights& weights, const Chunk* cols, Mask mask,
                                     Sums<kColumns>& sums) {
    MOE_UNROLL
    for (int j = 0; j < kColSquares; ++j) {
      if (mask.Hidden(0, j) && mask.Hidden(kRowSquares - 1, j)) continue;
      // for rows 2t, 2t + 1, and for those 8 below
      [[maybe_unused]] uint32_t finite[2] = {~0u, ~0u};
      MOE_UNROLL
      for (int c = 0; c < kColumns / kSquare; ++c) {
        const int matrix = LaneInWarp() / 8;
        uint32_t b[4];
        cuda::LoadMatricesTransposed(
            MatrixRow(cols, j * kSquare, c * kSquare, matrix % 2, matrix / 2), b);
        MOE_UNROLL
        for (int m = 0; m < kRowSquares; ++m) {
          if (mask.Hidden(m, j)) continue;
          uint32_t there[4];
          for (int i = 0; i < 4; ++i) there[i] = b[i];
          if constexpr (!Mask::kAll) {
            if (m == mask.RowSquare(j)) {
              for (int i = 0; i < 4; ++i) {
                const uint32_t halves = Finite<T>(b[i]);
                finite[i % 2] &= halves;
                there[i] &= (halves >> 15) * 0xffff;
              }
            }
          }
          cuda::MultiplyAdd<T>(sums[m][2 * c], weights[m][j], {there[0], there[1]});
          cuda::MultiplyAdd<T>(sums[m][2 * c + 1], weights[m][j], {there[2], there[3]});
        }
      }
      if constexpr (!Mask::kAll) {
        const uint32_t bad[2] = {~finite[0] & 0x80008000, ~finite[1] & 0x80008000};
        if (__ballot_sync(cuda::kAllLanes, (bad[0] | bad[1]) != 0) == 0) continue;
        uint32_t columns = 0;
        for (int i = 0; i < 2; ++i) {
          const uint32_t pair = (bad[i] >> 15 & 1) | (bad[i] >> 30 & 2);
          columns |= pair << (LaneInWarp() % 4 * 2 + i * 8);
        }
        for (int width = 16; width >= 1; width /= 2) {
          columns |= __shfl_xor_sync(cuda::kAllLanes, columns, width);
        }
        MOE_UNROLL
        for (int m = 0; m < kRowSquares; ++m) {
          MOE_UNROLL
          for (int half = 0; half < 2; ++half) {
            const uint32_t seen = columns & Mask::SeenOnDiagonal(LaneInWarp() / 4 + half * 8);
            // Added for every m: selecting registers by m would move them to local memory.
            const float poison = m == mask.RowSquare(j) && seen != 0 ? NAN : 0.0f;
            for (auto& values : sums[m]) {
              values[2 * half] += poison;
              values[2 * half + 1] += poison;
            }
          }
        }
      }
    }
  }

  // Stores the warp's results, each times factor(m, half), in the columns of `to` from first_column
  // on. `to` has the block's rows.
  template <int kColumns, typename Factor>
  __device__ static void Store(const Sums<kColumns>& sums, Factor factor, int first_column,
                               MatrixView<T> to) {
    const bool pairs = cuda::RowsAlignedTo(to, 2 * sizeof(T));
    const int first_row = OwnRow();
    MOE_UNROLL
    for (int m = 0; m < kRowSquares; ++m) {
      MOE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int64_t row = first_row + m * kSquare + half * 8 + LaneInWarp() / 4;
        if (row >= to.rows()) continue;
        const float times = factor(m, half);
        MOE_UNROLL
        for (int n = 0; n < kColumns / 8; ++n) {
          const int64_t column = first_column + n * 8 + LaneInWarp() % 4 * 2;
          if (column >= to.cols()) continue;
          const float* const sum = sums[m][n] + half * 2;
          const auto pair =
              __builtin_bit_cast(Pair, cuda::RoundedPair<T>(sum[0] * times, sum[1] * times));
          T* const at = &to(row, column);
          if (pairs && column + 1 < to.cols()) {
            cuda::Store(pair, at);
            continue;
          }
          at[0] = pair.at[0];
          if (column + 1 < to.cols()) at[1] = pair.at[1];
        }
      }
    }
  }

 private:
  using Pair = cuda::Elements<T, 2>;
  // The row address that this lane passes to ldmatrix for its 8 x 8 matrix of the square at (row,
  // column): the matrix in the given halves of the square.
  __device__ static const Chunk* MatrixRow(const Chunk* rows, int row, int column, int row_half,
                                           int column_half) {
    return rows + (row + row_half * 8 + LaneInWarp() % 8) * kStride + column / kChunkColumns +
           column_half;
  }
};

}  // namespace moe::attention

#endif  // MOE_KERNELS_ATTENTION_ATTENTION_MMA_TILE_CUDA_H_
