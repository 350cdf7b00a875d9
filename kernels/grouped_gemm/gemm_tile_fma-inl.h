// Products of strips of tiles by fused multiply-adds, for CPUs without a tile unit. Compiled once
// per SIMD target.
#if defined(MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_FMA_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_FMA_INL_H_
#undef MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_FMA_INL_H_
#else
#define MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_FMA_INL_H_
#endif

#include "kernels/base/simd-inl.h"
#include "kernels/grouped_gemm/gemm_blocks.h"
#include "kernels/grouped_gemm/gemm_tile_order.h"

HWY_BEFORE_NAMESPACE();
namespace moe::gemm {
namespace HWY_NAMESPACE {

using namespace moe::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): this target's lanes

// Rows of left tiles and vectors of columns whose sums are in registers at a time, even and odd
// ones: 24 of 32 registers, or 12 of 16.
constexpr int kFmaVectors = 2;
constexpr int kFmaRows = HWY_TARGET == HWY_AVX2 ? 3 : 6;

// sums[i] += even chain + odd chain of one step, rows [0, kRows). left: 32 terms of a row as
// float32, kTerms apart; right: term t of 32 columns at t * kStripSide.
template <int kRows>
HWY_INLINE void AddStep(const float* HWY_RESTRICT left, const float* HWY_RESTRICT right,
                        float* HWY_RESTRICT sums) {
  const FloatTag d;
  FloatLanes even[kRows][kFmaVectors], odd[kRows][kFmaVectors];
  MOE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    MOE_UNROLL
    for (int j = 0; j < kFmaVectors; ++j) even[i][j] = odd[i][j] = hn::Zero(d);
  }
  for (int64_t t = 0; t < kTerms; t += 2, right += 2 * kStripSide) {
    FloatLanes column[kFmaVectors];
    MOE_UNROLL
    for (int j = 0; j < kFmaVectors; ++j) column[j] = hn::Load(d, right + j * kLanes);
    MOE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const FloatLanes x = hn::Set(d, left[i * kTerms + t]);
      MOE_UNROLL
      for (int j = 0; j < kFmaVectors; ++j) even[i][j] = hn::MulAdd(x, column[j], even[i][j]);
    }
    MOE_UNROLL
    for (int j = 0; j < kFmaVectors; ++j) column[j] = hn::Load(d, right + kStripSide + j * kLanes);
    MOE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const FloatLanes x = hn::Set(d, left[i * kTerms + t + 1]);
      MOE_UNROLL
      for (int j = 0; j < kFmaVectors; ++j) odd[i][j] = hn::MulAdd(x, column[j], odd[i][j]);
    }
  }
  MOE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    MOE_UNROLL
    for (int j = 0; j < kFmaVectors; ++j) {
      float* const sum = sums + i * kStripSide + j * kLanes;
      hn::Store(hn::Add(hn::Load(d, sum), hn::Add(even[i][j], odd[i][j])), d, sum);
    }
  }
}

// All of `rows` rows and the columns of `tiles` right tiles, which are whole vectors.
void AddSteps(int64_t rows, int64_t tiles, const float* left, const float* right, float* sums) {
  const EvenCut cut(rows, kFmaRows);  // 16 and 32 rows in parts of kFmaRows, or one less
  for (int64_t j = 0; j < tiles * kTileSide; j += kFmaVectors * kLanes) {
    for (int64_t part = 0; part < cut.parts; ++part) {
      const int64_t i = cut.Begin(part);
      const float* const from = left + i * kTerms;
      float* const to = sums + i * kStripSide + j;
      if (cut.Begin(part + 1) - i == kFmaRows) {
        AddStep<kFmaRows>(from, right + j, to);
      } else {
        AddStep<kFmaRows - 1>(from, right + j, to);
      }
    }
  }
}

// The portable kernel. Requires FlushSubnormals.
void MultiplyOnFma(const StripProduct& product, Prefetchers& ahead) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> bits;
  // Of one step, as float32; columns of tiles that are not there are zeros.
  HWY_ALIGN float left[kStripSide * kTerms], right[kTerms * kStripSide] = {};
  float* const sums = product.sums;
  const int64_t rows = product.left_tiles * kTileSide;
  if (!product.continues) std::fill_n(sums, rows * kStripSide, 0.0f);
  const auto lower = [&](const BFloat16* words) HWY_ATTR {
    return hn::BitCast(
        d, hn::ShiftLeft<16>(hn::LoadU(bits, reinterpret_cast<const uint32_t*>(words))));
  };
  const auto upper = [&](const BFloat16* words) HWY_ATTR {
    return hn::BitCast(d, hn::And(hn::LoadU(bits, reinterpret_cast<const uint32_t*>(words)),
                                  hn::Set(bits, 0xffff0000u)));
  };
  const BFloat16* from_left = product.left;
  const BFloat16* from_right = product.right;
  for (int64_t s = 0; s < product.steps; ++s) {
    ahead.Burst();
    for (int64_t i = 0; i < rows; ++i) {
      const BFloat16* const row =
          from_left + i / kTileSide * product.left_tile + i % kTileSide * product.left_row;
      for (int64_t t = 0; t < kTerms; t += kLanes) {
        hn::Store(LoadLanes(row + t), d, left + i * kTerms + t);
      }
    }
    for (int64_t h = 0; h < product.right_tiles; ++h) {
      for (int64_t w = 0; w < kTerms / 2; ++w) {
        for (int64_t j = 0; j < kTileSide; j += kLanes) {
          const BFloat16* const words = from_right + h * kTileElements + w * kTerms + 2 * j;
          float* const to = right + 2 * w * kStripSide + h * kTileSide + j;
          hn::Store(lower(words), d, to);
          hn::Store(upper(words), d, to + kStripSide);
        }
      }
    }
    AddSteps(rows, product.right_tiles, left, right, sums);
    from_left += product.left_step;
    from_right += product.right_tiles * kTileElements;
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moe::gemm
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
