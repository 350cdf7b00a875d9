// A slice of a parameter that AdamW updates. Plain C++: .cu files include it.
#ifndef MOE_KERNELS_ADAMW_ADAMW_SLICE_H_
#define MOE_KERNELS_ADAMW_ADAMW_SLICE_H_

#include <cstdint>

namespace moe {

// Some elements of a parameter: their gradients are elements [first, first + size) of the sum.
struct AdamWSlice {
  int64_t first, size;
  float* weight;  // [size], as m and v
  float* m;
  float* v;
  float weight_decay;
};

}  // namespace moe

#endif  // MOE_KERNELS_ADAMW_ADAMW_SLICE_H_
