// The CUDA path of permute.h. Internal: plain C++ between permute.cc (Abseil) and permute_cuda.cu
// (nvcc, no Abseil).
#ifndef MOE_KERNELS_PERMUTE_PERMUTE_CUDA_H_
#define MOE_KERNELS_PERMUTE_PERMUTE_CUDA_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::permute {

// Every gather of permute.h as one problem, in device memory: out[i] = scale[i] * in[view[i]][row[i]].
template <typename T>
struct CudaGather {
  MatrixView<const T> in;                      // [T, H], unless `views` is there
  const MatrixView<const T>* views = nullptr;  // or views of one [*, H] per rank
  const int32_t* source_view = nullptr;        // [N], with `views`
  const int32_t* source_row;                   // [N], -1 = a zero row
  const float* scale = nullptr;                // [N], or nullptr: rows are copied
  MatrixView<T> out;                           // [N, H]
};

// Enqueues on `stream` and returns; the error of the launch alone. The bits of permute.cc.
// Rows that begin at multiples of 16 bytes are moved 16 bytes at a time, whatever their length;
// others element by element. Instantiated for float and BFloat16.
template <typename T>
cudaError_t Run(const CudaGather<T>& gather, cudaStream_t stream);

}  // namespace moe::permute

#endif  // MOE_KERNELS_PERMUTE_PERMUTE_CUDA_H_
