// Root-mean-square normalisation. Zhang and Sennrich (2019), arXiv:1910.07467.
#ifndef MOE_KERNELS_NORM_RMS_NORM_H_
#define MOE_KERNELS_NORM_RMS_NORM_H_

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace moe {

// y[t, h] = x[t, h] * rstd[t] * weight[h],  rstd[t] = 1 / sqrt(mean_h x[t, h]^2 + epsilon).
//   x, y [T, H];  weight [H] float32;  rstd [T] float32, kept for backward.
// x and y may also be [T, G * H], with G adjacent groups (heads of a query), each of which is
// normalised as a row: group g of row t is row t * G + g of the above, and has rstd[t * G + g].
// The sum of squares is float32 in the fixed order of CombineWeightGradient's dot product.
template <typename T>
absl::Status RmsNorm(MatrixView<const T> x, absl::Span<const float> weight, float epsilon,
                     MatrixView<T> y, absl::Span<float> rstd, Stream& stream);

// dx (+)= gradient with respect to x; d_weight[h] (+)= sum_t dy[t, h] * x[t, h] * rstd[t], t
// ascending, float32.
//   dx [T, H] with kAdd adds to the residual stream's gradient (one rounding).
// Groups as above: d_weight sums over all of them, row by row.
template <typename T>
absl::Status RmsNormBackward(MatrixView<const T> x, absl::Span<const float> weight,
                             absl::Span<const float> rstd, MatrixView<const T> dy, MatrixView<T> dx,
                             Write write_dx, absl::Span<float> d_weight, Write write_d_weight,
                             Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_NORM_RMS_NORM_H_
