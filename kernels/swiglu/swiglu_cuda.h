// The CUDA path of swiglu.h. Internal: plain C++ between swiglu.cc (Abseil) and swiglu_cuda.cu
// (nvcc, no Abseil).
#ifndef MOE_KERNELS_SWIGLU_SWIGLU_CUDA_H_
#define MOE_KERNELS_SWIGLU_SWIGLU_CUDA_H_

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"
#include "kernels/swiglu/activation.h"

namespace moe::swiglu {

// The arguments of ActivationForward, in device memory. All [N, F].
template <typename T>
struct CudaForward {
  MatrixView<const T> gate;
  MatrixView<const T> up;  // not read by plain activations
  MatrixView<T> out;
};

// The arguments of ActivationBackward. Outputs may be the inputs' own memory.
template <typename T>
struct CudaBackward {
  MatrixView<const T> gate;
  MatrixView<const T> up;  // not read by plain activations
  MatrixView<const T> d_out;
  MatrixView<T> d_gate;
  MatrixView<T> d_up;  // not written by plain activations
};

// Enqueue on `stream` and return; the error of the launch alone. The formulas of swiglu_cpu.cc with
// CUDA's own exponential and error function, so that the last bits differ from a CPU's; an element
// has the same bits wherever it stands. Instantiated for float, BFloat16 and Float16.
template <typename T>
cudaError_t Run(ActivationFunction activation, const CudaForward<T>& forward, cudaStream_t stream);
template <typename T>
cudaError_t Run(ActivationFunction activation, const CudaBackward<T>& backward,
                cudaStream_t stream);

}  // namespace moe::swiglu

#endif  // MOE_KERNELS_SWIGLU_SWIGLU_CUDA_H_
