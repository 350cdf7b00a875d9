#include "kernels/adamw/adamw_op.h"
#include "kernels/base/highway_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/adamw/adamw_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::adamw {
namespace HWY_NAMESPACE {
namespace {

using namespace moe::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): this target's lanes

struct State {
  FloatLanes weight, m, v;
};

HWY_INLINE FloatLanes Constant(float x) {
  return hn::Set(FloatTag(), x);
}

HWY_INLINE State Update(const Step& s, float weight_decay, FloatLanes gradient, State x) {
  const auto g = hn::Mul(Constant(s.gradient_scale), gradient);
  const auto m = hn::Add(hn::Mul(Constant(s.beta1), x.m), hn::Mul(Constant(s.one_minus_beta1), g));
  const auto v =
      hn::Add(hn::Mul(Constant(s.beta2), x.v), hn::Mul(Constant(s.one_minus_beta2), hn::Mul(g, g)));
  const auto root = hn::Sqrt(hn::Div(v, Constant(s.correction2)));
  const auto direction =
      hn::Div(hn::Div(m, Constant(s.correction1)), hn::Add(root, Constant(s.epsilon)));
  const auto change = hn::Mul(Constant(s.learning_rate),
                              hn::Add(direction, hn::Mul(Constant(weight_decay), x.weight)));
  return {hn::Sub(x.weight, change), m, v};
}

// By value, so that no store can change what it reads next.
void Compute(Step step, const float* gradient, AdamWSlice s) {
  ForLanes(s.size, [&](int64_t i, auto lanes) MOE_LANES {
    const State x = Update(step, s.weight_decay, lanes.Load(gradient + i),
                           {lanes.Load(s.weight + i), lanes.Load(s.m + i), lanes.Load(s.v + i)});
    lanes.Store(x.weight, s.weight + i);
    lanes.Store(x.m, s.m + i);
    lanes.Store(x.v, s.v + i);
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe::adamw
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::adamw {

void Run(const Step& step, const float* gradient, const AdamWSlice& slice) {
  MOE_SIMD(Compute)(step, gradient, slice);
}

}  // namespace moe::adamw
#endif  // HWY_ONCE
