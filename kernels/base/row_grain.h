// How many rows one task of a loop over rows takes.
#ifndef MOE_KERNELS_BASE_ROW_GRAIN_H_
#define MOE_KERNELS_BASE_ROW_GRAIN_H_

#include <algorithm>
#include <cstdint>

namespace moe {

// So many that they hold some 8000 elements: below that a fork costs more than it saves.
inline int64_t RowGrain(int64_t cols) {
  return std::max<int64_t>(1, 8192 / std::max<int64_t>(1, cols));
}

}  // namespace moe

#endif  // MOE_KERNELS_BASE_ROW_GRAIN_H_
