#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/embedding/embedding_op.h"

namespace moe::embedding {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

constexpr int kWarps = kRowThreads / kWarpLanes;
constexpr int kBlockRows = 32;  // rows of the table; the more, the fewer times the ids are read
constexpr int kWarpIds = 256;   // ids that a warp searches at a time

// A token whose id is one of the block's rows.
struct Match {
  int16_t row;    // within the block
  int16_t token;  // within the ids that the warp searches
};

__device__ int Warp() {
  return static_cast<int>(threadIdx.x) / kWarpLanes;
}
__device__ int WarpLane() {
  return static_cast<int>(threadIdx.x) % kWarpLanes;
}

// The warp lists, in ascending order, those of `count` ids that are in rows [first_row, first_row +
// kBlockRows); returns their number.
__device__ int FindMatches(const int32_t* ids, int64_t count, int64_t first_row, Match* matches) {
  int found = 0;
  for (int i = 0; i < kWarpIds; i += kWarpLanes) {
    const int token = i + WarpLane();
    const int64_t row = token < count ? ids[token] - first_row : -1;
    const bool mine = row >= 0 && row < kBlockRows;
    const uint32_t lanes = __ballot_sync(0xffffffffu, mine);
    const int before = __popc(lanes & ((1u << WarpLane()) - 1));
    if (mine) matches[found + before] = {static_cast<int16_t>(row), static_cast<int16_t>(token)};
    found += __popc(lanes);
  }
  return found;
}

// Adds to row `row` of the block the rows of dx that `matches` lists. A lane keeps the sums of its
// columns over up to 32 matches in ascending order.
template <typename T>
__device__ void AddMatches(const Match* matches, int count, int row, MatrixView<const T> dx,
                           float* to, int64_t vector_columns) {
  for (int i = 0; i < count; i += kWarpLanes) {
    const bool mine = i + WarpLane() < count && matches[i + WarpLane()].row == row;
    const uint32_t lanes = __ballot_sync(0xffffffffu, mine);
    if (lanes == 0) continue;
    ForColumns<float>(dx.cols(), vector_columns, WarpLane(), kWarpLanes, [&](int64_t c, auto w) {
      auto sums = Load<w.value>(to + c);
      for (uint32_t left = lanes; left != 0; left &= left - 1) {
        const int next = __ffs(static_cast<int>(left)) - 1;
        const auto values = Load<w.value>(dx.row(matches[i + next].token) + c);
        for (int n = 0; n < w.value; ++n) sums.at[n] += static_cast<float>(values.at[n]);
      }
      Store(sums, to + c);
    });
  }
}

// A block owns kBlockRows rows of the table, a warp every kWarps-th of them, and a lane some of
// their columns, which no other thread touches.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) BackwardKernel(Backward<T> b) {
  MOE_SHARED_ARRAY(Match, matches, kWarps * kWarpIds);
  MOE_SHARED_ARRAY(int, found, kWarps);
  const int64_t first_row = int64_t{blockIdx.x} * kBlockRows;
  const int rows = static_cast<int>(Min<int64_t>(kBlockRows, b.d_table.rows() - first_row));
  const int64_t cols = b.d_table.cols(), tokens = b.dx.rows();
  const T* const dx = b.dx.data();
  float* const d_table = b.d_table.data();
  const int64_t vector_columns =
      VectorColumns<float>(cols, dx, dx + b.dx.stride(), d_table, d_table + b.d_table.stride());
  if (b.write == Write::kOverwrite) {
    for (int row = Warp(); row < rows; row += kWarps) {
      float* const to = b.d_table.row(first_row + row);
      ForColumns<float>(cols, vector_columns, WarpLane(), kWarpLanes,
                        [&](int64_t c, auto w) { Store(Elements<float, w.value>{}, to + c); });
    }
  }
  for (int64_t token = 0; token < tokens; token += kWarps * kWarpIds) {
    const int64_t begin = token + Warp() * kWarpIds;
    const int count =
        FindMatches(b.ids + begin, tokens - begin, first_row, matches + Warp() * kWarpIds);
    if (WarpLane() == 0) found[Warp()] = count;
    __syncthreads();
    for (int row = Warp(); row < rows; row += kWarps) {
      for (int part = 0; part < kWarps; ++part) {
        if (found[part] == 0) continue;
        const int64_t from = token + part * kWarpIds;
        AddMatches(matches + part * kWarpIds, found[part], row, RowRange(b.dx, from, tokens),
                   b.d_table.row(first_row + row), vector_columns);
      }
    }
    __syncthreads();  // the lists have been read
  }
}

}  // namespace

template <typename T>
cudaError_t Run(const Backward<T>& backward, cudaStream_t stream) {
  const int64_t rows = backward.d_table.rows();
  // without tokens the results are zeros
  if (rows == 0 || backward.d_table.cols() == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((rows + kBlockRows - 1) / kBlockRows);
  return Launch(&BackwardKernel<T>, {dim3(blocks), dim3(kRowThreads)}, stream, backward);
}

MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, Backward, cudaStream_t)

}  // namespace moe::embedding
