#include "kernels/bias/bias.h"

#include "kernels/base/run_op.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/bias/bias_op.h"

namespace moe {
namespace bias {

template <typename T>
void Reference(const Add<T>& add) {
  for (int64_t n = 0; n < add.y.rows(); ++n) {
    for (int64_t c = 0; c < add.y.cols(); ++c) {
      add.y(n, c) = T(static_cast<float>(add.y(n, c)) + add.bias[c]);
    }
  }
}

template <typename T>
void Reference(const Gradient<T>& g) {
  for (int64_t c = 0; c < g.dy.cols(); ++c) {
    float sum = g.write == Write::kAdd ? g.d_bias[c] : 0.0f;
    for (int64_t n = 0; n < g.dy.rows(); ++n) sum += static_cast<float>(g.dy(n, c));
    g.d_bias[c] = sum;
  }
}

}  // namespace bias

template <typename T>
absl::Status AddBias(MatrixView<T> y, const GroupOffsets& offsets,
                     absl::Span<const absl::Span<const float>> bias, Stream& stream) {
  constexpr const char* kFunction = "AddBias";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "y", y, y.rows(), y.cols()));
  MOE_RETURN_IF_ERROR(CheckGroups(kFunction, "biases", offsets, bias.size(), y.rows()));
  for (const absl::Span<const float> b : bias) {
    MOE_RETURN_IF_ERROR(CheckLength(kFunction, "bias", b.size(), y.cols()));
  }
  for (size_t g = 0; g < bias.size(); ++g) {
    bias::Add<T> add = {.y = y, .bias = bias[g].data()};
    if (offsets.known_to_host()) {
      add.y = RowRange(y, offsets.host()[g], offsets.host()[g + 1]);
      if (add.y.rows() == 0) continue;
    } else {
      add.rows = &offsets.device()[g];
    }
    MOE_RETURN_IF_ERROR(RunOp(kFunction, add, stream));
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status BiasGradient(MatrixView<const T> dy, const GroupOffsets& segments,
                          absl::Span<float> d_bias, Write write, Stream& stream) {
  constexpr const char* kFunction = "BiasGradient";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "dy", dy, dy.rows(), dy.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "d_bias", d_bias.size(), dy.cols()));
  bias::Gradient<T> gradient = {.dy = dy, .d_bias = d_bias.data(), .write = write};
  if (segments.known_to_host()) {
    gradient.dy = RowRange(dy, segments.host().front(), segments.host().back());
  } else {
    gradient.rows = segments.device().data();
    gradient.segments = static_cast<int64_t>(segments.size()) - 1;
  }
  return RunOp(kFunction, gradient, stream);
}

#define MOE_INSTANTIATE(T)                                                                        \
  template void bias::Reference(const bias::Add<T>&);                                             \
  template void bias::Reference(const bias::Gradient<T>&);                                        \
  template absl::Status AddBias(MatrixView<T>, const GroupOffsets&,                               \
                                absl::Span<const absl::Span<const float>>, Stream&);              \
  template absl::Status BiasGradient(MatrixView<const T>, const GroupOffsets&, absl::Span<float>, \
                                     Write, Stream&);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
