#include <algorithm>
#include <cstring>

#include "kernels/base/highway_targets.h"
#include "kernels/base/parallel.h"
#include "kernels/permute/permute_op.h"
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

// to[h] = T(scale * from[h]) for h in [0, n).
template <typename T>
void ScaleRow(const T* from, float scale, T* to, int64_t n) {
  const FloatLanes factor = hn::Set(FloatTag(), scale);
  ForLanes(n, [&](int64_t h, auto lanes)
                  MOE_LANES { lanes.Store(hn::Mul(factor, lanes.Load(from + h)), to + h); });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe::permute
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::permute {
namespace {

// Calls source(i), row i of what is gathered, for the rows that are not zero.
template <typename T, typename Source>
void GatherEach(const int32_t* source_row, const float* scale, MatrixView<T> out,
                ThreadPool& threads, Source source) {
  const int64_t hidden = out.cols();
  if (hidden == 0) return;
  // About 64 KiB a range: long enough to hide the hand-off, short enough to balance.
  const auto row_bytes = static_cast<size_t>(hidden) * sizeof(T);
  const int64_t grain = std::max<int64_t>(1, (int64_t{64} << 10) / static_cast<int64_t>(row_bytes));
  threads.For(out.rows(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      T* const to = out.row(i);
      if (source_row[i] < 0) {
        std::fill_n(to, hidden, T(0.0f));
      } else if (scale == nullptr) {
        std::memcpy(to, source(i), row_bytes);
      } else {
        MOE_SIMD(ScaleRow<T>)(source(i), scale[i], to, hidden);
      }
    }
  });
}

}  // namespace

template <typename T>
void Run(const Gather<T>& gather, ThreadPool& threads) {
  GatherEach(gather.source_row, gather.scale, gather.out, threads,
             [&](int64_t i) { return gather.in.row(gather.source_row[i]); });
}

template <typename T>
void Run(const GatherOfMany<T>& gather, ThreadPool& threads) {
  GatherEach(gather.source_row, gather.scale, gather.out, threads, [&](int64_t i) {
    return gather.views[gather.source_view[i]].row(gather.source_row[i]);
  });
}

#define MOE_INSTANTIATE(T)                          \
  template void Run(const Gather<T>&, ThreadPool&); \
  template void Run(const GatherOfMany<T>&, ThreadPool&);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe::permute
#endif  // HWY_ONCE
