#include "kernels/norm/rms_norm.h"

#include "kernels/base/run_op.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/norm/rms_norm_op.h"

namespace moe {

template <typename T>
absl::Status RmsNorm(MatrixView<const T> x, absl::Span<const float> weight, float epsilon,
                     MatrixView<T> y, absl::Span<float> rstd, Stream& stream) {
  constexpr const char* kFunction = "RmsNorm";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "x", x, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "weight", weight.size(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "y", y, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "rstd", rstd.size(), x.rows()));
  return RunOp(kFunction, rms_norm::Forward<T>{x, weight.data(), epsilon, y, rstd.data()}, stream);
}

template <typename T>
absl::Status RmsNormBackward(MatrixView<const T> x, absl::Span<const float> weight,
                             absl::Span<const float> rstd, MatrixView<const T> dy, MatrixView<T> dx,
                             Write write_dx, absl::Span<float> d_weight, Write write_d_weight,
                             Stream& stream) {
  constexpr const char* kFunction = "RmsNormBackward";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "x", x, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "weight", weight.size(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "rstd", rstd.size(), x.rows()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "dy", dy, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "dx", dx, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "d_weight", d_weight.size(), x.cols()));
  return RunOp(kFunction,
               rms_norm::Backward<T>{x, weight.data(), rstd.data(), dy, dx, write_dx,
                                     d_weight.data(), write_d_weight},
               stream);
}

#define MOE_INSTANTIATE(T)                                                            \
  template absl::Status RmsNorm(MatrixView<const T>, absl::Span<const float>, float,  \
                                MatrixView<T>, absl::Span<float>, Stream&);           \
  template absl::Status RmsNormBackward(MatrixView<const T>, absl::Span<const float>, \
                                        absl::Span<const float>, MatrixView<const T>, \
                                        MatrixView<T>, Write, absl::Span<float>, Write, Stream&);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
