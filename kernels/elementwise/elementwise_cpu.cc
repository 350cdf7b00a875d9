#include <algorithm>
#include <type_traits>

#include "kernels/base/highway_targets.h"
#include "kernels/base/parallel.h"
#include "kernels/base/row_grain.h"
#include "kernels/elementwise/elementwise_op.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/elementwise/elementwise_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::elementwise {
namespace HWY_NAMESPACE {
namespace {

using namespace moe::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): this target's lanes

// Compute(op, begin, end): elements [begin, end) of arrays, or rows of matrices.

template <typename From, typename To>
HWY_INLINE void Compute(const Cast<From, To>& op, int64_t begin, int64_t end) {
  const From* const in = op.in + begin;
  To* const out = op.out + begin;
  if constexpr (std::is_same_v<From, To>) {
    std::copy_n(in, end - begin, out);
  } else {
    ForLanes(end - begin, [&](int64_t i, auto lanes) MOE_LANES {  //
      lanes.Store(lanes.Load(in + i), out + i);
    });
  }
}

HWY_INLINE void Compute(const Scale& op, int64_t begin, int64_t end) {
  const float* const in = op.in + begin;
  float* const out = op.out + begin;
  const auto factor = hn::Set(FloatTag(), op.factor);
  const bool add = op.write == Write::kAdd;
  ForLanes(end - begin, [&](int64_t i, auto lanes) MOE_LANES {
    const auto product = hn::Mul(lanes.Load(in + i), factor);
    lanes.Store(add ? hn::Add(lanes.Load(out + i), product) : product, out + i);
  });
}

template <typename T>
HWY_INLINE void Compute(const AddPartial<T>& op, int64_t begin, int64_t end) {
  const hn::CappedTag<T, 64 / sizeof(T)> d;
  constexpr auto kStep = static_cast<int64_t>(hn::MaxLanes(decltype(d)()));
  const T* const in = op.in;
  T* const out = op.out;
  int64_t i = begin;
  for (; i + kStep <= end; i += kStep) {
    hn::StoreU(hn::Add(hn::LoadU(d, in + i), hn::LoadU(d, out + i)), d, out + i);
  }
  for (; i < end; ++i) out[i] = in[i] + out[i];
}

template <typename T, typename U>
HWY_INLINE void Compute(const Sum<T, U>& op, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const T* const a = op.a.row(t);
    const U* const b = op.b.row(t);
    T* const out = op.out.row(t);
    ForLanes(op.out.cols(), [&](int64_t h, auto lanes) MOE_LANES {
      lanes.Store(hn::Add(lanes.Load(a + h), lanes.Load(b + h)), out + h);
    });
  }
}

template <typename T, typename U>
HWY_INLINE void Compute(const Product<T, U>& op, int64_t begin, int64_t end) {
  const bool add = op.write == Write::kAdd;
  for (int64_t t = begin; t < end; ++t) {
    const U* const a = op.a.row(t);
    const float* const b = op.b.row(t);
    T* const out = op.out.row(t);
    ForLanes(op.out.cols(), [&](int64_t h, auto lanes) MOE_LANES {
      const auto product = hn::Mul(lanes.Load(a + h), lanes.Load(b + h));
      lanes.Store(add ? hn::Add(lanes.Load(out + h), product) : product, out + h);
    });
  }
}

template <class Op>
void ComputeRange(const Op& op, int64_t begin, int64_t end) {
  Compute(op, begin, end);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe::elementwise
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::elementwise {

template <class Op>
void Run(const Op& op, ThreadPool& threads) {
  const auto compute = [&](int64_t begin, int64_t end) {
    MOE_SIMD(ComputeRange<Op>)(op, begin, end);
  };
  if constexpr (requires { op.n; }) {
    threads.For(op.n, int64_t{1} << 15, compute);  // a fork costs about as much as 4000 elements
  } else {
    threads.For(op.out.rows(), RowGrain(op.out.cols()), compute);
  }
}

#define MOE_INSTANTIATE(...) template void Run(const __VA_ARGS__&, ThreadPool&);
MOE_FOR_ELEMENTWISE(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe::elementwise
#endif  // HWY_ONCE
