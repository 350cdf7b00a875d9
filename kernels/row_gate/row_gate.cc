#include "kernels/row_gate/row_gate.h"

#include <cmath>

#include "kernels/base/cuda_launch.h"
#include "kernels/base/fixed_dot.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/row_gate/row_gate_cuda.h"

namespace moe {
namespace {

constexpr int64_t kGatedRowsPerTask = 64;
constexpr int64_t kColumnsPerTask = 256;

template <typename T>
absl::Status CheckGradient(const RowGateGradient<T>& g) {
  constexpr const char* kFunction = "RowGateBackward";
  const int64_t rows = g.rows.rows(), cols = g.rows.cols();
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "rows", g.rows, rows, cols));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "gate", g.gate.size(), rows));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "weight", g.weight, 1, cols));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "dy", g.dy, rows, cols));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "d_rows", g.d_rows, rows, cols));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "d_logit", g.d_logit.size(), rows));
  return CheckShape(kFunction, "dx", g.dx, rows, cols);
}

template <typename T>
void BackwardRow(const RowGateGradient<T>& g, int64_t t) {
  const int64_t cols = g.dy.cols();
  const float gate = g.gate[t];
  const double d_gate = WideDot<T>(g.dy.row(t), g.rows.row(t), cols);
  const auto d_logit = static_cast<float>(d_gate * gate * (1 - static_cast<double>(gate)));
  g.d_logit[t] = d_logit;
  for (int64_t h = 0; h < cols; ++h) {
    g.d_rows(t, h) = static_cast<T>(gate * static_cast<float>(g.dy(t, h)));
    g.dx(t, h) = static_cast<T>(
        std::fma(d_logit, static_cast<float>(g.weight(0, h)), static_cast<float>(g.dx(t, h))));
  }
}

}  // namespace

template <typename T>
absl::Status RowGate(MatrixView<const T> rows, absl::Span<const float> logit,
                     absl::Span<float> gate, MatrixView<T> y, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckShape("RowGate", "rows", rows, rows.rows(), rows.cols()));
  MOE_RETURN_IF_ERROR(CheckLength("RowGate", "logit", logit.size(), rows.rows()));
  MOE_RETURN_IF_ERROR(CheckLength("RowGate", "gate", gate.size(), rows.rows()));
  MOE_RETURN_IF_ERROR(CheckShape("RowGate", "y", y, rows.rows(), rows.cols()));
  if (IsCuda(stream)) {
    return LaunchOn("RowGate", stream, [&](auto cuda) {
      return row_gate::Run(row_gate::CudaForward<T>{rows, logit.data(), gate.data(), y}, cuda);
    });
  }
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    threads.For(rows.rows(), kGatedRowsPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const auto g = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(logit[t]))));
        gate[t] = g;
        for (int64_t h = 0; h < rows.cols(); ++h) {
          y(t, h) = static_cast<T>(g * static_cast<float>(rows(t, h)));
        }
      }
    });
    return absl::OkStatus();
  });
}

template <typename T>
absl::Status RowGateBackward(const RowGateGradient<T>& gradient, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckGradient(gradient));
  if (IsCuda(stream)) {
    return LaunchOn("RowGateBackward", stream, [&](auto cuda) {
      return row_gate::Run(row_gate::CudaBackward<T>{.rows = gradient.rows,
                                                     .gate = gradient.gate.data(),
                                                     .weight = gradient.weight.data(),
                                                     .dy = gradient.dy,
                                                     .d_rows = gradient.d_rows,
                                                     .d_logit = gradient.d_logit.data(),
                                                     .dx = gradient.dx},
                           cuda);
    });
  }
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([gradient, &threads] {
    threads.For(gradient.dy.rows(), kGatedRowsPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) BackwardRow(gradient, t);
    });
    return absl::OkStatus();
  });
}

template <typename T>
absl::Status RowGateWeightGradient(MatrixView<const T> x, absl::Span<const float> d_logit,
                                   absl::Span<float> d_weight, Write write, Stream& stream) {
  constexpr const char* kFunction = "RowGateWeightGradient";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "x", x, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "d_logit", d_logit.size(), x.rows()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "d_weight", d_weight.size(), x.cols()));
  if (IsCuda(stream)) {
    return LaunchOn(kFunction, stream, [&](auto cuda) {
      return row_gate::Run(
          row_gate::CudaWeightGradient<T>{x, d_logit.data(), d_weight.data(), write}, cuda);
    });
  }
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    threads.For(x.cols(), kColumnsPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t h = begin; h < end; ++h) {
        float sum = write == Write::kAdd ? d_weight[h] : 0.0f;
        for (int64_t t = 0; t < x.rows(); ++t) {
          sum = std::fma(d_logit[t], static_cast<float>(x(t, h)), sum);
        }
        d_weight[h] = sum;
      }
    });
    return absl::OkStatus();
  });
}

#define MOE_INSTANTIATE(T)                                                                       \
  template absl::Status RowGate(MatrixView<const T>, absl::Span<const float>, absl::Span<float>, \
                                MatrixView<T>, Stream&);                                         \
  template absl::Status RowGateBackward(const RowGateGradient<T>&, Stream&);                     \
  template absl::Status RowGateWeightGradient(MatrixView<const T>, absl::Span<const float>,      \
                                              absl::Span<float>, Write, Stream&);
MOE_INSTANTIATE(float)
MOE_INSTANTIATE(BFloat16)
MOE_INSTANTIATE(Float16)
#undef MOE_INSTANTIATE

}  // namespace moe
