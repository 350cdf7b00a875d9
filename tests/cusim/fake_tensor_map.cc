// The driver's cuTensorMapEncodeTiled, found as on a GPU: through the runtime's entry points.
#include <cstdint>
#include <cstring>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "tests/cusim/fake_streams.h"
#include "tests/cusim/tensor_map.h"

namespace {

bool IsMultiple(uint64_t n, uint64_t of) {
  return n % of == 0;
}

// Refuses what the driver refuses, and besides what no kernel here needs: element types of other
// than 16 bits, other than three dimensions, steps, boxes less wide than their swizzle.
CUresult CUDAAPI EncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                             void* data, const cuuint64_t* size, const cuuint64_t* stride,
                             const cuuint32_t* box, const cuuint32_t* step,
                             CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  constexpr uint64_t kMostElements = uint64_t{1} << 32, kMostStride = uint64_t{1} << 40;
  constexpr uint32_t kMostBox = 256;
  if (rank != 3 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE ||
      (type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 && type != CU_TENSOR_MAP_DATA_TYPE_FLOAT16)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!IsMultiple(reinterpret_cast<uintptr_t>(map), 64) || data == nullptr ||
      !IsMultiple(reinterpret_cast<uintptr_t>(data), 16)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  cusim::TensorMap made = {.magic = cusim::TensorMap::kMagic,
                           .data = static_cast<const uint16_t*>(data),
                           .size = {},
                           .stride = {2, stride[0], stride[1]},
                           .box = {},
                           .swizzle_bytes = 0};
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_NONE:
      break;
    case CU_TENSOR_MAP_SWIZZLE_32B:
      made.swizzle_bytes = 32;
      break;
    case CU_TENSOR_MAP_SWIZZLE_64B:
      made.swizzle_bytes = 64;
      break;
    case CU_TENSOR_MAP_SWIZZLE_128B:
      made.swizzle_bytes = 128;
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  for (int i = 0; i < 3; ++i) {
    if (size[i] == 0 || size[i] > kMostElements || box[i] == 0 || box[i] > kMostBox ||
        step[i] != 1) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (i > 0 && (!IsMultiple(made.stride[i], 16) || made.stride[i] >= kMostStride)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    made.size[i] = size[i];
    made.box[i] = box[i];
  }
  const uint32_t row_bytes = box[0] * 2;
  if (!IsMultiple(row_bytes, 16) || (made.swizzle_bytes != 0 && row_bytes != made.swizzle_bytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *map = {};
  std::memcpy(map, &made, sizeof(made));
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" cudaError_t CUDARTAPI cudaGetDriverEntryPointByVersion(
    const char* symbol, void** function, unsigned, unsigned long long,  // NOLINT: CUDA's types
    cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (cusim::TheMachine().driver != cudaSuccess) return cusim::TheMachine().driver;
  const bool found = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  if (found) *function = reinterpret_cast<void*>(&EncodeTiled);
  *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
