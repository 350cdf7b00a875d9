// Attention of the query heads that share one key-value head over one sequence on the CPU.
// Instantiated for float, BFloat16 and Float16.
#ifndef MOE_KERNELS_ATTENTION_ATTENTION_CPU_H_
#define MOE_KERNELS_ATTENTION_ATTENTION_CPU_H_

#include <cstdint>

#include "kernels/base/tensor_view.h"

namespace moe {

// Rows of one sequence, columns of G query heads and of their key-value head: q, out, d_out and d_q
// [n, G * D], k, v, d_k and d_v [n, D], log_sum_exp [n, G]. In forward k and v may have more rows:
// q then holds the last rows of the sequence. Forward's log_sum_exp may be empty.
template <typename T>
struct HeadsForward {
  MatrixView<const T> q, k, v;
  MatrixView<T> out;
  MatrixView<float> log_sum_exp;
};

template <typename T>
struct HeadsBackward {
  MatrixView<const T> q, k, v, out, d_out;
  MatrixView<const float> log_sum_exp;
  MatrixView<T> d_q, d_k, d_v;
};

// Blocking of the widest SIMD target: 8 queries a block, 32 keys a panel, 16 lanes.
inline constexpr int64_t kMaxBlockRows = 8;
inline constexpr int64_t kMaxPanelKeys = 32;
constexpr int64_t PaddedDepth(int64_t depth) {
  return (depth + 15) / 16 * 16;
}
constexpr int64_t PaddedTokens(int64_t n) {
  return (n + kMaxPanelKeys - 1) / kMaxPanelKeys * kMaxPanelKeys;
}

// Scratch in float32 elements for a sequence of n tokens. Queries of its last tokens alone need
// that of up to kMaxBlockRows more tokens. Grows with n.
constexpr int64_t HeadForwardScratch(int64_t n, int64_t depth) {
  return PaddedTokens(n) * (depth + PaddedDepth(depth) + kMaxBlockRows) +
         2 * kMaxBlockRows * PaddedDepth(depth);
}
constexpr int64_t HeadBackwardScratch(int64_t n, int64_t depth) {
  return PaddedTokens(n) * (2 * depth + 3 * PaddedDepth(depth) + 2 * kMaxBlockRows) +
         3 * kMaxBlockRows * PaddedDepth(depth);
}

// Hands out the scratch.
class HeadScratch {
 public:
  explicit HeadScratch(float* next) : next_(next) {}
  float* Take(int64_t count) {
    float* const part = next_;
    next_ += count;
    return part;
  }

 private:
  float* next_;
};

// scratch: as many elements as above, 64-byte aligned, with any contents.
template <typename T>
void AttendHeads(const HeadsForward<T>& heads, float* scratch);
template <typename T>
void AttendHeadsBackward(const HeadsBackward<T>& heads, float* scratch);

}  // namespace moe

#endif  // MOE_KERNELS_ATTENTION_ATTENTION_CPU_H_
