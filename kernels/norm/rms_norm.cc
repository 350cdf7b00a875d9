#include "kernels/norm/rms_norm.h"

#include <type_traits>

#include "kernels/base/cuda_launch.h"
#include "kernels/base/row_grain.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/norm/rms_norm_cpu.h"
#include "kernels/norm/rms_norm_cuda.h"

namespace moe {
namespace {

template <typename T>
absl::Status CheckBackward(MatrixView<const T> x, absl::Span<const float> weight,
                           absl::Span<const float> rstd, MatrixView<const T> dy, MatrixView<T> dx,
                           absl::Span<float> d_weight) {
  constexpr const char* kFunction = "RmsNormBackward";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "x", x, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "weight", weight.size(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "rstd", rstd.size(), x.rows()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "dy", dy, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "dx", dx, x.rows(), x.cols()));
  return CheckLength(kFunction, "d_weight", d_weight.size(), x.cols());
}

}  // namespace

template <typename T>
absl::Status RmsNorm(MatrixView<const T> x, absl::Span<const float> weight, float epsilon,
                     MatrixView<T> y, absl::Span<float> rstd, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckShape("RmsNorm", "x", x, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength("RmsNorm", "weight", weight.size(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckShape("RmsNorm", "y", y, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength("RmsNorm", "rstd", rstd.size(), x.rows()));
  if (IsCuda(stream)) {
    return LaunchOn("RmsNorm", stream, [&](auto cuda) {
      return rms_norm::Run(rms_norm::CudaForward<T>{x, weight.data(), epsilon, y, rstd.data()},
                           cuda);
    });
  }
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    if (x.cols() == 0) return absl::OkStatus();
    threads.For(x.rows(), RowGrain(x.cols()), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        rstd[t] = RmsNormRow<T>(x.row(t), weight.data(), epsilon, x.cols(), y.row(t));
      }
    });
    return absl::OkStatus();
  });
}

template <typename T>
absl::Status RmsNormBackward(MatrixView<const T> x, absl::Span<const float> weight,
                             absl::Span<const float> rstd, MatrixView<const T> dy, MatrixView<T> dx,
                             Write write_dx, absl::Span<float> d_weight, Write write_d_weight,
                             Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckBackward(x, weight, rstd, dy, dx, d_weight));
  if (IsCuda(stream)) {
    return LaunchOn("RmsNormBackward", stream, [&](auto cuda) {
      return rms_norm::Run(rms_norm::CudaBackward<T>{x, weight.data(), rstd.data(), dy, dx,
                                                     write_dx, d_weight.data(), write_d_weight},
                           cuda);
    });
  }
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    // Threads share the weight's columns, so that every element sees its tokens in ascending order.
    threads.For(x.cols(), kNormColumns, [&](int64_t begin, int64_t end) {
      RmsNormWeightColumns<T>(ColumnRange(x, begin, end), rstd.data(), ColumnRange(dy, begin, end),
                              d_weight.data() + begin, write_d_weight);
    });
    threads.For(x.rows(), RowGrain(x.cols()), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        RmsNormBackwardRow<T>({.x = x.row(t),
                               .weight = weight.data(),
                               .rstd = rstd[t],
                               .dy = dy.row(t),
                               .dx = dx.row(t),
                               .write = write_dx,
                               .n = x.cols()});
      }
    });
    return absl::OkStatus();
  });
}

template <typename T, typename U>
absl::Status AddRows(MatrixView<const T> a, MatrixView<const std::type_identity_t<U>> b,
                     MatrixView<T> out, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckShape("AddRows", "a", a, out.rows(), out.cols()));
  MOE_RETURN_IF_ERROR(CheckShape("AddRows", "b", b, out.rows(), out.cols()));
  MOE_RETURN_IF_ERROR(CheckShape("AddRows", "out", out, out.rows(), out.cols()));
  if (IsCuda(stream)) {
    return LaunchOn("AddRows", stream,
                    [&](auto cuda) { return rms_norm::CudaAddRows<T, U>(a, b, out, cuda); });
  }
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    threads.For(out.rows(), RowGrain(out.cols()), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        if constexpr (std::is_same_v<T, U>) {
          AddRow<T>(a.row(t), b.row(t), out.cols(), out.row(t));
        } else {
          for (int64_t h = 0; h < out.cols(); ++h) {
            out(t, h) = static_cast<T>(static_cast<float>(a(t, h)) + b(t, h));
          }
        }
      }
    });
    return absl::OkStatus();
  });
}

template absl::Status RmsNorm(MatrixView<const float>, absl::Span<const float>, float,
                              MatrixView<float>, absl::Span<float>, Stream&);
template absl::Status RmsNorm(MatrixView<const BFloat16>, absl::Span<const float>, float,
                              MatrixView<BFloat16>, absl::Span<float>, Stream&);
template absl::Status RmsNorm(MatrixView<const Float16>, absl::Span<const float>, float,
                              MatrixView<Float16>, absl::Span<float>, Stream&);
template absl::Status RmsNormBackward(MatrixView<const float>, absl::Span<const float>,
                                      absl::Span<const float>, MatrixView<const float>,
                                      MatrixView<float>, Write, absl::Span<float>, Write, Stream&);
template absl::Status RmsNormBackward(MatrixView<const BFloat16>, absl::Span<const float>,
                                      absl::Span<const float>, MatrixView<const BFloat16>,
                                      MatrixView<BFloat16>, Write, absl::Span<float>, Write,
                                      Stream&);
template absl::Status RmsNormBackward(MatrixView<const Float16>, absl::Span<const float>,
                                      absl::Span<const float>, MatrixView<const Float16>,
                                      MatrixView<Float16>, Write, absl::Span<float>, Write,
                                      Stream&);
template absl::Status AddRows<float>(MatrixView<const float>, MatrixView<const float>,
                                     MatrixView<float>, Stream&);
template absl::Status AddRows<BFloat16>(MatrixView<const BFloat16>, MatrixView<const BFloat16>,
                                        MatrixView<BFloat16>, Stream&);
template absl::Status AddRows<Float16>(MatrixView<const Float16>, MatrixView<const Float16>,
                                       MatrixView<Float16>, Stream&);
template absl::Status AddRows<BFloat16, float>(MatrixView<const BFloat16>, MatrixView<const float>,
                                               MatrixView<BFloat16>, Stream&);
template absl::Status AddRows<Float16, float>(MatrixView<const Float16>, MatrixView<const float>,
                                              MatrixView<Float16>, Stream&);

}  // namespace moe
