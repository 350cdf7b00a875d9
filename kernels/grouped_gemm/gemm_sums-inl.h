// Where float32 sums wait between the depth blocks of a product. Compiled once per SIMD target.
#if defined(MOE_KERNELS_GROUPED_GEMM_GEMM_SUMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOE_KERNELS_GROUPED_GEMM_GEMM_SUMS_INL_H_
#undef MOE_KERNELS_GROUPED_GEMM_GEMM_SUMS_INL_H_
#else
#define MOE_KERNELS_GROUPED_GEMM_GEMM_SUMS_INL_H_
#endif

#include <algorithm>
#include <type_traits>

#include <hwy/highway.h>

#include "kernels/exact_sum/exact_sum-inl.h"
#include "kernels/grouped_gemm/gemm_pack-inl.h"
#include "kernels/grouped_gemm/gemm_panels.h"
#include "kernels/grouped_gemm/gemm_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::gemm {
namespace HWY_NAMESPACE {

// Where the float32 sums of a panel's tiles are kept until they become elements of c, or are added
// to integers:
//   in c itself     float32 elements, one depth block, a whole tile
//   tile by tile    one depth block: in the same few lines of the slot, which stay in the first
//                   cache
//   row behind row  in the slot, between depth blocks, each waiting node of a tree in a place of
//                   its own. (Rows of c may lie a power of two apart and push each other out of
//                   cache.)
template <class T, class TOut>
class Sums {
 public:
  Sums(const Problem<T, TOut>& problem, const Block& block, const Panel& panel, const Slot& slot)
      : c_(problem.c),
        exact_(problem.exact),
        exact_write_(panel.segment == 0 ? problem.exact.write : SumWrite::kAdd),
        adds_(problem.write == Write::kAdd),
        panel_(panel),
        row_(block.row_begin),
        cols_padded_((panel.cols + kTileCols - 1) / kTileCols * kTileCols),
        slot_(slot.sums),
        node_(slot.node) {}

  // The sums of the tile whose first element is (row, j) of the panel. It adds to those of its own
  // earlier depth blocks, or to Load's.
  TileSums Tile(int64_t row, int64_t j) const {
    return {SumsOf(panel_.waiting, row, j), stride(j), !panel_.first || adds_, panel_.folds, node_};
  }
  // Before the first depth block of an addition.
  void Load(int64_t row, int64_t rows, int64_t j) const {
    if (!panel_.first || !adds_ || InPlace(j)) return;
    for (int64_t i = 0; i < rows; ++i) {
      Convert(Output(row + i, j), Cols(j), SumsOf(0, row, j) + i * stride(j));
    }
  }
  // After the last depth block. Returns how many sums the exact grid could not hold.
  int64_t Store(int64_t row, int64_t rows, int64_t j) const {
    if (!panel_.last || InPlace(j)) return 0;
    const float* const tile = SumsOf(0, row, j);
    int64_t bad = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const float* const from = tile + i * stride(j);
      if (exact_.used()) {
        bad += ::moe::HWY_NAMESPACE::Accumulate(from, exact_.inverse_unit, exact_.limit,
                                                exact_write_, ExactOutput(row + i, j), Cols(j));
      } else {
        Convert(from, Cols(j), Output(row + i, j));
      }
    }
    return bad;
  }

  // Fetches what Load and Store touch of a strip of `rows` rows, during `steps` steps of tiles.
  WritePrefetcher PrefetchOutput(int64_t rows, int64_t j, int64_t steps) const {
    if (!panel_.last && !(panel_.first && adds_)) return {};
    if (exact_.used()) {
      if (exact_write_ == SumWrite::kStreamed) return {};
      return {ExactOutput(0, j), rows, Cols(j) * int64_t{sizeof(int64_t)},
              exact_.sum.stride() * int64_t{sizeof(int64_t)}, steps};
    }
    return {Output(0, j), rows, Cols(j) * int64_t{sizeof(TOut)},
            c_.stride() * int64_t{sizeof(TOut)}, steps};
  }

 private:
  // `node`: how many nodes of a tree wait beside these sums.
  float* SumsOf(int64_t node, int64_t row, int64_t j) const {
    if (InPlace(j)) {
      if constexpr (std::is_same_v<TOut, float>) return c_.row(row_ + row) + panel_.col + j;
    }
    return OneDepthBlock() ? slot_ : slot_ + node * node_ + row * cols_padded_ + j;
  }
  int64_t stride(int64_t j) const {
    if (InPlace(j)) return c_.stride();
    return OneDepthBlock() ? kTileCols : cols_padded_;
  }
  bool OneDepthBlock() const { return panel_.first && panel_.last && panel_.waiting == 0; }
  int64_t Cols(int64_t j) const { return std::min(kTileCols, panel_.cols - j); }
  bool InPlace(int64_t j) const {
    return std::is_same_v<TOut, float> && !exact_.used() && OneDepthBlock() && Cols(j) == kTileCols;
  }
  TOut* Output(int64_t row, int64_t j) const { return c_.row(row_ + row) + panel_.col + j; }
  int64_t* ExactOutput(int64_t row, int64_t j) const {
    return exact_.sum.row(row_ + row) + panel_.col + j;
  }

  MatrixView<TOut> c_;
  ExactSink exact_;
  SumWrite exact_write_;  // of this panel's segment
  bool adds_;
  Panel panel_;
  int64_t row_;  // of c, where the block begins
  int64_t cols_padded_;
  float* slot_;
  int64_t node_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moe::gemm
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
