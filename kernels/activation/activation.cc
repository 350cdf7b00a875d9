#include "kernels/activation/activation.h"

#include <numbers>

#include "kernels/activation/activation_op.h"
#include "kernels/base/highway_targets.h"
#include "kernels/base/parallel.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/activation/activation.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::activation {
namespace HWY_NAMESPACE {
namespace {

using namespace moe::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): this target's lanes

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
  static constexpr bool kGated = true;
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
  static constexpr bool kGated = true;
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
  static constexpr bool kGated = true;
  static HWY_INLINE FloatLanes Forward(FloatLanes gate, FloatLanes up) {
    return hn::Mul(hn::Mul(gate, NormalCdf(gate)), up);
  }
  static HWY_INLINE Gradients Backward(FloatLanes gate, FloatLanes up, FloatLanes d_out) {
    const auto cdf = NormalCdf(gate);
    const auto slope = hn::MulAdd(gate, NormalDensity(gate), cdf);
    return {hn::Mul(hn::Mul(d_out, up), slope), hn::Mul(d_out, hn::Mul(gate, cdf))};
  }
};

// x sigmoid(2 y) with y = sqrt(2 / pi) (x + 0.044715 x^3), since (1 + tanh(y)) / 2 = sigmoid(2 y).
// The sigmoid keeps the digits of the left tail, which 1 + tanh(y) cancels.
struct GeGluTanh {
  static constexpr bool kGated = true;
  static constexpr float kScale = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  static constexpr float kCubic = 0.044715f;
  // From there on the sigmoid is 0 or 1; no power of the clamped x overflows.
  static constexpr float kFar = 16.0f;

  // Comparisons, as in ClampedSwiGlu.
  static HWY_INLINE FloatLanes Near(FloatLanes x) {
    const auto far = hn::Set(FloatTag(), kFar);
    const auto below = hn::IfThenElse(hn::Gt(x, far), far, x);
    return hn::IfThenElse(hn::Lt(below, hn::Neg(far)), hn::Neg(far), below);
  }
  static HWY_INLINE FloatLanes Cdf(FloatLanes near) {
    const auto cubic = hn::Mul(hn::Set(FloatTag(), kCubic), hn::Mul(near, near));
    return Sigmoid(hn::Mul(hn::Set(FloatTag(), kScale), hn::MulAdd(cubic, near, near)));
  }
  static HWY_INLINE FloatLanes Forward(FloatLanes gate, FloatLanes up) {
    return hn::Mul(hn::Mul(gate, Cdf(Near(gate))), up);
  }
  static HWY_INLINE Gradients Backward(FloatLanes gate, FloatLanes up, FloatLanes d_out) {
    const auto near = Near(gate);
    const auto cdf = Cdf(near);
    // (x sigmoid(z))' = sigmoid (1 + x z' (1 - sigmoid)),  z' = scale (1 + 3 cubic x^2)
    const auto square = hn::Mul(hn::Set(FloatTag(), 3 * kCubic), hn::Mul(near, near));
    const auto steep = hn::Mul(hn::Set(FloatTag(), kScale), hn::MulAdd(square, near, near));
    const auto slope = hn::Mul(cdf, hn::MulAdd(steep, hn::Sub(One(), cdf), One()));
    return {hn::Mul(hn::Mul(d_out, up), slope), hn::Mul(d_out, hn::Mul(gate, cdf))};
  }
};

// max(x, 0); NaN stays NaN.
HWY_INLINE FloatLanes Positive(FloatLanes x) {
  return hn::IfThenElse(hn::Lt(x, hn::Zero(FloatTag())), hn::Zero(FloatTag()), x);
}

struct Relu {
  static constexpr bool kGated = false;
  static HWY_INLINE FloatLanes Forward(FloatLanes gate, FloatLanes) { return Positive(gate); }
  static HWY_INLINE Gradients Backward(FloatLanes gate, FloatLanes, FloatLanes d_out) {
    const auto on = hn::Gt(gate, hn::Zero(FloatTag()));
    return {hn::IfThenElseZero(on, d_out), d_out};
  }
};

struct Relu2 {
  static constexpr bool kGated = false;
  static HWY_INLINE FloatLanes Forward(FloatLanes gate, FloatLanes) {
    const auto x = Positive(gate);
    return hn::Mul(x, x);
  }
  static HWY_INLINE Gradients Backward(FloatLanes gate, FloatLanes, FloatLanes d_out) {
    const auto x = Positive(gate);
    return {hn::Mul(d_out, hn::Add(x, x)), d_out};
  }
};

template <class Op, typename T>
HWY_INLINE void ForwardRow(const Op& op, const Forward<T>& f, int64_t n) {
  const T* const gate = f.gate.row(n);
  const T* const up = Op::kGated ? f.up.row(n) : gate;
  T* const out = f.out.row(n);
  ForLanes(f.gate.cols(), [&](int64_t c, auto lanes) MOE_LANES {
    const auto g = lanes.Load(gate + c);
    lanes.Store(op.Forward(g, Op::kGated ? lanes.Load(up + c) : g), out + c);
  });
}

template <class Op, typename T>
HWY_INLINE void BackwardRow(const Op& op, const Backward<T>& b, int64_t n) {
  const T* const gate = b.gate.row(n);
  const T* const up = Op::kGated ? b.up.row(n) : gate;
  const T* const d_out = b.d_out.row(n);
  T* const d_gate = b.d_gate.row(n);
  T* const d_up = Op::kGated ? b.d_up.row(n) : nullptr;
  ForLanes(b.gate.cols(), [&](int64_t c, auto lanes) MOE_LANES {
    const auto g = lanes.Load(gate + c);
    const Gradients d = op.Backward(g, Op::kGated ? lanes.Load(up + c) : g, lanes.Load(d_out + c));
    lanes.Store(d.gate, d_gate + c);
    if constexpr (Op::kGated) lanes.Store(d.up, d_up + c);
  });
}

// f(Op()) for the activation's Op.
template <class Function>
HWY_INLINE void WithOp(ActivationFunction activation, Function f) {
  switch (activation.kind) {
    case Activation::kSwiGlu:
      return f(SwiGlu());
    case Activation::kGeGlu:
      return f(GeGlu());
    case Activation::kGeGluTanh:
      return f(GeGluTanh());
    case Activation::kRelu:
      return f(Relu());
    case Activation::kRelu2:
      return f(Relu2());
    case Activation::kClampedSwiGlu:
      return f(ClampedSwiGlu{activation.alpha, activation.limit});
  }
}

template <typename T>
void ForwardRows(const Forward<T>& forward, int64_t begin, int64_t end) {
  WithOp(forward.activation, [&](auto op) MOE_LANES {
    for (int64_t n = begin; n < end; ++n) ForwardRow(op, forward, n);
  });
}

template <typename T>
void BackwardRows(const Backward<T>& backward, int64_t begin, int64_t end) {
  WithOp(backward.activation, [&](auto op) MOE_LANES {
    for (int64_t n = begin; n < end; ++n) BackwardRow(op, backward, n);
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe::activation
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::activation {

template <typename T>
void Run(const Forward<T>& f, ThreadPool& threads) {
  threads.For(f.gate.rows(), RowGrain(f.gate.cols()), [&](int64_t begin, int64_t end) {
    MOE_SIMD(ForwardRows<T>)(f, begin, end);
  });
}

template <typename T>
void Run(const Backward<T>& b, ThreadPool& threads) {
  threads.For(b.gate.rows(), RowGrain(b.gate.cols()), [&](int64_t begin, int64_t end) {
    MOE_SIMD(BackwardRows<T>)(b, begin, end);
  });
}

}  // namespace moe::activation

namespace moe {

template <typename T>
absl::Status ActivationForward(ActivationFunction activation, MatrixView<const T> gate,
                               MatrixView<const T> up, MatrixView<T> out, Stream& stream) {
  constexpr const char* kFunction = "ActivationForward";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "gate", gate, gate.rows(), gate.cols()));
  if (IsGated(activation)) {
    MOE_RETURN_IF_ERROR(CheckShape(kFunction, "up", up, gate.rows(), gate.cols()));
  }
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "out", out, gate.rows(), gate.cols()));
  return RunOp(kFunction, activation::Forward<T>{activation, gate, up, out}, stream);
}

template <typename T>
absl::Status ActivationBackward(ActivationFunction activation, MatrixView<const T> gate,
                                MatrixView<const T> up, MatrixView<const T> d_out,
                                MatrixView<T> d_gate, MatrixView<T> d_up, Stream& stream) {
  constexpr const char* kFunction = "ActivationBackward";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "gate", gate, gate.rows(), gate.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "d_out", d_out, gate.rows(), gate.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "d_gate", d_gate, gate.rows(), gate.cols()));
  if (IsGated(activation)) {
    MOE_RETURN_IF_ERROR(CheckShape(kFunction, "up", up, gate.rows(), gate.cols()));
    MOE_RETURN_IF_ERROR(CheckShape(kFunction, "d_up", d_up, gate.rows(), gate.cols()));
  }
  return RunOp(kFunction, activation::Backward<T>{activation, gate, up, d_out, d_gate, d_up},
               stream);
}

MOE_INSTANTIATE_FOR_STORAGE(ActivationForward)
MOE_INSTANTIATE_FOR_STORAGE(ActivationBackward)

}  // namespace moe
#endif  // HWY_ONCE
