// The CUDA path of embedding.h. Internal: plain C++ between embedding.cc (Abseil) and
// embedding_cuda.cu (nvcc, no Abseil). The forward pass is permute::CudaGather of the table by ids.
#ifndef MOE_KERNELS_EMBEDDING_EMBEDDING_CUDA_H_
#define MOE_KERNELS_EMBEDDING_EMBEDDING_CUDA_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::embedding {

// The arguments of EmbeddingBackward, in device memory.
template <typename T>
struct CudaBackward {
  const int32_t* ids;         // [T]; the row of an id outside [0, V) is left out
  MatrixView<const T> dx;     // [T, H]
  MatrixView<float> d_table;  // [V, H]
  Write write;
};

// Enqueues on `stream` and returns; the error of the launch alone. The bits of embedding.cc: one
// thread adds an element's tokens, in ascending order. Needs no scratch: every block reads all ids
// to find those of its rows. Instantiated for float, BFloat16 and Float16.
template <typename T>
cudaError_t Run(const CudaBackward<T>& backward, cudaStream_t stream);

}  // namespace moe::embedding

#endif  // MOE_KERNELS_EMBEDDING_EMBEDDING_CUDA_H_
