// One row of an activation on the CPU.
#ifndef MOE_KERNELS_SWIGLU_SWIGLU_CPU_H_
#define MOE_KERNELS_SWIGLU_SWIGLU_CPU_H_

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/swiglu/swiglu.h"

namespace moe {

template <typename T>
struct ActivationRow {
  const T* gate;
  const T* up;     // not read by plain activations
  const T* d_out;  // backward only
  T* out;          // forward only
  T* d_gate;       // backward only
  T* d_up;         // backward of gated activations only
  int64_t n;
};

// Instantiated for float, BFloat16 and Float16.
template <typename T>
void ActivationForwardRow(ActivationFunction activation, const ActivationRow<T>& row);
template <typename T>
void ActivationBackwardRow(ActivationFunction activation, const ActivationRow<T>& row);

}  // namespace moe

#endif  // MOE_KERNELS_SWIGLU_SWIGLU_CPU_H_
