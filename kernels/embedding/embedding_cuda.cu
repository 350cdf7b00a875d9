#include <bit>
#include <limits>

#include "kernels/base/cuda_cub.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/embedding/embedding_op.h"

namespace moe::embedding {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

constexpr int kWarps = kRowThreads / kWarpLanes;
constexpr int kBlockColumns = 512;  // 4 vectors of 4 a lane; long runs of one id get more warps

// Arrays of T elements: ids and their tokens, in the tokens' order, and sorted by id.
struct Tokens {
  uint32_t *id, *sorted_id;
  int32_t *token, *sorted_token;
};

// A thread owns a token. Ids that the table does not have become the one behind its last.
__global__ void __launch_bounds__(kRowThreads)
    ListTokensKernel(const int32_t* ids, int count, int64_t table_rows, Tokens to) {
  const int step = static_cast<int>(gridDim.x) * kRowThreads;
  for (int t = static_cast<int>(blockIdx.x) * kRowThreads + static_cast<int>(threadIdx.x);
       t < count; t += step) {
    const bool valid = ids[t] >= 0 && ids[t] < table_rows;
    to.id[t] = static_cast<uint32_t>(valid ? ids[t] : table_rows);
    to.token[t] = t;
  }
}

// A warp owns a sorted token, and does nothing unless it is the first of its id: then it adds the
// rows of all of them, in ascending order, 32 at a time, to kBlockColumns columns of the table's
// row. A lane owns some of the columns.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    AddRunsKernel(Backward<T> b, Tokens tokens) {
  const int count = static_cast<int>(b.dx.rows());
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int first = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (first >= count) return;
  const uint32_t id = tokens.sorted_id[first];
  if (id >= b.d_table.rows() || (first > 0 && tokens.sorted_id[first - 1] == id)) return;
  const int64_t column = int64_t{blockIdx.y} * kBlockColumns;
  const int64_t columns = Min<int64_t>(kBlockColumns, b.d_table.cols() - column);
  const T* const dx = b.dx.data() + column;
  float* const to = b.d_table.row(id) + column;
  const int64_t vector_columns =
      VectorColumns<float>(columns, dx, dx + b.dx.stride(), to, to + b.d_table.stride());
  for (int from = first; from < count; from += kWarpLanes) {
    const bool mine = from + lane < count && tokens.sorted_id[from + lane] == id;
    const int rows = __popc(__ballot_sync(kAllLanes, mine));
    if (rows == 0) return;
    ForColumns<float>(columns, vector_columns, lane, kWarpLanes, [&](int64_t c, auto w) {
      auto sums = Load<w.value>(to + c);
      for (int i = 0; i < rows; ++i) {
        const auto values = Load<w.value>(dx + tokens.sorted_token[from + i] * b.dx.stride() + c);
        for (int n = 0; n < w.value; ++n) sums.at[n] += static_cast<float>(values.at[n]);
      }
      Store(sums, to + c);
    });
  }
}

// Zeroes the table, between whose rows other memory may lie.
cudaError_t Zero(MatrixView<float> table, cudaStream_t stream) {
  const auto row_bytes = static_cast<size_t>(table.cols()) * sizeof(float);
  const auto rows = static_cast<size_t>(table.rows());
  if (table.stride() == table.cols()) {
    return cudaMemsetAsync(table.data(), 0, rows * row_bytes, stream);
  }
  return cudaMemset2DAsync(table.data(), static_cast<size_t>(table.stride()) * sizeof(float), 0,
                           row_bytes, rows, stream);
}

}  // namespace

template <typename T>
cudaError_t Run(const Backward<T>& b, cudaStream_t stream) {
  const int64_t rows = b.d_table.rows(), cols = b.d_table.cols();
  if (rows == 0 || cols == 0) return cudaSuccess;
  if (b.write == Write::kOverwrite) {
    if (const cudaError_t error = Zero(b.d_table, stream); error != cudaSuccess) return error;
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (b.dx.rows() == 0) return cudaSuccess;
  if (b.dx.rows() > kMost || rows >= kMost) return cudaErrorInvalidValue;
  const int count = static_cast<int>(b.dx.rows());
  int32_t* const scratch = b.scratch;
  auto* const ids = reinterpret_cast<uint32_t*>(scratch);
  const Tokens tokens = {ids, ids + count, scratch + 2 * int64_t{count},
                         scratch + 3 * int64_t{count}};
  cudaError_t error =
      Launch(&ListTokensKernel, {dim3(GridBlocks(count, kRowThreads)), dim3(kRowThreads)}, stream,
             b.ids, count, rows, tokens);
  if (error != cudaSuccess) return error;
  const auto bits = static_cast<int>(std::bit_width(static_cast<uint64_t>(rows)));
  error = SortPairs(tokens.id, tokens.token, count, bits, tokens.sorted_id, tokens.sorted_token,
                    scratch + 4 * int64_t{count}, stream);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>((int64_t{count} + kWarps - 1) / kWarps),
                  static_cast<unsigned>((cols + kBlockColumns - 1) / kBlockColumns));
  return Launch(&AddRunsKernel<T>, {grid, dim3(kRowThreads)}, stream, b, tokens);
}

MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, Backward, cudaStream_t)

}  // namespace moe::embedding
