#include "kernels/activation/activation.h"

#include "kernels/activation/activation_op.h"
#include "kernels/base/run_op.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"

namespace moe {

template <typename T>
absl::Status ActivationForward(ActivationFunction activation, MatrixView<const T> gate,
                               MatrixView<const T> up, MatrixView<T> out, Stream& stream) {
  constexpr const char* kFunction = "ActivationForward";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "gate", gate, gate.rows(), gate.cols()));
  if (IsGated(activation)) {
    MOE_RETURN_IF_ERROR(CheckShape(kFunction, "up", up, gate.rows(), gate.cols()));
  }
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "out", out, gate.rows(), gate.cols()));
  return RunOp(kFunction, activation::Forward<T>{activation, gate, up, out}, stream);
}

template <typename T>
absl::Status ActivationBackward(ActivationFunction activation, MatrixView<const T> gate,
                                MatrixView<const T> up, MatrixView<const T> d_out,
                                MatrixView<T> d_gate, MatrixView<T> d_up, Stream& stream) {
  constexpr const char* kFunction = "ActivationBackward";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "gate", gate, gate.rows(), gate.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "d_out", d_out, gate.rows(), gate.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "d_gate", d_gate, gate.rows(), gate.cols()));
  if (IsGated(activation)) {
    MOE_RETURN_IF_ERROR(CheckShape(kFunction, "up", up, gate.rows(), gate.cols()));
    MOE_RETURN_IF_ERROR(CheckShape(kFunction, "d_up", d_up, gate.rows(), gate.cols()));
  }
  return RunOp(kFunction, activation::Backward<T>{activation, gate, up, d_out, d_gate, d_up},
               stream);
}

#define MOE_INSTANTIATE(T)                                                              \
  template absl::Status ActivationForward(ActivationFunction, MatrixView<const T>,      \
                                          MatrixView<const T>, MatrixView<T>, Stream&); \
  template absl::Status ActivationBackward(ActivationFunction, MatrixView<const T>,     \
                                           MatrixView<const T>, MatrixView<const T>,    \
                                           MatrixView<T>, MatrixView<T>, Stream&);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
