#include "kernels/bias/bias.h"

#include "kernels/base/cuda_launch.h"
#include "kernels/base/row_grain.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/bias/bias_cpu.h"
#include "kernels/bias/bias_cuda.h"

namespace moe {
template <typename T>
void AddBiasReference(MatrixView<T> y, const float* bias) {
  for (int64_t n = 0; n < y.rows(); ++n) {
    for (int64_t c = 0; c < y.cols(); ++c) y(n, c) = T(static_cast<float>(y(n, c)) + bias[c]);
  }
}

template <typename T>
void BiasGradientReference(MatrixView<const T> dy, float* d_bias, Write write) {
  for (int64_t c = 0; c < dy.cols(); ++c) {
    float sum = write == Write::kAdd ? d_bias[c] : 0.0f;
    for (int64_t n = 0; n < dy.rows(); ++n) sum += static_cast<float>(dy(n, c));
    d_bias[c] = sum;
  }
}

template <typename T>
absl::Status AddBias(MatrixView<T> y, absl::Span<const int64_t> offsets,
                     absl::Span<const absl::Span<const float>> bias, Stream& stream) {
  constexpr const char* kFunction = "AddBias";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "y", y, y.rows(), y.cols()));
  MOE_RETURN_IF_ERROR(CheckGroups(kFunction, "biases", offsets, bias.size(), y.rows()));
  for (const absl::Span<const float> b : bias) {
    MOE_RETURN_IF_ERROR(CheckLength(kFunction, "bias", b.size(), y.cols()));
  }
  ThreadPool& threads = stream.threads();
  for (size_t g = 0; g < bias.size(); ++g) {
    if (offsets[g] == offsets[g + 1]) continue;
    const MatrixView<T> rows = RowRange(y, offsets[g], offsets[g + 1]);
    const float* const b = bias[g].data();
    if (IsCuda(stream)) {
      MOE_RETURN_IF_ERROR(LaunchOn(
          kFunction, stream, [&](auto cuda) { return moe::bias::CudaAddBias(rows, b, cuda); }));
      continue;
    }
    MOE_RETURN_IF_ERROR(stream.Enqueue([rows, b, &threads] {
      threads.For(rows.rows(), RowGrain(rows.cols()), [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) AddBiasRow<T>(b, rows.cols(), rows.row(n));
      });
      return absl::OkStatus();
    }));
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status BiasGradient(MatrixView<const T> dy, absl::Span<float> d_bias, Write write,
                          Stream& stream) {
  constexpr const char* kFunction = "BiasGradient";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "dy", dy, dy.rows(), dy.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "d_bias", d_bias.size(), dy.cols()));
  if (IsCuda(stream)) {
    return LaunchOn(kFunction, stream, [&](auto cuda) {
      return bias::CudaBiasGradient(dy, d_bias.data(), write, cuda);
    });
  }
  return stream.Enqueue([dy, d_bias, write, &threads = stream.threads()] {
    threads.For(dy.cols(), kBiasColumns, [&](int64_t begin, int64_t end) {
      BiasGradientColumns<T>(ColumnRange(dy, begin, end), d_bias.data() + begin, write);
    });
    return absl::OkStatus();
  });
}

#define MOE_INSTANTIATE(T)                                                           \
  template void AddBiasReference(MatrixView<T>, const float*);                       \
  template void BiasGradientReference(MatrixView<const T>, float*, Write);           \
  template absl::Status AddBias(MatrixView<T>, absl::Span<const int64_t>,            \
                                absl::Span<const absl::Span<const float>>, Stream&); \
  template absl::Status BiasGradient(MatrixView<const T>, absl::Span<float>, Write, Stream&)
MOE_INSTANTIATE(float);
MOE_INSTANTIATE(BFloat16);
MOE_INSTANTIATE(Float16);
#undef MOE_INSTANTIATE

}  // namespace moe
