// One block of a product on the CPU: pack, multiply, round. Needs fused multiply-add (x86-64-v3,
// AVX-512 or NEON); where the CPU has none, the plain loops of the specification run instead.
#include <type_traits>

#include "kernels/grouped_gemm/gemm_blocks.h"

// Two x86 targets with FMA are enough, and every target costs compile time. Tiles need vectors of
// known size, which SVE and RVV do not have.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/grouped_gemm/grouped_gemm_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#if HWY_NATIVE_FMA
#include "kernels/grouped_gemm/gemm_pack-inl.h"
#include "kernels/grouped_gemm/gemm_tile-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace moe::gemm {
namespace HWY_NAMESPACE {

#if HWY_NATIVE_FMA

// Where a panel's float32 sums are kept between depth blocks: in c itself if its elements are
// float32 and whole tiles fit, else in the slot.
template <class T, class TOut>
class Sums {
 public:
  Sums(const Problem<T, TOut>& problem, const Block& block, int64_t col, int64_t cols, Slot slot)
      : out_(problem.c.data() + block.row_begin * problem.c.stride() + col),
        out_stride_(problem.c.stride()),
        rows_(block.row_end - block.row_begin),
        cols_(cols),
        scratch_(slot.sums()) {}

  float* data() const {
    if constexpr (std::is_same_v<TOut, float>) {
      if (direct()) return out_;
    }
    return scratch_;
  }
  int64_t stride() const { return direct() ? out_stride_ : kPanelCols; }

  // Before the first depth block of an addition.
  void Load() const {
    if (direct()) return;
    for (int64_t i = 0; i < rows_; ++i) {
      Convert(out_ + i * out_stride_, cols_, scratch_ + i * kPanelCols);
    }
  }
  // After the last depth block.
  void Store() const {
    if (direct()) return;
    for (int64_t i = 0; i < rows_; ++i) {
      Convert(scratch_ + i * kPanelCols, cols_, out_ + i * out_stride_);
    }
  }

 private:
  bool direct() const { return std::is_same_v<TOut, float> && cols_ % kTileCols == 0; }

  TOut* out_;
  int64_t out_stride_;
  int64_t rows_;
  int64_t cols_;
  float* scratch_;
};

// All rows of the block times one packed panel.
template <class T, class TOut>
void MultiplyPanel(const Problem<T, TOut>& problem, const Block& block, const EvenCut& tiles,
                   int64_t k, int64_t depth, int64_t cols, Slot slot, float* sums, int64_t stride,
                   bool add) {
  for (int64_t j = 0; j < cols; j += kTileCols) {
    const float* const b = slot.panel() + j * depth;
    for (int64_t t = 0; t < tiles.parts; ++t) {
      const int64_t row = tiles.Begin(t);
      const int64_t rows = tiles.Begin(t + 1) - row;
      float* const c = sums + row * stride + j;
      if (problem.a_layout == Layout::kTransposed) {
        const FloatRows a{slot.a() + row * depth, 1, rows};
        TileOf(rows, a, b, depth, c, stride, add);
        continue;
      }
      const T* const data = problem.a.data() + (block.row_begin + row) * problem.a.stride() + k;
      if constexpr (std::is_same_v<T, float>) {
        TileOf(rows, FloatRows{data, problem.a.stride(), 1}, b, depth, c, stride, add);
      } else {
        TileOf(rows, BFloat16Rows{data, problem.a.stride()}, b, depth, c, stride, add);
      }
    }
  }
}

// Depth blocks in ascending order; each adds to the float32 sums that the one before left. Storing
// and loading a float32 keeps its bits, so an element still is one chain of multiply-adds. Only
// the last panel of a block may need the slot's sums: blocks of bfloat16 outputs have one panel.
template <class T, class TOut>
void Run(const Problem<T, TOut>& problem, const Block& block, Slot slot) {
  const EvenCut tiles(block.row_end - block.row_begin, kTileRows);
  // A product over nothing still writes zeros: one depth block of no steps.
  const EvenCut depths(problem.depth(), kDepthBlock);
  const int64_t last = std::max<int64_t>(depths.parts, 1) - 1;
  for (int64_t i = 0; i <= last; ++i) {
    const int64_t k = depths.parts > 0 ? depths.Begin(i) : 0;
    const int64_t depth = depths.parts > 0 ? depths.Begin(i + 1) - k : 0;
    if (problem.a_layout == Layout::kTransposed) {
      PackTransposedRows(problem, k, depth, block.row_begin, tiles, slot.a());
    }
    for (int64_t col = block.col_begin; col < block.col_end; col += kPanelCols) {
      const int64_t cols = std::min(kPanelCols, block.col_end - col);
      const Sums<T, TOut> sums(problem, block, col, cols, slot);
      if (i == 0 && problem.write == Write::kAdd) sums.Load();
      PackPanel(problem, k, depth, col, cols, slot.panel());
      MultiplyPanel(problem, block, tiles, k, depth, cols, slot, sums.data(), sums.stride(),
                    i > 0 || problem.write == Write::kAdd);
      if (i == last) sums.Store();
    }
  }
}

#else

template <class T, class TOut>
void Run(const Problem<T, TOut>& problem, const Block& block, Slot) {
  const auto cut = [](auto m, int64_t row, int64_t rows, int64_t col, int64_t cols) {
    return decltype(m)(m.data() + row * m.stride() + col, rows, cols, m.stride());
  };
  const int64_t rows = block.row_end - block.row_begin;
  const int64_t cols = block.col_end - block.col_begin;
  const int64_t depth = problem.depth();
  Problem<T, TOut> part = problem;
  part.a = problem.a_layout == Layout::kPlain ? cut(part.a, block.row_begin, rows, 0, depth)
                                              : cut(part.a, 0, depth, block.row_begin, rows);
  part.b = problem.b_layout == Layout::kPlain ? cut(part.b, 0, depth, block.col_begin, cols)
                                              : cut(part.b, block.col_begin, cols, 0, depth);
  part.c = cut(part.c, block.row_begin, rows, block.col_begin, cols);
  Reference(part);
}

#endif  // HWY_NATIVE_FMA

void RunFloat(const Problem<float, float>& problem, const Block& block, Slot slot) {
  Run(problem, block, slot);
}
void RunBFloat16(const Problem<BFloat16, BFloat16>& problem, const Block& block, Slot slot) {
  Run(problem, block, slot);
}
void RunBFloat16ToFloat(const Problem<BFloat16, float>& problem, const Block& block, Slot slot) {
  Run(problem, block, slot);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moe::gemm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::gemm {

HWY_EXPORT(RunFloat);
HWY_EXPORT(RunBFloat16);
HWY_EXPORT(RunBFloat16ToFloat);

void RunBlock(const Problem<float, float>& problem, const Block& block, Slot slot) {
  HWY_DYNAMIC_DISPATCH(RunFloat)(problem, block, slot);
}
void RunBlock(const Problem<BFloat16, BFloat16>& problem, const Block& block, Slot slot) {
  HWY_DYNAMIC_DISPATCH(RunBFloat16)(problem, block, slot);
}
void RunBlock(const Problem<BFloat16, float>& problem, const Block& block, Slot slot) {
  HWY_DYNAMIC_DISPATCH(RunBFloat16ToFloat)(problem, block, slot);
}

}  // namespace moe::gemm
#endif  // HWY_ONCE
