// Flat arrays: how a grid walks them, 16 bytes at a time.
#ifndef MOE_KERNELS_BASE_CUDA_ELEMENTS_H_
#define MOE_KERNELS_BASE_CUDA_ELEMENTS_H_

#include <cstdint>

#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"

namespace moe::cuda {

// kWidth neighbouring elements, in accesses of 16 bytes where they are more than that.
template <int kWidth, typename T>
__device__ inline Elements<T, kWidth> LoadElements(const T* p) {
  constexpr int kPiece = Min(kWidth, kVectorWidth<T>);
  Elements<T, kWidth> values;
  for (int i = 0; i < kWidth; i += kPiece) {
    const auto piece = Load<kPiece>(p + i);
    for (int j = 0; j < kPiece; ++j) values.at[i + j] = piece.at[j];
  }
  return values;
}

template <int kWidth, typename T>
__device__ inline void StoreElements(const Elements<T, kWidth>& values, T* p) {
  constexpr int kPiece = Min(kWidth, kVectorWidth<T>);
  for (int i = 0; i < kWidth; i += kPiece) {
    Elements<T, kPiece> piece;
    for (int j = 0; j < kPiece; ++j) piece.at[j] = values.at[i + j];
    Store(piece, p + i);
  }
}

// A grid-stride loop over n elements of each of `arrays`: f(i, Width<kVectorWidth<T>>) if all of
// them begin at a multiple of 16 bytes (nullptr does), f(i, Width<1>) for what is left.
template <typename T, typename Function, typename... Arrays>
__device__ inline void ForElements(int64_t n, Function f, const Arrays*... arrays) {
  const auto thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const auto threads = static_cast<int>(gridDim.x * blockDim.x);
  ForColumns<T>(n, VectorColumns<T>(n, arrays...), thread, threads, f);
}

// The shape for ForElements<T>.
template <typename T>
LaunchShape ElementShape(int64_t n) {
  return {dim3(GridBlocks(n, int64_t{kRowThreads} * kVectorWidth<T>)), dim3(kRowThreads)};
}

}  // namespace moe::cuda

#endif  // MOE_KERNELS_BASE_CUDA_ELEMENTS_H_
