// The instructions of tensor cores and of the copies that feed them (sm_80 and later), each in a
// function of its own. PTX ISA, "cp.async", "ldmatrix", "mma.m16n8k16". All lanes of a warp call
// LoadMatrices* and MultiplyAdd together.
#ifndef MOE_KERNELS_BASE_CUDA_TENSOR_H_
#define MOE_KERNELS_BASE_CUDA_TENSOR_H_

#include <cstdint>
#include <type_traits>

#include "kernels/base/cuda_kernel.h"
#include "kernels/base/dtype.h"

#if !defined(__CUDACC__)
#include <cusim/tensor.h>
#endif

namespace moe::cuda {

// 16 bytes: a row of an 8 x 8 matrix of 16-bit elements, and the unit of an asynchronous copy.
struct alignas(16) Chunk {
  uint32_t word[4];
};

// The first `valid` (0 to 8) of neighbouring 16-bit elements, one by one, then zeros.
template <typename T>
__device__ inline Chunk SingleLoads(const T* from, int valid) {
  Chunk chunk = {};
  MOE_UNROLL
  for (int i = 0; i < 8; ++i) {
    if (i < valid) chunk.word[i / 2] |= static_cast<uint32_t>(from[i].bits) << i % 2 * 16;
  }
  return chunk;
}

// Two float32 rounded to T (to nearest, ties to even), the lower half first.
template <typename T>
__device__ inline uint32_t RoundedPair(float low, float high) {
#if defined(__CUDACC__)
  uint32_t pair;
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    static_assert(std::is_same_v<T, Float16>);
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  return T(low).bits | static_cast<uint32_t>(T(high).bits) << 16;
#endif
}

#if defined(__CUDACC__)
__device__ inline uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
#endif

// The asynchronous copies of one thread from global to shared memory. Other threads see a copy's
// result after the thread's Wait() and a barrier.
class AsyncCopies {
 public:
  // Copies the first `source_bytes` (0 to 16) of *global, then zeros; nothing beyond them is read.
  // Both addresses must be multiples of 16. The L2 cache fetches the whole line, which holds the
  // neighbours.
  __device__ void Copy(Chunk* shared, const void* global, int source_bytes) {
#if defined(__CUDACC__)
    asm volatile(
        "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(SharedAddress(shared)),
        "l"(global), "r"(source_bytes)
        : "memory");
#else
    copies_.Copy16(shared, global, source_bytes);
#endif
  }

  // Closes a group, which may be empty: the copies since the last Commit().
  __device__ void Commit() {
#if defined(__CUDACC__)
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    copies_.Commit();
#endif
  }

  // Waits until all but the last kPending groups have arrived.
  template <int kPending>
  __device__ void Wait() {
#if defined(__CUDACC__)
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#else
    copies_.Wait(kPending);
#endif
  }

#if !defined(__CUDACC__)
 private:
  cusim::AsyncCopies copies_;
#endif
};

// Loads four 8 x 8 matrices of 16-bit elements: lane l passes the address of row l % 8 of matrix l
// / 8. With g = lane / 4 and t = lane % 4, out[j] is elements 2t and 2t + 1 of row g of matrix j.
__device__ inline void LoadMatrices(const Chunk* row, uint32_t (&out)[4]) {
#if defined(__CUDACC__)
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(SharedAddress(row))
               : "memory");
#else
  cusim::LoadMatrices(row, out);
#endif
}

// LoadMatrices of the transposed matrices: out[j] is elements 2t and 2t + 1 of column g.
__device__ inline void LoadMatricesTransposed(const Chunk* row, uint32_t (&out)[4]) {
#if defined(__CUDACC__)
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(SharedAddress(row))
               : "memory");
#else
  cusim::LoadMatricesTransposed(row, out);
#endif
}

// Transposes an 8 x 8 matrix of 16-bit elements: this lane passes elements 2t and 2t + 1 of row g
// and receives those of column g.
__device__ inline uint32_t Transposed(uint32_t pair) {
#if defined(__CUDACC__)
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
#else
  return cusim::TransposedMatrix(pair);
#endif
}

// d (16 x 8, float32) += a (16 x 16, T) * b (16 x 8, T); T: BFloat16 or Float16. A register of a or
// b holds two elements, the lower half first:
//   a[0], a[1]  rows g and g + 8, columns 2t, 2t + 1     a[2], a[3]  the same, columns + 8
//   b[0]        rows 2t, 2t + 1 of column g              b[1]        rows + 8
//   d[0], d[1]  row g, columns 2t, 2t + 1                d[2], d[3]  row g + 8
// Products are exact. The hardware determines in which order the 17 terms are added and how sums
// are rounded: the same for every call.
template <typename T>
__device__ inline void MultiplyAdd(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(__CUDACC__)
#define MOE_MMA(type)                                                            \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type            \
               ".f32 "                                                           \
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if constexpr (std::is_same_v<T, BFloat16>) {
    MOE_MMA("bf16");
  } else {
    static_assert(std::is_same_v<T, Float16>);
    MOE_MMA("f16");
  }
#undef MOE_MMA
#else
  cusim::MmaM16N8K16<T>(d, a, b);
#endif
}

}  // namespace moe::cuda

#endif  // MOE_KERNELS_BASE_CUDA_TENSOR_H_
