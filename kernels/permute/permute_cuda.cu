#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/permute/permute_cuda.h"

namespace moe::permute {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// A warp owns an output row: one source index a row, coalesced 16-byte loads and stores along it.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) GatherKernel(CudaGather<T> gather) {
  const int64_t cols = gather.out.cols();
  ForRows<kWarpLanes>(gather.out.rows(), [&](int64_t i, int lane) {
    T* const to = gather.out.row(i);
    const int32_t row = gather.source_row[i];
    if (row < 0) {
      ForColumns<T>(cols, VectorColumns<T>(cols, to), lane, kWarpLanes, [&](int64_t c, auto w) {
        Elements<T, w.value> zero;
        for (T& value : zero.at) value = T(0.0f);
        Store(zero, to + c);
      });
      return;
    }
    const T* const from =
        gather.views == nullptr ? gather.in.row(row) : gather.views[gather.source_view[i]].row(row);
    const float scale = gather.scale == nullptr ? 1.0f : gather.scale[i];
    ForColumns<T>(cols, VectorColumns<T>(cols, from, to), lane, kWarpLanes, [&](int64_t c, auto w) {
      auto values = Load<w.value>(from + c);
      if (gather.scale != nullptr) {
        for (T& value : values.at) value = T(scale * static_cast<float>(value));
      }
      Store(values, to + c);
    });
  });
}

}  // namespace

template <typename T>
cudaError_t Run(const CudaGather<T>& gather, cudaStream_t stream) {
  if (gather.out.rows() == 0 || gather.out.cols() == 0) return cudaSuccess;
  return Launch(&GatherKernel<T>, RowShape<kWarpLanes>(gather.out.rows()), stream, gather);
}

template cudaError_t Run(const CudaGather<float>&, cudaStream_t);
template cudaError_t Run(const CudaGather<BFloat16>&, cudaStream_t);

}  // namespace moe::permute
