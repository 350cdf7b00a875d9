// One block of a product on the CPU: pack, multiply, round. Needs fused multiply-add (x86-64-v3,
// AVX-512 or NEON); where the CPU has none, the plain loops of the specification run instead.
#include <type_traits>
#include <utility>

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

// All rows of the block times one packed panel.
template <class T, class TOut>
void MultiplyPanel(const Problem<T, TOut>& problem, const Block& block, const EvenCut& tiles,
                   const Panel& panel, const Slot& slot, const Sums<T, TOut>& sums,
                   Prefetcher& next) {
  const bool add = !panel.first || problem.write == Write::kAdd;
  const int64_t stride = sums.stride();
  for (int64_t j = 0; j < panel.cols; j += kTileCols) {
    const float* const b = slot.panel + j * panel.depth;
    for (int64_t t = 0; t < tiles.parts; ++t) {
      const int64_t row = tiles.Begin(t);
      const int64_t rows = tiles.Begin(t + 1) - row;
      float* const c = sums.data() + row * stride + j;
      if (sums.direct() && t + 2 < tiles.parts) PrefetchForWrite(c + rows * stride, rows, stride);
      if (problem.a_layout == Layout::kTransposed) {
        const FloatRows a{slot.a + row * panel.depth, 1, rows};
        TileOf(rows, a, b, panel.depth, c, stride, add, next);
        continue;
      }
      if constexpr (kPacksPlainRows<T>) {
        const FloatRows a{slot.a + row * panel.depth, panel.depth, 1};
        TileOf(rows, a, b, panel.depth, c, stride, add, next);
        continue;
      }
      const T* const data =
          problem.a.data() + (block.row_begin + row) * problem.a.stride() + panel.k;
      if constexpr (std::is_same_v<T, float>) {
        TileOf(rows, FloatRows{data, problem.a.stride(), 1}, b, panel.depth, c, stride, add, next);
      } else if constexpr (std::is_same_v<T, BFloat16>) {
        TileOf(rows, BFloat16Rows{data, problem.a.stride()}, b, panel.depth, c, stride, add, next);
      }
    }
  }
}

template <class T, class TOut>
void Pack(const Problem<T, TOut>& problem, const Panel& panel, float* to) {
  const int64_t stride = problem.b.stride();
  if (problem.b_layout == Layout::kTransposed) {
    const T* const from = problem.b.data() + panel.col * stride + panel.k;
    return PackTransposedPanel(from, stride, panel.cols, panel.depth, to);
  }
  PackPlainPanel(problem.b.data() + panel.k * stride + panel.col, stride, panel.cols, panel.depth,
                 to);
}

template <class T, class TOut>
void PackA(const Problem<T, TOut>& problem, const Block& block, const EvenCut& tiles,
           const Panel& panel, float* to) {
  if (problem.a_layout == Layout::kTransposed) {
    return PackTransposedRows(problem, panel.k, panel.depth, block.row_begin, tiles, to);
  }
  PackPlainRows(problem, panel.k, panel.depth, block.row_begin, tiles.total, to);
}

// For the time in which `panel` is multiplied: `next`, and the rows of a if it needs others.
template <class T, class TOut>
Prefetcher PrefetchFor(const Problem<T, TOut>& problem, const Block& block, const Panel& panel,
                       const Panel& next, int64_t tiles) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
  const auto piece = [](const MatrixView<const T>& m, bool transposed, int64_t row, int64_t rows,
                        int64_t col, int64_t cols) -> Prefetcher::Rows {
    if (transposed) {
      std::swap(row, col);
      std::swap(rows, cols);
    }
    return {m.data() + row * m.stride() + col, rows, cols * kBytes, m.stride() * kBytes};
  };
  const int64_t a_rows = next.k == panel.k ? 0 : block.row_end - block.row_begin;
  const int64_t strips = (panel.cols + kTileCols - 1) / kTileCols;
  return {piece(problem.b, problem.b_layout == Layout::kTransposed, next.k, next.depth, next.col,
                next.cols),
          piece(problem.a, problem.a_layout == Layout::kTransposed, block.row_begin, a_rows, next.k,
                next.depth),
          panel.depth * tiles * strips};
}

// Each depth block adds to the float32 sums that the one before left. Storing and loading a float32
// keeps its bits, so an element still is one chain of multiply-adds.
template <class T, class TOut>
void Run(const Problem<T, TOut>& problem, const Block& block, const Slot& slot) {
  const EvenCut tiles(block.row_end - block.row_begin, kTileRows);
  const Panels panels(block, problem.depth(), ShapeFor(problem.b_layout));
  for (int64_t i = 0; i < panels.size(); ++i) {
    const Panel panel = panels.At(i);
    const bool same_rows = i > 0 && panel.first && panel.last;  // one depth block, packed before
    if (PacksRows<T>(problem.a_layout) && !same_rows) {
      PackA(problem, block, tiles, panel, slot.a);
    }
    const Sums<T, TOut> sums(problem, block, panel, slot);
    if (panel.first && problem.write == Write::kAdd) sums.Load();
    Pack(problem, panel, slot.panel);
    Prefetcher next;
    if (i + 1 < panels.size()) {
      next = PrefetchFor(problem, block, panel, panels.At(i + 1), tiles.parts);
    }
    MultiplyPanel(problem, block, tiles, panel, slot, sums, next);
    if (panel.last) sums.Store();
  }
}

#else

template <class T, class TOut>
void Run(const Problem<T, TOut>& problem, const Block& block, const Slot&) {
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

void RunFloat(const Problem<float, float>& problem, const Block& block, const Slot& slot) {
  Run(problem, block, slot);
}
void RunBFloat16(const Problem<BFloat16, BFloat16>& problem, const Block& block, const Slot& slot) {
  Run(problem, block, slot);
}
void RunBFloat16ToFloat(const Problem<BFloat16, float>& problem, const Block& block,
                        const Slot& slot) {
  Run(problem, block, slot);
}
void RunFloat16(const Problem<Float16, Float16>& problem, const Block& block, const Slot& slot) {
  Run(problem, block, slot);
}
void RunFloat16ToFloat(const Problem<Float16, float>& problem, const Block& block,
                       const Slot& slot) {
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
HWY_EXPORT(RunFloat16);
HWY_EXPORT(RunFloat16ToFloat);

void RunBlock(const Problem<float, float>& problem, const Block& block, const Slot& slot) {
  HWY_DYNAMIC_DISPATCH(RunFloat)(problem, block, slot);
}
void RunBlock(const Problem<BFloat16, BFloat16>& problem, const Block& block, const Slot& slot) {
  HWY_DYNAMIC_DISPATCH(RunBFloat16)(problem, block, slot);
}
void RunBlock(const Problem<BFloat16, float>& problem, const Block& block, const Slot& slot) {
  HWY_DYNAMIC_DISPATCH(RunBFloat16ToFloat)(problem, block, slot);
}
void RunBlock(const Problem<Float16, Float16>& problem, const Block& block, const Slot& slot) {
  HWY_DYNAMIC_DISPATCH(RunFloat16)(problem, block, slot);
}
void RunBlock(const Problem<Float16, float>& problem, const Block& block, const Slot& slot) {
  HWY_DYNAMIC_DISPATCH(RunFloat16ToFloat)(problem, block, slot);
}

}  // namespace moe::gemm
#endif  // HWY_ONCE
