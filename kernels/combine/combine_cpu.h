// The CPU paths of combine.h. Internal: callers include combine.h.
#ifndef MOE_KERNELS_COMBINE_COMBINE_CPU_H_
#define MOE_KERNELS_COMBINE_COMBINE_CPU_H_

#include <cstdint>

#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/parallel.h"
#include "kernels/base/tensor_view.h"

namespace moe::combine {

// The arguments of CombineRows.
template <typename T>
struct Combine {
  MatrixView<const T> rows;
  absl::Span<const int64_t> slot_offset;
  absl::Span<const int32_t> row_of_slot;
  absl::Span<const float> weight;
  MatrixView<T> out;
  Write write = Write::kOverwrite;
};

// The arguments of CombineWeightGradient.
template <typename T>
struct WeightGradient {
  MatrixView<const T> dy;
  MatrixView<const T> rows;
  absl::Span<const int64_t> slot_offset;
  absl::Span<const int32_t> row_of_slot;
  absl::Span<float> d_weight;
};

// The specification, in plain loops.
template <typename T>
void Reference(const Combine<T>& combine);
template <typename T>
void Reference(const WeightGradient<T>& gradient);

// The same bits, vectorised, over `threads`.
template <typename T>
void Run(const Combine<T>& combine, ThreadPool& threads);
template <typename T>
void Run(const WeightGradient<T>& gradient, ThreadPool& threads);

}  // namespace moe::combine

#endif  // MOE_KERNELS_COMBINE_COMBINE_CPU_H_
