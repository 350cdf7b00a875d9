// Causal attention, multi-head or grouped-query, with rotary positions over packed sequences.
#ifndef MOE_KERNELS_ATTENTION_ATTENTION_H_
#define MOE_KERNELS_ATTENTION_ATTENTION_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"

namespace moe {

// Heads are adjacent in the columns: head a is columns [a * D, (a + 1) * D), D = cols / heads.
// sequence_offsets [B + 1] cuts the T rows into sequences that do not attend to each other. It is
// host memory on every device; all else is memory of the stream's device, workspaces included.
struct AttentionShape {
  int heads = 1;
  absl::Span<const int64_t> sequence_offsets;
  int64_t first_position = 0;  // position of the first row of every sequence here; rotary, on CPUs

  // kInvalidArgument unless the heads divide `cols` and the sequences cover `rows`.
  absl::Status Check(absl::string_view function, int64_t rows, int64_t cols) const;
  // Rows of the longest sequence; 0 without sequences.
  int64_t LongestSequence() const;
};

// +1 rotates forward, -1 is the inverse rotation (backward).
enum class RotaryDirection : int8_t { kForward = 1, kBackward = -1 };

// Rotates pairs (d, d + D/2) of every head by position * base^(-2d/D), in place; positions count
// from first_position at the start of the row's sequence. D must be even. Su et al. (2021),
// arXiv:2104.09864, in the half-split layout of Llama. Angles are computed in float64; their
// cosines and sines are kept for the process, one table per (base, D, device), so that every device
// gives the same bits. A call that needs more positions than earlier ones waits for a longer table.
// Scratch: CUDA takes the offsets, B + 1 int64, at the call; the caller releases its mark.
template <typename T>
absl::Status ApplyRotary(const AttentionShape& shape, float base, RotaryDirection direction,
                         MatrixView<T> x, Workspace& workspace, Stream& stream);

// out = softmax(q k^T / sqrt(D), causal) v, per head and sequence. q, out [T, heads * D]; k, v
// [T, kv_heads * D], where kv_heads, from their columns, divides heads: query heads
// [g * heads / kv_heads, (g + 1) * heads / kv_heads) share key-value head g (Ainslie et al., 2023,
// arXiv:2305.13245). log_sum_exp [T, heads] float32 is kept for backward.
// A token's bits depend on its own sequence only: float32, keys in ascending order. Later tokens,
// even a NaN in them, do not change a bit of it. CPU: two passes, K and V of a head packed once.
// CUDA: one pass with a running maximum, within float32's roundings of the CPU's results; in 16
// bits probabilities are rounded to T before they multiply values (attention_cuda.h).
// Scratch, taken at the call; the caller releases its mark. CPU: about n (2 D + 8) floats a thread
// for the longest sequence n (backward n (5 D + 16)). CUDA: B + 1 int64, and for backward T * heads
// floats.
// Errors: kInvalidArgument if shapes disagree, the sequences do not cover the T rows or, on CUDA,
// for more than 65535 heads.
template <typename T>
absl::Status CausalAttention(const AttentionShape& shape, MatrixView<const T> q,
                             MatrixView<const T> k, MatrixView<const T> v, MatrixView<T> out,
                             MatrixView<float> log_sum_exp, Workspace& workspace, Stream& stream);

// CausalAttention for the last n tokens of one sequence, given the keys and values of all m tokens:
// q, out [n, heads * D], k, v [m, kv_heads * D], m >= n; row r of q is token m - n + r. The bits
// are those of CausalAttention of all m tokens. Scratch: as above for m tokens. Errors: as above;
// kUnimplemented on CUDA.
template <typename T>
absl::Status CausalAttentionOfLast(int heads, MatrixView<const T> q, MatrixView<const T> k,
                                   MatrixView<const T> v, MatrixView<T> out, Workspace& workspace,
                                   Stream& stream);

// d_q, d_k, d_v (overwritten) from d_out and what forward saved. An element of d_k or d_v is summed
// in one chain: over the query heads of its key-value head in ascending order, and over the queries
// of each in ascending order.
template <typename T>
absl::Status CausalAttentionBackward(const AttentionShape& shape, MatrixView<const T> q,
                                     MatrixView<const T> k, MatrixView<const T> v,
                                     MatrixView<const T> out, MatrixView<const float> log_sum_exp,
                                     MatrixView<const T> d_out, MatrixView<T> d_q,
                                     MatrixView<T> d_k, MatrixView<T> d_v, Workspace& workspace,
                                     Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_ATTENTION_ATTENTION_H_
