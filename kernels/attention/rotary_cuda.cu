#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/sequences_cuda.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"

namespace moe::attention {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// A warp owns a row, a lane some neighbouring pairs (d, d + D/2) of a head at a time. Products are
// rounded before they are added, as on a CPU.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) RotaryKernel(CudaRotary<T> r) {
  const int64_t half = r.x.cols() / r.heads / 2;
  const int64_t pairs = half * r.heads;
  ForRows<kWarpLanes>(r.x.rows(), [&](int64_t t, int lane) {
    T* const x = r.x.row(t);
    const int64_t sequence =
        LastStartedBy(t, r.sequences, [&](int64_t s) { return r.sequence_offsets[s]; });
    const int64_t position = t - r.sequence_offsets[sequence];
    const float* const cosine = r.cosine + position * half;
    const float* const sine = r.sine + position * half;
    const bool whole = half % kVectorWidth<T> == 0;  // else a vector would reach into the next head
    const int64_t vector_pairs = whole ? VectorColumns<T>(pairs, x) : 0;
    ForColumns<T>(pairs, vector_pairs, lane, kWarpLanes, [&](int64_t pair, auto width) {
      constexpr int kWidth = decltype(width)::value;
      const int64_t head = pair / half, d = pair % half;
      T* const at = x + head * 2 * half + d;
      auto first = Load<kWidth>(at), second = Load<kWidth>(at + half);
      for (int i = 0; i < kWidth; ++i) {
        const auto a = static_cast<float>(first.at[i]), b = static_cast<float>(second.at[i]);
        const float c = cosine[d + i], s = r.direction * sine[d + i];
        first.at[i] = T(a * c - b * s);
        second.at[i] = T(b * c + a * s);
      }
      Store(first, at);
      Store(second, at + half);
    });
  });
}

}  // namespace

template <typename T>
cudaError_t Run(const CudaRotary<T>& rotary, cudaStream_t stream) {
  if (rotary.x.rows() == 0) return cudaSuccess;
  return Launch(&RotaryKernel<T>, RowShape<kWarpLanes>(rotary.x.rows()), stream, rotary);
}

MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, CudaRotary, cudaStream_t)

}  // namespace moe::attention
