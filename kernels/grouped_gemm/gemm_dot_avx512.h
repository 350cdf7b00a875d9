// The register tile of bfloat16 on CPUs with AVX-512 dot products (vdpbf16ps): twice the
// multiply-adds of float32, with the bits of the tile in gemm_tile-inl.h. Internal.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_DOT_AVX512_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_DOT_AVX512_H_

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/grouped_gemm/gemm_pieces.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define MOE_GEMM_DOT_AVX512 1
#else
#define MOE_GEMM_DOT_AVX512 0
#endif

namespace moe::gemm {

// Whether products use the instruction. kWhereFaster, the default: if the two multiply-adds that it
// replaces take longer. It has their rate on some CPUs, and a quarter of it on others. Measured
// once, in some 30 microseconds.
enum class DotUse : uint8_t { kNever, kWhereFaster, kAlways };
void UseBFloat16Dot(DotUse use);
bool MayDotBFloat16();  // this CPU has it, and it is not forbidden
bool DotsBFloat16();

// Arithmetic without subnormal numbers, like vdpbf16ps's, for multiply-adds beside it. On x86,
// while an object lives, this thread's floating-point operations read subnormal numbers as zeros
// and return zeros instead of them. Elsewhere, and with `enable` false, nothing changes.
class FlushSubnormals {
 public:
#if MOE_GEMM_DOT_AVX512
  explicit FlushSubnormals(bool enable) : saved_(_mm_getcsr()) {
    constexpr uint32_t kFlushToZero = 0x8000, kSubnormalsAreZeros = 0x0040;
    if (enable) _mm_setcsr(saved_ | kFlushToZero | kSubnormalsAreZeros);
  }
  ~FlushSubnormals() {
    _mm_setcsr(saved_);
  }
#else
  explicit FlushSubnormals(bool) {}
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
#if MOE_GEMM_DOT_AVX512
  uint32_t saved_;
#endif
};

#if MOE_GEMM_DOT_AVX512

// The rows of a tile in place: word w of row i at data + i * row_bytes + 4 * w.
struct PlainDotRows {
  const char* data;
  int64_t row_bytes;
};
// The rows of a tile interleaved: word w of row i at data + 4 * (w * rows + i).
struct PackedDotRows {
  const char* data;
};

// c [rows, 64] from a * b, piece by piece; word w of b is the line of 64 words at b + 64 * w.
// `rows`: 1 to kTileRows. Requires MayDotBFloat16().
void DotTile(int64_t rows, const PlainDotRows& a, const float* b,
             absl::Span<const TilePiece> pieces, const TileSums& c, Prefetchers& ahead);
void DotTile(int64_t rows, const PackedDotRows& a, const float* b,
             absl::Span<const TilePiece> pieces, const TileSums& c, Prefetchers& ahead);

// Runs `steps` rounds of independent dot products in registers. Returns the number of
// floating-point operations, four for each lane. Requires MayDotBFloat16().
double RunDots(int64_t steps);

#endif  // MOE_GEMM_DOT_AVX512

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_DOT_AVX512_H_
