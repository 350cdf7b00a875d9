#include <math.h>

#include <cuda/atomic>

#include "kernels/adamw/adamw_op.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"

namespace moe::adamw {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// Updates one element with the operations of adamw.cc in the same order. nvcc compiles / and sqrtf
// to the IEEE operations, and no product into a fused multiply-add (--fmad=false).
__device__ void Update(const Step& s, float weight_decay, float gradient, float& weight, float& m,
                       float& v) {
  const float g = s.gradient_scale * gradient;
  m = s.beta1 * m + s.one_minus_beta1 * g;
  v = s.beta2 * v + s.one_minus_beta2 * (g * g);
  const float root = sqrtf(v / s.correction2);
  const float direction = m / s.correction1 / (root + s.epsilon);
  weight = weight - s.learning_rate * (direction + weight_decay * weight);
}

// A block owns kSliceElements elements, a thread some of them.
template <class View>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) AdamWKernel(AdamW<View> a) {
  ForSlices(a.slices, a.count, a.first, [&](const AdamWSlice& s, int64_t begin, int64_t n) {
    const auto* const sum = a.gradients.sum + s.first + begin;
    float* const weights = s.weight + begin;
    float* const ms = s.m + begin;
    float* const vs = s.v + begin;
    int64_t non_finite = 0;
    ForColumns<float>(n, VectorColumns<float>(n, sum, weights, ms, vs),
                      static_cast<int>(threadIdx.x), kRowThreads, [&](int64_t i, auto width) {
                        constexpr int kWidth = decltype(width)::value;
                        const auto gradient = LoadElements<kWidth>(sum + i);
                        auto weight = Load<kWidth>(weights + i);
                        auto m = Load<kWidth>(ms + i);
                        auto v = Load<kWidth>(vs + i);
                        for (int j = 0; j < kWidth; ++j) {
                          Update(a.step, s.weight_decay, a.gradients.Scaled(gradient.at[j]),
                                 weight.at[j], m.at[j], v.at[j]);
                          // Only w and v are tested: an m that is not finite makes its weight
                          // non-finite.
                          if (!isfinite(weight.at[j]) || !isfinite(v.at[j])) ++non_finite;
                        }
                        Store(weight, weights + i);
                        Store(m, ms + i);
                        Store(v, vs + i);
                      });
    if (non_finite == 0 || a.non_finite == nullptr) return;
    ::cuda::atomic_ref<int64_t, ::cuda::thread_scope_device>(*a.non_finite)
        .fetch_add(non_finite, ::cuda::memory_order_relaxed);
  });
}

}  // namespace

template <class View>
cudaError_t Run(const AdamW<View>& adamw, cudaStream_t stream) {
  if (adamw.first == adamw.end) return cudaSuccess;
  return Launch(&AdamWKernel<View>, SliceShape(adamw.first, adamw.end), stream, adamw);
}

template cudaError_t Run(const AdamW<SumView<float>>&, cudaStream_t);
template cudaError_t Run(const AdamW<SumView<int64_t>>&, cudaStream_t);

}  // namespace moe::adamw
