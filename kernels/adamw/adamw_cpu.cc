#include "kernels/adamw/adamw_cpu.h"

#include "kernels/base/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/adamw/adamw_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

struct AdamWLanes {
  FloatLanes weight, m, v;
};

HWY_INLINE FloatLanes Constant(float x) {
  return hn::Set(FloatTag(), x);
}

HWY_INLINE AdamWLanes Update(const AdamWStep& s, FloatLanes gradient, AdamWLanes x) {
  const auto g = hn::Mul(Constant(s.gradient_scale), gradient);
  const auto m = hn::Add(hn::Mul(Constant(s.beta1), x.m), hn::Mul(Constant(s.one_minus_beta1), g));
  const auto v =
      hn::Add(hn::Mul(Constant(s.beta2), x.v), hn::Mul(Constant(s.one_minus_beta2), hn::Mul(g, g)));
  const auto root = hn::Sqrt(hn::Div(v, Constant(s.correction2)));
  const auto direction =
      hn::Div(hn::Div(m, Constant(s.correction1)), hn::Add(root, Constant(s.epsilon)));
  const auto change = hn::Mul(Constant(s.learning_rate),
                              hn::Add(direction, hn::Mul(Constant(s.weight_decay), x.weight)));
  return {hn::Sub(x.weight, change), m, v};
}

void Range(const AdamWStep& step, const float* gradient, float* weight, float* m, float* v,
           int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const AdamWLanes x = Update(step, LoadLanes(gradient + i),
                                {LoadLanes(weight + i), LoadLanes(m + i), LoadLanes(v + i)});
    StoreLanes(x.weight, weight + i);
    StoreLanes(x.m, m + i);
    StoreLanes(x.v, v + i);
  }
  if (i == n) return;
  const int64_t rest = n - i;
  const AdamWLanes x =
      Update(step, LoadFirst(gradient + i, rest),
             {LoadFirst(weight + i, rest), LoadFirst(m + i, rest), LoadFirst(v + i, rest)});
  StoreFirst(x.weight, weight + i, rest);
  StoreFirst(x.m, m + i, rest);
  StoreFirst(x.v, v + i, rest);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

HWY_EXPORT(Range);

void AdamWRange(const AdamWStep& step, const float* gradient, float* weight, float* m, float* v,
                int64_t n) {
  HWY_DYNAMIC_DISPATCH(Range)(step, gradient, weight, m, v, n);
}

}  // namespace moe
#endif  // HWY_ONCE
