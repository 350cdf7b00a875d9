// Fetches what is multiplied next while the tiles multiply. Internal.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_PREFETCH_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_PREFETCH_H_

#include <cstdint>

#include <hwy/base.h>

namespace moe::gemm {

// Walks two pieces of memory, cache line by cache line. Weights of a mixture seldom are in cache,
// and a packed panel takes less time to multiply than to load: neither may wait for the other.
class Prefetcher {
 public:
  // Steps of a tile between two bursts, so that the loop over steps stays free of address
  // arithmetic; and bytes of a cache line.
  static constexpr int64_t kSteps = 16;
  static constexpr int64_t kLine = 64;

  // `rows` rows of `row_bytes` bytes, `stride_bytes` apart.
  struct Rows {
    const void* data = nullptr;
    int64_t rows = 0;
    int64_t row_bytes = 0;
    int64_t stride_bytes = 0;

    int64_t lines() const { return rows * (row_bytes / kLine + 1); }
  };

  Prefetcher() = default;
  // First `first`, then `second`, spread over `steps` steps of tiles.
  Prefetcher(const Rows& first, const Rows& second, int64_t steps) : second_(second) {
    Begin(first);
    const int64_t bursts = steps / kSteps + 1;
    lines_per_burst_ = (first.lines() + second.lines() + bursts - 1) / bursts;
  }

  HWY_INLINE void Burst() {
    for (int64_t i = 0; i < lines_per_burst_; ++i) {
      if (rows_left_ == 0) {
        if (second_.rows == 0) return;
        Begin(second_);
        second_.rows = 0;
      }
      // Into the second-level cache: the first is full of what is multiplied now.
      __builtin_prefetch(row_ + offset_, /*rw=*/0, /*locality=*/2);
      offset_ += kLine;
      if (offset_ < row_bytes_) continue;
      offset_ = 0;
      row_ += stride_bytes_;
      --rows_left_;
    }
  }

 private:
  void Begin(const Rows& rows) {
    row_ = static_cast<const char*>(rows.data);
    row_bytes_ = rows.row_bytes;
    stride_bytes_ = rows.stride_bytes;
    rows_left_ = rows.rows;
  }

  const char* row_ = nullptr;
  int64_t row_bytes_ = 0;
  int64_t stride_bytes_ = 0;
  int64_t rows_left_ = 0;
  int64_t offset_ = 0;
  Rows second_;
  int64_t lines_per_burst_ = 0;
};

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_PREFETCH_H_
