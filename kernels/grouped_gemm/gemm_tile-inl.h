// The register tile: rows of a times a packed panel of b. Compiled once per SIMD target.
#if defined(MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_INL_H_
#undef MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_INL_H_
#else
#define MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_INL_H_
#endif

#include <bit>
#include <cstring>

#include <hwy/highway.h>

#include "kernels/grouped_gemm/gemm_blocks.h"
#include "kernels/grouped_gemm/gemm_prefetch.h"

// The accumulators live in registers only if the loops over them are unrolled.
#ifndef MOE_UNROLL
#ifdef __clang__
#define MOE_UNROLL _Pragma("unroll")
#else
#define MOE_UNROLL _Pragma("GCC unroll 8")
#endif
#endif

HWY_BEFORE_NAMESPACE();
namespace moe::gemm {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVector = hn::Vec<FloatTag>;
constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(FloatTag()));
// AVX2 has 16 registers, AVX-512 and NEON have 32.
constexpr int kVectors = HWY_TARGET == HWY_AVX2 ? 2 : 4;
constexpr int64_t kTileCols = kVectors * kLanes;
static_assert(kMaxTileCols % kTileCols == 0);

// Float32 rows, dense in k.
struct FloatRows {
  template <int kRows>
  HWY_INLINE FloatVector Broadcast(int64_t i, int64_t k) const {
    return hn::Set(FloatTag(), data[i * row_stride + k]);
  }
  static constexpr int64_t kPeeled = 0;

  const float* data;
  int64_t row_stride;
};

// The rows of a tile side by side, step after step: a transposed a, packed.
struct PackedRows {
  template <int kRows>
  HWY_INLINE FloatVector Broadcast(int64_t i, int64_t k) const {
    return hn::Set(FloatTag(), data[k * kRows + i]);
  }
  static constexpr int64_t kPeeled = 0;

  const float* data;
};

// BFloat16 rows, dense in k. A float32 is the bfloat16 in its upper half and zeros below: one
// 32-bit broadcast of elements (k - 1, k) and a mask give element k. The first element of a row
// may have none before it.
struct BFloat16Rows {
  template <int kRows>
  HWY_INLINE FloatVector Broadcast(int64_t i, int64_t k) const {
    uint32_t pair;
    std::memcpy(&pair, data + i * row_stride + k - 1, sizeof pair);
    const hn::RebindToUnsigned<FloatTag> bits;
    return hn::BitCast(FloatTag(), hn::And(hn::Set(bits, pair), hn::Set(bits, 0xffff0000u)));
  }
  static constexpr int64_t kPeeled = 1;
  HWY_INLINE FloatVector BroadcastPeeled(int64_t i, int64_t k) const {
    return hn::Set(FloatTag(), static_cast<float>(data[i * row_stride + k]));
  }

  const BFloat16* data;
  int64_t row_stride;
};
static_assert(std::endian::native == std::endian::little);

// kTileCols columns of b: step k at data + k * stride. `copy`, if there is one, is written with the
// steps side by side as they are read: packing costs the first tile its stores alone, which
// overlap with its multiply-adds.
struct Strip {
  const float* data;
  int64_t stride;
  float* copy = nullptr;
};

// Step k: one column vector after the other, times every row.
template <int kRows, bool kCopies, class Rows>
HWY_INLINE void Step(const Rows& a, int64_t k, const float* HWY_RESTRICT b,
                     float* HWY_RESTRICT copy, FloatVector (&sum)[kRows][kVectors]) {
  const FloatTag d;
  FloatVector column[kVectors];
  MOE_UNROLL
  for (int j = 0; j < kVectors; ++j) column[j] = hn::LoadU(d, b + j * kLanes);
  if constexpr (kCopies) {
    MOE_UNROLL
    for (int j = 0; j < kVectors; ++j) hn::Store(column[j], d, copy + j * kLanes);
  }
  MOE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const FloatVector x = a.template Broadcast<kRows>(i, k);
    MOE_UNROLL
    for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::MulAdd(x, column[j], sum[i][j]);
  }
}

// c [kRows, kTileCols] = (add ? c : 0) + a * b over `depth` ascending steps, one fused
// multiply-add per element and step.
template <int kRows, bool kCopies, class Rows>
HWY_NOINLINE void Tile(const Rows a, const Strip strip, int64_t depth, float* HWY_RESTRICT c,
                       int64_t c_stride, bool add, Prefetchers& ahead) {
  const float* HWY_RESTRICT b = strip.data;
  float* HWY_RESTRICT copy = strip.copy;
  const FloatTag d;
  FloatVector sum[kRows][kVectors];
  MOE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    MOE_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      sum[i][j] = add ? hn::LoadU(d, c + i * c_stride + j * kLanes) : hn::Zero(d);
    }
  }
  int64_t k = 0;
  if constexpr (Rows::kPeeled > 0) {
    for (; k < Rows::kPeeled && k < depth; ++k, b += strip.stride) {
      MOE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const FloatVector x = a.BroadcastPeeled(i, k);
        MOE_UNROLL
        for (int j = 0; j < kVectors; ++j) {
          sum[i][j] = hn::MulAdd(x, hn::LoadU(d, b + j * kLanes), sum[i][j]);
        }
      }
    }
  }
  // By hand, so that the steps share one set of addresses: instructions are what the tile waits for
  // where two threads share a core.
  static_assert(Prefetcher::kSteps == 4);
  constexpr int64_t kCopied = kCopies ? kTileCols : 0;
  for (; k + 4 <= depth; k += 4, b += 4 * strip.stride, copy += 4 * kCopied) {
    ahead.next.Burst();
    ahead.output.Burst();
    Step<kRows, kCopies>(a, k, b, copy, sum);
    Step<kRows, kCopies>(a, k + 1, b + strip.stride, copy + kCopied, sum);
    Step<kRows, kCopies>(a, k + 2, b + 2 * strip.stride, copy + 2 * kCopied, sum);
    Step<kRows, kCopies>(a, k + 3, b + 3 * strip.stride, copy + 3 * kCopied, sum);
  }
  for (; k < depth; ++k, b += strip.stride, copy += kCopied) {
    Step<kRows, kCopies>(a, k, b, copy, sum);
  }
  MOE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    MOE_UNROLL
    for (int j = 0; j < kVectors; ++j) hn::StoreU(sum[i][j], d, c + i * c_stride + j * kLanes);
  }
}

template <bool kCopies, class Rows>
void TileOf(int64_t rows, const Rows& a, const Strip& b, int64_t depth, float* c, int64_t c_stride,
            bool add, Prefetchers& ahead) {
  switch (rows) {
    case 1:
      return Tile<1, kCopies>(a, b, depth, c, c_stride, add, ahead);
    case 2:
      return Tile<2, kCopies>(a, b, depth, c, c_stride, add, ahead);
    case 3:
      return Tile<3, kCopies>(a, b, depth, c, c_stride, add, ahead);
    case 4:
      return Tile<4, kCopies>(a, b, depth, c, c_stride, add, ahead);
    case 5:
      return Tile<5, kCopies>(a, b, depth, c, c_stride, add, ahead);
    default:
      static_assert(kTileRows == 6);
      return Tile<6, kCopies>(a, b, depth, c, c_stride, add, ahead);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moe::gemm
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
