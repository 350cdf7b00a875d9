#include <math.h>

#include "kernels/activation/activation_op.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"

namespace moe::activation {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// 1 / (1 + e^-x), from e^-|x| so that nothing overflows.
__device__ inline float Sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return (x < 0 ? e : 1.0f) / (1.0f + e);
}

struct Gradients {
  float gate, up;
};

struct SwiGlu {
  static constexpr bool kGated = true;
  static __device__ float Forward(float gate, float up) { return gate * Sigmoid(gate) * up; }
  static __device__ Gradients Backward(float gate, float up, float d_out) {
    const float sigmoid = Sigmoid(gate);
    // silu' = sigmoid (1 + gate (1 - sigmoid))
    const float slope = sigmoid * fmaf(gate, 1.0f - sigmoid, 1.0f);
    return {d_out * up * slope, d_out * (gate * sigmoid)};
  }
};

struct ClampedSwiGlu {
  static constexpr bool kGated = true;
  float alpha, limit;

  // Comparisons rather than fminf and fmaxf, which lose a NaN.
  __device__ float AtMostLimit(float x) const { return x > limit ? limit : x; }
  __device__ float UpPlusOne(float up) const {
    const float u = AtMostLimit(up);
    return (u < -limit ? -limit : u) + 1.0f;
  }
  __device__ float Forward(float gate, float up) const {
    const float g = AtMostLimit(gate);
    return g * Sigmoid(alpha * g) * UpPlusOne(up);
  }
  __device__ Gradients Backward(float gate, float up, float d_out) const {
    const float g = AtMostLimit(gate), z = alpha * g;
    const float sigmoid = Sigmoid(z);
    // (g sigmoid(z))' = sigmoid (1 + z (1 - sigmoid))
    const float slope = sigmoid * fmaf(z, 1.0f - sigmoid, 1.0f);
    return {gate <= limit ? d_out * UpPlusOne(up) * slope : 0.0f,
            fabsf(up) <= limit ? d_out * (g * sigmoid) : 0.0f};
  }
};

struct GeGlu {
  static constexpr bool kGated = true;
  static constexpr float kRootHalf = 0.70710678118654752f;
  static constexpr float kNormalizer = 0.39894228040143268f;  // 1 / sqrt(2 pi)
  // P(X <= x) of the standard normal distribution; erfc keeps the digits of the left tail.
  static __device__ float NormalCdf(float x) { return 0.5f * erfcf(-x * kRootHalf); }
  static __device__ float Forward(float gate, float up) { return gate * NormalCdf(gate) * up; }
  static __device__ Gradients Backward(float gate, float up, float d_out) {
    const float cdf = NormalCdf(gate);
    const float density = kNormalizer * expf(-0.5f * gate * gate);
    return {d_out * up * fmaf(gate, density, cdf), d_out * (gate * cdf)};
  }
};

// As on the CPU.
struct GeGluTanh {
  static constexpr bool kGated = true;
  static constexpr float kScale = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  static constexpr float kCubic = 0.044715f;
  static constexpr float kFar = 16.0f;
  static __device__ float Near(float x) { return x > kFar ? kFar : x < -kFar ? -kFar : x; }
  static __device__ float Cdf(float near) {
    return Sigmoid(kScale * fmaf(kCubic * (near * near), near, near));
  }
  static __device__ float Forward(float gate, float up) { return gate * Cdf(Near(gate)) * up; }
  static __device__ Gradients Backward(float gate, float up, float d_out) {
    const float near = Near(gate);
    const float cdf = Cdf(near);
    const float steep = kScale * fmaf(3 * kCubic * (near * near), near, near);
    return {d_out * up * (cdf * fmaf(steep, 1.0f - cdf, 1.0f)), d_out * (gate * cdf)};
  }
};

// max(x, 0); NaN stays NaN.
__device__ inline float Positive(float x) {
  return x < 0 ? 0.0f : x;
}

struct Relu {
  static constexpr bool kGated = false;
  static __device__ float Forward(float gate, float) { return Positive(gate); }
  static __device__ Gradients Backward(float gate, float, float d_out) {
    return {gate > 0 ? d_out : 0.0f, 0.0f};
  }
};

struct Relu2 {
  static constexpr bool kGated = false;
  static __device__ float Forward(float gate, float) { return Positive(gate) * Positive(gate); }
  static __device__ Gradients Backward(float gate, float, float d_out) {
    return {d_out * (Positive(gate) + Positive(gate)), 0.0f};
  }
};

template <typename T, int kWidth>
struct Inputs {
  Elements<T, kWidth> gate, up;
};

// A warp owns a row. Everything of a few columns is read before any of it is written.
template <class Op, typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) ForwardKernel(Op op, Forward<T> f) {
  const int64_t cols = f.gate.cols();
  ForRows<kWarpLanes>(f.gate.rows(), [&](int64_t n, int lane) {
    const T* const gate = f.gate.row(n);
    const T* const up = Op::kGated ? f.up.row(n) : gate;
    T* const out = f.out.row(n);
    const auto read = [&](int64_t c, auto width) {
      return Inputs<T, width.value>{Load<width.value>(gate + c), Load<width.value>(up + c)};
    };
    const auto write = [&](int64_t c, auto width, auto in) {
      for (int i = 0; i < width.value; ++i) {
        in.gate.at[i] =
            T(op.Forward(static_cast<float>(in.gate.at[i]), static_cast<float>(in.up.at[i])));
      }
      Store(in.gate, out + c);
    };
    constexpr int kAhead = Op::kGated ? kReadAheadOfMany : kReadAhead;
    ForColumns<T, kAhead>(cols, VectorColumns<T>(cols, gate, up, out), lane, kWarpLanes, read,
                          write);
  });
}

template <class Op, typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) BackwardKernel(Op op, Backward<T> b) {
  const int64_t cols = b.gate.cols();
  ForRows<kWarpLanes>(b.gate.rows(), [&](int64_t n, int lane) {
    const T* const gate = b.gate.row(n);
    const T* const up = Op::kGated ? b.up.row(n) : gate;
    const T* const d_out = b.d_out.row(n);
    T* const d_gate = b.d_gate.row(n);
    T* const d_up = Op::kGated ? b.d_up.row(n) : d_gate;
    ForColumns<T>(cols, VectorColumns<T>(cols, gate, up, d_out, d_gate, d_up), lane, kWarpLanes,
                  [&](int64_t c, auto width) {
                    constexpr int kWidth = decltype(width)::value;
                    auto gates = Load<kWidth>(gate + c);
                    auto ups = Load<kWidth>(up + c);
                    const auto d_outs = Load<kWidth>(d_out + c);
                    for (int i = 0; i < kWidth; ++i) {
                      const Gradients d = op.Backward(static_cast<float>(gates.at[i]),
                                                      static_cast<float>(ups.at[i]),
                                                      static_cast<float>(d_outs.at[i]));
                      gates.at[i] = T(d.gate);
                      ups.at[i] = T(d.up);
                    }
                    Store(gates, d_gate + c);
                    if constexpr (Op::kGated) Store(ups, d_up + c);
                  });
  });
}

// f(Op()) for the activation's Op.
template <typename Function>
cudaError_t WithOp(ActivationFunction activation, Function f) {
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
  return cudaErrorInvalidValue;
}

}  // namespace

template <typename T>
cudaError_t Run(const Forward<T>& forward, cudaStream_t stream) {
  const int64_t rows = forward.gate.rows();
  if (rows == 0 || forward.gate.cols() == 0) return cudaSuccess;
  return WithOp(forward.activation, [&](auto op) {
    return Launch(&ForwardKernel<decltype(op), T>, RowShape<kWarpLanes>(rows), stream, op, forward);
  });
}

template <typename T>
cudaError_t Run(const Backward<T>& backward, cudaStream_t stream) {
  const int64_t rows = backward.gate.rows();
  if (rows == 0 || backward.gate.cols() == 0) return cudaSuccess;
  return WithOp(backward.activation, [&](auto op) {
    return Launch(&BackwardKernel<decltype(op), T>, RowShape<kWarpLanes>(rows), stream, op,
                  backward);
  });
}

MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, Forward, cudaStream_t)
MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, Backward, cudaStream_t)

}  // namespace moe::activation
