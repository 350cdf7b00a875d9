#include <math.h>

#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_mma_tile_cuda.h"

namespace moe::attention {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// Registers of a thread: at most 128 for sums, and 64 for scores and products. That fits two blocks
// of four warps on a multiprocessor, or one of eight.
template <typename T, int kDepth>
using QueryBlock = MmaBlock<T, kDepth, 4, kDepth <= 128 ? 2 : 1, 32>;
template <typename T, int kDepth>
using KeyBlock =
    MmaBlock<T, kDepth, kDepth == 128 ? 8 : 4, kDepth == 64 ? 2 : 1, kDepth == 128 ? 64 : 32>;
template <int kDepth>
// columns of d_k and d_v that a block owns
constexpr int kKeyColumns = kDepth <= 128 ? kDepth : 128;

// Terms of one query for the gradients of its scores.
struct alignas(8) RowTerms {
  float log2_sum_exp, dot;  // log_sum_exp in powers of two; d_out . out
};

template <typename T>
__device__ RowTerms LoadTerms(const CudaBackward<T>& b, int64_t query, int head) {
  return {b.log_sum_exp(query, head) * kLog2E, b.row_dot(query, head)};
}

// Replaces score s and product d_out . v by the weight p = 2^(scale * s - log2_sum_exp) and the
// gradient with respect to scale * s, p * (product - dot); both are 0 where the query does not
// attend to the key.
__device__ void ScoreGradient(bool seen, float scale, const RowTerms& terms, float& score,
                              float& product) {
  score = seen ? Exp2(fmaf(score, scale, -terms.log2_sum_exp)) : 0.0f;
  product = seen ? score * (product - terms.dot) : 0.0f;
}

// Two tiles of columns in shared memory, each of two operands: one arrives while the other is
// computed with.
template <typename Block>
struct Stages {
  Chunk* shared;
  __device__ Chunk* First(int stage) const { return shared + 2 * stage * Block::kColChunks; }
  __device__ Chunk* Second(int stage) const { return First(stage) + Block::kColChunks; }
};
template <typename Block>
constexpr size_t kSharedBytes = (2 * Block::kRowChunks + 4 * Block::kColChunks) *
                                sizeof(Chunk);  // dynamic
// RowTerms of two tiles of queries, before dynamic memory at a multiple of 1,024.
constexpr size_t kTermsBytes = 1024;

// A block owns Block::kRows queries of a head; keys in ascending order.
template <typename T, int kDepth>
__global__ void __launch_bounds__(QueryBlock<T, kDepth>::kThreads, 2)
    MmaQueryGradientKernel(CudaBackward<T> b) {
  using Block = QueryBlock<T, kDepth>;
  MOE_DYNAMIC_SHARED(shared);
  auto* const q_rows = reinterpret_cast<Chunk*>(shared);
  Chunk* const d_out_rows = q_rows + Block::kRowChunks;
  const Stages<Block> stages = {d_out_rows + Block::kRowChunks};
  const Place place = FindPlace<Block::kRows>(b.sequence_offsets, b.sequences, QuerySlot(b.group));
  if (place.first == place.last) return;
  const int depth = static_cast<int>(b.q.cols() / b.heads);
  const int head = QueryHead(b.group);
  const int keys = static_cast<int>(place.last - place.begin);
  // keys that all of the queries attend to
  const int before = static_cast<int>(place.first - place.begin);
  const MatrixView<const T> k = HeadRows(b.k, depth, blockIdx.y, place.begin, place.begin + keys);
  const MatrixView<const T> v = HeadRows(b.v, depth, blockIdx.y, place.begin, place.begin + keys);
  AsyncCopies copies;
  const auto fetch_keys = [&](int key, int stage) {
    Block::template Fetch<Block::kCols>(k, key, stages.First(stage), copies);
    Block::template Fetch<Block::kCols>(v, key, stages.Second(stage), copies);
  };
  Block::template Fetch<Block::kRows>(
      HeadRows(b.q, depth, head, place.begin + before, place.begin + keys), 0, q_rows, copies);
  Block::template Fetch<Block::kRows>(
      HeadRows(b.d_out, depth, head, place.begin + before, place.begin + keys), 0, d_out_rows,
      copies);
  fetch_keys(0, 0);
  copies.Commit();

  RowTerms terms[Block::kRowSquares][2];
  MOE_UNROLL
  for (int m = 0; m < Block::kRowSquares; ++m) {
    MOE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = Block::OwnRow() + m * kSquare + half * 8 + LaneInWarp() / 4;
      terms[m][half] = {};
      if (row < keys - before) terms[m][half] = LoadTerms(b, place.begin + before + row, head);
    }
  }
  const float scale = Scale(depth);
  typename Block::template Sums<kDepth> sums = {};
  int stage = 0;
  const auto add_keys = [&](int key, auto mask) {
    copies.Wait<0>();
    __syncthreads();  // the tile has arrived, and the previous one has been read
    if (key + Block::kCols < keys) fetch_keys(key + Block::kCols, 1 - stage);
    copies.Commit();
    if (before + Block::OwnRow() < keys && mask.Any(Block::kRowSquares)) {
      typename Block::Scores scores, products;
      Block::Products(q_rows, stages.First(stage), mask, scores);
      Block::Products(d_out_rows, stages.Second(stage), mask, products);
      Block::ForScores(mask, [&](int m, int n, int e, bool seen) {
        ScoreGradient(seen, scale * kLog2E, terms[m][e / 2], scores[m][n][e], products[m][n][e]);
      });
      typename Block::Weights weights;
      Block::Round(products, weights);
      Block::template AddWeighted<kDepth>(weights, stages.First(stage), mask, sums);
    }
    stage = 1 - stage;
  };
  int key = 0;
  for (; key < before; key += Block::kCols) add_keys(key, AllSeen());
  for (; key < keys; key += Block::kCols) {
    add_keys(key, Causal<false>{(before + Block::OwnRow() - key) / kSquare, Block::kColSquares});
  }
  if (before + Block::OwnRow() >= keys) return;
  Block::template Store<kDepth>(
      sums, [&](int, int) { return scale; }, 0,
      HeadRows(b.d_q, depth, head, place.begin + before, place.begin + keys));
}

// A block owns Block::kRows keys of key-value head blockIdx.y and kColumns columns of d_k and d_v;
// query heads, and the queries of each, in ascending order.
template <typename T, int kDepth>
__global__ void __launch_bounds__(KeyBlock<T, kDepth>::kThreads, kDepth == 128 ? 1 : 2)
    MmaKeyGradientKernel(CudaBackward<T> b) {
  using Block = KeyBlock<T, kDepth>;
  constexpr int kColumns = kKeyColumns<kDepth>;
  MOE_DYNAMIC_SHARED(shared);
  MOE_SHARED_ARRAY(RowTerms, terms, 2 * Block::kCols);
  static_assert(sizeof(RowTerms) * 2 * Block::kCols <= kTermsBytes);
  auto* const k_rows = reinterpret_cast<Chunk*>(shared);
  Chunk* const v_rows = k_rows + Block::kRowChunks;
  const Stages<Block> stages = {v_rows + Block::kRowChunks};
  // Earlier keys have more queries: their blocks start first.
  const Place place = FindPlace<Block::kRows>(b.sequence_offsets, b.sequences, blockIdx.x);
  if (place.first == place.last) return;
  const int depth = static_cast<int>(b.q.cols() / b.heads);
  // those that attend to the first key
  const int queries = static_cast<int>(place.end - place.first);
  const int keys = static_cast<int>(place.last - place.first);
  AsyncCopies copies;
  RowTerms next_terms;  // being loaded, for the thread's query of the next tile
  const auto fetch_queries = [&](int member, int query, int stage) {
    const int head = static_cast<int>(blockIdx.y) * b.group + member;
    Block::template Fetch<Block::kCols>(
        HeadRows(b.q, depth, head, place.first, place.first + queries), query, stages.First(stage),
        copies);
    Block::template Fetch<Block::kCols>(
        HeadRows(b.d_out, depth, head, place.first, place.first + queries), query,
        stages.Second(stage), copies);
    if (threadIdx.x < Block::kCols) {
      const int row = query + static_cast<int>(threadIdx.x);
      next_terms = {};
      if (row < queries) next_terms = LoadTerms(b, place.first + row, head);
    }
  };
  Block::template Fetch<Block::kRows>(
      HeadRows(b.k, depth, blockIdx.y, place.first, place.first + keys), 0, k_rows, copies);
  Block::template Fetch<Block::kRows>(
      HeadRows(b.v, depth, blockIdx.y, place.first, place.first + keys), 0, v_rows, copies);
  fetch_queries(0, 0, 0);
  copies.Commit();

  const float scale = Scale(depth);
  const bool has_rows = Block::OwnRow() < keys;
  const int first_column = static_cast<int>(blockIdx.z) * kColumns;
  typename Block::template Sums<kColumns> d_k = {}, d_v = {};
  int stage = 0;
  const auto add_queries = [&](int member, int query, auto mask) {
    RowTerms* const tile_terms = terms + stage * Block::kCols;
    if (threadIdx.x < Block::kCols) tile_terms[threadIdx.x] = next_terms;
    copies.Wait<0>();
    __syncthreads();  // the tile has arrived, and the previous one has been read
    if (query + Block::kCols < queries) {
      fetch_queries(member, query + Block::kCols, 1 - stage);
    } else if (member + 1 < b.group) {
      fetch_queries(member + 1, 0, 1 - stage);
    }
    copies.Commit();
    if (has_rows && mask.Any(Block::kRowSquares)) {
      typename Block::Scores scores, products;
      Block::Products(k_rows, stages.First(stage), mask, scores);
      Block::Products(v_rows, stages.Second(stage), mask, products);
      Block::ForScores(mask, [&](int m, int n, int e, bool seen) {
        ScoreGradient(seen, scale * kLog2E, tile_terms[n * 8 + LaneInWarp() % 4 * 2 + e % 2],
                      scores[m][n][e], products[m][n][e]);
      });
      typename Block::Weights weights, gradients;
      Block::Round(scores, weights);
      Block::Round(products, gradients);
      const int chunk = first_column / kChunkColumns;
      Block::template AddWeighted<kColumns>(weights, stages.Second(stage) + chunk, mask, d_v);
      Block::template AddWeighted<kColumns>(gradients, stages.First(stage) + chunk, mask, d_k);
    }
    stage = 1 - stage;
  };
  for (int member = 0; member < b.group; ++member) {
    int query = 0;
    for (; query < keys; query += Block::kCols) {
      const int diagonal = (Block::OwnRow() - query) / kSquare;
      add_queries(member, query, Causal<true>{diagonal, Block::kColSquares});
    }
    for (; query < queries; query += Block::kCols) add_queries(member, query, AllSeen());
  }
  if (!has_rows) return;
  Block::template Store<kColumns>(
      d_k, [&](int, int) { return scale; }, first_column,
      HeadRows(b.d_k, depth, blockIdx.y, place.first, place.first + keys));
  Block::template Store<kColumns>(
      d_v, [](int, int) { return 1.0f; }, first_column,
      HeadRows(b.d_v, depth, blockIdx.y, place.first, place.first + keys));
}

template <typename T, int kDepth>
cudaError_t RunDepth(const CudaBackward<T>& backward, cudaStream_t stream) {
  using Queries = QueryBlock<T, kDepth>;
  using Keys = KeyBlock<T, kDepth>;
  const cudaError_t error = Launch(&MmaQueryGradientKernel<T, kDepth>,
                                   {Grid<Queries::kRows>(backward, backward.group, kDepth),
                                    dim3(Queries::kThreads), kSharedBytes<Queries>},
                                   stream, backward);
  if (error != cudaSuccess) return error;
  return Launch(&MmaKeyGradientKernel<T, kDepth>,
                {Grid<Keys::kRows>(backward, 1, kKeyColumns<kDepth>), dim3(Keys::kThreads),
                 kSharedBytes<Keys>},
                stream, backward);
}

template <typename T, int kDepth>
constexpr size_t kMostSharedBytes = std::max(kSharedBytes<QueryBlock<T, kDepth>>,
                                             kTermsBytes + kSharedBytes<KeyBlock<T, kDepth>>);

}  // namespace

template <typename T>
bool FitsMma(const CudaBackward<T>& backward) {
  const int64_t depth = backward.q.cols() / backward.heads;
  const size_t needed = depth <= 64    ? kMostSharedBytes<T, 64>
                        : depth <= 128 ? kMostSharedBytes<T, 128>
                                       : kMostSharedBytes<T, kMostMmaDepth>;
  return needed <= static_cast<size_t>(DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
}

template <typename T>
cudaError_t RunMma(const CudaBackward<T>& backward, cudaStream_t stream) {
  const int64_t depth = backward.q.cols() / backward.heads;
  if (depth <= 64) return RunDepth<T, 64>(backward, stream);
  if (depth <= 128) return RunDepth<T, 128>(backward, stream);
  return RunDepth<T, kMostMmaDepth>(backward, stream);
}

template bool FitsMma(const CudaBackward<BFloat16>&);
template bool FitsMma(const CudaBackward<Float16>&);
template cudaError_t RunMma(const CudaBackward<BFloat16>&, cudaStream_t);
template cudaError_t RunMma(const CudaBackward<Float16>&, cudaStream_t);

}  // namespace moe::attention
