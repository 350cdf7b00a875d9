// A gate that scales whole rows: Qwen2-MoE's shared expert.
#ifndef MOE_KERNELS_ROW_GATE_ROW_GATE_H_
#define MOE_KERNELS_ROW_GATE_ROW_GATE_H_

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace moe {

// y[t, :] = gate[t] * rows[t, :],  gate[t] = sigmoid(logit[t]).
//   rows, y [T, H];  logit [T] float32;  gate [T] float32, kept for backward
// The sigmoid is computed in float64 and rounded to float32, the product rounded to T once. CUDA's
// float64 exponential differs from the CPU's in the last bits, so that a gate may differ by one
// ulp.
// Errors of all three: kInvalidArgument if shapes disagree.
template <typename T>
absl::Status RowGate(MatrixView<const T> rows, absl::Span<const float> logit,
                     absl::Span<float> gate, MatrixView<T> y, Stream& stream);

// The arguments of RowGateBackward, for logit[t] = <weight, x[t, :]>.
template <typename T>
struct RowGateGradient {
  MatrixView<const T> rows;      // [T, H], as in forward
  absl::Span<const float> gate;  // [T], from forward
  MatrixView<const T> weight;    // [1, H]
  MatrixView<const T> dy;        // [T, H]
  // [T, H] gradient with respect to `rows`, overwritten; does not overlap dy.
  MatrixView<T> d_rows;
  absl::Span<float> d_logit;  // [T], overwritten
  // [T, H] gradient with respect to x, added to.
  MatrixView<T> dx;
};

// d_rows = gate * dy;  d_logit = <dy, rows> * gate * (1 - gate);  dx += d_logit * weight.
// dy and an expert's output are nearly orthogonal, so the dot product cancels: it is WideDot
// (kernels/base/fixed_dot.h), and d_logit is rounded from float64 once. dx takes one fused
// multiply-add in float32, rounded to T. Every device gives the same bits.
template <typename T>
absl::Status RowGateBackward(const RowGateGradient<T>& gradient, Stream& stream);

// d_weight[h] (+)= sum_t d_logit[t] * x[t, h], float32, one fused multiply-add a term, t ascending,
// kAdd starting from the old value. Every device gives the same bits.
//   x [T, H];  d_logit [T];  d_weight [H]
template <typename T>
absl::Status RowGateWeightGradient(MatrixView<const T> x, absl::Span<const float> d_logit,
                                   absl::Span<float> d_weight, Write write, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_ROW_GATE_ROW_GATE_H_
