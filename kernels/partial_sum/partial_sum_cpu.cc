#include "kernels/partial_sum/partial_sum_cpu.h"

#include "kernels/base/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/partial_sum/partial_sum_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

template <typename T>
HWY_INLINE void Add(const T* partial, T* acc, int64_t n) {
  const hn::CappedTag<T, 64 / sizeof(T)> d;
  constexpr auto kStep = static_cast<int64_t>(hn::MaxLanes(decltype(d)()));
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    hn::StoreU(hn::Add(hn::LoadU(d, partial + i), hn::LoadU(d, acc + i)), d, acc + i);
  }
  for (; i < n; ++i) acc[i] = partial[i] + acc[i];
}

void AddFloats(const float* partial, float* acc, int64_t n) {
  Add(partial, acc, n);
}
void AddIntegers(const uint64_t* partial, uint64_t* acc, int64_t n) {
  Add(partial, acc, n);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

HWY_EXPORT(AddFloats);
HWY_EXPORT(AddIntegers);

void AddPartialRange(const float* partial, float* acc, int64_t n) {
  HWY_DYNAMIC_DISPATCH(AddFloats)(partial, acc, n);
}
void AddPartialRange(const uint64_t* partial, uint64_t* acc, int64_t n) {
  HWY_DYNAMIC_DISPATCH(AddIntegers)(partial, acc, n);
}

}  // namespace moe
#endif  // HWY_ONCE
