// Floats as unsigned integers that compare alike, for reductions and selections of integers.
#ifndef MOE_KERNELS_BASE_CUDA_FLOAT_KEYS_H_
#define MOE_KERNELS_BASE_CUDA_FLOAT_KEYS_H_

#include <cstdint>

#include "kernels/base/cuda_kernel.h"

namespace moe::cuda {

// Unsigned integers in the order of the floats; -0 counts as +0, and NaN is below -infinity.
constexpr uint32_t kNoKey = 0;  // below all
constexpr uint32_t kNanKey = 1;
constexpr uint32_t kLowestKey = 0x007fffffu;  // the key of -infinity

// The bits of x + 0: -0 becomes +0, and a NaN what a GPU's arithmetic makes of it.
__device__ inline int32_t BitsPlusZero(float x) {
#if !defined(__CUDACC__)
  if (x != x) return INT32_MAX;
#endif
  return __builtin_bit_cast(int32_t, x + 0.0f);
}

__device__ inline uint32_t KeyOf(float x) {
  constexpr auto kNanBits = static_cast<int32_t>(~kNanKey);  // those of a negative NaN
  const int32_t bits = x != x ? kNanBits : BitsPlusZero(x);
  return static_cast<uint32_t>(bits ^ (bits >> 31 | INT32_MIN));
}

// The float of a key; -infinity for the keys of NaN and of no value.
__device__ inline float ValueOf(uint32_t key) {
  if (key < kLowestKey) key = kLowestKey;
  return __builtin_bit_cast(float, key ^ (key >> 31 != 0 ? 0x80000000u : 0xffffffffu));
}

}  // namespace moe::cuda

#endif  // MOE_KERNELS_BASE_CUDA_FLOAT_KEYS_H_
