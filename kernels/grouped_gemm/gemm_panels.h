// The panels of b that one block of a product passes by, in their order. Internal.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_PANELS_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_PANELS_H_

#include <algorithm>
#include <cstdint>

#include "kernels/grouped_gemm/gemm_blocks.h"

namespace moe::gemm {

// A panel of b: `depth` steps from `k`, `cols` columns from `col`.
struct Panel {
  int64_t k, depth, col, cols;
  bool first, last;  // of its columns' depth blocks
};

// The panels of one block, in the order in which they are multiplied: all of some columns, in
// ascending depth, before the next columns.
class Panels {
 public:
  Panels(const Block& block, int64_t depth, const Shape& shape)
      : block_(block),
        depth_(depth),
        panel_cols_(shape.panel_cols),
        depths_(std::max<int64_t>(depth, 1), shape.panel_depth) {}

  int64_t size() const {
    return depths_.parts * ((block_.col_end - block_.col_begin + panel_cols_ - 1) / panel_cols_);
  }
  Panel At(int64_t i) const {
    const int64_t d = i % depths_.parts;
    // A product over nothing still writes zeros: one panel of no steps.
    const int64_t begin = depths_.Begin(d), end = std::min(depths_.Begin(d + 1), depth_);
    const int64_t col = block_.col_begin + i / depths_.parts * panel_cols_;
    return {.k = begin,
            .depth = end - begin,
            .col = col,
            .cols = std::min(panel_cols_, block_.col_end - col),
            .first = d == 0,
            .last = d + 1 == depths_.parts};
  }

 private:
  Block block_;
  int64_t depth_;
  int64_t panel_cols_;
  EvenCut depths_;
};

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_PANELS_H_
