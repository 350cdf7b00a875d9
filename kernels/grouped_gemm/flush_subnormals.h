// Arithmetic without subnormal numbers, as vdpbf16ps has it, for the multiply-adds beside it.
#ifndef MOE_KERNELS_GROUPED_GEMM_FLUSH_SUBNORMALS_H_
#define MOE_KERNELS_GROUPED_GEMM_FLUSH_SUBNORMALS_H_

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moe::gemm {

// On x86, while one lives, this thread's floating-point operations take subnormal numbers as zeros
// and round to zeros instead of to them. Elsewhere, and with `enable` false, nothing changes.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
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
#if defined(__x86_64__)
  uint32_t saved_;
#endif
};

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_FLUSH_SUBNORMALS_H_
