// Biases of rows grouped by expert, and their gradients.
#ifndef MOE_KERNELS_BIAS_BIAS_H_
#define MOE_KERNELS_BIAS_BIAS_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/group_offsets.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace moe {

// y[n, c] = T(float(y[n, c]) + bias[g][c]) for the rows n of group g, in float32, rounded to T
// once.
//
//   y        [N, C]  any stride >= C; columns beyond C are not touched
//   offsets  [L+1]   group g owns rows [offsets[g], offsets[g + 1]); from 0 to N, or to less if
//                    only a device knows them; ascending; groups may be empty
//   bias     [L]     bias[g] is [C]
//
// y, every bias[g] and device offsets are in memory of stream.device() and stay valid until the
// stream passes this point; host offsets and the L spans themselves are read before the call
// returns. Enqueues one task for each group that has, or may have, rows; stream.threads() share the
// rows. Reads and writes N*C elements. An element has the same bits in body or tail, on any number
// of threads, for any N.
// Errors: kInvalidArgument if shapes disagree or offsets do not ascend.
// Instantiated for float, BFloat16 and Float16.
template <typename T>
absl::Status AddBias(MatrixView<T> y, const GroupOffsets& offsets,
                     absl::Span<const absl::Span<const float>> bias, Stream& stream);

// d_bias[c] (+)= sum_n dy[n, c].   One group: the rows of dy [N, C] from the first of `segments` to
// before the last; d_bias [C] float32.
//
// An element starts from 0 (Write::kOverwrite) or from its old value (Write::kAdd) and takes its
// terms in ascending n, one float32 addition each: the same bits on any number of threads and any
// SIMD width. Without rows kOverwrite writes zeros. Threads share the columns. Reads N*C elements.
// Memory, errors and instances as above.
template <typename T>
absl::Status BiasGradient(MatrixView<const T> dy, const GroupOffsets& segments,
                          absl::Span<float> d_bias, Write write, Stream& stream);

// The same over all rows.
template <typename T>
absl::Status BiasGradient(MatrixView<const T> dy, absl::Span<float> d_bias, Write write,
                          Stream& stream) {
  return BiasGradient<T>(dy, {0, dy.rows()}, d_bias, write, stream);
}

}  // namespace moe

#endif  // MOE_KERNELS_BIAS_BIAS_H_
