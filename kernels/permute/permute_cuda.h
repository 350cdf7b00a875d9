// The CUDA path of permute.h. Internal: plain C++ between permute.cc (Abseil) and permute_cuda.cu
// (nvcc, no Abseil).
#ifndef MOE_KERNELS_PERMUTE_PERMUTE_CUDA_H_
#define MOE_KERNELS_PERMUTE_PERMUTE_CUDA_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::permute {

// GatherRows and GatherScaledRows, in device memory: out[i] = scale[i] * in[row[i]].
template <typename T>
struct CudaGather {
  MatrixView<const T> in;        // [T, H]
  const int32_t* source_row;     // [N], -1 = a zero row
  const float* scale = nullptr;  // [N], or nullptr: rows are copied
  MatrixView<T> out;             // [N, H]
};

// GatherRowsOfMany: out[i] = scale[i] * views[view[i]][row[i]]. All in device memory but the array
// of views, which is the host's and read before Run returns.
template <typename T>
struct CudaGatherOfMany {
  const MatrixView<const T>* views;  // one [*, H] per rank
  int64_t view_count;
  const int32_t* source_view;    // [N]
  const int32_t* source_row;     // [N], -1 = a zero row
  const float* scale = nullptr;  // [N], or nullptr: rows are copied
  MatrixView<T> out;             // [N, H]
};

// Views that travel with one launch: 2 of its 4 KiB of arguments.
constexpr int kViewsPerLaunch = 64;

// Enqueue on `stream` and return; the error of the launches alone. The bits of permute.cc.
// Rows that begin at multiples of 16 bytes are moved 16 bytes at a time, whatever their length;
// others element by element. Of many views each kViewsPerLaunch take a launch of their own, which
// leaves the rows of others alone: no memory and no copy for the table of views.
// Instantiated for float, BFloat16 and Float16.
template <typename T>
cudaError_t Run(const CudaGather<T>& gather, cudaStream_t stream);
template <typename T>
cudaError_t Run(const CudaGatherOfMany<T>& gather, cudaStream_t stream);

}  // namespace moe::permute

#endif  // MOE_KERNELS_PERMUTE_PERMUTE_CUDA_H_
