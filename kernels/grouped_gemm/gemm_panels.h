// The panels of b that one block of a product passes by, in their order. Internal.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_PANELS_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_PANELS_H_

#include <algorithm>
#include <cstdint>
#include <iterator>

#include <absl/types/span.h>

#include "kernels/grouped_gemm/gemm_blocks.h"

namespace moe::gemm {

// A panel of b: `steps` steps from `k`, `cols` columns from `col`. No columns: no panel.
struct Panel {
  int64_t k = 0, steps = 0, col = 0, cols = 0;
  int64_t depth = 0;                 // its words,
  int64_t word = 0;                  // and an upper bound of those of all segments before it
  bool first = false, last = false;  // of the depth blocks of its columns and segment
  int64_t segment = 0, part = 0;     // which depth block it is
};

// The panels of one block, in the order in which they are multiplied: all of some columns, in
// ascending depth, before the next columns. Depth blocks end where segments do: `segments` has the
// first step of each, and the depth. Words begin anew with each segment.
template <typename T>
class Panels {
 public:
  Panels(const Block& block, absl::Span<const int64_t> segments, const Shape& shape)
      : block_(block), segments_(segments), shape_(shape) {}

  Panel First() const { return At(block_.col_begin, 0, 0); }
  Panel After(const Panel& panel) const {
    if (!panel.last) return At(panel.col, panel.segment, panel.part + 1);
    if (panel.segment + 2 < std::ssize(segments_)) return At(panel.col, panel.segment + 1, 0);
    return At(panel.col + shape_.panel_cols, 0, 0);
  }

 private:
  Panel At(int64_t col, int64_t segment, int64_t part) const {
    if (col >= block_.col_end) return {};
    const int64_t begin = segments_[segment], steps = segments_[segment + 1] - begin;
    // A product over nothing still writes zeros: one panel of no steps.
    const int64_t words = WordsOf<T>(steps);
    const EvenCut depths(std::max<int64_t>(words, 1), shape_.panel_depth);
    const int64_t first = depths.Begin(part), end = std::min(depths.Begin(part + 1), words);
    const int64_t first_step = first * kStepsPerWord<T>;
    return {.k = begin + first_step,
            .steps = std::min(end * kStepsPerWord<T>, steps) - first_step,
            .col = col,
            .cols = std::min(shape_.panel_cols, block_.col_end - col),
            .depth = end - first,
            .word = WordsBefore<T>(begin, segment) + first,
            .first = part == 0,
            .last = part + 1 == depths.parts,
            .segment = segment,
            .part = part};
  }

  Block block_;
  absl::Span<const int64_t> segments_;
  Shape shape_;
};

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_PANELS_H_
