#include "kernels/row_gate/row_gate.h"

#include <cmath>

#include "kernels/base/fixed_dot.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/row_gate/row_gate_op.h"

namespace moe {
namespace row_gate {

// The specification, in plain loops.

constexpr int64_t kRowsPerTask = 64;
constexpr int64_t kColumnsPerTask = 256;

template <typename T>
void Run(const Forward<T>& f, ThreadPool& threads) {
  threads.For(f.rows.rows(), kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const auto g = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(f.logit[t]))));
      f.gate[t] = g;
      for (int64_t h = 0; h < f.rows.cols(); ++h) {
        f.y(t, h) = static_cast<T>(g * static_cast<float>(f.rows(t, h)));
      }
    }
  });
}

template <typename T>
void Run(const Backward<T>& b, ThreadPool& threads) {
  threads.For(b.dy.rows(), kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t cols = b.dy.cols();
      const float gate = b.gate[t];
      const double d_gate = WideDot<T>(b.dy.row(t), b.rows.row(t), cols);
      const auto d_logit = static_cast<float>(d_gate * gate * (1 - static_cast<double>(gate)));
      b.d_logit[t] = d_logit;
      for (int64_t h = 0; h < cols; ++h) {
        b.d_rows(t, h) = static_cast<T>(gate * static_cast<float>(b.dy(t, h)));
        b.dx(t, h) = static_cast<T>(
            std::fma(d_logit, static_cast<float>(b.weight[h]), static_cast<float>(b.dx(t, h))));
      }
    }
  });
}

template <typename T>
void Run(const WeightGradient<T>& g, ThreadPool& threads) {
  threads.For(g.x.cols(), kColumnsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) {
      float sum = g.write == Write::kAdd ? g.d_weight[h] : 0.0f;
      for (int64_t t = 0; t < g.x.rows(); ++t) {
        sum = std::fma(g.d_logit[t], static_cast<float>(g.x(t, h)), sum);
      }
      g.d_weight[h] = sum;
    }
  });
}

}  // namespace row_gate

template <typename T>
absl::Status RowGate(MatrixView<const T> rows, absl::Span<const float> logit,
                     absl::Span<float> gate, MatrixView<T> y, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckShape("RowGate", "rows", rows, rows.rows(), rows.cols()));
  MOE_RETURN_IF_ERROR(CheckLength("RowGate", "logit", logit.size(), rows.rows()));
  MOE_RETURN_IF_ERROR(CheckLength("RowGate", "gate", gate.size(), rows.rows()));
  MOE_RETURN_IF_ERROR(CheckShape("RowGate", "y", y, rows.rows(), rows.cols()));
  return RunOp("RowGate", row_gate::Forward<T>{rows, logit.data(), gate.data(), y}, stream);
}

template <typename T>
absl::Status RowGateBackward(const RowGateGradient<T>& g, Stream& stream) {
  constexpr const char* kFunction = "RowGateBackward";
  const int64_t rows = g.rows.rows(), cols = g.rows.cols();
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "rows", g.rows, rows, cols));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "gate", g.gate.size(), rows));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "weight", g.weight, 1, cols));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "dy", g.dy, rows, cols));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "d_rows", g.d_rows, rows, cols));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "d_logit", g.d_logit.size(), rows));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "dx", g.dx, rows, cols));
  return RunOp(kFunction,
               row_gate::Backward<T>{g.rows, g.gate.data(), g.weight.data(), g.dy, g.d_rows,
                                     g.d_logit.data(), g.dx},
               stream);
}

template <typename T>
absl::Status RowGateWeightGradient(MatrixView<const T> x, absl::Span<const float> d_logit,
                                   absl::Span<float> d_weight, Write write, Stream& stream) {
  constexpr const char* kFunction = "RowGateWeightGradient";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "x", x, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "d_logit", d_logit.size(), x.rows()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "d_weight", d_weight.size(), x.cols()));
  return RunOp(kFunction, row_gate::WeightGradient<T>{x, d_logit.data(), d_weight.data(), write},
               stream);
}

MOE_INSTANTIATE_FOR_STORAGE(RowGate)
MOE_INSTANTIATE_FOR_STORAGE(RowGateBackward)
MOE_INSTANTIATE_FOR_STORAGE(RowGateWeightGradient)

}  // namespace moe
