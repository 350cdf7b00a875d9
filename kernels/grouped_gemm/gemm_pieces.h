// What one call of the register tile multiplies, and where its sums are. Internal.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_PIECES_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_PIECES_H_

#include <cstdint>

#include <absl/types/span.h>

namespace moe::gemm {

// Sums that wait within one call beside those in c: of leaves, log2 of the most of a tree.
inline constexpr int kMaxWaiting = 4;

// Words that follow each other in rows of a and columns of b, from word `a` and `b` of those on.
struct TilePiece {
  int64_t a, b, words;
  // Where a chain ends here: how many of the sums that wait are added to its own, the last one
  // first; the sum waits then, the first that does in c. Negative: the chain goes on with the next
  // piece.
  int folds;
};

// Where sums go. If `continues`, those of the depth blocks before wait there. At the end `folds`
// sums that wait before them, each `node` floats before the other, are added, and they go where the
// last of these was.
struct TileSums {
  float* data;
  int64_t stride;
  bool continues = false;
  int folds = 0;
  int64_t node = 0;
};

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_PIECES_H_
