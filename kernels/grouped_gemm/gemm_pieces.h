// What one call of the register tile multiplies, where its sums are, and what it fetches meanwhile.
// Internal.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_PIECES_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_PIECES_H_

#include <cstdint>

#include <absl/types/span.h>
#include <hwy/base.h>

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

// Walks rows of memory, cache line by cache line. Weights of a mixture seldom are in cache, and a
// panel takes less time to multiply than to load: neither may wait for the other. (Rows of a are
// few, used again and again, and left to the hardware.)
template <bool kForWrite>
class LinePrefetcher {
 public:
  // Steps of a tile between two bursts: few, because a core has 10 to 16 line buffers, and a longer
  // burst waits for them. And bytes of a cache line.
  static constexpr int64_t kSteps = 4;
  static constexpr int64_t kLine = 64;

  LinePrefetcher() = default;
  // `rows` rows of `row_bytes` bytes, `stride_bytes` apart, spread over `steps` steps of tiles.
  LinePrefetcher(const void* data, int64_t rows, int64_t row_bytes, int64_t stride_bytes,
                 int64_t steps)
      : LinePrefetcher(data, 1, 0, rows, row_bytes, stride_bytes, steps) {}
  // `parts` times as many, `part_bytes` apart.
  LinePrefetcher(const void* data, int64_t parts, int64_t part_bytes, int64_t rows,
                 int64_t row_bytes, int64_t stride_bytes, int64_t steps)
      : line_(static_cast<const char*>(data)) {
    // Without gaps they are one row: fewer ends, none of which the tile's branches foresee.
    if (row_bytes == stride_bytes) {
      row_bytes *= rows;
      stride_bytes = row_bytes;
      rows = 1;
    }
    row_end_ = line_ + row_bytes;
    row_bytes_ = row_bytes;
    stride_bytes_ = stride_bytes;
    rows_left_ = rows_ = rows;
    parts_left_ = parts;
    to_next_part_ = part_bytes - rows * stride_bytes;
    const int64_t lines = parts * rows * (row_bytes / kLine + 1), bursts = steps / kSteps + 1;
    lines_per_burst_ = (lines + bursts - 1) / bursts;
  }

  HWY_INLINE void Burst() {
    for (int64_t i = 0; i < lines_per_burst_; ++i) {
      // Into the second-level cache: the first is full of what is multiplied now.
      __builtin_prefetch(line_, /*rw=*/kForWrite, /*locality=*/2);
      line_ += kLine;
      if (HWY_UNLIKELY(line_ >= row_end_)) NextRow();
    }
  }

 private:
  // Inline: a call would spill the tile's registers.
  HWY_INLINE void NextRow() {
    row_end_ += stride_bytes_;
    line_ = row_end_ - row_bytes_;
    if (--rows_left_ > 0) return;
    if (--parts_left_ <= 0) lines_per_burst_ = 0;
    line_ += to_next_part_;
    row_end_ += to_next_part_;
    rows_left_ = rows_;
  }

  const char* line_ = nullptr;
  const char* row_end_ = nullptr;
  int64_t row_bytes_ = 0;
  int64_t stride_bytes_ = 0;
  int64_t rows_left_ = 0, rows_ = 0;
  int64_t parts_left_ = 0, to_next_part_ = 0;
  int64_t lines_per_burst_ = 0;
};

using Prefetcher = LinePrefetcher<false>;      // what is multiplied next
using WritePrefetcher = LinePrefetcher<true>;  // where the tiles to come go

// What a tile fetches while it multiplies.
struct Prefetchers {
  Prefetcher next;
  WritePrefetcher output;
};

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_PIECES_H_
