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
    for (T& value : values.at) value = T(factor * static_cast<float>(value));
    return values;
  };
  ForColumns<T, kReadAhead>(cols, vector_columns, lane, kWarpLanes, read_scaled, StoreTo(to));
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
MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, GatherOfMany, cudaStream_t)

}  // namespace moe::permute
