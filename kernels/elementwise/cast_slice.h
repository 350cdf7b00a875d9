// One of several arrays that are cast together. Plain C++: .cu files include it.
#ifndef MOE_KERNELS_ELEMENTWISE_CAST_SLICE_H_
#define MOE_KERNELS_ELEMENTWISE_CAST_SLICE_H_

#include <cstdint>

namespace moe {

// Elements [first, first + size), numbered across all arrays.
template <typename To>
struct CastSlice {
  int64_t first, size;
  const float* in;  // [size]
  To* out;          // [size]
};

}  // namespace moe

#endif  // MOE_KERNELS_ELEMENTWISE_CAST_SLICE_H_
