// A ScaledSum for kernels. Plain C++: .cu files include it.
#ifndef MOE_KERNELS_EXACT_SUM_SUM_VIEW_H_
#define MOE_KERNELS_EXACT_SUM_SUM_VIEW_H_

#include <cstdint>
#include <type_traits>

#include "kernels/base/tensor_view.h"

namespace moe {

// Sum: float, or int64_t on the exact grid.
template <typename Sum>
struct SumView {
  using Factor = std::conditional_t<std::is_same_v<Sum, int64_t>, double, float>;

  const Sum* sum;
  Factor factor;  // includes the grid's unit

  // The scaled value of an element, as Scale and ExactToFloat compute it.
  MOE_HOST_DEVICE float Scaled(Sum value) const {
    return static_cast<float>(static_cast<Factor>(value) * factor);
  }
};

}  // namespace moe

#endif  // MOE_KERNELS_EXACT_SUM_SUM_VIEW_H_
