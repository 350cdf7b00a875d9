// Where float32 sums wait between the depth blocks of a product. Compiled once per SIMD target.
#if defined(MOE_KERNELS_GROUPED_GEMM_GEMM_SUMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOE_KERNELS_GROUPED_GEMM_GEMM_SUMS_INL_H_
#undef MOE_KERNELS_GROUPED_GEMM_GEMM_SUMS_INL_H_
#else
#define MOE_KERNELS_GROUPED_GEMM_GEMM_SUMS_INL_H_
#endif

#include <type_traits>

#include <hwy/highway.h>

#include "kernels/grouped_gemm/gemm_pack-inl.h"
#include "kernels/grouped_gemm/gemm_panels.h"
#include "kernels/grouped_gemm/gemm_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::gemm {
namespace HWY_NAMESPACE {

// Where the float32 sums of a panel's columns are kept: in c itself if its elements are float32,
// whole tiles fit and there is one depth block, else in the slot, row behind row. (Rows of c may
// lie a power of two apart and push each other out of cache between depth blocks.)
template <class T, class TOut>
class Sums {
 public:
  Sums(const Problem<T, TOut>& problem, const Block& block, const Panel& panel, const Slot& slot)
      : out_(problem.c.data() + block.row_begin * problem.c.stride() + panel.col),
        out_stride_(problem.c.stride()),
        rows_(block.row_end - block.row_begin),
        cols_(panel.cols),
        cols_padded_((cols_ + kTileCols - 1) / kTileCols * kTileCols),
        direct_(std::is_same_v<TOut, float> && cols_ == cols_padded_ && panel.first && panel.last),
        scratch_(slot.sums) {}

  bool direct() const { return direct_; }
  float* data() const {
    if constexpr (std::is_same_v<TOut, float>) {
      if (direct()) return out_;
    }
    return scratch_;
  }
  int64_t stride() const { return direct() ? out_stride_ : cols_padded_; }

  // Before the first depth block of an addition.
  void Load() const {
    if (direct()) return;
    for (int64_t i = 0; i < rows_; ++i) {
      Convert(out_ + i * out_stride_, cols_, scratch_ + i * cols_padded_);
    }
  }
  // After the last depth block.
  void Store() const {
    if (direct()) return;
    for (int64_t i = 0; i < rows_; ++i) {
      Convert(scratch_ + i * cols_padded_, cols_, out_ + i * out_stride_);
    }
  }

 private:
  TOut* out_;
  int64_t out_stride_;
  int64_t rows_;
  int64_t cols_;
  int64_t cols_padded_;
  bool direct_;
  float* scratch_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moe::gemm
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
