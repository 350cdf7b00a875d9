#include <math.h>

#include "kernels/adamw/adamw_op.h"
#include "kernels/base/cuda_elements.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"

namespace moe::adamw {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// One element, an operation of adamw_cpu.cc after the other. nvcc compiles / and sqrtf to the IEEE
// ones, and no product into a fused multiply-add (--fmad=false).
__device__ void Update(const Step& s, float gradient, float& weight, float& m, float& v) {
  const float g = s.gradient_scale * gradient;
  m = s.beta1 * m + s.one_minus_beta1 * g;
  v = s.beta2 * v + s.one_minus_beta2 * (g * g);
  const float root = sqrtf(v / s.correction2);
  const float direction = m / s.correction1 / (root + s.epsilon);
  weight = weight - s.learning_rate * (direction + s.weight_decay * weight);
}

// A thread owns elements.
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) AdamWKernel(AdamW a) {
  ForElements<float>(
      a.n,
      [&](int64_t i, auto width) {
        constexpr int kWidth = decltype(width)::value;
        const auto gradient = Load<kWidth>(a.gradient + i);
        auto weight = Load<kWidth>(a.weight + i);
        auto m = Load<kWidth>(a.m + i);
        auto v = Load<kWidth>(a.v + i);
        for (int j = 0; j < kWidth; ++j) {
          Update(a.step, gradient.at[j], weight.at[j], m.at[j], v.at[j]);
        }
        Store(weight, a.weight + i);
        Store(m, a.m + i);
        Store(v, a.v + i);
      },
      a.gradient, a.weight, a.m, a.v);
}

}  // namespace

cudaError_t Run(const AdamW& adamw, cudaStream_t stream) {
  if (adamw.n == 0) return cudaSuccess;
  return Launch(&AdamWKernel, ElementShape<float>(adamw.n), stream, adamw);
}

}  // namespace moe::adamw
