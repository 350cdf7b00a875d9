// The weighted sum of a token's expert rows, and its backward.
#ifndef MOE_KERNELS_COMBINE_COMBINE_H_
#define MOE_KERNELS_COMBINE_COMBINE_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace moe {

// out[t, :] (+)= sum over slots s of token t, ascending, of weight[s] * rows[row_of_slot[s], :]
//
//   rows         [S, H]  expert outputs, returned to the rank of the token
//   slot_offset  [T + 1] slots of token t are slot_offset[t] .. slot_offset[t + 1]
//   row_of_slot  [slots] row in `rows`; -1 = dropped, contributes nothing
//   weight       [slots] float32; empty = all 1 (dispatch backward)
//   out          [T, H]  kAdd starts from the old value
//
// float32 accumulation in choice order, one fused multiply-add a term (a plain add when `weight` is
// empty), rounded to T once; no atomics. Source: combine of GShard, arXiv:2006.16668.
// Errors: kInvalidArgument if shapes disagree. On CUDA all arguments are device memory, so that the
// number of slots, which is in slot_offset, is not checked there.
template <typename T>
absl::Status CombineRows(MatrixView<const T> rows, absl::Span<const int64_t> slot_offset,
                         absl::Span<const int32_t> row_of_slot, absl::Span<const float> weight,
                         MatrixView<T> out, Write write, Stream& stream);

// d_weight[s] = <dy[token of s, :], rows[row_of_slot[s], :]>; 0 for dropped slots.
// dy and an expert's output are nearly orthogonal, so the dot product cancels: it is WideDot
// (kernels/base/fixed_dot.h), float64 in a fixed order, rounded to float32 once.
template <typename T>
absl::Status CombineWeightGradient(MatrixView<const T> dy, MatrixView<const T> rows,
                                   absl::Span<const int64_t> slot_offset,
                                   absl::Span<const int32_t> row_of_slot,
                                   absl::Span<float> d_weight, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_COMBINE_COMBINE_H_
