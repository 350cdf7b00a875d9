// The register tile: rows of a times a packed panel of b. Compiled once per SIMD target.
#if defined(MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_INL_H_
#undef MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_INL_H_
#else
#define MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_INL_H_
#endif

#include <atomic>
#include <bit>
#include <cstring>

#include "kernels/base/simd-inl.h"
#include "kernels/grouped_gemm/gemm_blocks.h"
#include "kernels/grouped_gemm/gemm_pieces.h"

HWY_BEFORE_NAMESPACE();
namespace moe::gemm {
namespace HWY_NAMESPACE {

using namespace moe::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): this target's lanes

// AVX2 has 16 registers, AVX-512 and NEON have 32.
constexpr int kVectors = HWY_TARGET == HWY_AVX2 ? 2 : 4;
constexpr int64_t kTileCols = kVectors * kLanes;
static_assert(kMaxTileCols % kTileCols == 0);

// Which step of its words a multiply-add uses: the only one, or one half of a pair of bfloat16. The
// float32 of a bfloat16 has it in the upper half and zeros below.
struct Whole {
  static HWY_INLINE FloatLanes Of(FloatLanes words) { return words; }
};
struct UpperHalf {
  static HWY_INLINE FloatLanes Of(FloatLanes words) {
    const hn::RebindToUnsigned<FloatTag> bits;
    return hn::BitCast(FloatTag(), hn::And(hn::BitCast(bits, words), hn::Set(bits, 0xffff0000u)));
  }
};
struct LowerHalf {
  static HWY_INLINE FloatLanes Of(FloatLanes words) {
    const hn::RebindToUnsigned<FloatTag> bits;
    return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(hn::BitCast(bits, words)));
  }
};

// Type of words: pairs of bfloat16 as two floats, the second of them first. Without dot products
// that are faster than multiply-adds a tile reads those of b, and converts its rows of a: halves of
// words take an instruction each, half as many as there are multiply-adds.
struct FloatPairs {};

// Rows of a tile, each contiguous: rows of a in place, or packed. From: from that word on.
template <typename T>
struct PlainRows {
  template <int kRows>
  HWY_INLINE PlainRows From(int64_t word) const {
    return {data + word * kStepsPerWord<T>, row_stride};
  }
  template <int kRows>
  HWY_INLINE FloatLanes Broadcast(int64_t i, int64_t word) const {
    float value;
    std::memcpy(&value, data + i * row_stride + word * kStepsPerWord<T>, sizeof value);
    return hn::Set(FloatTag(), value);
  }

  const T* data;
  int64_t row_stride;  // in elements
};

// The rows of a tile, interleaved word by word.
struct PackedRows {
  template <int kRows>
  HWY_INLINE PackedRows From(int64_t word) const {
    return {data + word * kRows};
  }
  template <int kRows>
  HWY_INLINE FloatLanes Broadcast(int64_t i, int64_t word) const {
    return hn::Set(FloatTag(), data[word * kRows + i]);
  }

  const float* data;
};
static_assert(std::endian::native == std::endian::little);

// Rows of FloatPairs: the second and the first of each pair.
template <class Rows>
struct PairRows {
  Rows upper, lower;
};

HWY_INLINE void UnpackPairs(const float* words, int64_t count, float* HWY_RESTRICT upper,
                            float* HWY_RESTRICT lower) {
  const FloatTag d;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const FloatLanes pairs = hn::LoadU(d, words + i);
    hn::StoreU(UpperHalf::Of(pairs), d, upper + i);
    hn::StoreU(LowerHalf::Of(pairs), d, lower + i);
  }
  for (; i < count; ++i) {
    uint32_t pair;  // rows of 16-bit values need no alignment of 4
    std::memcpy(&pair, reinterpret_cast<const unsigned char*>(words) + i * int64_t{sizeof pair},
                sizeof pair);
    upper[i] = std::bit_cast<float>(pair & 0xffff0000u);
    lower[i] = std::bit_cast<float>(pair << 16);
  }
}

// Up to kChainWords words of rows. `memory`: kPairFloats<kRows> floats.
template <int kRows>
constexpr int64_t kPairFloats = 2 * kRows* kChainWords;
template <int kRows, typename T>
HWY_INLINE PairRows<PlainRows<float>> Unpack(const PlainRows<T>& rows, int64_t words,
                                             float* memory) {
  float* const lower = memory + kRows * kChainWords;
  for (int i = 0; i < kRows; ++i) {
    UnpackPairs(reinterpret_cast<const float*>(rows.data + i * rows.row_stride), words,
                memory + i * kChainWords, lower + i * kChainWords);
  }
  return {{memory, kChainWords}, {lower, kChainWords}};
}
template <int kRows>
HWY_INLINE PairRows<PackedRows> Unpack(const PackedRows& rows, int64_t words, float* memory) {
  float* const lower = memory + kRows * kChainWords;
  UnpackPairs(rows.data, kRows * words, memory, lower);
  return {{memory}, {lower}};
}

// kTileCols columns of b: word k at data + k * stride.
struct Strip {
  const float* data;
  int64_t stride;
};

// Multiplies one step of word k: one column vector after the other, times every row.
template <class Half, int kRows, class Rows>
HWY_INLINE void Step(const Rows& a, int64_t k, const float* HWY_RESTRICT b,
                     FloatLanes (&sum)[kRows][kVectors]) {
  const FloatTag d;
  FloatLanes column[kVectors];
  MOE_UNROLL
  for (int j = 0; j < kVectors; ++j) column[j] = Half::Of(hn::LoadU(d, b + j * kLanes));
  MOE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const FloatLanes x = Half::Of(a.template Broadcast<kRows>(i, k));
    MOE_UNROLL
    for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::MulAdd(x, column[j], sum[i][j]);
  }
}

// Multiplies all steps of word k. The second of a pair goes first, as in vdpbf16ps.
template <typename T, int kRows, class Rows>
HWY_INLINE void Word(const Rows& a, int64_t k, const float* HWY_RESTRICT b,
                     FloatLanes (&sum)[kRows][kVectors]) {
  if constexpr (std::is_same_v<T, FloatPairs>) {
    Step<Whole, kRows>(a.upper, k, b, sum);
    Step<Whole, kRows>(a.lower, k, b + kTileCols, sum);
  } else if constexpr (kStepsPerWord<T> == 1) {
    Step<Whole, kRows>(a, k, b, sum);
  } else {
    Step<UpperHalf, kRows>(a, k, b, sum);
    // Loads the words again: kept for the other half they would spill sums from 16 registers.
    std::atomic_signal_fence(std::memory_order_acq_rel);
    Step<LowerHalf, kRows>(a, k, b, sum);
  }
}

template <int kRows>
HWY_INLINE void Clear(FloatLanes (&sum)[kRows][kVectors]) {
  MOE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    MOE_UNROLL
    for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::Zero(FloatTag());
  }
}

// Adds pending sums, `stride` floats from row to row: sum = pending + sum.
template <int kRows>
HWY_INLINE void AddSums(const float* HWY_RESTRICT from, int64_t stride,
                        FloatLanes (&sum)[kRows][kVectors]) {
  const FloatTag d;
  MOE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    MOE_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      sum[i][j] = hn::Add(hn::LoadU(d, from + i * stride + j * kLanes), sum[i][j]);
    }
  }
}
template <int kRows>
HWY_INLINE void StoreSums(const FloatLanes (&sum)[kRows][kVectors], float* HWY_RESTRICT to,
                          int64_t stride) {
  MOE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    MOE_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      hn::StoreU(sum[i][j], FloatTag(), to + i * stride + j * kLanes);
    }
  }
}

// c [kRows, kTileCols] from a * b: over the words of each piece in ascending order, one fused
// multiply-add per element and step; chains end and are added as the pieces say. T: type of the
// words.
template <typename T, int kRows, class Rows>
HWY_NOINLINE void Tile(const Rows rows, const Strip strip, absl::Span<const TilePiece> pieces,
                       const TileSums c, Prefetchers& ahead) {
  constexpr bool kUnpacks = std::is_same_v<T, FloatPairs>;
  HWY_ALIGN float unpacked[kUnpacks ? kPairFloats<kRows> : 1];
  const auto rows_from = [&](const TilePiece& piece) HWY_ATTR {
    const Rows from = rows.template From<kRows>(piece.a);
    if constexpr (kUnpacks) {
      return Unpack<kRows>(from, piece.words, unpacked);
    } else {
      return from;
    }
  };
  HWY_ALIGN float beside_c[kMaxWaiting][kRows * kTileCols];
  int waiting = c.continues ? 1 : 0;
  FloatLanes sum[kRows][kVectors];
  Clear<kRows>(sum);
  const TilePiece* piece = pieces.data();
  const TilePiece* const last = piece + pieces.size() - 1;
  for (;; ++piece) {
    const float* HWY_RESTRICT b = strip.data + piece->b * strip.stride;
    const auto a = rows_from(*piece);
    int64_t k = 0;
    const int64_t end = piece->words;
    // Unrolled by hand, so that the words share one set of addresses: the tile is bound by
    // instructions where two threads share a core.
    static_assert(Prefetcher::kSteps == 4);
    for (; k + 4 <= end; k += 4, b += 4 * strip.stride) {
      ahead.Burst();
      Word<T, kRows>(a, k, b, sum);
      Word<T, kRows>(a, k + 1, b + strip.stride, sum);
      Word<T, kRows>(a, k + 2, b + 2 * strip.stride, sum);
      Word<T, kRows>(a, k + 3, b + 3 * strip.stride, sum);
    }
    for (; k < end; ++k, b += strip.stride) {
      Word<T, kRows>(a, k, b, sum);
    }
    for (int fold = 0; fold < piece->folds; ++fold) {
      if (--waiting == 0) {
        AddSums<kRows>(c.data, c.stride, sum);
      } else {
        AddSums<kRows>(beside_c[waiting - 1], kTileCols, sum);
      }
    }
    if (piece == last) break;
    if (piece->folds < 0) continue;
    if (waiting == 0) {
      StoreSums<kRows>(sum, c.data, c.stride);
    } else {
      StoreSums<kRows>(sum, beside_c[waiting - 1], kTileCols);
    }
    ++waiting;
    Clear<kRows>(sum);
  }
  float* to = c.data;
  for (int fold = 0; fold < c.folds; ++fold) AddSums<kRows>(to -= c.node, c.stride, sum);
  StoreSums<kRows>(sum, to, c.stride);
}

template <typename T, class Rows>
void TileOf(int64_t rows, const Rows& a, const Strip& b, absl::Span<const TilePiece> pieces,
            const TileSums& c, Prefetchers& ahead) {
  switch (rows) {
    case 1:
      return Tile<T, 1>(a, b, pieces, c, ahead);
    case 2:
      return Tile<T, 2>(a, b, pieces, c, ahead);
    case 3:
      return Tile<T, 3>(a, b, pieces, c, ahead);
    case 4:
      return Tile<T, 4>(a, b, pieces, c, ahead);
    case 5:
      return Tile<T, 5>(a, b, pieces, c, ahead);
    default:
      static_assert(kTileRows == 6);
      return Tile<T, 6>(a, b, pieces, c, ahead);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moe::gemm
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
