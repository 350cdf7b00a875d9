// Attention by tiles of kTile rows x kTile columns of scores: the products that a block computes
// together. Device code.
//
// The block's threads form a square of kSide x kSide. Each owns 4 x 4 scores in registers, and of
// the kTile x kColumns results 4 rows in groups of 4 columns, kTile apart. Every element is one
// chain of fused multiply-adds in ascending order, as on the CPU (attention_blocks-inl.h).
#ifndef MOE_KERNELS_ATTENTION_ATTENTION_TILE_CUDA_H_
#define MOE_KERNELS_ATTENTION_ATTENTION_TILE_CUDA_H_

#include <cstdint>

#include <math.h>

#include "kernels/attention/sequences_cuda.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"

namespace moe::attention {

constexpr int kTile = 64;
constexpr int kSide = 16;
constexpr int kThreads = kSide * kSide;
constexpr int kOwn = kTile / kSide;  // rows of a thread, and columns: one vector of float32
constexpr int kDepth = 32;           // of the index that a product sums over, staged at a time
constexpr int kStride = kTile + 4;   // spreads a column over the banks; rows stay aligned
static_assert(kOwn == cuda::kVectorWidth<float>);

// A block's shared memory is made of these: 16-byte accesses need arrays that begin so.
using Vector = cuda::Elements<float, kOwn>;
constexpr int kStagedVectors = 2 * kDepth * kStride / kOwn;
constexpr int kWeightVectors = kTile * kStride / kOwn;

__device__ inline int OwnRow() {
  return static_cast<int>(threadIdx.x) / kSide * kOwn;
}
__device__ inline int OwnColumn() {
  return static_cast<int>(threadIdx.x) % kSide * kOwn;
}

// Elements [column, column + kVectorWidth<T>) of a row; zeros outside of the matrix.
template <typename T>
__device__ inline cuda::Elements<T, cuda::kVectorWidth<T>> LoadPadded(MatrixView<const T> m,
                                                                      int64_t row, int64_t column) {
  constexpr int kWidth = cuda::kVectorWidth<T>;
  cuda::Elements<T, kWidth> values = {};
  if (row >= m.rows() || column >= m.cols()) return values;
  const T* const from = m.row(row) + column;
  if (column + kWidth <= cuda::VectorColumns<T>(m.cols(), m.data(), m.data() + m.stride())) {
    return cuda::Load<kWidth>(from);
  }
  for (int i = 0; i < kWidth; ++i) {
    if (column + i < m.cols()) values.at[i] = from[i];
  }
  return values;
}

// to[d][r] = rows(r, first + d) for d < kDepth, r < kTile. Neighbouring lanes take neighbouring
// rows: their stores fall into different banks.
template <typename T>
__device__ inline void StageTransposed(MatrixView<const T> rows, int64_t first, float* to) {
  constexpr int kWidth = cuda::kVectorWidth<T>;
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kDepth / kWidth; i += kThreads) {
    const int r = i % kTile, d = i / kTile * kWidth;
    const auto values = LoadPadded(rows, r, first + d);
    for (int w = 0; w < kWidth; ++w) to[(d + w) * kStride + r] = static_cast<float>(values.at[w]);
  }
}

// to[r][c] = rows(first + r, column + c) for r < kDepth, c < kColumns.
template <int kColumns, typename T>
__device__ inline void StageRows(MatrixView<const T> rows, int64_t first, int64_t column,
                                 float* to) {
  constexpr int kWidth = cuda::kVectorWidth<T>, kVectors = kColumns / kWidth;
  static_assert(kDepth * kColumns <= kStagedVectors * kOwn);
  for (int i = static_cast<int>(threadIdx.x); i < kDepth * kVectors; i += kThreads) {
    const int r = i / kVectors, c = i % kVectors * kWidth;
    const auto values = LoadPadded(rows, first + r, column + c);
    for (int w = 0; w < kWidth; w += kOwn) {
      Vector four;
      for (int n = 0; n < kOwn; ++n) four.at[n] = static_cast<float>(values.at[w + n]);
      cuda::StoreShared(four, to + r * kColumns + c + w);
    }
  }
}

// scores[r][c] = sum over d of a(row, d) * b(column, d). `a` and `b` have at most kTile rows;
// scores beyond them are zeros. All threads call it; begins with a barrier, so that `staged` and
// the weights of the tile before may be in use until then.
template <typename T>
__device__ inline void Products(MatrixView<const T> a, MatrixView<const T> b, float* staged,
                                float (&scores)[kOwn][kOwn]) {
  for (auto& row : scores) {
    for (float& score : row) score = 0;
  }
  float* const staged_b = staged + kDepth * kStride;
  for (int64_t first = 0; first < a.cols(); first += kDepth) {
    __syncthreads();
    StageTransposed(a, first, staged);
    StageTransposed(b, first, staged_b);
    __syncthreads();
    const int depth = static_cast<int>(cuda::Min<int64_t>(kDepth, a.cols() - first));
    for (int d = 0; d < depth; ++d) {
      const auto x = cuda::Load<kOwn>(staged + d * kStride + OwnRow());
      const auto y = cuda::Load<kOwn>(staged_b + d * kStride + OwnColumn());
      for (int r = 0; r < kOwn; ++r) {
        for (int c = 0; c < kOwn; ++c) scores[r][c] = fmaf(x.at[r], y.at[c], scores[r][c]);
      }
    }
  }
}

// The thread's scores, for AddWeighted: weights[column][row]. No thread may still read them.
__device__ inline void StoreWeights(const float (&scores)[kOwn][kOwn], float* weights) {
  for (int c = 0; c < kOwn; ++c) {
    Vector rows;
    for (int r = 0; r < kOwn; ++r) rows.at[r] = scores[r][c];
    cuda::StoreShared(rows, weights + (OwnColumn() + c) * kStride + OwnRow());
  }
}

// sums[r][..] += weight(row, j) * rows(j, first_column + ..) for the j that sees(r, j) names. The
// others are left out, not multiplied by 0: they may hold a NaN. All threads call it; begins with a
// barrier, so that weights may be stored until then.
template <int kColumns, typename T, typename Sees>
__device__ inline void AddWeighted(const float* weights, MatrixView<const T> rows,
                                   int64_t first_column, Sees sees, float* staged,
                                   float (&sums)[kOwn][kColumns / kSide]) {
  for (int64_t first = 0; first < rows.rows(); first += kDepth) {
    __syncthreads();
    StageRows<kColumns>(rows, first, first_column, staged);
    __syncthreads();
    const int count = static_cast<int>(cuda::Min<int64_t>(kDepth, rows.rows() - first));
    for (int i = 0; i < count; ++i) {
      const int j = static_cast<int>(first) + i;
      const auto weight = cuda::Load<kOwn>(weights + j * kStride + OwnRow());
      for (int group = 0; group < kColumns / kTile; ++group) {
        const auto x = cuda::Load<kOwn>(staged + i * kColumns + group * kTile + OwnColumn());
        for (int r = 0; r < kOwn; ++r) {
          if (!sees(r, j)) continue;
          for (int c = 0; c < kOwn; ++c) {
            float& sum = sums[r][group * kOwn + c];
            sum = fmaf(weight.at[r], x.at[c], sum);
          }
        }
      }
    }
  }
}

// The thread's results to the columns of `to` from first_column on, rounded to T.
template <int kColumns, typename T>
__device__ inline void StoreSums(const float (&sums)[kOwn][kColumns / kSide], int64_t first_column,
                                 MatrixView<T> to) {
  const int64_t vectors = cuda::VectorColumns<T>(to.cols(), to.data(), to.data() + to.stride());
  for (int r = 0; r < kOwn && OwnRow() + r < to.rows(); ++r) {
    for (int group = 0; group < kColumns / kTile; ++group) {
      const int64_t column = first_column + group * kTile + OwnColumn();
      cuda::Elements<T, kOwn> values;
      for (int c = 0; c < kOwn; ++c) values.at[c] = T(sums[r][group * kOwn + c]);
      if (column + kOwn <= vectors) {
        cuda::Store(values, to.row(OwnRow() + r) + column);
        continue;
      }
      for (int c = 0; c < kOwn; ++c) {
        if (column + c < to.cols()) to(OwnRow() + r, column + c) = values.at[c];
      }
    }
  }
}

}  // namespace moe::attention

#endif  // MOE_KERNELS_ATTENTION_ATTENTION_TILE_CUDA_H_
