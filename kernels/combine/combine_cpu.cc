#include <algorithm>

#include "kernels/base/fixed_dot.h"
#include "kernels/base/highway_targets.h"
#include "kernels/base/parallel.h"
#include "kernels/combine/combine_op.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/combine/combine_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::combine {
namespace HWY_NAMESPACE {
namespace {

using namespace moe::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): this target's lanes

// Columns [h, h + kVectors * kLanes) of one token: the sums stay in registers over its slots.
template <int kVectors, typename T>
HWY_INLINE void CombineColumns(const Combine<T>& c, int64_t token, int64_t h) {
  const FloatTag d;
  T* const out = c.out.row(token) + h;
  FloatLanes sum[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    sum[v] = c.write == Write::kAdd ? LoadLanes(out + v * kLanes) : hn::Zero(d);
  }
  for (int64_t s = c.slot_offset[token]; s < c.slot_offset[token + 1]; ++s) {
    if (c.row_of_slot[s] < 0) continue;
    const T* const row = c.rows.row(c.row_of_slot[s]) + h;
    if (c.weight == nullptr) {
      for (int v = 0; v < kVectors; ++v) sum[v] = hn::Add(sum[v], LoadLanes(row + v * kLanes));
      continue;
    }
    const FloatLanes weight = hn::Set(d, c.weight[s]);
    for (int v = 0; v < kVectors; ++v) {
      sum[v] = hn::MulAdd(weight, LoadLanes(row + v * kLanes), sum[v]);
    }
  }
  for (int v = 0; v < kVectors; ++v) StoreLanes(sum[v], out + v * kLanes);
}

// The last `n` < kLanes columns.
template <typename T>
HWY_INLINE void CombineTail(const Combine<T>& c, int64_t token, int64_t h, int64_t n) {
  const FloatTag d;
  T* const out = c.out.row(token) + h;
  FloatLanes sum = c.write == Write::kAdd ? LoadFirst(out, n) : hn::Zero(d);
  for (int64_t s = c.slot_offset[token]; s < c.slot_offset[token + 1]; ++s) {
    if (c.row_of_slot[s] < 0) continue;
    const FloatLanes row = LoadFirst(c.rows.row(c.row_of_slot[s]) + h, n);
    sum = c.weight == nullptr ? hn::Add(sum, row) : hn::MulAdd(hn::Set(d, c.weight[s]), row, sum);
  }
  StoreFirst(sum, out, n);
}

template <typename T>
void CombineTokens(const Combine<T>& c, int64_t begin, int64_t end) {
  constexpr int kVectors = 4;  // enough independent sums to cover the latency of an addition
  const int64_t hidden = c.out.cols();
  for (int64_t token = begin; token < end; ++token) {
    int64_t h = 0;
    for (; h + kVectors * kLanes <= hidden; h += kVectors * kLanes) {
      CombineColumns<kVectors>(c, token, h);
    }
    for (; h + kLanes <= hidden; h += kLanes) CombineColumns<1>(c, token, h);
    if (h < hidden) CombineTail(c, token, h, hidden - h);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe::combine
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::combine {

namespace {

// Tokens a range: about 32 Ki elements of the output.
int64_t Grain(int64_t hidden) {
  return std::max<int64_t>(1, (int64_t{32} << 10) / std::max<int64_t>(hidden, 1));
}

}  // namespace

template <typename T>
void Run(const Combine<T>& combine, ThreadPool& threads) {
  threads.For(combine.out.rows(), Grain(combine.out.cols()), [&](int64_t begin, int64_t end) {
    MOE_SIMD(CombineTokens<T>)(combine, begin, end);
  });
}

template <typename T>
void Run(const WeightGradient<T>& g, ThreadPool& threads) {
  threads.For(g.dy.rows(), Grain(g.dy.cols()), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t s = g.slot_offset[t]; s < g.slot_offset[t + 1]; ++s) {
        const int32_t row = g.row_of_slot[s];
        g.d_weight[s] =
            row < 0 ? 0.0f
                    : static_cast<float>(WideDot<T>(g.dy.row(t), g.rows.row(row), g.dy.cols()));
      }
    }
  });
}

#define MOE_INSTANTIATE(T)                           \
  template void Run(const Combine<T>&, ThreadPool&); \
  template void Run(const WeightGradient<T>&, ThreadPool&);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe::combine
#endif  // HWY_ONCE
