// Arguments of both paths of activation.h, in the memory of one device. Internal. Plain C++: .cu
// files include it.
#ifndef MOE_KERNELS_ACTIVATION_ACTIVATION_OP_H_
#define MOE_KERNELS_ACTIVATION_ACTIVATION_OP_H_

#include "kernels/activation/activation_kind.h"
#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::activation {

// ActivationForward. All [N, F].
template <typename T>
struct Forward {
  ActivationFunction activation;
  MatrixView<const T> gate;
  MatrixView<const T> up;  // not read by plain activations
  MatrixView<T> out;
};

// ActivationBackward. Outputs may share the inputs' memory.
template <typename T>
struct Backward {
  ActivationFunction activation;
  MatrixView<const T> gate;
  MatrixView<const T> up;  // not read by plain activations
  MatrixView<const T> d_out;
  MatrixView<T> d_gate;
  MatrixView<T> d_up;  // not written by plain activations
};

// Both enqueue on `stream` and return the launch error alone. The formulas are the CPU's with
// CUDA's own exponential and error function, so the last bits differ; an element has the same bits
// at every position.
template <typename T>
cudaError_t Run(const Forward<T>& forward, cudaStream_t stream);
template <typename T>
cudaError_t Run(const Backward<T>& backward, cudaStream_t stream);

}  // namespace moe::activation

#endif  // MOE_KERNELS_ACTIVATION_ACTIVATION_OP_H_
