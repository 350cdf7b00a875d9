#include <algorithm>

#include "kernels/base/highway_targets.h"
#include "kernels/base/parallel.h"
#include "kernels/base/row_grain.h"
#include "kernels/bias/bias_op.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/bias/bias_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::bias {
namespace HWY_NAMESPACE {
namespace {

using namespace moe::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): this target's lanes

template <typename T>
void AddTo(const float* bias, int64_t n, T* y) {
  ForLanes(n, [&](int64_t i, auto lanes) MOE_LANES {
    lanes.Store(hn::Add(lanes.Load(y + i), lanes.Load(bias + i)), y + i);
  });
}

// A block of at most kColumns columns: their sums stay in cache over all rows.
constexpr int64_t kColumns = 64;
template <typename T>
void SumColumns(const Gradient<T>& g, int64_t begin, int64_t end) {
  const int64_t n = end - begin;
  float sum[kColumns] = {};
  if (g.write == Write::kAdd) std::copy_n(g.d_bias + begin, n, sum);
  for (int64_t r = 0; r < g.dy.rows(); ++r) {
    const T* const row = g.dy.row(r) + begin;
    ForLanes(n, [&](int64_t i, auto lanes) MOE_LANES {
      StoreLanes(hn::Add(LoadLanes(sum + i), lanes.Load(row + i)), sum + i);
    });
  }
  std::copy_n(sum, n, g.d_bias + begin);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe::bias
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::bias {

template <typename T>
void Run(const Add<T>& add, ThreadPool& threads) {
  const int64_t cols = add.y.cols();
  threads.For(add.y.rows(), RowGrain(cols), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) MOE_SIMD(AddTo<T>)(add.bias, cols, add.y.row(n));
  });
}

template <typename T>
void Run(const Gradient<T>& g, ThreadPool& threads) {
  threads.For(g.dy.cols(), HWY_NAMESPACE::kColumns, [&](int64_t begin, int64_t end) {
    MOE_SIMD(SumColumns<T>)(g, begin, end);
  });
}

#define MOE_INSTANTIATE(T)                       \
  template void Run(const Add<T>&, ThreadPool&); \
  template void Run(const Gradient<T>&, ThreadPool&);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe::bias
#endif  // HWY_ONCE
