// The two CPU implementations of TopKGate for rows [begin, end), and what the operations on rows of
// expert scores share. `count` is not touched.
#ifndef MOE_KERNELS_TOPK_GATE_TOPK_GATE_CPU_H_
#define MOE_KERNELS_TOPK_GATE_TOPK_GATE_CPU_H_

#include <cmath>
#include <cstddef>
#include <cstdint>

#include <absl/status/status.h>
#include <absl/strings/string_view.h>

#include "kernels/base/tensor_view.h"
#include "kernels/topk_gate/topk_gate.h"

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

// Plain loops: the specification.
ExpSum ExpSumReference(const float* row, int64_t experts);
void TopKGateReference(MatrixView<const float> logits, const TopKGateOutput& out, int64_t begin,
                       int64_t end);

// SIMD for the best target of this machine.
void TopKGateCpu(MatrixView<const float> logits, const TopKGateOutput& out, int64_t begin,
                 int64_t end);

}  // namespace moe

#endif  // MOE_KERNELS_TOPK_GATE_TOPK_GATE_CPU_H_
