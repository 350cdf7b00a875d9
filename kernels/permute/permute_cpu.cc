#include "kernels/permute/permute_cpu.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/permute/permute_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::permute {
namespace HWY_NAMESPACE {
namespace {

using namespace moe::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): this target's lanes

template <typename T>
HWY_INLINE void ScaleRowOf(const T* from, float scale, T* to, int64_t n) {
  const FloatLanes factor = hn::Set(FloatTag(), scale);
  int64_t h = 0;
  for (; h + kLanes <= n; h += kLanes) {
    StoreLanes(hn::Mul(factor, LoadLanes(from + h)), to + h);
  }
  if (h < n) StoreFirst(hn::Mul(factor, LoadFirst(from + h, n - h)), to + h, n - h);
}

void ScaleFloatRow(const float* from, float scale, float* to, int64_t n) {
  ScaleRowOf(from, scale, to, n);
}
void ScaleBFloat16Row(const BFloat16* from, float scale, BFloat16* to, int64_t n) {
  ScaleRowOf(from, scale, to, n);
}
void ScaleFloat16Row(const Float16* from, float scale, Float16* to, int64_t n) {
  ScaleRowOf(from, scale, to, n);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe::permute
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::permute {

HWY_EXPORT(ScaleFloatRow);
HWY_EXPORT(ScaleBFloat16Row);
HWY_EXPORT(ScaleFloat16Row);

void ScaleRow(const float* from, float scale, float* to, int64_t n) {
  HWY_DYNAMIC_DISPATCH(ScaleFloatRow)(from, scale, to, n);
}
void ScaleRow(const BFloat16* from, float scale, BFloat16* to, int64_t n) {
  HWY_DYNAMIC_DISPATCH(ScaleBFloat16Row)(from, scale, to, n);
}
void ScaleRow(const Float16* from, float scale, Float16* to, int64_t n) {
  HWY_DYNAMIC_DISPATCH(ScaleFloat16Row)(from, scale, to, n);
}

template <typename T>
void Run(const Gather<T>& gather, ThreadPool& threads) {
  const int64_t hidden = gather.out.cols();
  if (hidden == 0) return;
  // About 64 KiB a range: long enough to hide the hand-off, short enough to balance.
  const auto row_bytes = static_cast<size_t>(hidden) * sizeof(T);
  const int64_t grain = std::max<int64_t>(1, (int64_t{64} << 10) / static_cast<int64_t>(row_bytes));
  threads.For(gather.out.rows(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      T* const to = gather.out.row(i);
      if (gather.source_row[i] < 0) {
        std::fill_n(to, hidden, T(0.0f));
        continue;
      }
      const int32_t view = gather.source_view.empty() ? 0 : gather.source_view[i];
      const T* const from = gather.in[view].row(gather.source_row[i]);
      if (gather.scale.empty()) {
        std::memcpy(to, from, row_bytes);
      } else {
        ScaleRow(from, gather.scale[i], to, hidden);
      }
    }
  });
}

template void Run<float>(const Gather<float>&, ThreadPool&);
template void Run<BFloat16>(const Gather<BFloat16>&, ThreadPool&);
template void Run<Float16>(const Gather<Float16>&, ThreadPool&);

}  // namespace moe::permute
#endif  // HWY_ONCE
