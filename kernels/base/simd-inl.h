// float32 lanes over float, BFloat16 and Float16 memory, for sources that Highway compiles once per
// target. The bits of a lane do not depend on the other lanes.
// (No plain include guard: foreach_target.h includes this file once per target.)
#if defined(MOE_KERNELS_BASE_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOE_KERNELS_BASE_SIMD_INL_H_
#undef MOE_KERNELS_BASE_SIMD_INL_H_
#else
#define MOE_KERNELS_BASE_SIMD_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include <hwy/highway.h>

#include <hwy/contrib/math/math-inl.h>

#include "kernels/base/dtype.h"

// For a loop of at most eight iterations: arrays of vectors stay in registers only if the loops
// over them are unrolled.
#ifndef MOE_UNROLL
#ifdef __clang__
#define MOE_UNROLL _Pragma("unroll")
#else
#define MOE_UNROLL _Pragma("GCC unroll 8")
#endif
#endif

// Attribute of the lambdas that are passed to ForLanes.
#ifndef MOE_LANES
#define MOE_LANES HWY_ATTR __attribute__((always_inline))
#endif

// MOE_SIMD(F<T>)(arguments...), outside HWY_NAMESPACE, calls F<T> of the machine's best target: one
// line for a template, where HWY_EXPORT needs a function for each type. F is one name.
#ifndef MOE_SIMD
#if HWY_IDE || ((HWY_TARGETS & (HWY_TARGETS - 1)) == 0)
#define MOE_SIMD(function) HWY_STATIC_DISPATCH(function)
#else
#define MOE_SIMD(function)                                                         \
  [] {                                                                             \
    /* Entry 0 is never chosen once the target is known. */                        \
    static constexpr decltype(&HWY_STATIC_DISPATCH(function)) kOfTarget[] = {      \
        nullptr, HWY_CHOOSE_TARGET_LIST(function), HWY_CHOOSE_FALLBACK(function)}; \
    hwy::ChosenTarget& chosen = hwy::GetChosenTarget();                            \
    if (HWY_UNLIKELY(!chosen.IsInitialized())) {                                   \
      chosen.Update(hwy::SupportedTargets());                                      \
    }                                                                              \
    return kOfTarget[chosen.GetIndex()];                                           \
  }()
#endif
#endif

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes, the number of partial sums in FixedDot.
using FloatTag = hn::CappedTag<float, 16>;
using FloatLanes = hn::Vec<FloatTag>;
constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(FloatTag()));

// As many elements from p on as D has lanes, converted.
template <class D>
HWY_INLINE hn::Vec<D> LoadFloats(D d, const float* p) {
  return hn::LoadU(d, p);
}

template <class D>
HWY_INLINE hn::Vec<D> LoadFloats(D d, const BFloat16* p) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto wide = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)));
  return hn::BitCast(d, hn::ShiftLeft<16>(wide));
}

template <class D>
HWY_INLINE hn::Vec<D> LoadFloats(D d, const Float16* p) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto half = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)));
  const auto shifted = hn::ShiftLeft<13>(hn::And(half, hn::Set(d32, 0x7fff)));
  const auto finite = hn::Mul(hn::BitCast(d, shifted), hn::Set(d, 0x1p112f));
  const auto special = hn::BitCast(d, hn::Or(shifted, hn::Set(d32, 0x7f800000u)));
  const auto is_special = hn::Ge(finite, hn::Set(d, 65536.0f));
  const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(d32, 0x8000)));
  return hn::Or(hn::IfThenElse(is_special, special, finite), hn::BitCast(d, sign));
}

// The lower halves of `bits`, whose upper halves are 0.
template <class D, class Bits>
HWY_INLINE void StoreHalves(D, Bits bits, uint16_t* p) {
  const hn::Rebind<uint16_t, D> d16;
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(hn::RebindToSigned<D>(), bits)), d16, p);
}

// Stores all lanes of v, rounded as by the element's constructor.
template <class D>
HWY_INLINE void StoreFloats(hn::Vec<D> v, D d, float* p) {
  hn::StoreU(v, d, p);
}

template <class D>
HWY_INLINE void StoreFloats(hn::Vec<D> v, D d, BFloat16* p) {
  const hn::RebindToUnsigned<D> d32;
  const auto u = hn::BitCast(d32, v);
  const auto high = hn::ShiftRight<16>(u);
  const auto odd = hn::And(high, hn::Set(d32, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(u, hn::Set(d32, 0x7fff)), odd));
  const auto quiet = hn::Or(high, hn::Set(d32, 0x40));
  const auto is_number = hn::RebindMask(d32, hn::Eq(v, v));
  StoreHalves(d, hn::IfThenElse(is_number, rounded, quiet), reinterpret_cast<uint16_t*>(p));
}

template <class D>
HWY_INLINE void StoreFloats(hn::Vec<D> v, D d, Float16* p) {
  const hn::RebindToUnsigned<D> d32;
  const auto size = hn::Abs(v);
  const auto u = hn::BitCast(d32, size);
  const auto odd = hn::And(hn::ShiftRight<13>(u), hn::Set(d32, 1));
  const auto carried = hn::Add(hn::Sub(u, hn::Set(d32, 0x38000000u - 0xfffu)), odd);
  const auto normal = hn::ShiftRight<13>(carried);
  const auto raised = hn::BitCast(d32, hn::Add(size, hn::Set(d, 0.5f)));
  const auto small = hn::Sub(raised, hn::Set(d32, 0x3f000000u));
  const auto payload = hn::And(hn::ShiftRight<13>(u), hn::Set(d32, 0x3ff));
  const auto is_small = hn::RebindMask(d32, hn::Lt(size, hn::Set(d, 0x1p-14f)));
  const auto is_large = hn::RebindMask(d32, hn::Ge(size, hn::Set(d, 65536.0f)));
  const auto is_number = hn::RebindMask(d32, hn::Eq(v, v));
  auto bits = hn::IfThenElse(is_small, small, normal);
  bits = hn::IfThenElse(is_large, hn::Set(d32, 0x7c00), bits);
  bits = hn::IfThenElse(is_number, bits, hn::Or(payload, hn::Set(d32, 0x7e00)));
  const auto sign = hn::And(hn::ShiftRight<16>(hn::BitCast(d32, v)), hn::Set(d32, 0x8000));
  StoreHalves(d, hn::Or(bits, sign), reinterpret_cast<uint16_t*>(p));
}

template <typename T>
HWY_INLINE FloatLanes LoadLanes(const T* p) {
  return LoadFloats(FloatTag(), p);
}

template <typename T>
HWY_INLINE void StoreLanes(FloatLanes v, T* p) {
  StoreFloats(v, FloatTag(), p);
}

// The first n <= kLanes elements; the other lanes hold 0.
template <typename T>
HWY_INLINE FloatLanes LoadFirst(const T* p, int64_t n) {
  T padded[kLanes] = {};
  std::copy_n(p, n, padded);
  return LoadLanes(padded);
}

// Stores lanes [0, n).
template <typename T>
HWY_INLINE void StoreFirst(FloatLanes v, T* p, int64_t n) {
  T padded[kLanes];
  StoreLanes(v, padded);
  std::copy_n(padded, n, p);
}

// Loads and stores of a loop over a row: whole vectors, or the first n < kLanes elements of one.
struct WholeLanes {
  HWY_INLINE FloatLanes ZeroBeyond(FloatLanes v) const { return v; }
  template <typename T>
  HWY_INLINE FloatLanes Load(const T* p) const {
    return LoadLanes(p);
  }
  template <typename T>
  HWY_INLINE void Store(FloatLanes v, T* p) const {
    StoreLanes(v, p);
  }
};
struct FirstLanes {
  int64_t n;
  HWY_INLINE FloatLanes ZeroBeyond(FloatLanes v) const {
    return hn::IfThenElseZero(hn::FirstN(FloatTag(), static_cast<size_t>(n)), v);
  }
  template <typename T>
  HWY_INLINE FloatLanes Load(const T* p) const {
    return LoadFirst(p, n);
  }
  template <typename T>
  HWY_INLINE void Store(FloatLanes v, T* p) const {
    StoreFirst(v, p, n);
  }
};

// f(i, lanes) for i = 0, kLanes, 2 kLanes ... below n: body and tail run the same code.
// f: [&](int64_t i, auto lanes) MOE_LANES { ... }.
template <class Function>
HWY_INLINE void ForLanes(int64_t n, Function f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, WholeLanes());
  if (i < n) f(i, FirstLanes{n - i});
}

// e^x within 1 ulp for x <= 88.7; infinity above, 0 below -104; NaN stays NaN.
HWY_INLINE FloatLanes ExpLanes(FloatLanes x) {
  const FloatTag d;
  // Highway's range ends at 104; beyond 89 the result is infinite anyway.
  const auto y = hn::Exp(d, hn::Min(x, hn::Set(d, 100.0f)));
  return hn::IfThenElse(hn::Eq(x, x), y, x);
}

// The sum of the lanes, folded by halves.
template <class D>
HWY_INLINE float FoldLanes(D, hn::Vec<D> v) {
#if HWY_TARGET != HWY_SCALAR  // one lane
  if constexpr (hn::MaxLanes(D()) > 4) {
    const hn::Half<D> half;
    return FoldLanes(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  } else {
    static_assert(hn::MaxLanes(D()) == 4);
    v = hn::Add(v, hn::Shuffle1032(v));
    v = hn::Add(v, hn::Shuffle2301(v));
  }
#endif
  return hn::GetLane(v);
}

// The 16 partial sums of FixedDot: element i of a row goes to partial i mod 16.
constexpr int64_t kPartials = 16;
struct FixedPartials {
  FloatLanes lanes[kPartials / kLanes];

  HWY_INLINE FixedPartials() {
    for (FloatLanes& v : lanes) v = hn::Zero(FloatTag());
  }

  // Pairwise: 8 + 8, 4 + 4, 2 + 2, 1 + 1.
  HWY_INLINE float Fold() const {
    FloatLanes sum[kPartials / kLanes];
    for (int64_t i = 0; i < kPartials / kLanes; ++i) sum[i] = lanes[i];
    for (int64_t width = kPartials / kLanes / 2; width > 0; width /= 2) {
      for (int64_t i = 0; i < width; ++i) sum[i] = hn::Add(sum[i], sum[i + width]);
    }
    return FoldLanes(FloatTag(), sum[0]);
  }
};

// The sum of n terms in the order of FixedDot: term(i, lanes, sum), a MOE_LANES lambda as for
// ForLanes, returns sum with the terms from i on added; terms beyond n must be zeros.
template <class Term>
HWY_INLINE float FixedSumOf(int64_t n, Term term) {
  FixedPartials sum;
  const int64_t body = n - n % kPartials;
  for (int64_t i = 0; i < body; i += kPartials) {
    for (int64_t j = 0; j < kPartials / kLanes; ++j) {
      sum.lanes[j] = term(i + j * kLanes, WholeLanes(), sum.lanes[j]);
    }
  }
  if (body == n) return sum.Fold();
  for (int64_t j = 0; j < kPartials / kLanes; ++j) {
    const int64_t i = std::min(n, body + j * kLanes);
    sum.lanes[j] = term(i, FirstLanes{std::min(kLanes, n - i)}, sum.lanes[j]);
  }
  return sum.Fold();
}

}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#endif  // MOE_KERNELS_BASE_SIMD_INL_H_
