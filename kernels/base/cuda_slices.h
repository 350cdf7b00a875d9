// Many arrays in one launch: a table of slices, each some of the elements of all.
#ifndef MOE_KERNELS_BASE_CUDA_SLICES_H_
#define MOE_KERNELS_BASE_CUDA_SLICES_H_

#include <cstdint>

#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"

namespace moe::cuda {

// Elements of a block: its search of the table, a dozen reads one after the other, is short beside
// what it reads and writes of them.
constexpr int64_t kSliceElements = int64_t{1} << 13;

// Slice has first and size: elements [first, first + size), ascending. Block i owns the elements
// from origin + i * kSliceElements on: f(slice, begin, n) for its part of each slice, n elements
// from the slice's element `begin` on. All threads of the block call f.
template <class Slice, typename Function>
__device__ inline void ForSlices(const Slice* slices, int64_t count, int64_t origin, Function f) {
  const int64_t begin = origin + int64_t{blockIdx.x} * kSliceElements, end = begin + kSliceElements;
  int64_t at = 0;  // the last slice from no later than `begin`, or the first
  for (int64_t after = count; after - at > 1;) {
    const int64_t middle = (at + after) / 2;
    (slices[middle].first <= begin ? at : after) = middle;
  }
  for (; at < count; ++at) {
    const Slice slice = slices[at];
    if (slice.first >= end) return;
    const int64_t from = slice.first < begin ? begin - slice.first : 0;
    const int64_t to = Min(slice.size, end - slice.first);
    if (from < to) f(slice, from, to - from);
  }
}

// The shape for ForSlices of elements [origin, end), at least one.
inline LaunchShape SliceShape(int64_t origin, int64_t end) {
  const int64_t blocks = (end - origin + kSliceElements - 1) / kSliceElements;
  return {dim3(static_cast<unsigned>(blocks)), dim3(kRowThreads)};
}

}  // namespace moe::cuda

#endif  // MOE_KERNELS_BASE_CUDA_SLICES_H_
