#include "kernels/norm/rms_norm.h"

#include "kernels/base/run_op.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/norm/rms_norm_op.h"

namespace moe {
namespace {

// As many groups of the weight's length as the columns are; one where they are not a multiple,
// which CheckShape of the weight then refuses.
rms_norm::Groups GroupsOf(int64_t cols, size_t weight) {
  const auto length = static_cast<int64_t>(weight);
  const bool several = length > 0 && cols % length == 0;
  return {several ? cols / length : 1, several ? length : cols};
}

}  // namespace

template <typename T>
absl::Status RmsNorm(MatrixView<const T> x, absl::Span<const float> weight, float epsilon,
                     MatrixView<T> y, absl::Span<float> rstd, Stream& stream) {
  constexpr const char* kFunction = "RmsNorm";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "x", x, x.rows(), x.cols()));
  const rms_norm::Groups groups = GroupsOf(x.cols(), weight.size());
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "weight", weight.size(), groups.cols));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "y", y, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "rstd", rstd.size(), x.rows() * groups.count));
  return RunOp(kFunction, rms_norm::Forward<T>{groups, x, weight.data(), epsilon, y, rstd.data()},
               stream);
}

template <typename T>
absl::Status RmsNormBackward(MatrixView<const T> x, absl::Span<const float> weight,
                             absl::Span<const float> rstd, MatrixView<const T> dy, MatrixView<T> dx,
                             Write write_dx, absl::Span<float> d_weight, Write write_d_weight,
                             Stream& stream) {
  constexpr const char* kFunction = "RmsNormBackward";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "x", x, x.rows(), x.cols()));
  const rms_norm::Groups groups = GroupsOf(x.cols(), weight.size());
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "weight", weight.size(), groups.cols));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "rstd", rstd.size(), x.rows() * groups.count));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "dy", dy, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "dx", dx, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "d_weight", d_weight.size(), groups.cols));
  return RunOp(kFunction,
               rms_norm::Backward<T>{groups, x, weight.data(), rstd.data(), dy, dx, write_dx,
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
