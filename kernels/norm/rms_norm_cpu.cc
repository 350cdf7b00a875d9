#include <algorithm>
#include <cmath>

#include "kernels/base/fixed_dot.h"
#include "kernels/base/highway_targets.h"
#include "kernels/base/parallel.h"
#include "kernels/base/row_grain.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/norm/rms_norm_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"
#include "kernels/norm/rms_norm_op.h"

HWY_BEFORE_NAMESPACE();
namespace moe::rms_norm {
namespace HWY_NAMESPACE {
namespace {

using namespace moe::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): this target's lanes

template <typename T>
void Normalize(const T* x, const float* weight, float rstd, int64_t n, T* y) {
  const auto scale = hn::Set(FloatTag(), rstd);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    StoreLanes(hn::Mul(hn::Mul(LoadLanes(x + i), scale), LoadLanes(weight + i)), y + i);
  }
  if (i == n) return;
  const auto last = hn::Mul(LoadFirst(x + i, n - i), scale);
  StoreFirst(hn::Mul(last, LoadFirst(weight + i, n - i)), y + i, n - i);
}

// sum_i (dy[i] * weight[i]) * x[i] in the order of FixedDot.
template <typename T>
HWY_INLINE float WeightedDot(const T* dy, const float* weight, const T* x, int64_t n) {
  FixedPartials sum;
  const int64_t body = n - n % kPartials;
  for (int64_t i = 0; i < body; i += kPartials) {
    for (int64_t j = 0; j < kPartials / kLanes; ++j) {
      const int64_t at = i + j * kLanes;
      const auto dn = hn::Mul(LoadLanes(dy + at), LoadLanes(weight + at));
      sum.lanes[j] = hn::MulAdd(dn, LoadLanes(x + at), sum.lanes[j]);
    }
  }
  for (int64_t i = body, j = 0; i < n; i += kLanes, ++j) {
    const int64_t rest = std::min(kLanes, n - i);
    const auto dn = hn::Mul(LoadFirst(dy + i, rest), LoadFirst(weight + i, rest));
    sum.lanes[j] = hn::MulAdd(dn, LoadFirst(x + i, rest), sum.lanes[j]);
  }
  return sum.Fold();
}

// dx of row t: rstd * (dy * weight - x * slope) (+ dx)
template <typename T>
void InputGradient(const Backward<T>& b, int64_t t) {
  const int64_t n = b.groups.cols;
  const T *const x = b.groups.Row(b.x, t), *const dy = b.groups.Row(b.dy, t);
  T* const dx = b.groups.Row(b.dx, t);
  const float dot = WeightedDot(dy, b.weight, x, n);
  const auto slope = hn::Set(FloatTag(), b.rstd[t] * b.rstd[t] * (dot / static_cast<float>(n)));
  const auto rstd = hn::Set(FloatTag(), b.rstd[t]);
  const bool add = b.write_dx == Write::kAdd;
  const auto gradient = [&](auto d_out, auto weight, auto in) HWY_ATTR {
    return hn::Mul(rstd, hn::NegMulAdd(in, slope, hn::Mul(d_out, weight)));
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    auto d = gradient(LoadLanes(dy + i), LoadLanes(b.weight + i), LoadLanes(x + i));
    if (add) d = hn::Add(LoadLanes(dx + i), d);
    StoreLanes(d, dx + i);
  }
  if (i == n) return;
  const int64_t rest = n - i;
  auto d = gradient(LoadFirst(dy + i, rest), LoadFirst(b.weight + i, rest), LoadFirst(x + i, rest));
  if (add) d = hn::Add(LoadFirst(dx + i, rest), d);
  StoreFirst(d, dx + i, rest);
}

// Columns [begin, end), at most kColumns, of
// d_weight[h] (+)= sum_t (dy[t, h] * x[t, h]) * rstd[t], t ascending.
template <typename T>
void WeightColumns(const Backward<T>& b, int64_t begin, int64_t end) {
  const int64_t n = end - begin;
  float sum[kColumns] = {};
  for (int64_t t = 0; t < b.rows(); ++t) {
    const T *const x = b.groups.Row(b.x, t) + begin, *const dy = b.groups.Row(b.dy, t) + begin;
    const auto scale = hn::Set(FloatTag(), b.rstd[t]);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      const auto product = hn::Mul(LoadLanes(dy + i), LoadLanes(x + i));
      StoreLanes(hn::MulAdd(product, scale, LoadLanes(sum + i)), sum + i);
    }
    if (i == n) continue;
    const auto product = hn::Mul(LoadFirst(dy + i, n - i), LoadFirst(x + i, n - i));
    StoreLanes(hn::MulAdd(product, scale, LoadLanes(sum + i)), sum + i);
  }
  float* const d_weight = b.d_weight + begin;
  for (int64_t i = 0; i < n; ++i) {
    d_weight[i] = b.write_d_weight == Write::kAdd ? d_weight[i] + sum[i] : sum[i];
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe::rms_norm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::rms_norm {

template <typename T>
void Run(const Forward<T>& f, ThreadPool& threads) {
  const int64_t cols = f.groups.cols;
  if (cols == 0) return;
  threads.For(f.rows(), RowGrain(cols), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* const x = f.groups.Row(f.x, t);
      f.rstd[t] = 1.0f / std::sqrt(FixedDot(x, x, cols) / static_cast<float>(cols) + f.epsilon);
      MOE_SIMD(Normalize<T>)(x, f.weight, f.rstd[t], cols, f.groups.Row(f.y, t));
    }
  });
}

template <typename T>
void Run(const Backward<T>& b, ThreadPool& threads) {
  // Threads share the weight's columns, so that every element sees its tokens in ascending order.
  threads.For(b.groups.cols, kColumns, [&](int64_t begin, int64_t end) {
    MOE_SIMD(WeightColumns<T>)(b, begin, end);
  });
  threads.For(b.rows(), RowGrain(b.groups.cols), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) MOE_SIMD(InputGradient<T>)(b, t);
  });
}

#define MOE_INSTANTIATE(T)                           \
  template void Run(const Forward<T>&, ThreadPool&); \
  template void Run(const Backward<T>&, ThreadPool&);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe::rms_norm
#endif  // HWY_ONCE
