// Accesses of 16 bytes to rows, and how a warp walks the columns of a row.
#ifndef MOE_KERNELS_BASE_CUDA_VECTOR_H_
#define MOE_KERNELS_BASE_CUDA_VECTOR_H_

#include <cstdint>

#include "kernels/base/cuda_kernel.h"
#include "kernels/base/dtype.h"

namespace moe::cuda {

constexpr int kVectorBytes = 16;

// Neighbouring elements of a row: kWidth * sizeof(T) bytes are one access.
template <typename T, int kWidth>
struct alignas(kWidth * sizeof(T)) Elements {
  T at[kWidth];
};

template <typename T>
constexpr int kVectorWidth = kVectorBytes / static_cast<int>(sizeof(T));

// `p` must be a multiple of the access: a GPU stops the kernel otherwise.
template <int kWidth, typename T>
__device__ inline Elements<T, kWidth> Load(const T* p) {
#if !defined(__CUDACC__)
  if (reinterpret_cast<uintptr_t>(p) % sizeof(Elements<T, kWidth>) != 0) {
    cusim::KernelFault("misaligned vector access", "Load", {__FILE__, __LINE__});
  }
#endif
  return *reinterpret_cast<const Elements<T, kWidth>*>(p);
}

template <int kWidth, typename T>
__device__ inline void Store(const Elements<T, kWidth>& values, T* p) {
#if !defined(__CUDACC__)
  if (reinterpret_cast<uintptr_t>(p) % sizeof(Elements<T, kWidth>) != 0) {
    cusim::KernelFault("misaligned vector access", "Store", {__FILE__, __LINE__});
  }
#endif
  *reinterpret_cast<Elements<T, kWidth>*>(p) = values;
}

// How many of a row's n columns whole vectors of T may cover: none unless each row begins at a
// multiple of 16 bytes.
template <typename T, typename... Rows>
__device__ inline int64_t VectorColumns(int64_t n, const Rows*... rows) {
  const uintptr_t together = (uintptr_t{0} | ... | reinterpret_cast<uintptr_t>(rows));
  return together % kVectorBytes == 0 ? n - n % kVectorWidth<T> : 0;
}

template <int kWidth>
struct Width {
  static constexpr int value = kWidth;
};

// The threads of a group that walks a row together, thread `lane` of `lanes`, call
// f(column, Width<kVectorWidth<T>>) for the vectors and f(column, Width<1>) for the columns left.
// Neighbouring lanes take neighbouring vectors.
template <typename T, typename Function>
__device__ inline void ForColumns(int64_t n, int64_t vector_columns, int lane, int lanes,
                                  Function f) {
  constexpr int kWidth = kVectorWidth<T>;
  for (int64_t c = int64_t{lane} * kWidth; c < vector_columns; c += int64_t{lanes} * kWidth) {
    f(c, Width<kWidth>());
  }
  for (int64_t c = vector_columns + lane; c < n; c += lanes) f(c, Width<1>());
}

// A grid-stride loop over rows, `kLanes` (a power of two, at most 32) neighbouring lanes a row:
// f(row, lane). The lanes of one row stay together, those of a warp may not.
template <int kLanes, typename Function>
__device__ inline void ForRows(int64_t rows, Function f) {
  static_assert(kLanes <= kWarpLanes && (kLanes & (kLanes - 1)) == 0);
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * blockDim.x / kLanes;
  for (int64_t row = thread / kLanes; row < rows; row += step) {
    f(row, static_cast<int>(thread % kLanes));
  }
}

// The shape for ForRows<kLanes>. Such kernels have __launch_bounds__(kRowThreads, kRowBlocks): 3
// blocks must fit a multiprocessor, which leaves a thread 80 registers. Without it ptxas aims at 64
// or 32 of its own accord and spills.
constexpr int kRowThreads = 256;
constexpr int kRowBlocks = 3;
template <int kLanes>
LaunchShape RowShape(int64_t rows) {
  return {dim3(GridBlocks(rows, kRowThreads / kLanes)), dim3(kRowThreads)};
}

// One thread a column, for sums that run down the rows in a fixed order. Small blocks: columns are
// few, and the more blocks there are the more of the GPU takes part.
constexpr int kColumnThreads = 64;
inline LaunchShape ColumnShape(int64_t columns) {
  return {dim3(static_cast<unsigned>((columns + kColumnThreads - 1) / kColumnThreads)),
          dim3(kColumnThreads)};
}

}  // namespace moe::cuda

#endif  // MOE_KERNELS_BASE_CUDA_VECTOR_H_
