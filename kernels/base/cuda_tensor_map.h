// Descriptions of tensors whose tiles Hopper's copy engine reads. Plain C++, for launchers.
#ifndef MOE_KERNELS_BASE_CUDA_TENSOR_MAP_H_
#define MOE_KERNELS_BASE_CUDA_TENSOR_MAP_H_

#include <cstdint>

#include <cuda.h>

#include "kernels/base/cuda_types.h"

namespace moe::cuda {

// Passed to kernels as `const __grid_constant__`, by itself or in a struct.
using TensorMap = CUtensorMap;

// A row of a tile in shared memory. The 16-byte chunks of eight rows are permuted (swizzled), so
// that those of a column fall into different banks.
constexpr int kTileRowBytes = 128;

// A tensor of 16-bit elements, dimension 0 contiguous. Sizes in elements, strides in bytes.
struct TensorShape {
  const void* data = nullptr;    // a multiple of 16
  int64_t size[3] = {};          // at least 1
  int64_t stride_bytes[2] = {};  // between elements of dimensions 1 and of 2: multiples of 16
  uint32_t box[3] = {};          // size of a tile, at most 256 each; dimension 0: kTileRowBytes
};

// The runtime's error where there is no driver; cudaErrorNotSupported where the driver does not
// support tensor maps, cudaErrorInvalidValue where it refuses the shape. Copies move bits, so a map
// of bfloat16 also serves float16.
cudaError_t EncodeTensorMap(const TensorShape& shape, TensorMap& map);

}  // namespace moe::cuda

#endif  // MOE_KERNELS_BASE_CUDA_TENSOR_MAP_H_
