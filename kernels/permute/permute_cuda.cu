#include <algorithm>

#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/permute/permute_op.h"

namespace moe::permute {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// The lanes of a warp write a row of zeros together.
template <typename T>
__device__ void WriteZeros(int64_t cols, int lane, T* to) {
  ForColumns<T>(cols, VectorColumns<T>(cols, to), lane, kWarpLanes, [&](int64_t c, auto w) {
    Elements<T, w.value> zero;
    for (T& value : zero.at) value = T(0.0f);
    Store(zero, to + c);
  });
}

// The lanes of a warp copy a row to row i together, scaled by scale[i] if there are scales.
template <typename T>
__device__ void CopyRow(const T* from, const float* scale, int64_t i, int64_t cols, int lane,
                        T* to) {
  const int64_t vector_columns = VectorColumns<T>(cols, from, to);
  const auto read = [&](int64_t c, auto w) {
    return Load<w.value>(from + c);
  };
  if (scale == nullptr) {
    ForColumns<T, kReadAhead>(cols, vector_columns, lane, kWarpLanes, read, StoreTo(to));
    return;
  }
  const auto read_scaled = [&, factor = scale[i]](int64_t c, auto w) {
    auto values = read(c, w);
    for (T& value : values.at) value = RoundTo<T>(factor * ToFloat(value));
    return values;
  };
  ForColumns<T, kReadAhead>(cols, vector_columns, lane, kWarpLanes, read_scaled, StoreTo(to));
}

// Warps of TokenGatherKernel that own output rows.
__host__ __device__ inline int64_t WarpsForZeros(int64_t rows) {
  return (rows + kWarpLanes - 1) / kWarpLanes;
}

// A warp owns an output row: one source index a row, coalesced 16-byte loads and stores along it.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) GatherKernel(Gather<T> gather) {
  const int64_t cols = gather.out.cols();
  ForRows<kWarpLanes>(gather.out.rows(), [&](int64_t i, int lane) {
    T* const to = gather.out.row(i);
    const int32_t row = gather.source_row[i];
    if (row < 0) {
      WriteZeros(cols, lane, to);
      return;
    }
    CopyRow(gather.in.row(row), gather.scale, i, cols, lane, to);
  });
}

// The same of row i itself.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) CopyKernel(Copy<T> copy) {
  const int64_t cols = copy.out.cols();
  ForRows<kWarpLanes>(copy.out.rows(), [&](int64_t i, int lane) {
    CopyRow(copy.in.row(i), nullptr, i, cols, lane, copy.out.row(i));
  });
}

// A warp owns a token: it reads each vector once and stores it in the rows of the token's slots, of
// which it owns every `sharers`-th where warps share a token. Beyond the tokens, a warp owns 32
// output rows, of which it zeroes those without a token.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    TokenGatherKernel(TokenGather<T> g, uint32_t sharers) {
  const int64_t cols = g.out.cols(), owners = g.in.rows() * sharers, rows = g.out.rows();
  const bool aligned = RowsAlignedTo(g.in, kVectorBytes) && RowsAlignedTo(g.out, kVectorBytes);
  const int64_t vector_columns = aligned ? cols - cols % kVectorWidth<T> : 0;
  ForRows<kWarpLanes>(owners + WarpsForZeros(rows), [&](int64_t item, int lane) {
    if (item >= owners) {
      const int64_t first = (item - owners) * kWarpLanes, mine = first + lane;
      uint32_t empty = __ballot_sync(kAllLanes, mine < rows && g.token_of_row[mine] < 0);
      for (; empty != 0; empty &= empty - 1) {
        WriteZeros(cols, lane, g.out.row(first + __ffs(static_cast<int>(empty)) - 1));
      }
      return;
    }
    const auto owner = static_cast<uint32_t>(item);  // at most 2^31: 64 bits divide slowly
    const uint32_t token = owner / sharers;
    const T* const from = g.in.row(token);
    const int64_t begin = g.slot_offset[token] + owner % sharers, end = g.slot_offset[token + 1];
    if (begin >= end) return;
    const auto read = [&](int64_t c, auto w) {
      return Load<w.value>(from + c);
    };
    const auto write = [&](int64_t c, auto, const auto& values) {
      MOE_NO_UNROLL
      for (int64_t s = begin; s < end; s += sharers) {
        const int64_t row = g.RowOf(s);
        if (!g.Has(row)) continue;
        auto scaled = values;
        if (g.weight != nullptr) {
          for (T& value : scaled.at) value = RoundTo<T>(g.weight[s] * ToFloat(value));
        }
        Store(scaled, g.out.row(row) + c);
      }
    };
    ForColumns<T, kReadAhead>(cols, vector_columns, lane, kWarpLanes, read, write);
  });
}

// Views [first, first + kViewsPerLaunch) of GatherOfMany's, as far as there are.
template <typename T>
struct ViewRange {
  MatrixView<const T> views[kViewsPerLaunch];
  int64_t first;
};

// A warp owns an output row whose view is in `range`. The first launch also writes zero rows.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    GatherOfManyKernel(GatherOfMany<T> gather, ViewRange<T> range) {
  const int64_t cols = gather.out.cols();
  ForRows<kWarpLanes>(gather.out.rows(), [&](int64_t i, int lane) {
    T* const to = gather.out.row(i);
    const int32_t row = gather.source_row[i];
    if (row < 0) {
      if (range.first == 0) WriteZeros(cols, lane, to);
      return;
    }
    const int64_t view = gather.source_view[i] - range.first;
    if (view < 0 || view >= kViewsPerLaunch) return;
    CopyRow(range.views[view].row(row), gather.scale, i, cols, lane, to);
  });
}

}  // namespace

template <typename T>
cudaError_t Run(const Gather<T>& gather, cudaStream_t stream) {
  if (gather.out.rows() == 0 || gather.out.cols() == 0) return cudaSuccess;
  return Launch(&GatherKernel<T>, RowShape<kWarpLanes>(gather.out.rows()), stream, gather);
}

template <typename T>
cudaError_t Run(const Copy<T>& copy, cudaStream_t stream) {
  if (copy.out.rows() == 0 || copy.out.cols() == 0) return cudaSuccess;
  return Launch(&CopyKernel<T>, RowShape<kWarpLanes>(copy.out.rows()), stream, copy);
}

template <typename T>
cudaError_t Run(const TokenGather<T>& gather, cudaStream_t stream) {
  if (gather.out.rows() == 0 || gather.out.cols() == 0) return cudaSuccess;
  // Few tokens are too few warps, and are in a cache.
  constexpr int64_t kEnoughWarps = 4096, kMostSharers = 8;
  const int64_t tokens = std::max<int64_t>(1, gather.in.rows());
  const int64_t sharers = std::clamp<int64_t>(kEnoughWarps / tokens, 1, kMostSharers);
  const int64_t warps = gather.in.rows() * sharers + WarpsForZeros(gather.out.rows());
  return Launch(&TokenGatherKernel<T>, RowShape<kWarpLanes>(warps), stream, gather,
                static_cast<uint32_t>(sharers));
}

template <typename T>
cudaError_t Run(const GatherOfMany<T>& gather, cudaStream_t stream) {
  if (gather.out.rows() == 0 || gather.out.cols() == 0) return cudaSuccess;
  const LaunchShape shape = RowShape<kWarpLanes>(gather.out.rows());
  for (int64_t first = 0; first < gather.view_count; first += kViewsPerLaunch) {
    ViewRange<T> range = {.first = first};
    const int64_t count = std::min<int64_t>(kViewsPerLaunch, gather.view_count - first);
    std::copy_n(gather.views + first, count, range.views);
    const cudaError_t error = Launch(&GatherOfManyKernel<T>, shape, stream, gather, range);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, Gather, cudaStream_t)
MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, Copy, cudaStream_t)
MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, TokenGather, cudaStream_t)
MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, GatherOfMany, cudaStream_t)

}  // namespace moe::permute
