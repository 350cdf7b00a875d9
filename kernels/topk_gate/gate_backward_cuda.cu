#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/topk_gate/topk_gate_cuda.h"

namespace moe::topk_gate {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// term of lane 0 + term of lane 1 + ... of lane k - 1, returned to every lane.
__device__ double SumInChoiceOrder(double term, int k) {
  double sum = 0;
  for (int j = 0; j < k; ++j) sum += __shfl_sync(kAllLanes, term, j);
  return sum;
}

// The gradient with respect to the score of this lane's slot, from its score and the gradient with
// respect to its weight.
__device__ double ScoreGradient(const GateRule& rule, double score, double d_weight, int k) {
  const auto scale = static_cast<double>(rule.scale);
  if (rule.weights == GateWeights::kScores) return d_weight * scale;
  const double sum = SumInChoiceOrder(score, k) + static_cast<double>(rule.epsilon);
  const double dot = SumInChoiceOrder(score * d_weight, k);
  return (sum != 0 ? (d_weight - dot / sum) / sum : 0.0) * scale;
}

// Fills the row as if no expert had been selected: scores * factor of a softmax, zeros of a
// sigmoid.
__device__ void FillRow(const CudaGateGradient& g, int64_t t, int lane, double factor) {
  const float* const score = g.score.row(t);
  float* const d_logits = g.d_logits.row(t);
  const int64_t experts = g.score.cols();
  const auto scaled = [&](int64_t e, auto width) {
    constexpr int kWidth = decltype(width)::value;
    Elements<float, kWidth> values = {};
    if (g.rule.score == ScoreFunction::kSoftmax) {
      values = Load<kWidth>(score + e);
      for (int i = 0; i < kWidth; ++i) {
        values.at[i] = static_cast<float>(static_cast<double>(values.at[i]) * factor);
      }
    }
    return values;
  };
  ForColumns<float, kReadAheadOfMany>(experts, VectorColumns<float>(experts, score, d_logits), lane,
                                      kWarpLanes, scaled, StoreTo(d_logits));
}

// A warp owns a token, lane j its slot j.
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) GateBackwardKernel(CudaGateGradient g) {
  ForRows<kWarpLanes>(g.score.rows(), [&](int64_t t, int lane) {
    const int64_t slot = g.slot_offset[t] + lane;
    const auto k = static_cast<int>(g.slot_offset[t + 1] - g.slot_offset[t]);
    const bool has_slot = lane < k;
    const int32_t expert = has_slot ? g.expert[slot] : 0;
    const double s = has_slot ? static_cast<double>(g.score(t, expert)) : 0.0;
    const double d_weight =
        has_slot && g.dropped[slot] == 0 ? static_cast<double>(g.d_weight[slot]) : 0.0;
    const double d_score = ScoreGradient(g.rule, s, d_weight, k);
    const bool softmax = g.rule.score == ScoreFunction::kSoftmax;
    const double mean = softmax ? SumInChoiceOrder(s * d_score, k) : 0.0;
    FillRow(g, t, lane, -mean);
    __syncwarp();  // the elements of selected experts are written again below
    if (!has_slot) return;
    g.d_logits(t, expert) =
        static_cast<float>(softmax ? s * (d_score - mean) : s * (1 - s) * d_score);
  });
}

}  // namespace

cudaError_t Run(const CudaGateGradient& gradient, cudaStream_t stream) {
  if (gradient.score.rows() == 0) return cudaSuccess;
  return Launch(&GateBackwardKernel, RowShape<kWarpLanes>(gradient.score.rows()), stream, gradient);
}

}  // namespace moe::topk_gate
