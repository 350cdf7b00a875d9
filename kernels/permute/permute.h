// Row gathers of dispatch (token order -> send order -> expert order).
#ifndef MOE_KERNELS_PERMUTE_PERMUTE_H_
#define MOE_KERNELS_PERMUTE_PERMUTE_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace moe {

// out[i, :] = in[source_row[i], :] for i in [0, N).
//
//   in          [T, H]  any strides, contiguous columns
//   source_row  [N]     values in [0, T); -1 writes a zero row (capacity padding)
//   out         [N, H]  must not overlap `in`
//
// All three are memory of stream.device() and must stay valid until the stream passes this point.
// Enqueues and returns; bitwise deterministic; reads N*H and writes N*H elements.
//
// Errors: kInvalidArgument if N or H disagree. Indices out of range are a bug in the caller:
// undefined in release builds, trapped in debug builds.
// Instantiated for float, BFloat16 and Float16.
template <typename T>
absl::Status GatherRows(MatrixView<const T> in, absl::Span<const int32_t> source_row,
                        MatrixView<T> out, Stream& stream);

// out[i, :] = scale[i] * in[source_row[i], :], the product computed in float32 and rounded to T
// once.
//   scale [N] float32. Rows with source_row -1 are zero.
// Used by combine's backward between ranks, which sends the token's dy, scaled by the combine
// weight.
template <typename T>
absl::Status GatherScaledRows(MatrixView<const T> in, absl::Span<const int32_t> source_row,
                              absl::Span<const float> scale, MatrixView<T> out, Stream& stream);

// out = in, [N, H], any strides: some columns of rows, for example. Otherwise as GatherRows.
template <typename T>
absl::Status CopyRows(MatrixView<const T> in, MatrixView<T> out, Stream& stream);

// Slots [slots] of T tokens and the rows [N] that they go to, in both directions.
struct TokenRows {
  absl::Span<const int64_t> slot_offset;   // [T + 1] as in combine.h
  absl::Span<const int32_t> row_of_slot;   // [slots] first_row + row; other values: none of these
  absl::Span<const int32_t> token_of_row;  // [N] -1 = no slot has this row
  int64_t first_row = 0;                   // where `out` is a range of more rows
};

// out[row_of_slot[s] - first_row, :] = in[t, :] for the slots s of each token t, times weight[s]
// (float32, as above) unless `weight` is empty. Rows without a slot are zero; no two slots share
// one.
//   in  [T, H], out [N, H]  as above
// The bits of GatherRows by token_of_row, but reads T*H elements instead of N*H.
// Errors: as above. On CUDA the number of slots, which is in slot_offset, is not checked.
template <typename T>
absl::Status GatherTokens(MatrixView<const T> in, const TokenRows& rows,
                          absl::Span<const float> weight, MatrixView<T> out, Stream& stream);

// out[i, :] = in[source_view[i]][source_row[i], :], times scale[i] (as above) unless `scale` is
// empty: rows are read directly from the memory of several ranks.
//   in           one view per rank, [*, H], of memory that the stream's device can read; the span
//                itself is host memory on every device and is read before the call returns
//   source_view  [N]  values in [0, in.size()); ignored where source_row is -1
// On CUDA a launch takes 64 views; each further 64 take another, which reads the N indices again.
template <typename T>
absl::Status GatherRowsOfMany(absl::Span<const MatrixView<const T>> in,
                              absl::Span<const int32_t> source_view,
                              absl::Span<const int32_t> source_row, absl::Span<const float> scale,
                              MatrixView<T> out, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_PERMUTE_PERMUTE_H_
