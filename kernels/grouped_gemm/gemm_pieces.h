// What one call of the register tile multiplies, and where its sums are. Internal.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_PIECES_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_PIECES_H_

#include <cstdint>

#include <absl/types/span.h>

namespace moe::gemm {

// Leaves that wait within one call: log2 of the most.
inline constexpr int kMaxWaiting = 4;

// Words that follow each other in rows of a and columns of b, from word `a` and `b` of those on.
struct TilePiece {
  int64_t a, b, words;
  // Where a leaf ends here: how many of those that wait are added to it, the last one first; the
  // sum waits then, unless it is the last. Negative: the leaf goes on with the next piece.
  int folds;
};

// Sums start from those in `data` if `continues`, else from 0. At the end `folds` sums that wait
// before them, each `node` floats before the other, are added, and they go where the last of these
// was.
struct TileSums {
  float* data;
  int64_t stride;
  bool continues = false;
  int folds = 0;
  int64_t node = 0;
};

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_PIECES_H_
