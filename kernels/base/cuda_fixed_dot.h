// Dot products on a GPU with the bits of kernels/base/fixed_dot.h.
#ifndef MOE_KERNELS_BASE_CUDA_FIXED_DOT_H_
#define MOE_KERNELS_BASE_CUDA_FIXED_DOT_H_

#include <cstdint>

#include "kernels/base/cuda_kernel.h"

namespace moe::cuda {

// The partial sums of fixed_dot.h, one a lane: half a warp shares a row.
constexpr int kPartials = 16;

// The lanes of the half warp that this thread belongs to.
__device__ inline uint32_t HalfWarpMask() {
  return threadIdx.x % kWarpLanes < kPartials ? 0x0000ffffu : 0xffff0000u;
}

// Folds the partial sums of the lanes pairwise (8 + 8, 4 + 4, 2 + 2, 1 + 1); every lane gets the
// sum. Addition commutes, so that both lanes of a pair hold the same bits. mask: of the lanes that
// call this; a constant saves nvcc's check that they are together.
template <typename Sum>
__device__ inline Sum FoldPartials(Sum partial, uint32_t mask = HalfWarpMask()) {
  for (int width = kPartials / 2; width >= 1; width /= 2) {
    partial += __shfl_xor_sync(mask, partial, width);
  }
  return partial;
}

// FixedDot of n terms: term(i, sum) returns sum with term i added. All 16 lanes call it.
template <typename Sum, typename Term>
__device__ inline Sum FixedSumOf(int64_t n, int lane, Term term) {
  Sum partial = 0;
  for (int64_t i = lane; i < n; i += kPartials) partial = term(i, partial);
  return FoldPartials(partial);
}

}  // namespace moe::cuda

#endif  // MOE_KERNELS_BASE_CUDA_FIXED_DOT_H_
