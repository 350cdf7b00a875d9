// What the operations on rows of expert scores share. On the CPU each has two implementations, for
// rows [begin, end): plain loops, which are the specification, and SIMD. Internal.
#ifndef MOE_KERNELS_TOPK_GATE_GATE_ROWS_H_
#define MOE_KERNELS_TOPK_GATE_GATE_ROWS_H_

#include <cmath>
#include <cstddef>
#include <cstdint>

#include <absl/status/status.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/topk_gate/gate_rule.h"
#include "kernels/topk_gate/topk_gate.h"
#include "kernels/topk_gate/topk_gate_cuda.h"

namespace moe {

// Bits of an id beside the 32 of a score in a rank (gate_rows-inl.h): the most experts are 2^20.
inline constexpr int kExpertIdBits = 20;

// kInvalidArgument unless 1 <= k <= experts <= 2^kExpertIdBits.
absl::Status CheckSelection(absl::string_view function, int64_t k, int64_t experts);

// Rows that one task takes: enough to pay for its scratch, few enough to balance threads.
inline constexpr int64_t kGateRowsPerTask = 256;

// Scratch for more experts than this comes from the heap.
inline constexpr size_t kMostInlineExperts = 256;

// sum = sum_e exp(row[e] - max), in the order of TopKGate's contract; max is the largest number of
// the row, -infinity if it has none.
struct ExpSum {
  float max;
  float sum;
};
inline float LogSumExp(const ExpSum& s) {
  return static_cast<float>(static_cast<double>(s.max) + std::log(static_cast<double>(s.sum)));
}

ExpSum ExpSumReference(const float* row, int64_t experts);

// `count` is not touched.
void TopKGateReference(MatrixView<const float> logits, const TopKGateOutput& out, int64_t begin,
                       int64_t end);
void TopKGateCpu(MatrixView<const float> logits, const TopKGateOutput& out, int64_t begin,
                 int64_t end);

void TopKSelectReference(MatrixView<const float> value, MatrixView<int32_t> expert, int64_t begin,
                         int64_t end);
void TopKSelectCpu(MatrixView<const float> value, MatrixView<int32_t> expert, int64_t begin,
                   int64_t end);

// The reference computes scores in float64 and rounds them once.
void SigmoidScoresReference(MatrixView<const float> logits, MatrixView<float> score,
                            absl::Span<float> log_sum_exp, int64_t begin, int64_t end);
void SigmoidScoresCpu(MatrixView<const float> logits, MatrixView<float> score,
                      absl::Span<float> log_sum_exp, int64_t begin, int64_t end);

// Rows [begin, end) of weight [T, K], which holds the scores: `weights`, `scale` and `epsilon` of
// the rule, with the bits of Normalise (gate_row.h).
void WeighRowsCpu(MatrixView<float> weight, const GateRule& rule, int64_t begin, int64_t end);

// count [E] = how often each id stands in expert [T, K].
void CountSelected(MatrixView<const int32_t> expert, absl::Span<int64_t> count);

// Enqueues `gate`, whose shapes `function` has checked, on a stream of a CUDA device.
// kInvalidArgument, naming value and limit, for sizes that the kernel is not compiled for.
absl::Status LaunchGate(absl::string_view function, const topk_gate::CudaGate<float>& gate,
                        Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_TOPK_GATE_GATE_ROWS_H_
