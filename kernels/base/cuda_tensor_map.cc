#include "kernels/base/cuda_tensor_map.h"

#include <atomic>

#include <cuda_runtime_api.h>

namespace moe::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Looked up at run time: programs do not link the driver, so that they start without one.
cudaError_t Find(Encode& encode) {
  constexpr unsigned kSince = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             kSince, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  encode = reinterpret_cast<Encode>(function);
  return cudaSuccess;
}

}  // namespace

cudaError_t EncodeTensorMap(const TensorShape& shape, TensorMap& map) {
  static std::atomic<Encode> known = nullptr;  // from the driver, the same for all devices
  Encode encode = known;
  if (encode == nullptr) {
    const cudaError_t error = Find(encode);
    if (error != cudaSuccess) return error;
    known = encode;
  }
  const cuuint64_t size[3] = {static_cast<cuuint64_t>(shape.size[0]),
                              static_cast<cuuint64_t>(shape.size[1]),
                              static_cast<cuuint64_t>(shape.size[2])};
  const cuuint64_t stride[2] = {static_cast<cuuint64_t>(shape.stride_bytes[0]),
                                static_cast<cuuint64_t>(shape.stride_bytes[1])};
  const cuuint32_t step[3] = {1, 1, 1};
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(shape.data), size, stride,
             shape.box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace moe::cuda
