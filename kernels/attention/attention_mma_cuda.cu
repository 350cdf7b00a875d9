#include <float.h>
#include <math.h>

#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_mma_tile_cuda.h"

namespace moe::attention {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// Registers of a thread: 128 for the sums of 32 queries and 128 columns (or 16 and 256), and 64 for
// scores. Two blocks of four warps fit a multiprocessor.
constexpr int kBlocks = 2;
template <typename T, int kDepth>
using ForwardBlock = MmaBlock<T, kDepth, 4, kDepth <= 128 ? 2 : 1, kDepth == 128 ? 32 : 64>;

// Softmax over the keys so far for the lane's rows, in powers of two. The four lanes of a row hold
// the same maximum, and each the sum of its own columns.
template <typename Block>
struct RunningSoftmax {
  float max[Block::kRowSquares][2], sum[Block::kRowSquares][2] = {};

  __device__ RunningSoftmax() {
    for (auto& rows : max) {
      for (float& row : rows) row = -FLT_MAX;  // not infinity: the difference of two is a number
    }
  }

  // Replaces scores by 2^(scale * (score - max)) and rescales the sums of values so far where the
  // maximum has grown.
  template <typename Sums>
  __device__ void Add(typename Block::Scores& scores, float scale, Sums& sums) {
    MOE_UNROLL
    for (int m = 0; m < Block::kRowSquares; ++m) {
      MOE_UNROLL
      for (int half = 0; half < 2; ++half) {
        float largest = max[m][half];
        for (const auto& score : scores[m]) {
          largest = fmaxf(largest, fmaxf(score[2 * half], score[2 * half + 1]));
        }
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
        const float offset = -largest * scale;
        float partial = 0;
        for (auto& score : scores[m]) {
          for (int c = 2 * half; c < 2 * half + 2; ++c) {
            score[c] = Exp2(fmaf(score[c], scale, offset));
            partial += score[c];
          }
        }
        const float rescale = Exp2((max[m][half] - largest) * scale);
        max[m][half] = largest;
        sum[m][half] = fmaf(sum[m][half], rescale, partial);
        // Usually no maximum of the warp has grown: a factor of 1 is skipped.
        if (__ballot_sync(kAllLanes, rescale != 1) == 0) continue;
        for (auto& values : sums[m]) {
          values[2 * half] *= rescale;
          values[2 * half + 1] *= rescale;
        }
      }
    }
  }

  // The sum over all columns of a row.
  __device__ float Sum(int m, int half) const {
    const float pair = sum[m][half] + __shfl_xor_sync(kAllLanes, sum[m][half], 1);
    return pair + __shfl_xor_sync(kAllLanes, pair, 2);
  }
};

// A block owns Block::kRows queries of a head. A tile's keys arrive while the previous values are
// multiplied, its values while its keys are.
template <typename T, int kDepth>
__global__ void __launch_bounds__(ForwardBlock<T, kDepth>::kThreads, kBlocks)
    MmaForwardKernel(CudaForward<T> f) {
  using Block = ForwardBlock<T, kDepth>;
  MOE_DYNAMIC_SHARED(shared);
  auto* const q_rows = reinterpret_cast<Chunk*>(shared);
  Chunk* const k_rows = q_rows + Block::kRowChunks;
  Chunk* const v_rows = k_rows + Block::kColChunks;
  const Place place = FindPlace<Block::kRows>(f.sequence_offsets, f.sequences, QuerySlot(f.group));
  if (place.first == place.last) return;
  const int depth = static_cast<int>(f.q.cols() / f.heads);
  const int head = QueryHead(f.group);
  const int keys = static_cast<int>(place.last - place.begin);
  // keys that all of the queries attend to
  const int before = static_cast<int>(place.first - place.begin);
  const MatrixView<const T> k = HeadRows(f.k, depth, blockIdx.y, place.begin, place.begin + keys);
  const MatrixView<const T> v = HeadRows(f.v, depth, blockIdx.y, place.begin, place.begin + keys);
  AsyncCopies copies;
  Block::template Fetch<Block::kRows>(HeadRows(f.q, depth, head, place.first, place.last), 0,
                                      q_rows, copies);
  Block::template Fetch<Block::kCols>(k, 0, k_rows, copies);
  copies.Commit();

  const float scale = Scale(depth);
  const auto has_rows = [&] {
    return before + Block::OwnRow() < keys;
  };
  RunningSoftmax<Block> softmax;
  typename Block::template Sums<kDepth> sums = {};
  const auto add_keys = [&](int key, auto mask) {
    copies.Wait<0>();
    __syncthreads();  // the keys have arrived, and the previous values have been read
    Block::template Fetch<Block::kCols>(v, key, v_rows, copies);
    copies.Commit();
    const bool sees = has_rows() && mask.Any(Block::kRowSquares);
    typename Block::Scores scores;
    if (sees) Block::Products(q_rows, k_rows, mask, scores);
    copies.Wait<0>();
    __syncthreads();  // the values have arrived, and the keys have been read
    if (key + Block::kCols < keys) {
      Block::template Fetch<Block::kCols>(k, key + Block::kCols, k_rows, copies);
    }
    copies.Commit();
    if (!sees) return;
    Block::ForScores(mask, [&](int m, int n, int e, bool seen) {
      if (!seen) scores[m][n][e] = -INFINITY;
    });
    softmax.Add(scores, scale * kLog2E, sums);
    typename Block::Weights weights;
    Block::Round(scores, weights);
    Block::template AddWeighted<kDepth>(weights, v_rows, mask, sums);
  };
  int key = 0;
  for (; key < before; key += Block::kCols) add_keys(key, AllSeen());
  for (; key < keys; key += Block::kCols) {
    const int diagonal = (before + Block::OwnRow() - key) / kSquare;
    add_keys(key, Causal<false>{diagonal, Block::kColSquares});
  }
  if (!has_rows()) return;

  float reciprocal[Block::kRowSquares][2];
  MOE_UNROLL
  for (int m = 0; m < Block::kRowSquares; ++m) {
    MOE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.Sum(m, half);
      reciprocal[m][half] = 1.0f / sum;
      const int query = before + Block::OwnRow() + m * kSquare + half * 8 + LaneInWarp() / 4;
      if (LaneInWarp() % 4 == 0 && query < keys) {
        f.log_sum_exp(place.begin + query, head) = scale * softmax.max[m][half] + logf(sum);
      }
    }
  }
  Block::template Store<kDepth>(
      sums, [&](int m, int half) { return reciprocal[m][half]; }, 0,
      HeadRows(f.out, depth, head, place.begin + before, place.begin + keys));
}

template <typename T, int kDepth>
cudaError_t RunDepth(const CudaForward<T>& forward, cudaStream_t stream) {
  using Block = ForwardBlock<T, kDepth>;
  constexpr size_t kShared = (Block::kRowChunks + 2 * Block::kColChunks) * sizeof(Chunk);
  return Launch(
      &MmaForwardKernel<T, kDepth>,
      {Grid<Block::kRows>(forward, forward.group, kDepth), dim3(Block::kThreads), kShared}, stream,
      forward);
}

}  // namespace

template <typename T>
cudaError_t RunMma(const CudaForward<T>& forward, cudaStream_t stream) {
  const int64_t depth = forward.q.cols() / forward.heads;
  if (depth <= 64) return RunDepth<T, 64>(forward, stream);
  if (depth <= 128) return RunDepth<T, 128>(forward, stream);
  return RunDepth<T, kMostMmaDepth>(forward, stream);
}

template cudaError_t RunMma(const CudaForward<BFloat16>&, cudaStream_t);
template cudaError_t RunMma(const CudaForward<Float16>&, cudaStream_t);

}  // namespace moe::attention
