#include <math.h>

#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/cross_entropy/cross_entropy_op.h"

namespace moe::cross_entropy {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

constexpr int kWarps = kRowThreads / kWarpLanes;
constexpr int kGroup = kVectorWidth<float>;  // neighbouring columns of one thread

// The values of the block's threads, folded by `f`: pairwise in each warp, then the warps in
// ascending order. f commutes, so that every thread gets the same bits.
template <typename Function>
__device__ float FoldBlock(float value, float (&of_warp)[kWarps], Function f) {
  for (int width = kWarpLanes / 2; width >= 1; width /= 2) {
    value = f(value, __shfl_xor_sync(0xffffffffu, value, width));
  }
  if (threadIdx.x % kWarpLanes == 0) of_warp[threadIdx.x / kWarpLanes] = value;
  __syncthreads();
  float result = of_warp[0];
  for (int w = 1; w < kWarps; ++w) result = f(result, of_warp[w]);
  return result;
}

// Visits the thread's columns in ascending order, as f(column, Width<kGroup>()) for groups within
// `vector_columns` and f(column, Width<1>()) beyond. Unlike in ForColumns, a thread's columns do
// not depend on vector_columns: sums have the same bits at any alignment.
template <typename Function>
__device__ void ForGroups(int64_t n, int64_t vector_columns, Function f) {
  const int64_t first = int64_t{threadIdx.x} * kGroup;
  for (int64_t group = first; group < n; group += int64_t{kRowThreads} * kGroup) {
    if (group < vector_columns) {
      f(group, Width<kGroup>());
      continue;
    }
    for (int64_t v = group; v < n && v < group + kGroup; ++v) f(v, Width<1>());
  }
}

// A block owns a row. It reads the row three times: for the largest logit, the sum of exponentials
// and the gradients. The last two come from the cache only while the rows of all running blocks
// fit.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) CrossEntropyKernel(CrossEntropy<T> c) {
  MOE_SHARED_ARRAY(float, warp_max, kWarps);
  MOE_SHARED_ARRAY(float, warp_sum, kWarps);
  const int64_t t = blockIdx.x, cols = c.logits.cols();
  const bool loss_only = c.d_logits.data() == nullptr;
  const float* const logits = c.logits.row(t);
  T* const d_logits = loss_only ? nullptr : c.d_logits.row(t);
  const int64_t vector_columns = VectorColumns<float>(cols, logits, d_logits);
  const int32_t target = c.target[t];
  const bool in_range = target >= 0 && target < cols;
  // Read before gradients, which may overwrite the logits, are written.
  const float target_logit = in_range ? logits[target] : NAN;

  float max = -INFINITY;  // fmaxf ignores NaNs: the sum exposes them
  ForGroups(cols, vector_columns, [&](int64_t v, auto width) {
    const auto x = Load<decltype(width)::value>(logits + v);
    for (const float logit : x.at) max = fmaxf(max, logit);
  });
  max = FoldBlock(max, warp_max, [](float a, float b) { return fmaxf(a, b); });
  if (!in_range) max = NAN;

  float sum = 0;
  ForGroups(cols, vector_columns, [&](int64_t v, auto width) {
    const auto x = Load<decltype(width)::value>(logits + v);
    for (const float logit : x.at) sum += expf(logit - max);
  });
  sum = FoldBlock(sum, warp_sum, [](float a, float b) { return a + b; });
  if (threadIdx.x == 0) c.loss[t] = logf(sum) - (target_logit - max);
  if (loss_only) return;

  const float factor = c.scale / sum;
  ForGroups(cols, vector_columns, [&](int64_t v, auto width) {
    constexpr int kWidth = decltype(width)::value;
    const auto x = Load<kWidth>(logits + v);
    Elements<T, kWidth> gradients;
    for (int i = 0; i < kWidth; ++i) {
      const float e = expf(x.at[i] - max);
      // The target's own element, rounded once: scale * (p - 1).
      gradients.at[i] = T(v + i == target ? c.scale * (e / sum - 1.0f) : e * factor);
    }
    Store(gradients, d_logits + v);
  });
}

}  // namespace

template <typename T>
cudaError_t Run(const CrossEntropy<T>& problem, cudaStream_t stream) {
  const int64_t rows = problem.logits.rows();
  if (rows == 0) return cudaSuccess;  // no columns: every target is out of range
  if (rows > INT32_MAX) return cudaErrorInvalidConfiguration;
  const LaunchShape shape = {dim3(static_cast<unsigned>(rows)), dim3(kRowThreads)};
  return Launch(&CrossEntropyKernel<T>, shape, stream, problem);
}

MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, CrossEntropy, cudaStream_t)

}  // namespace moe::cross_entropy
