// Arguments of one call of the register tile: what it multiplies, where its sums go, and what it
// prefetches. Internal.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_PIECES_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_PIECES_H_

#include <cstdint>

#include <absl/types/span.h>
#include <hwy/base.h>

namespace moe::gemm {

// The most pending sums within one call beside those in c: of leaves, log2 of the most leaves of a
// tree.
inline constexpr int kMaxWaiting = 4;

// Consecutive words of rows of a and columns of b, from words `a` and `b` of them on.
struct TilePiece {
  int64_t a, b, words;
  // Where a chain ends here: how many pending sums are added to its own, the latest first; the
  // result is then pending, the first one in c. Negative: the chain continues in the next piece.
  int folds;
};

// Destination of sums. If `continues`, it holds the sums of earlier depth blocks. At the end
// `folds` pending sums, each `node` floats before the next, are added, and the result replaces the
// earliest of them.
struct TileSums {
  float* data;
  int64_t stride;
  bool continues = false;
  int folds = 0;
  int64_t node = 0;
};

// Prefetches rows of memory, cache line by cache line. The weights of a mixture are seldom in
// cache, and multiplying a panel takes less time than loading it: the two must overlap. (Rows of a
// are few and used repeatedly; the hardware prefetches them.)
template <bool kForWrite>
class LinePrefetcher {
 public:
  // Steps of a tile between two bursts: few, because a core has 10 to 16 line buffers, and a longer
  // burst stalls on them. kLine: bytes of a cache line.
  static constexpr int64_t kSteps = 4;
  static constexpr int64_t kLine = 64;

  LinePrefetcher() = default;
  // `rows` rows of `row_bytes` bytes, `stride_bytes` apart, spread over `steps` steps of tiles.
  LinePrefetcher(const void* data, int64_t rows, int64_t row_bytes, int64_t stride_bytes,
                 int64_t steps)
      : LinePrefetcher(data, 1, 0, rows, row_bytes, stride_bytes, steps) {}
  // `parts` times as many rows, `part_bytes` apart.
  LinePrefetcher(const void* data, int64_t parts, int64_t part_bytes, int64_t rows,
                 int64_t row_bytes, int64_t stride_bytes, int64_t steps)
      : line_(static_cast<const char*>(data)) {
    // Rows without gaps are one row: fewer row ends, which are branches that the CPU mispredicts.
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
      // To the second-level cache: the first is full of current operands.
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

using Prefetcher = LinePrefetcher<false>;      // for the next operands
using WritePrefetcher = LinePrefetcher<true>;  // for the next tiles' outputs

// What a tile prefetches while it multiplies.
struct Prefetchers {
  HWY_INLINE void Burst() {
    next.Burst();
    output.Burst();
  }

  Prefetcher next;
  WritePrefetcher output;
};

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_PIECES_H_
