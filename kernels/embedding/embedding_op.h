// Arguments of both paths of embedding.h, in the memory of one device. Internal. Plain C++: .cu
// files include it.
#ifndef MOE_KERNELS_EMBEDDING_EMBEDDING_OP_H_
#define MOE_KERNELS_EMBEDDING_EMBEDDING_OP_H_

#include <cstdint>

#include "kernels/base/cub_scratch.h"
#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::embedding {

// EmbeddingBackward.
template <typename T>
struct Backward {
  const int32_t* ids;         // [T]
  MatrixView<const T> dx;     // [T, H]
  MatrixView<float> d_table;  // [V, H]
  Write write;
  int32_t* scratch = nullptr;  // [ScratchElements(T)], on CUDA
};

// Ids and tokens, unsorted and sorted, and what sorting needs.
inline int64_t ScratchElements(int64_t tokens) {
  return 4 * tokens + SortScratchBytes(tokens) / static_cast<int64_t>(sizeof(int32_t));
}

// Enqueues on `stream` and returns the launch error alone. The same bits as the CPU: a stable sort
// of the tokens by their ids, then one thread adds an element's tokens, in ascending order. Tokens
// with an id outside [0, V) are left out. cudaErrorInvalidValue for 2^31 tokens or rows.
template <typename T>
cudaError_t Run(const Backward<T>& backward, cudaStream_t stream);

}  // namespace moe::embedding

#endif  // MOE_KERNELS_EMBEDDING_EMBEDDING_OP_H_
