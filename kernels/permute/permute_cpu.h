// The CPU paths of permute.h. Internal: callers include permute.h.
#ifndef MOE_KERNELS_PERMUTE_PERMUTE_CPU_H_
#define MOE_KERNELS_PERMUTE_PERMUTE_CPU_H_

#include <cstdint>

#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/parallel.h"
#include "kernels/base/tensor_view.h"

namespace moe::permute {

// Every gather of permute.h as one problem: out[i] = scale[i] * in[view[i]][row[i]].
template <typename T>
struct Gather {
  absl::Span<const MatrixView<const T>> in;
  absl::Span<const int32_t> source_view;  // [N], or empty: all rows are of in[0]
  absl::Span<const int32_t> source_row;   // [N], -1 = a zero row
  absl::Span<const float> scale;          // [N], or empty: rows are copied
  MatrixView<T> out;                      // [N, H]
};

// The specification, in plain loops.
template <typename T>
void Reference(const Gather<T>& gather);

// The same bits, vectorised, over `threads`.
template <typename T>
void Run(const Gather<T>& gather, ThreadPool& threads);

// to[h] = T(scale * from[h]) for h in [0, n).
void ScaleRow(const float* from, float scale, float* to, int64_t n);
void ScaleRow(const BFloat16* from, float scale, BFloat16* to, int64_t n);
void ScaleRow(const Float16* from, float scale, Float16* to, int64_t n);

}  // namespace moe::permute

#endif  // MOE_KERNELS_PERMUTE_PERMUTE_CPU_H_
