#include <math.h>

#include <cuda/atomic>

#include "kernels/base/cuda_fixed_dot.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/router_loss/router_loss_op.h"

namespace moe::router_loss {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// A CUDA block owns a block of tokens, half a warp a token of it.
constexpr int kThreads = 256;
static_assert(kThreads >= kBlockTokens);

// Calls f(t, lane of 16) for the tokens of block blockIdx.x.
template <typename Function>
__device__ void ForTokens(const TokenBlocks& blocks, Function f) {
  const int64_t end = blocks.begin[blockIdx.x + 1];
  const auto lane = static_cast<int>(threadIdx.x % kPartials);
  for (int64_t t = blocks.begin[blockIdx.x] + threadIdx.x / kPartials; t < end;
       t += kThreads / kPartials) {
    f(t, lane);
  }
}

// The first half warp of a CUDA block adds value[0] .. value[n - 1]; the result is undefined in
// other threads.
__device__ double SumByFirstHalfWarp(const double* value, int64_t n) {
  if (threadIdx.x >= kPartials) return 0;
  return FixedSumOf<double>(n, static_cast<int>(threadIdx.x),
                            [&](int64_t i, double sum) { return sum + value[i]; });
}

__device__ double SumOfScores(const float* score, int64_t experts, int lane) {
  return FixedSumOf<double>(
      experts, lane, [&](int64_t e, double sum) { return sum + static_cast<double>(score[e]); });
}

// The factor of p = factor * score for a token.
__device__ double ProbabilityScale(const Balance& b, int64_t t, int lane) {
  if (b.function == ScoreFunction::kSoftmax) return 1;
  const double sum = SumOfScores(b.score.row(t), b.score.cols(), lane);
  return sum == 0 ? 0 : 1 / sum;
}

// A thread counts slots of a token, then adds up a column of the block.
__global__ void __launch_bounds__(kThreads) BlockSumsKernel(Balance b) {
  MOE_SHARED_ARRAY(int32_t, count, kMaxExperts);
  MOE_SHARED_ARRAY(double, scale, kBlockTokens);
  const auto experts = static_cast<int>(b.score.cols());
  const auto thread = static_cast<int>(threadIdx.x);
  const int64_t begin = b.groups.begin[blockIdx.x], end = b.groups.begin[blockIdx.x + 1];
  for (int e = thread; e < experts; e += kThreads) count[e] = 0;
  ForTokens(b.groups, [&](int64_t t, int lane) {
    const double of_token = ProbabilityScale(b, t, lane);
    if (lane == 0) scale[t - begin] = of_token;
  });
  __syncthreads();
  if (begin + thread < end && b.expert_share == nullptr) {
    const int64_t first = b.slot_offset[begin + thread];
    const int64_t last = Min(first + b.choices, b.slot_offset[begin + thread + 1]);
    for (int64_t s = first; s < last; ++s) atomicAdd(&count[b.expert[s]], 1);
  }
  __syncthreads();
  for (int e = thread; e < experts; e += kThreads) {
    double sum = 0;
    for (int64_t t = begin; t < end; ++t) {
      sum += scale[t - begin] * static_cast<double>(b.score(t, e));
    }
    b.block_sums[int64_t{blockIdx.x} * experts + e] = sum;
    b.block_counts[int64_t{blockIdx.x} * experts + e] = count[e];
  }
}

// A CUDA block owns a group, a thread its columns. Adds up the group in the sums of its first
// block, and multiplies them by the counts.
__global__ void __launch_bounds__(kThreads) GroupKernel(Balance b) {
  const int64_t group = blockIdx.x, experts = b.score.cols();
  const int64_t first = b.groups.first_block[group], last = b.groups.first_block[group + 1];
  const auto tokens = static_cast<double>(b.groups.begin[last] - b.groups.begin[first]);
  const double scale = b.scale[group];
  double* const product = b.block_sums + first * experts;
  for (int64_t e = threadIdx.x; e < experts; e += kThreads) {
    int64_t slots = 0;
    double sum = 0;
    for (int64_t block = first; block < last; ++block) {
      slots += b.block_counts[block * experts + e];
      sum += b.block_sums[block * experts + e];
    }
    const double count = b.expert_share == nullptr ? static_cast<double>(slots)
                                                   : b.expert_share[e] * b.choices * tokens;
    product[e] = sum * count;
    b.by_prob[group * experts + e] = scale * count;
  }
  __syncthreads();
  const double loss = SumByFirstHalfWarp(product, experts);
  if (threadIdx.x == 0) b.group_loss[group] = scale * loss;
}

// Half a warp adds up the parts, one after the other.
__global__ void __launch_bounds__(kPartials) FoldKernel(Fold fold) {
  double sum = threadIdx.x == 0 ? *fold.sum : 0.0;
  for (int64_t part = 0; part < fold.parts; ++part) {
    const int64_t begin = fold.offset[part];
    sum += SumByFirstHalfWarp(fold.value + begin, fold.offset[part + 1] - begin);
  }
  if (threadIdx.x == 0) *fold.sum = sum;
}

// d_logits[t, e] += p_te * (G_e - sum_j p_tj G_j), times 1 - score for a sigmoid.
__global__ void __launch_bounds__(kThreads) BalanceGradientKernel(Balance b) {
  const int64_t experts = b.score.cols();
  const bool sigmoid = b.function == ScoreFunction::kSigmoid;
  const double* const by_prob = b.by_prob + b.groups.unit[blockIdx.x] * experts;
  ForTokens(b.groups, [&](int64_t t, int lane) {
    const float* const score = b.score.row(t);
    float* const d_logits = b.d_logits.row(t);
    const double scale = ProbabilityScale(b, t, lane);
    const double mean = FixedSumOf<double>(experts, lane, [&](int64_t e, double sum) {
      return sum + scale * static_cast<double>(score[e]) * by_prob[e];
    });
    for (int64_t e = lane; e < experts; e += kPartials) {
      const auto s = static_cast<double>(score[e]);
      d_logits[e] += static_cast<float>(scale * s * (by_prob[e] - mean) * (sigmoid ? 1 - s : 1));
    }
  });
}

// Adds up value[] of the CUDA block's tokens, in shared memory, and stores the sum times a factor
// in block_value.
__device__ void SumBlock(const Entropy& entropy, const double* value, double factor) {
  const TokenBlocks& blocks = entropy.blocks;
  __syncthreads();
  const double sum =
      SumByFirstHalfWarp(value, blocks.begin[blockIdx.x + 1] - blocks.begin[blockIdx.x]);
  if (threadIdx.x == 0) entropy.block_value[blockIdx.x] = factor * sum;
}

__device__ double SoftmaxEntropy(const Entropy& entropy, int64_t t, int lane) {
  const float* const p = entropy.score.row(t);
  const float* const l = entropy.logits.row(t);
  // Logits beyond the scores count with p = 0. 0 * logit makes a logit that is not finite NaN.
  const int64_t experts = entropy.score.cols();
  const double mean = FixedSumOf<double>(entropy.logits.cols(), lane, [&](int64_t e, double sum) {
    return sum + static_cast<double>(e < experts ? p[e] : 0) * static_cast<double>(l[e]);
  });
  return static_cast<double>(entropy.log_sum_exp[t]) - mean;
}

__device__ double SigmoidEntropy(const Entropy& entropy, int64_t t, int lane) {
  const float* const score = entropy.score.row(t);
  const float* const l = entropy.logits.row(t);
  const int64_t experts = entropy.score.cols();
  const double sum = SumOfScores(score, experts, lane);
  const int64_t columns = entropy.logits.cols();
  const double weighted = FixedSumOf<double>(columns, lane, [&](int64_t e, double partial) {
    const float s = e < experts ? score[e] : 0;
    const auto none = static_cast<double>(0 * l[e]);  // NaN for a logit that is not finite
    return partial + (s != 0 ? static_cast<double>(s) * static_cast<double>(logf(s)) + none : none);
  });
  return sum == 0 ? weighted : log(sum) - weighted / sum;
}

// Rare, so one lane searches.
__device__ void FindBadLogit(const Entropy& entropy, int64_t t) {
  const int64_t columns = entropy.logits.cols();
  for (int64_t c = 0; c < columns; ++c) {
    if (isfinite(entropy.logits(t, c))) continue;
    ::cuda::atomic_ref<int64_t, ::cuda::thread_scope_device>(*entropy.bad_logit)
        .fetch_max(kFirstLogit - (t * columns + c), ::cuda::memory_order_relaxed);
    return;
  }
}

__global__ void __launch_bounds__(kThreads) EntropyKernel(Entropy entropy) {
  MOE_SHARED_ARRAY(double, value, kBlockTokens);
  const int64_t begin = entropy.blocks.begin[blockIdx.x];
  ForTokens(entropy.blocks, [&](int64_t t, int lane) {
    const double of_token = entropy.function == ScoreFunction::kSoftmax
                                ? SoftmaxEntropy(entropy, t, lane)
                                : SigmoidEntropy(entropy, t, lane);
    if (lane != 0) return;
    value[t - begin] = of_token;
    if (!isfinite(of_token)) FindBadLogit(entropy, t);
  });
  SumBlock(entropy, value, 1);
}

// Squares of the block's log-sum-exps, and d_logits[t, :] += 2 scale lse * softmax of the logits.
__global__ void __launch_bounds__(kThreads) ZLossKernel(ZLoss z) {
  MOE_SHARED_ARRAY(double, value, kBlockTokens);
  const Entropy& in = z.input;
  const int64_t begin = in.blocks.begin[blockIdx.x];
  const double scale = z.scale[in.blocks.unit[blockIdx.x]];
  const bool sigmoid = in.function == ScoreFunction::kSigmoid;
  ForTokens(in.blocks, [&](int64_t t, int lane) {
    const auto lse = static_cast<double>(in.log_sum_exp[t]);
    if (lane == 0) value[t - begin] = lse * lse;
    if (z.d_logits.data() == nullptr) return;
    const float* const from = sigmoid ? in.logits.row(t) : in.score.row(t);
    float* const d_logits = z.d_logits.row(t);
    for (int64_t e = lane; e < in.score.cols(); e += kPartials) {
      const float p =
          sigmoid ? static_cast<float>(exp(static_cast<double>(from[e]) - lse)) : from[e];
      d_logits[e] += static_cast<float>(2 * scale * lse * static_cast<double>(p));
    }
  });
  SumBlock(in, value, scale);
}

// One CUDA block for each of `blocks`.
LaunchShape BlockShape(int64_t blocks) {
  return {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)};
}

cudaError_t RunFold(const Fold& fold, cudaStream_t stream) {
  return Launch(&FoldKernel, {dim3(1), dim3(kPartials)}, stream, fold);
}

}  // namespace

cudaError_t Run(const Balance& balance, cudaStream_t stream) {
  if (balance.groups.blocks == 0) return cudaSuccess;
  const LaunchShape shape = BlockShape(balance.groups.blocks);
  cudaError_t error = Launch(&BlockSumsKernel, shape, stream, balance);
  if (error != cudaSuccess) return error;
  error = Launch(&GroupKernel, BlockShape(balance.groups.units), stream, balance);
  if (error != cudaSuccess) return error;
  error = RunFold(balance.fold, stream);
  if (error != cudaSuccess || balance.d_logits.data() == nullptr) return error;
  return Launch(&BalanceGradientKernel, shape, stream, balance);
}

cudaError_t Run(const ZLoss& z, cudaStream_t stream) {
  if (z.input.blocks.blocks == 0) return cudaSuccess;
  const cudaError_t error = Launch(&ZLossKernel, BlockShape(z.input.blocks.blocks), stream, z);
  return error != cudaSuccess ? error : RunFold(z.input.fold, stream);
}

cudaError_t Run(const Entropy& entropy, cudaStream_t stream) {
  if (entropy.blocks.blocks == 0) return cudaSuccess;
  const cudaError_t error =
      Launch(&EntropyKernel, BlockShape(entropy.blocks.blocks), stream, entropy);
  return error != cudaSuccess ? error : RunFold(entropy.fold, stream);
}

}  // namespace moe::router_loss
