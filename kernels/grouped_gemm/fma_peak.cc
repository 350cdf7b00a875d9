#include "kernels/grouped_gemm/fma_peak.h"

#include "kernels/base/highway_targets.h"
#include "kernels/grouped_gemm/gemm_dot_avx512.h"
#include "kernels/grouped_gemm/gemm_tile_amx.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/grouped_gemm/fma_peak.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::gemm {
namespace HWY_NAMESPACE {
namespace {

using namespace moe::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): this target's lanes

double MultiplyAdds(int64_t steps) {
  // Two units with a latency of 4 or 5 cycles need 10 chains, and AVX2 has 16 registers. Chains
  // have different initial values, since the compiler would merge equal ones.
  constexpr int kChains = 12;
  const FloatTag d;
  const auto x = hn::Set(d, 1.0f), y = hn::Set(d, 1e-20f);
  FloatLanes chain[kChains];
  for (int i = 0; i < kChains; ++i) chain[i] = hn::Set(d, static_cast<float>(i + 1));
  for (int64_t n = 0; n < steps; ++n) {
    _Pragma("GCC unroll 12") for (auto& a : chain) a = hn::MulAdd(a, x, y);
  }
  auto sum = chain[0];
  for (int i = 1; i < kChains; ++i) sum = hn::Add(sum, chain[i]);
  // Never true, but the compiler cannot prove it, so that the chains are computed.
  if (hn::GetLane(sum) < 0) return 0;
  return static_cast<double>(steps) * kChains * 2 * static_cast<double>(kLanes);
}

float Largest(const float* data, int64_t count) {
  constexpr int kChains = 4;
  const FloatTag d;
  FloatLanes most[kChains];
  for (auto& a : most) a = hn::Zero(d);
  for (int64_t i = 0; i + kChains * kLanes <= count; i += kChains * kLanes) {
    MOE_UNROLL for (int c = 0; c < kChains; ++c) {
      most[c] = hn::Max(most[c], hn::LoadU(d, data + i + c * kLanes));
    }
  }
  for (int c = 1; c < kChains; ++c) most[0] = hn::Max(most[0], most[c]);
  return hn::GetLane(hn::MaxOfLanes(d, most[0]));
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe::gemm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::gemm {

double RunFma(int64_t steps) {
  return MOE_SIMD(MultiplyAdds)(steps);
}

double RunBFloat16Peak(BFloat16Order order, int64_t steps) {
  constexpr int64_t kFmaSteps = 12;  // take about as long as one of RunTiles
  if (order == BFloat16Order::kTile) {
    return UsesAmx() ? RunTiles(steps / kFmaSteps) : RunFma(steps);
  }
#if MOE_GEMM_DOT_AVX512
  if (DotsBFloat16()) return RunDots(steps);
#endif
  return RunFma(steps);
}

float ReadFloats(const float* data, int64_t count) {
  return MOE_SIMD(Largest)(data, count);
}

}  // namespace moe::gemm
#endif  // HWY_ONCE
