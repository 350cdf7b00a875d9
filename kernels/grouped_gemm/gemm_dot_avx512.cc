#include "kernels/grouped_gemm/gemm_dot_avx512.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#if MOE_GEMM_DOT_AVX512
#include <hwy/targets.h>
#include <immintrin.h>
#endif

#include "kernels/grouped_gemm/gemm_blocks.h"

namespace moe::gemm {
namespace {

std::atomic<DotUse> use_dot = DotUse::kWhereFaster;

bool IsDotFaster();

bool HasDot() {
#if MOE_GEMM_DOT_AVX512
  static const bool has =
      __builtin_cpu_supports("avx512bf16") && (hwy::SupportedTargets() & HWY_AVX3) != 0;
  return has;
#else
  return false;
#endif
}

}  // namespace

bool MayDotBFloat16() {
  return use_dot.load(std::memory_order_relaxed) != DotUse::kNever && HasDot();
}

bool DotsBFloat16() {
  return MayDotBFloat16() &&
         (use_dot.load(std::memory_order_relaxed) == DotUse::kAlways || IsDotFaster());
}

void UseBFloat16Dot(DotUse use) {
  use_dot.store(use, std::memory_order_relaxed);
}

#if MOE_GEMM_DOT_AVX512

#define MOE_DOT_TARGET __attribute__((target("avx512f,avx512vl,avx512bw,avx512bf16")))
#ifdef __clang__
#define MOE_DOT_UNROLL _Pragma("unroll")
#else
#define MOE_DOT_UNROLL _Pragma("GCC unroll 8")
#endif

namespace {

constexpr int kLanes = 16;
constexpr int kVectors = 4;

// Multiplies one word of 64 columns by every row. The instruction adds the product of the upper
// halves first.
template <int kRows>
MOE_DOT_TARGET inline __attribute__((always_inline)) void DotWord(const char* a, int64_t row_bytes,
                                                                  const float* b,
                                                                  __m512 (&sum)[kRows][kVectors]) {
  __m512i column[kVectors];
  MOE_DOT_UNROLL
  for (int j = 0; j < kVectors; ++j) column[j] = _mm512_loadu_si512(b + j * kLanes);
  MOE_DOT_UNROLL
  for (int i = 0; i < kRows; ++i) {
    int32_t word;
    __builtin_memcpy(&word, a + i * row_bytes, sizeof word);
    const __m512i x = _mm512_set1_epi32(word);
    MOE_DOT_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      sum[i][j] = _mm512_dpbf16_ps(sum[i][j], (__m512bh)x, (__m512bh)column[j]);
    }
  }
}

// Bytes between words and between rows: constants where possible. Computing addresses, 24 for four
// words of six rows, would cost a short tile a good 2 % of its time.
template <int kRows>
constexpr int64_t WordBytes(const PlainDotRows&) {
  return sizeof(float);
}
template <int kRows>
constexpr int64_t WordBytes(const PackedDotRows&) {
  return kRows * sizeof(float);
}
inline int64_t RowBytes(const PlainDotRows& rows) {
  return rows.row_bytes;
}
constexpr int64_t RowBytes(const PackedDotRows&) {
  return sizeof(float);
}

template <int kRows>
MOE_DOT_TARGET inline __attribute__((always_inline)) void Clear(__m512 (&sum)[kRows][kVectors]) {
  MOE_DOT_UNROLL
  for (int i = 0; i < kRows; ++i) {
    MOE_DOT_UNROLL
    for (int j = 0; j < kVectors; ++j) sum[i][j] = _mm512_setzero_ps();
  }
}

// Adds pending sums, `stride` floats from row to row: sum = pending + sum. Below, storing them.
template <int kRows>
MOE_DOT_TARGET inline __attribute__((always_inline)) void AddSums(const float* from, int64_t stride,
                                                                  __m512 (&sum)[kRows][kVectors]) {
  MOE_DOT_UNROLL
  for (int i = 0; i < kRows; ++i) {
    MOE_DOT_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      sum[i][j] = _mm512_add_ps(_mm512_loadu_ps(from + i * stride + j * kLanes), sum[i][j]);
    }
  }
}
template <int kRows>
MOE_DOT_TARGET inline __attribute__((always_inline)) void StoreSums(
    const __m512 (&sum)[kRows][kVectors], float* to, int64_t stride) {
  MOE_DOT_UNROLL
  for (int i = 0; i < kRows; ++i) {
    MOE_DOT_UNROLL
    for (int j = 0; j < kVectors; ++j) _mm512_storeu_ps(to + i * stride + j * kLanes, sum[i][j]);
  }
}

// As Tile in gemm_tile-inl.h.
template <int kRows, class Rows>
MOE_DOT_TARGET void DotTileOf(const Rows& rows, const float* __restrict strip,
                              absl::Span<const TilePiece> pieces, const TileSums& c,
                              Prefetchers& ahead) {
  constexpr int64_t kLine = kVectors * kLanes;
  alignas(64) float beside_c[kMaxWaiting][kRows * kLine];
  int waiting = c.continues ? 1 : 0;
  __m512 sum[kRows][kVectors];
  Clear<kRows>(sum);
  const int64_t row_bytes = RowBytes(rows), word_bytes = WordBytes<kRows>(rows);
  static_assert(Prefetcher::kSteps == 4);
  const TilePiece* piece = pieces.data();
  const TilePiece* const last = piece + pieces.size() - 1;
  for (;; ++piece) {
    const char* a = rows.data + piece->a * word_bytes;
    const float* b = strip + piece->b * kLine;
    int64_t k = 0;
    for (; k + 4 <= piece->words; k += 4, a += 4 * word_bytes, b += 4 * kLine) {
      ahead.Burst();
      DotWord<kRows>(a, row_bytes, b, sum);
      DotWord<kRows>(a + word_bytes, row_bytes, b + kLine, sum);
      DotWord<kRows>(a + 2 * word_bytes, row_bytes, b + 2 * kLine, sum);
      DotWord<kRows>(a + 3 * word_bytes, row_bytes, b + 3 * kLine, sum);
    }
    for (; k < piece->words; ++k, a += word_bytes, b += kLine) DotWord<kRows>(a, row_bytes, b, sum);
    for (int fold = 0; fold < piece->folds; ++fold) {
      if (--waiting == 0) {
        AddSums<kRows>(c.data, c.stride, sum);
      } else {
        AddSums<kRows>(beside_c[waiting - 1], kLine, sum);
      }
    }
    if (piece == last) break;
    if (piece->folds < 0) continue;
    if (waiting == 0) {
      StoreSums<kRows>(sum, c.data, c.stride);
    } else {
      StoreSums<kRows>(sum, beside_c[waiting - 1], kLine);
    }
    ++waiting;
    Clear<kRows>(sum);
  }
  float* to = c.data;
  for (int fold = 0; fold < c.folds; ++fold) AddSums<kRows>(to -= c.node, c.stride, sum);
  StoreSums<kRows>(sum, to, c.stride);
}

template <class Rows>
void DotTileOfAny(int64_t rows, const Rows& a, const float* b, absl::Span<const TilePiece> pieces,
                  const TileSums& c, Prefetchers& ahead) {
  switch (rows) {
    case 1:
      return DotTileOf<1>(a, b, pieces, c, ahead);
    case 2:
      return DotTileOf<2>(a, b, pieces, c, ahead);
    case 3:
      return DotTileOf<3>(a, b, pieces, c, ahead);
    case 4:
      return DotTileOf<4>(a, b, pieces, c, ahead);
    case 5:
      return DotTileOf<5>(a, b, pieces, c, ahead);
    default:
      static_assert(kTileRows == 6 && kMaxTileCols == kVectors * kLanes);
      return DotTileOf<6>(a, b, pieces, c, ahead);
  }
}

}  // namespace

void DotTile(int64_t rows, const PlainDotRows& a, const float* b,
             absl::Span<const TilePiece> pieces, const TileSums& c, Prefetchers& ahead) {
  DotTileOfAny(rows, a, b, pieces, c, ahead);
}
void DotTile(int64_t rows, const PackedDotRows& a, const float* b,
             absl::Span<const TilePiece> pieces, const TileSums& c, Prefetchers& ahead) {
  DotTileOfAny(rows, a, b, pieces, c, ahead);
}

namespace {

constexpr int kChains = 12;  // more than units times latency

// `steps` rounds of independent dot products, or multiply-adds, in registers.
template <bool kDots>
MOE_DOT_TARGET void RunChains(int64_t steps) {
  const __m512i one = _mm512_set1_epi32(0x3f803f80);
  __m512 sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = _mm512_set1_ps(static_cast<float>(i));
  for (int64_t n = 0; n < steps; ++n) {
    _Pragma("GCC unroll 12") for (__m512& s : sum) {
      s = kDots ? _mm512_dpbf16_ps(s, (__m512bh)one, (__m512bh)one)
                : _mm512_fmadd_ps(_mm512_castsi512_ps(one), _mm512_castsi512_ps(one), s);
    }
  }
  // The compiler must not leave the chains out.
  for (const __m512& s : sum) __asm__ volatile("" ::"v"(s));
}

bool IsDotFaster() {
  static const bool faster = [] {
    using Clock = std::chrono::steady_clock;
    Clock::duration dots = Clock::duration::max(), multiply_adds = dots;
    const auto time = [](void (*run)(int64_t), Clock::duration& least) {
      const auto begin = Clock::now();
      run(200);
      least = std::min(least, Clock::now() - begin);
    };
    for (int i = 0; i < 10; ++i) {  // the vector units may only wake up now
      time(RunChains<true>, dots);
      time(RunChains<false>, multiply_adds);
    }
    return dots < 2 * multiply_adds;
  }();
  return faster;
}

}  // namespace

double RunDots(int64_t steps) {
  RunChains<true>(steps);
  return static_cast<double>(steps) * kChains * kLanes * 4;
}

#undef MOE_DOT_TARGET
#undef MOE_DOT_UNROLL

#else

namespace {

bool IsDotFaster() {
  return false;
}

}  // namespace

#endif  // MOE_GEMM_DOT_AVX512

}  // namespace moe::gemm
