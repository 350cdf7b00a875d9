#include "kernels/grouped_gemm/fma_peak.h"

#include "kernels/grouped_gemm/gemm_dot_avx512.h"

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/grouped_gemm/fma_peak.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace moe::gemm {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

double RunFmaOnTarget(int64_t steps) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  // 12 chains: two units with a latency of 4 or 5 cycles need 10, and AVX2 has 16 registers. They
  // start apart, or the compiler would see that they are equal and compute one.
  const V x = hn::Set(d, 1.0f);
  const V y = hn::Set(d, 1e-20f);
  V a = hn::Set(d, 1), b = hn::Set(d, 2), c = hn::Set(d, 3), e = hn::Set(d, 4);
  V f = hn::Set(d, 5), g = hn::Set(d, 6), h = hn::Set(d, 7), i = hn::Set(d, 8);
  V j = hn::Set(d, 9), k = hn::Set(d, 10), l = hn::Set(d, 11), m = hn::Set(d, 12);
  for (int64_t n = 0; n < steps; ++n) {
    a = hn::MulAdd(a, x, y);
    b = hn::MulAdd(b, x, y);
    c = hn::MulAdd(c, x, y);
    e = hn::MulAdd(e, x, y);
    f = hn::MulAdd(f, x, y);
    g = hn::MulAdd(g, x, y);
    h = hn::MulAdd(h, x, y);
    i = hn::MulAdd(i, x, y);
    j = hn::MulAdd(j, x, y);
    k = hn::MulAdd(k, x, y);
    l = hn::MulAdd(l, x, y);
    m = hn::MulAdd(m, x, y);
  }
  const V left = hn::Add(hn::Add(hn::Add(a, b), hn::Add(c, e)), hn::Add(f, g));
  const V right = hn::Add(hn::Add(hn::Add(h, i), hn::Add(j, k)), hn::Add(l, m));
  // Never true, but the compiler does not know: the chains have to be computed.
  if (hn::GetLane(hn::Add(left, right)) < 0) return 0;
  return static_cast<double>(steps) * 12 * 2 * static_cast<double>(hn::Lanes(d));
}

float ReadOnTarget(const float* data, int64_t count) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto a = hn::Zero(d), b = a, c = a, e = a;
  for (int64_t i = 0; i + 4 * lanes <= count; i += 4 * lanes) {
    a = hn::Max(a, hn::LoadU(d, data + i));
    b = hn::Max(b, hn::LoadU(d, data + i + lanes));
    c = hn::Max(c, hn::LoadU(d, data + i + 2 * lanes));
    e = hn::Max(e, hn::LoadU(d, data + i + 3 * lanes));
  }
  return hn::GetLane(hn::MaxOfLanes(d, hn::Max(hn::Max(a, b), hn::Max(c, e))));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moe::gemm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::gemm {

HWY_EXPORT(RunFmaOnTarget);
HWY_EXPORT(ReadOnTarget);

double RunFma(int64_t steps) {
  return HWY_DYNAMIC_DISPATCH(RunFmaOnTarget)(steps);
}

double RunBFloat16Peak(int64_t steps) {
#if MOE_GEMM_DOT_AVX512
  if (DotsBFloat16()) return RunDots(steps);
#endif
  return RunFma(steps);
}

float ReadFloats(const float* data, int64_t count) {
  return HWY_DYNAMIC_DISPATCH(ReadOnTarget)(data, count);
}

}  // namespace moe::gemm
#endif  // HWY_ONCE
