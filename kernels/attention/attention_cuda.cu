#include <type_traits>

#include <float.h>
#include <math.h>

#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/sequences_cuda.h"
#include "kernels/base/cuda_fixed_dot.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"

namespace moe::attention {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// Attention by tiles of kTile rows x kTile columns of scores. The block's threads form a square of
// kSide x kSide. Each owns 4 x 4 scores in registers, and of the kTile x kColumns results 4 rows in
// groups of 4 columns, kTile apart. Every element is one chain of fused multiply-adds in ascending
// order, as on the CPU (attention_cpu.cc).

constexpr int kTile = 64;
constexpr int kSide = 16;
constexpr int kThreads = kSide * kSide;
constexpr int kOwn = kTile / kSide;  // rows and columns of a thread: one vector of float32
constexpr int kDepth = 32;           // extent of the summed index that is staged at a time
constexpr int kStride = kTile + 4;   // spreads a column over the banks; rows stay aligned
static_assert(kOwn == kVectorWidth<float>);

// A block's shared memory is made of these: 16-byte accesses need arrays that begin so.
using Vector = Elements<float, kOwn>;
constexpr int kStagedVectors = 2 * kDepth * kStride / kOwn;
constexpr int kWeightVectors = kTile * kStride / kOwn;

__device__ int OwnRow() {
  return static_cast<int>(threadIdx.x) / kSide * kOwn;
}
__device__ int OwnColumn() {
  return static_cast<int>(threadIdx.x) % kSide * kOwn;
}

// Elements [column, column + kVectorWidth<T>) of a row; zeros outside the matrix.
template <typename T>
__device__ Elements<T, kVectorWidth<T>> LoadPadded(MatrixView<const T> m, int64_t row,
                                                   int64_t column) {
  constexpr int kWidth = kVectorWidth<T>;
  Elements<T, kWidth> values = {};
  if (row >= m.rows() || column >= m.cols()) return values;
  const T* const from = m.row(row) + column;
  if (column + kWidth <= VectorColumns<T>(m.cols(), m.data(), m.data() + m.stride())) {
    return Load<kWidth>(from);
  }
  for (int i = 0; i < kWidth; ++i) {
    if (column + i < m.cols()) values.at[i] = from[i];
  }
  return values;
}

// to[d][r] = rows(r, first + d) for d < kDepth, r < kTile. Neighbouring lanes take neighbouring
// rows: their stores fall into different banks.
template <typename T>
__device__ void StageTransposed(MatrixView<const T> rows, int64_t first, float* to) {
  constexpr int kWidth = kVectorWidth<T>;
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kDepth / kWidth; i += kThreads) {
    const int r = i % kTile, d = i / kTile * kWidth;
    const auto values = LoadPadded(rows, r, first + d);
    for (int w = 0; w < kWidth; ++w) to[(d + w) * kStride + r] = static_cast<float>(values.at[w]);
  }
}

// to[r][c] = rows(first + r, column + c) for r < kDepth, c < kColumns.
template <int kColumns, typename T>
__device__ void StageRows(MatrixView<const T> rows, int64_t first, int64_t column, float* to) {
  constexpr int kWidth = kVectorWidth<T>, kVectors = kColumns / kWidth;
  static_assert(kDepth * kColumns <= kStagedVectors * kOwn);
  for (int i = static_cast<int>(threadIdx.x); i < kDepth * kVectors; i += kThreads) {
    const int r = i / kVectors, c = i % kVectors * kWidth;
    const auto values = LoadPadded(rows, first + r, column + c);
    for (int w = 0; w < kWidth; w += kOwn) {
      Vector four;
      for (int n = 0; n < kOwn; ++n) four.at[n] = static_cast<float>(values.at[w + n]);
      StoreShared(four, to + r * kColumns + c + w);
    }
  }
}

// scores[r][c] = sum over d of a(row, d) * b(column, d). `a` and `b` have at most kTile rows;
// scores beyond them are zeros. All threads call it. It begins with a barrier, so that `staged` and
// the weights of the previous tile may be in use until then.
template <typename T>
__device__ void Products(MatrixView<const T> a, MatrixView<const T> b, float* staged,
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
    const int depth = static_cast<int>(Min<int64_t>(kDepth, a.cols() - first));
    for (int d = 0; d < depth; ++d) {
      const auto x = Load<kOwn>(staged + d * kStride + OwnRow());
      const auto y = Load<kOwn>(staged_b + d * kStride + OwnColumn());
      for (int r = 0; r < kOwn; ++r) {
        for (int c = 0; c < kOwn; ++c) scores[r][c] = fmaf(x.at[r], y.at[c], scores[r][c]);
      }
    }
  }
}

// Stores the thread's scores for AddWeighted: weights[column][row]. No thread may still read the
// old ones.
__device__ void StoreWeights(const float (&scores)[kOwn][kOwn], float* weights) {
  for (int c = 0; c < kOwn; ++c) {
    Vector rows;
    for (int r = 0; r < kOwn; ++r) rows.at[r] = scores[r][c];
    StoreShared(rows, weights + (OwnColumn() + c) * kStride + OwnRow());
  }
}

// sums[r][..] += weight(row, j) * rows(j, first_column + ..) for the j that sees(r, j) selects. The
// others are left out, not multiplied by 0: they may be NaN. All threads call it. It begins with a
// barrier, so that weights may be stored until then.
template <int kColumns, typename T, typename Sees>
__device__ void AddWeighted(const float* weights, MatrixView<const T> rows, int64_t first_column,
                            Sees sees, float* staged, float (&sums)[kOwn][kColumns / kSide]) {
  for (int64_t first = 0; first < rows.rows(); first += kDepth) {
    __syncthreads();
    StageRows<kColumns>(rows, first, first_column, staged);
    __syncthreads();
    const int count = static_cast<int>(Min<int64_t>(kDepth, rows.rows() - first));
    for (int i = 0; i < count; ++i) {
      const int j = static_cast<int>(first) + i;
      const auto weight = Load<kOwn>(weights + j * kStride + OwnRow());
      for (int group = 0; group < kColumns / kTile; ++group) {
        const auto x = Load<kOwn>(staged + i * kColumns + group * kTile + OwnColumn());
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
__device__ void StoreSums(const float (&sums)[kOwn][kColumns / kSide], int64_t first_column,
                          MatrixView<T> to) {
  const int64_t vectors = VectorColumns<T>(to.cols(), to.data(), to.data() + to.stride());
  for (int r = 0; r < kOwn && OwnRow() + r < to.rows(); ++r) {
    for (int group = 0; group < kColumns / kTile; ++group) {
      const int64_t column = first_column + group * kTile + OwnColumn();
      Elements<T, kOwn> values;
      for (int c = 0; c < kOwn; ++c) values.at[c] = T(sums[r][group * kOwn + c]);
      if (column + kOwn <= vectors) {
        Store(values, to.row(OwnRow() + r) + column);
        continue;
      }
      for (int c = 0; c < kOwn; ++c) {
        if (column + c < to.cols()) to(OwnRow() + r, column + c) = values.at[c];
      }
    }
  }
}

// How many keys of a tile the first of the thread's queries attends to; each further query attends
// to one more. kTile or above: all of them.
__device__ int KeysSeen(int64_t first_query, int64_t first_key) {
  return static_cast<int>(Min<int64_t>(first_query - first_key, kTile)) + OwnRow() + 1;
}

// The largest value of the 16 lanes that share a row. It may ignore a NaN.
__device__ float RowMax(float value) {
  for (int width = kSide / 2; width >= 1; width /= 2) {
    value = fmaxf(value, __shfl_xor_sync(HalfWarpMask(), value, width));
  }
  return value;
}

// Softmax over the keys so far; the 16 lanes of a row hold the same values.
struct RunningSoftmax {
  float max = -FLT_MAX;  // not infinity: the difference of two maxima is a number
  float sum = 0;         // sum of exp(scale * (score - max))

  // The first `seen` scores of a tile's row become exp(scale * (score - max)), the others 0.
  // Returns the factor that rescales earlier sums, because the maximum may have grown.
  __device__ float Add(float (&scores)[kOwn], int seen, float scale) {
    float largest = max;
    for (int c = 0; c < kOwn; ++c) {
      if (OwnColumn() + c < seen) largest = fmaxf(largest, scores[c]);
    }
    largest = RowMax(largest);
    float partial = 0;
    for (int c = 0; c < kOwn; ++c) {
      scores[c] = OwnColumn() + c < seen ? expf(scale * (scores[c] - largest)) : 0.0f;
      partial += scores[c];
    }
    const float rescale = expf(scale * (max - largest));
    sum = fmaf(sum, rescale, FoldPartials(partial));
    max = largest;
    return rescale;
  }
};

// A block owns kTile queries of a head and kColumns columns of their results.
template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads) ForwardKernel(CudaForward<T> f) {
  MOE_SHARED_ARRAY(Vector, staged_vectors, kStagedVectors);
  MOE_SHARED_ARRAY(Vector, weight_vectors, kWeightVectors);
  auto* const staged = reinterpret_cast<float*>(staged_vectors);
  auto* const weights = reinterpret_cast<float*>(weight_vectors);
  const Place place = FindPlace<kTile>(f.sequence_offsets, f.sequences, QuerySlot(f.group));
  if (place.first == place.last) return;
  const int64_t depth = f.q.cols() / f.heads, first_column = int64_t{blockIdx.z} * kColumns;
  const float scale = Scale(depth);
  const int head = QueryHead(f.group);
  const auto q = HeadRows(f.q, depth, head, place.first, place.last);
  RunningSoftmax softmax[kOwn];
  float sums[kOwn][kColumns / kSide] = {};
  for (int64_t key = place.begin; key < place.last; key += kTile) {
    const int64_t end = Min(key + kTile, place.last);
    float scores[kOwn][kOwn];
    Products(q, HeadRows(f.k, depth, blockIdx.y, key, end), staged, scores);
    const int seen = KeysSeen(place.first, key);
    for (int r = 0; r < kOwn; ++r) {
      const float rescale = softmax[r].Add(scores[r], seen + r, scale);
      for (float& sum : sums[r]) sum *= rescale;
    }
    StoreWeights(scores, weights);
    AddWeighted<kColumns>(
        weights, HeadRows(f.v, depth, blockIdx.y, key, end), first_column,
        [&](int r, int j) { return j < seen + r; }, staged, sums);
  }
  for (int r = 0; r < kOwn; ++r) {
    const float reciprocal = 1.0f / softmax[r].sum;
    for (float& sum : sums[r]) sum *= reciprocal;
    const int64_t query = place.first + OwnRow() + r;
    if (blockIdx.z == 0 && OwnColumn() == 0 && query < place.last) {
      f.log_sum_exp(query, head) = scale * softmax[r].max + logf(softmax[r].sum);
    }
  }
  StoreSums<kColumns>(sums, first_column, HeadRows(f.out, depth, head, place.first, place.last));
}

// Replaces score s and product d_out . v by the weight p = exp(scale * s - log_sum_exp) and the
// gradient with respect to s, scale * p * (product - dot).
__device__ void ScoreGradient(float& score, float& product, float scale, float log_sum_exp,
                              float dot) {
  score = expf(fmaf(score, scale, -log_sum_exp));
  product = score * ((product - dot) * scale);
}

// Half a warp owns a row of a head: d_out . out in the order of FixedDot.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) RowDotKernel(CudaBackward<T> b) {
  const int64_t depth = b.out.cols() / b.heads;
  ForRows<kPartials>(b.out.rows() * b.heads, [&](int64_t i, int lane) {
    const int64_t row = i / b.heads, head = i % b.heads;
    const T* const out = b.out.row(row) + head * depth;
    const T* const d_out = b.d_out.row(row) + head * depth;
    const auto dot = FixedSumOf<float>(depth, lane, [&](int64_t d, float sum) {
      return fmaf(static_cast<float>(d_out[d]), static_cast<float>(out[d]), sum);
    });
    if (lane == 0) b.row_dot(row, head) = dot;
  });
}

// Blocks that a multiprocessor must hold. One leaves each thread of the gradient kernels the
// 130 to 200 registers that it needs; by default ptxas aims at two and spills.
constexpr int kGradientBlocks = 1;

// A block owns kTile queries of a head and kColumns columns of d_q; keys in ascending
// order.
template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, kGradientBlocks)
    QueryGradientKernel(CudaBackward<T> b) {
  MOE_SHARED_ARRAY(Vector, staged_vectors, kStagedVectors);
  MOE_SHARED_ARRAY(Vector, weight_vectors, kWeightVectors);
  auto* const staged = reinterpret_cast<float*>(staged_vectors);
  auto* const weights = reinterpret_cast<float*>(weight_vectors);
  const Place place = FindPlace<kTile>(b.sequence_offsets, b.sequences, QuerySlot(b.group));
  if (place.first == place.last) return;
  const int64_t depth = b.q.cols() / b.heads, first_column = int64_t{blockIdx.z} * kColumns;
  const float scale = Scale(depth);
  const int head = QueryHead(b.group);
  const auto q = HeadRows(b.q, depth, head, place.first, place.last);
  const auto d_out = HeadRows(b.d_out, depth, head, place.first, place.last);
  float log_sum_exp[kOwn] = {}, dot[kOwn] = {};
  for (int r = 0; r < kOwn && OwnRow() + r < q.rows(); ++r) {
    const int64_t query = place.first + OwnRow() + r;
    log_sum_exp[r] = b.log_sum_exp(query, head);
    dot[r] = b.row_dot(query, head);
  }
  float sums[kOwn][kColumns / kSide] = {};
  for (int64_t key = place.begin; key < place.last; key += kTile) {
    const int64_t end = Min(key + kTile, place.last);
    const auto k = HeadRows(b.k, depth, blockIdx.y, key, end);
    float scores[kOwn][kOwn], products[kOwn][kOwn];
    Products(q, k, staged, scores);
    Products(d_out, HeadRows(b.v, depth, blockIdx.y, key, end), staged, products);
    for (int r = 0; r < kOwn; ++r) {
      for (int c = 0; c < kOwn; ++c) {
        ScoreGradient(scores[r][c], products[r][c], scale, log_sum_exp[r], dot[r]);
      }
    }
    StoreWeights(products, weights);
    const int seen = KeysSeen(place.first, key);
    AddWeighted<kColumns>(
        weights, k, first_column, [&](int r, int j) { return j < seen + r; }, staged, sums);
  }
  StoreSums<kColumns>(sums, first_column, HeadRows(b.d_q, depth, head, place.first, place.last));
}

// A block owns kTile keys of key-value head blockIdx.y and kColumns columns of d_k and d_v; query
// heads, and the queries of each, in ascending order.
template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, kGradientBlocks) KeyGradientKernel(CudaBackward<T> b) {
  MOE_SHARED_ARRAY(Vector, staged_vectors, kStagedVectors);
  MOE_SHARED_ARRAY(Vector, weight_vectors, kWeightVectors);
  auto* const staged = reinterpret_cast<float*>(staged_vectors);
  auto* const weights = reinterpret_cast<float*>(weight_vectors);
  // Earlier keys have more queries: their blocks start first.
  const Place place = FindPlace<kTile>(b.sequence_offsets, b.sequences, blockIdx.x);
  if (place.first == place.last) return;
  const int64_t depth = b.q.cols() / b.heads, first_column = int64_t{blockIdx.z} * kColumns;
  const float scale = Scale(depth);
  const auto k = HeadRows(b.k, depth, blockIdx.y, place.first, place.last);
  const auto v = HeadRows(b.v, depth, blockIdx.y, place.first, place.last);
  float d_k[kOwn][kColumns / kSide] = {}, d_v[kOwn][kColumns / kSide] = {};
  for (int member = 0; member < b.group; ++member) {
    const int head = static_cast<int>(blockIdx.y) * b.group + member;
    for (int64_t query = place.first; query < place.end; query += kTile) {
      const int64_t end = Min(query + kTile, place.end);
      const auto q = HeadRows(b.q, depth, head, query, end);
      const auto d_out = HeadRows(b.d_out, depth, head, query, end);
      float scores[kOwn][kOwn], products[kOwn][kOwn];
      Products(k, q, staged, scores);
      Products(v, d_out, staged, products);
      for (int c = 0; c < kOwn && OwnColumn() + c < q.rows(); ++c) {
        const int64_t row = query + OwnColumn() + c;
        const float log_sum_exp = b.log_sum_exp(row, head), dot = b.row_dot(row, head);
        for (int r = 0; r < kOwn; ++r) {
          ScoreGradient(scores[r][c], products[r][c], scale, log_sum_exp, dot);
        }
      }
      // A key's own query and later ones attend to it; past the first tile, all do.
      const auto sees = [own = query == place.first ? OwnRow() : -kOwn](int r, int j) {
        return j >= own + r;
      };
      StoreWeights(scores, weights);
      AddWeighted<kColumns>(weights, d_out, first_column, sees, staged, d_v);
      __syncthreads();  // the weights have been read
      StoreWeights(products, weights);
      AddWeighted<kColumns>(weights, q, first_column, sees, staged, d_k);
    }
  }
  StoreSums<kColumns>(d_k, first_column,
                      HeadRows(b.d_k, depth, blockIdx.y, place.first, place.last));
  StoreSums<kColumns>(d_v, first_column,
                      HeadRows(b.d_v, depth, blockIdx.y, place.first, place.last));
}

template <typename Arguments>
LaunchShape Shape(const Arguments& a, int members, int columns) {
  return {Grid<kTile>(a, members, columns), dim3(kThreads)};
}

template <typename T, int kColumns>
cudaError_t RunColumns(const CudaForward<T>& forward, cudaStream_t stream) {
  return Launch(&ForwardKernel<T, kColumns>, Shape(forward, forward.group, kColumns), stream,
                forward);
}

template <typename T, int kColumns>
cudaError_t RunColumns(const CudaBackward<T>& backward, cudaStream_t stream) {
  const cudaError_t error = Launch(&QueryGradientKernel<T, kColumns>,
                                   Shape(backward, backward.group, kColumns), stream, backward);
  if (error != cudaSuccess) return error;
  return Launch(&KeyGradientKernel<T, kColumns>, Shape(backward, 1, kColumns), stream, backward);
}

// Small heads get small blocks of columns: a block computes all of its columns, used or not.
template <typename T, typename Arguments>
cudaError_t RunAny(const Arguments& arguments, cudaStream_t stream) {
  const int64_t depth = arguments.q.cols() / arguments.heads;
  if constexpr (!std::is_same_v<T, float>) {
    if (depth <= kMostMmaDepth && FitsMma(arguments)) return RunMma(arguments, stream);
  } else if (depth <= kTile) {
    return RunColumns<T, kTile>(arguments, stream);
  }
  return RunColumns<T, 2 * kTile>(arguments, stream);
}

}  // namespace

template <typename T>
cudaError_t Run(const CudaForward<T>& forward, cudaStream_t stream) {
  if (forward.q.rows() == 0) return cudaSuccess;
  return RunAny<T>(forward, stream);
}

template <typename T>
cudaError_t Run(const CudaBackward<T>& backward, cudaStream_t stream) {
  if (backward.q.rows() == 0) return cudaSuccess;
  const int64_t dots = backward.out.rows() * backward.heads;
  const cudaError_t error = Launch(&RowDotKernel<T>, RowShape<kPartials>(dots), stream, backward);
  if (error != cudaSuccess) return error;
  return RunAny<T>(backward, stream);
}

MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, CudaForward, cudaStream_t)
MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, CudaBackward, cudaStream_t)

}  // namespace moe::attention
