#include "kernels/swiglu/swiglu_cpu.h"

#include <numbers>

#include "kernels/base/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/swiglu/swiglu_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

HWY_INLINE FloatLanes One() {
  return hn::Set(FloatTag(), 1.0f);
}

// 1 / (1 + e^-x), from e^-|x| so that nothing overflows.
HWY_INLINE FloatLanes Sigmoid(FloatLanes x) {
  const auto e = ExpLanes(hn::Neg(hn::Abs(x)));
  const auto numerator = hn::IfThenElse(hn::Lt(x, hn::Zero(FloatTag())), e, One());
  return hn::Div(numerator, hn::Add(One(), e));
}

struct Gradients {
  FloatLanes gate, up;
};

struct SwiGlu {
  static HWY_INLINE FloatLanes Forward(FloatLanes gate, FloatLanes up) {
    return hn::Mul(hn::Mul(gate, Sigmoid(gate)), up);
  }
  static HWY_INLINE Gradients Backward(FloatLanes gate, FloatLanes up, FloatLanes d_out) {
    const auto sigmoid = Sigmoid(gate);
    const auto silu = hn::Mul(gate, sigmoid);
    // silu' = sigmoid (1 + gate (1 - sigmoid))
    const auto slope = hn::Mul(sigmoid, hn::MulAdd(gate, hn::Sub(One(), sigmoid), One()));
    return {hn::Mul(hn::Mul(d_out, up), slope), hn::Mul(d_out, silu)};
  }
};

struct ClampedSwiGlu {
  float alpha, limit;

  // Comparisons rather than Min and Max, which lose a NaN on some targets.
  HWY_INLINE FloatLanes AtMostLimit(FloatLanes x) const {
    const auto bound = hn::Set(FloatTag(), limit);
    return hn::IfThenElse(hn::Gt(x, bound), bound, x);
  }
  HWY_INLINE FloatLanes UpPlusOne(FloatLanes up) const {
    const auto bound = hn::Set(FloatTag(), -limit);
    const auto u = AtMostLimit(up);
    return hn::Add(hn::IfThenElse(hn::Lt(u, bound), bound, u), One());
  }
  HWY_INLINE FloatLanes Forward(FloatLanes gate, FloatLanes up) const {
    const auto g = AtMostLimit(gate);
    const auto sigmoid = Sigmoid(hn::Mul(hn::Set(FloatTag(), alpha), g));
    return hn::Mul(hn::Mul(g, sigmoid), UpPlusOne(up));
  }
  HWY_INLINE Gradients Backward(FloatLanes gate, FloatLanes up, FloatLanes d_out) const {
    const auto bound = hn::Set(FloatTag(), limit);
    const auto g = AtMostLimit(gate);
    const auto z = hn::Mul(hn::Set(FloatTag(), alpha), g);
    const auto sigmoid = Sigmoid(z);
    // (g sigmoid(z))' = sigmoid (1 + z (1 - sigmoid))
    const auto slope = hn::Mul(sigmoid, hn::MulAdd(z, hn::Sub(One(), sigmoid), One()));
    const auto d_gate = hn::Mul(hn::Mul(d_out, UpPlusOne(up)), slope);
    const auto d_up = hn::Mul(d_out, hn::Mul(g, sigmoid));
    return {hn::IfThenElseZero(hn::Le(gate, bound), d_gate),
            hn::IfThenElseZero(hn::Le(hn::Abs(up), bound), d_up)};
  }
};

// Polynomial of the Chebyshev fit below, highest power first.
constexpr float kErfcFit[] = {0.17087277f,  -0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f,
                              -0.18628806f, 0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};

// P(X <= x) of the standard normal distribution: erfc(-x / sqrt(2)) / 2. For z >= 0
//   erfc(z) = t exp(-z^2 + fit(t)),  t = 1 / (1 + z / 2)
// with a relative error below 1.2e-7 (Press et al., "Numerical Recipes", 6.2), which keeps the
// digits of the left tail.
HWY_INLINE FloatLanes NormalCdf(FloatLanes x) {
  const FloatTag d;
  const auto z = hn::Mul(hn::Abs(x), hn::Set(d, std::numbers::sqrt2_v<float> / 2));
  const auto t = hn::Div(One(), hn::MulAdd(z, hn::Set(d, 0.5f), One()));
  auto fit = hn::Zero(d);
  for (const float coefficient : kErfcFit) fit = hn::MulAdd(fit, t, hn::Set(d, coefficient));
  const auto tail =
      hn::Mul(hn::Mul(hn::Set(d, 0.5f), t), ExpLanes(hn::NegMulAdd(z, z, fit)));  // P(X <= -|x|)
  return hn::IfThenElse(hn::Lt(x, hn::Zero(d)), tail, hn::Sub(One(), tail));
}

HWY_INLINE FloatLanes NormalDensity(FloatLanes x) {
  const FloatTag d;
  constexpr float kNormalizer = 0.3989422804014327f;  // 1 / sqrt(2 pi)
  const auto half = hn::Mul(hn::Set(d, -0.5f), x);
  return hn::Mul(hn::Set(d, kNormalizer), ExpLanes(hn::Mul(half, x)));
}

struct GeGlu {
  static HWY_INLINE FloatLanes Forward(FloatLanes gate, FloatLanes up) {
    return hn::Mul(hn::Mul(gate, NormalCdf(gate)), up);
  }
  static HWY_INLINE Gradients Backward(FloatLanes gate, FloatLanes up, FloatLanes d_out) {
    const auto cdf = NormalCdf(gate);
    const auto slope = hn::MulAdd(gate, NormalDensity(gate), cdf);
    return {hn::Mul(hn::Mul(d_out, up), slope), hn::Mul(d_out, hn::Mul(gate, cdf))};
  }
};

// max(x, 0); NaN stays NaN.
HWY_INLINE FloatLanes Positive(FloatLanes x) {
  return hn::IfThenElse(hn::Lt(x, hn::Zero(FloatTag())), hn::Zero(FloatTag()), x);
}

struct Relu {
  static HWY_INLINE FloatLanes Forward(FloatLanes gate, FloatLanes) { return Positive(gate); }
  static HWY_INLINE Gradients Backward(FloatLanes gate, FloatLanes, FloatLanes d_out) {
    const auto on = hn::Gt(gate, hn::Zero(FloatTag()));
    return {hn::IfThenElseZero(on, d_out), d_out};
  }
};

struct Relu2 {
  static HWY_INLINE FloatLanes Forward(FloatLanes gate, FloatLanes) {
    const auto x = Positive(gate);
    return hn::Mul(x, x);
  }
  static HWY_INLINE Gradients Backward(FloatLanes gate, FloatLanes, FloatLanes d_out) {
    const auto x = Positive(gate);
    return {hn::Mul(d_out, hn::Add(x, x)), d_out};
  }
};

// Body and tail run the same lanes: a tail is copied into a padded vector.
template <bool kGated, class Op, typename T>
HWY_INLINE void Forward(const Op& op, const ActivationRow<T>& row) {
  int64_t i = 0;
  for (; i + kLanes <= row.n; i += kLanes) {
    const auto gate = LoadLanes(row.gate + i);
    StoreLanes(op.Forward(gate, kGated ? LoadLanes(row.up + i) : gate), row.out + i);
  }
  if (i == row.n) return;
  const int64_t rest = row.n - i;
  const auto gate = LoadFirst(row.gate + i, rest);
  StoreFirst(op.Forward(gate, kGated ? LoadFirst(row.up + i, rest) : gate), row.out + i, rest);
}

template <bool kGated, class Op, typename T>
HWY_INLINE void Backward(const Op& op, const ActivationRow<T>& row) {
  int64_t i = 0;
  for (; i + kLanes <= row.n; i += kLanes) {
    const auto gate = LoadLanes(row.gate + i);
    const Gradients d =
        op.Backward(gate, kGated ? LoadLanes(row.up + i) : gate, LoadLanes(row.d_out + i));
    StoreLanes(d.gate, row.d_gate + i);
    if constexpr (kGated) StoreLanes(d.up, row.d_up + i);
  }
  if (i == row.n) return;
  const int64_t rest = row.n - i;
  const auto gate = LoadFirst(row.gate + i, rest);
  const Gradients d = op.Backward(gate, kGated ? LoadFirst(row.up + i, rest) : gate,
                                  LoadFirst(row.d_out + i, rest));
  StoreFirst(d.gate, row.d_gate + i, rest);
  if constexpr (kGated) StoreFirst(d.up, row.d_up + i, rest);
}

template <typename T>
HWY_INLINE void ForwardAny(ActivationFunction activation, const ActivationRow<T>& row) {
  switch (activation.kind) {
    case Activation::kSwiGlu:
      return Forward<true>(SwiGlu(), row);
    case Activation::kGeGlu:
      return Forward<true>(GeGlu(), row);
    case Activation::kRelu:
      return Forward<false>(Relu(), row);
    case Activation::kRelu2:
      return Forward<false>(Relu2(), row);
    case Activation::kClampedSwiGlu:
      return Forward<true>(ClampedSwiGlu{activation.alpha, activation.limit}, row);
  }
}

template <typename T>
HWY_INLINE void BackwardAny(ActivationFunction activation, const ActivationRow<T>& row) {
  switch (activation.kind) {
    case Activation::kSwiGlu:
      return Backward<true>(SwiGlu(), row);
    case Activation::kGeGlu:
      return Backward<true>(GeGlu(), row);
    case Activation::kRelu:
      return Backward<false>(Relu(), row);
    case Activation::kRelu2:
      return Backward<false>(Relu2(), row);
    case Activation::kClampedSwiGlu:
      return Backward<true>(ClampedSwiGlu{activation.alpha, activation.limit}, row);
  }
}

void ForwardF32(ActivationFunction a, const ActivationRow<float>& row) {
  ForwardAny(a, row);
}
void ForwardBF16(ActivationFunction a, const ActivationRow<BFloat16>& row) {
  ForwardAny(a, row);
}
void ForwardF16(ActivationFunction a, const ActivationRow<Float16>& row) {
  ForwardAny(a, row);
}
void BackwardF32(ActivationFunction a, const ActivationRow<float>& row) {
  BackwardAny(a, row);
}
void BackwardBF16(ActivationFunction a, const ActivationRow<BFloat16>& row) {
  BackwardAny(a, row);
}
void BackwardF16(ActivationFunction a, const ActivationRow<Float16>& row) {
  BackwardAny(a, row);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

HWY_EXPORT(ForwardF32);
HWY_EXPORT(ForwardBF16);
HWY_EXPORT(ForwardF16);
HWY_EXPORT(BackwardF32);
HWY_EXPORT(BackwardBF16);
HWY_EXPORT(BackwardF16);

template <>
void ActivationForwardRow(ActivationFunction activation, const ActivationRow<float>& row) {
  HWY_DYNAMIC_DISPATCH(ForwardF32)(activation, row);
}
template <>
void ActivationForwardRow(ActivationFunction activation, const ActivationRow<BFloat16>& row) {
  HWY_DYNAMIC_DISPATCH(ForwardBF16)(activation, row);
}
template <>
void ActivationForwardRow(ActivationFunction activation, const ActivationRow<Float16>& row) {
  HWY_DYNAMIC_DISPATCH(ForwardF16)(activation, row);
}
template <>
void ActivationBackwardRow(ActivationFunction activation, const ActivationRow<float>& row) {
  HWY_DYNAMIC_DISPATCH(BackwardF32)(activation, row);
}
template <>
void ActivationBackwardRow(ActivationFunction activation, const ActivationRow<BFloat16>& row) {
  HWY_DYNAMIC_DISPATCH(BackwardBF16)(activation, row);
}
template <>
void ActivationBackwardRow(ActivationFunction activation, const ActivationRow<Float16>& row) {
  HWY_DYNAMIC_DISPATCH(BackwardF16)(activation, row);
}

}  // namespace moe
#endif  // HWY_ONCE
