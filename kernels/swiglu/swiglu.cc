#include "kernels/swiglu/swiglu.h"

#include "kernels/base/cuda_launch.h"
#include "kernels/base/row_grain.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/swiglu/swiglu_cpu.h"
#include "kernels/swiglu/swiglu_cuda.h"

namespace moe {
template <typename T>
absl::Status ActivationForward(ActivationFunction activation, MatrixView<const T> gate,
                               MatrixView<const T> up, MatrixView<T> out, Stream& stream) {
  constexpr const char* kFunction = "ActivationForward";
  const bool gated = IsGated(activation);
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "gate", gate, gate.rows(), gate.cols()));
  if (gated) MOE_RETURN_IF_ERROR(CheckShape(kFunction, "up", up, gate.rows(), gate.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "out", out, gate.rows(), gate.cols()));
  if (IsCuda(stream)) {
    return LaunchOn(kFunction, stream, [&](auto cuda) {
      return swiglu::Run(activation, swiglu::CudaForward<T>{gate, up, out}, cuda);
    });
  }
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    threads.For(gate.rows(), RowGrain(gate.cols()), [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        ActivationForwardRow<T>(activation, {.gate = gate.row(n),
                                             .up = gated ? up.row(n) : nullptr,
                                             .out = out.row(n),
                                             .n = gate.cols()});
      }
    });
    return absl::OkStatus();
  });
}

template <typename T>
absl::Status ActivationBackward(ActivationFunction activation, MatrixView<const T> gate,
                                MatrixView<const T> up, MatrixView<const T> d_out,
                                MatrixView<T> d_gate, MatrixView<T> d_up, Stream& stream) {
  constexpr const char* kFunction = "ActivationBackward";
  const bool gated = IsGated(activation);
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "gate", gate, gate.rows(), gate.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "d_out", d_out, gate.rows(), gate.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "d_gate", d_gate, gate.rows(), gate.cols()));
  if (gated) {
    MOE_RETURN_IF_ERROR(CheckShape(kFunction, "up", up, gate.rows(), gate.cols()));
    MOE_RETURN_IF_ERROR(CheckShape(kFunction, "d_up", d_up, gate.rows(), gate.cols()));
  }
  if (IsCuda(stream)) {
    return LaunchOn(kFunction, stream, [&](auto cuda) {
      return swiglu::Run(activation, swiglu::CudaBackward<T>{gate, up, d_out, d_gate, d_up}, cuda);
    });
  }
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    threads.For(gate.rows(), RowGrain(gate.cols()), [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        ActivationBackwardRow<T>(activation, {.gate = gate.row(n),
                                              .up = gated ? up.row(n) : nullptr,
                                              .d_out = d_out.row(n),
                                              .d_gate = d_gate.row(n),
                                              .d_up = gated ? d_up.row(n) : nullptr,
                                              .n = gate.cols()});
      }
    });
    return absl::OkStatus();
  });
}

template absl::Status ActivationForward(ActivationFunction, MatrixView<const float>,
                                        MatrixView<const float>, MatrixView<float>, Stream&);
template absl::Status ActivationForward(ActivationFunction, MatrixView<const BFloat16>,
                                        MatrixView<const BFloat16>, MatrixView<BFloat16>, Stream&);
template absl::Status ActivationForward(ActivationFunction, MatrixView<const Float16>,
                                        MatrixView<const Float16>, MatrixView<Float16>, Stream&);
template absl::Status ActivationBackward(ActivationFunction, MatrixView<const float>,
                                         MatrixView<const float>, MatrixView<const float>,
                                         MatrixView<float>, MatrixView<float>, Stream&);
template absl::Status ActivationBackward(ActivationFunction, MatrixView<const BFloat16>,
                                         MatrixView<const BFloat16>, MatrixView<const BFloat16>,
                                         MatrixView<BFloat16>, MatrixView<BFloat16>, Stream&);
template absl::Status ActivationBackward(ActivationFunction, MatrixView<const Float16>,
                                         MatrixView<const Float16>, MatrixView<const Float16>,
                                         MatrixView<Float16>, MatrixView<Float16>, Stream&);

}  // namespace moe
