#include <type_traits>

#include <math.h>

#include <cuda/atomic>

#include "kernels/base/cuda_fixed_dot.h"
#include "kernels/base/cuda_float_keys.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/topk_gate/topk_gate_cuda.h"

namespace moe::topk_gate {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// A block counts in shared memory and adds to `count` once. So there are only as many blocks as run
// at once, of as many threads and registers as a multiprocessor has: up to 40, 64, 80 or 128 a
// thread, for a row of 4, 8, 16 or 32 logits a lane and their keys.
template <int kPerLane>
constexpr int kGateThreads = kPerLane <= 8 ? 512 : 256;
template <int kPerLane>
constexpr int kGateBlocks = kPerLane == 4 || kPerLane == 16 ? 3 : 2;

// A row of expert scores is in registers of a warp: lane l holds experts l, l + 32, l + 64 ...

// f(i, e) for the experts e = lane + 32 i. Unrolled, so that arrays indexed by i are registers.
template <int kPerLane, typename Function>
__device__ inline void ForExperts(int lane, Function f) {
  MOE_UNROLL
  for (int i = 0; i < kPerLane; ++i) f(i, lane + kWarpLanes * i);
}

// Keys of float32 values that differ only in their upper kValueBits. The lower 11 bits encode the
// expert, where a lower id is larger. All keys differ, so that one reduction finds the next, and
// the remaining keys are those below the last one. Keys have at most 30 bits: key - last is
// negative, hence large as unsigned, exactly for keys below the last one.
template <int kPerLane, int kValueBits>
class PackedKeys {
 public:
  __device__ PackedKeys(const float (&value)[kPerLane], int experts, int lane) : lane_(lane) {
    ForExperts<kPerLane>(lane, [&](int i, int e) {
      const auto id = static_cast<uint32_t>(kMaxExperts - e);
      key_[i] = e < experts ? KeyOf(value[i]) >> (32 - kValueBits) << kIdBits | id : kNoKey;
    });
  }

  // The largest remaining key.
  __device__ uint32_t Take() {
    uint32_t best = 0;
    ForExperts<kPerLane>(lane_, [&](int i, int) {
      const uint32_t below = key_[i] - last_;
      best = best < below ? below : best;
    });
    return last_ += __reduce_max_sync(kAllLanes, best);
  }
  __device__ static int32_t ExpertOf(uint32_t key) {
    return kMaxExperts - static_cast<int32_t>(key & ((1u << kIdBits) - 1));
  }

 private:
  static constexpr int kIdBits = 11;
  static_assert(kMaxExperts < 1 << kIdBits && kValueBits + kIdBits <= 30);

  const int lane_;
  uint32_t last_ = 1u << (kValueBits + kIdBits);  // initially above every key
  uint32_t key_[kPerLane];
};

// Keys of float32 values. One reduction finds the largest value, a second the lowest expert with
// it.
template <int kPerLane>
class WideKeys {
 public:
  struct Best {
    uint32_t key;
    int32_t expert;
  };

  __device__ WideKeys(const float (&value)[kPerLane], int experts, int lane) : lane_(lane) {
    ForExperts<kPerLane>(lane,
                         [&](int i, int e) { key_[i] = e < experts ? KeyOf(value[i]) : kNoKey; });
  }

  // The expert of the largest remaining key.
  __device__ int32_t Take() { return TakeAmong(left_).expert; }
  __device__ static int32_t ExpertOf(int32_t expert) { return expert; }

  // The largest of the keys whose bits of `left` are set, bit i for key i of this lane. Clears the
  // bit of the result.
  __device__ Best TakeAmong(uint32_t& left) const {
    uint32_t mine = kNoKey;
    int at = 0;
    ForExperts<kPerLane>(lane_, [&](int i, int) {
      if ((left >> i & 1) == 0 || key_[i] <= mine) return;
      mine = key_[i];
      at = i;
    });
    const uint32_t key = __reduce_max_sync(kAllLanes, mine);
    const auto expert = static_cast<uint32_t>(lane_ + kWarpLanes * at);
    const uint32_t first = __reduce_min_sync(kAllLanes, mine == key ? expert : 0xffffffffu);
    if (mine == key && expert == first) left &= ~(1u << at);
    return {key, static_cast<int32_t>(first)};
  }

  __device__ void Replace(int i, float value) { key_[i] = KeyOf(value); }

 private:
  const int lane_;
  uint32_t left_ = 0xffffffffu;
  uint32_t key_[kPerLane];
};

// Lane j receives the expert of choice j, j < k.
template <typename Keys>
__device__ inline int32_t TakeTopK(Keys keys, int k, int lane) {
  decltype(keys.Take()) mine = 0;
  for (int j = 0; j < k; ++j) {
    const auto next = keys.Take();
    if (lane == j) mine = next;
  }
  return Keys::ExpertOf(mine);
}

// The divisor of a softmax. The largest number of the row is -infinity if it has none.
struct ExpSum {
  float max = 0;
  float sum = 0;
};

// y = exp(x - max), -infinity beyond the row. Lane j computes partial sum j; its terms come
// alternately from lane j and from lane j + 16, experts j + 32 i and j + 16 + 32 i.
template <int kPerLane>
__device__ ExpSum ExpAndSum(const float (&x)[kPerLane], int lane, float (&y)[kPerLane]) {
  float max = -INFINITY;
  ForExperts<kPerLane>(lane, [&](int i, int) { max = fmaxf(max, x[i]); });
  max = ValueOf(__reduce_max_sync(kAllLanes, KeyOf(max)));
  float partial = 0;
  ForExperts<kPerLane>(lane, [&](int i, int) {
    y[i] = expf(x[i] - max);
    const float other = __shfl_down_sync(kAllLanes, y[i], kPartials);
    partial = partial + y[i] + other;
  });
  // The upper lanes' results are not used.
  return {max, __shfl_sync(kAllLanes, FoldPartials(partial, kAllLanes), 0)};
}

// As in gate_rows_cpu.cc: corrects for the rounding of d, and small scores keep their digits.
__device__ inline float Sigmoid(float x) {
  const float e = expf(-fabsf(x));
  const float d = 1.0f + e;
  const float lost = e - (d - 1.0f);
  const float q = (x < 0 ? e : 1.0f) / d;
  const float reciprocal = x < 0 ? 1.0f - q : q;
  return fmaf(-(q * lost), reciprocal, q);
}

// Lane g receives the sum of the group_sum largest values of group g, largest first.
template <typename T, int kPerLane>
__device__ float WorthOfGroup(const CudaGate<T>& g, int size, int lane,
                              const WideKeys<kPerLane>& keys) {
  float worth = 0;
  for (int group = 0; group < g.rule.num_groups; ++group) {
    uint32_t members = 0;
    ForExperts<kPerLane>(lane, [&](int i, int e) {
      if (e >= group * size && e < (group + 1) * size) members |= 1u << i;
    });
    float sum = 0;
    for (int n = 0; n < g.rule.group_sum && n < size; ++n)
      sum += ValueOf(keys.TakeAmong(members).key);
    if (lane == group) worth = sum;
  }
  return worth;
}

// Sets values outside the group_top_k best groups to -infinity.
template <typename T, int kPerLane>
__device__ void MaskGroups(const CudaGate<T>& g, int lane, WideKeys<kPerLane>& keys) {
  const auto experts = static_cast<int>(g.logits.cols());
  const int size = experts / g.rule.num_groups;
  const float worth = WorthOfGroup(g, size, lane, keys);
  int before = 0;
  for (int other = 0; other < g.rule.num_groups; ++other) {
    const float theirs = __shfl_sync(kAllLanes, worth, other);
    if (theirs > worth || (theirs == worth && other < lane)) ++before;
  }
  const uint32_t kept = __ballot_sync(kAllLanes, before < g.rule.group_top_k);
  ForExperts<kPerLane>(lane, [&](int i, int e) {
    if (e < experts && (kept >> (e / size) & 1) == 0) keys.Replace(i, -INFINITY);
  });
}

// The score of a logit, given the sum of its row.
template <typename T>
__device__ float ScoreOf(const CudaGate<T>& g, float x, const ExpSum& sum) {
  return g.rule.score == ScoreFunction::kSoftmax ? expf(x - sum.max) / sum.sum : Sigmoid(x);
}

// The weight of `expert`, the choice of lane j < k.
template <typename T>
__device__ float WeightOf(const CudaGate<T>& g, const T* logits, const ExpSum& sum, int32_t expert,
                          int lane) {
  const auto k = static_cast<int>(g.expert.cols());
  // Reads the logit again: which register of which lane holds it depends on the choice.
  float weight = lane < k ? ScoreOf(g, static_cast<float>(logits[expert]), sum) : 0.0f;
  if (g.rule.weights == GateWeights::kNormalised) {
    float total = 0;
    for (int j = 0; j < k; ++j) total += __shfl_sync(kAllLanes, weight, j);
    total += g.rule.epsilon;
    if (total != 0) weight /= total;
  }
  return weight * g.rule.scale;
}

// Computes the scores of the row, and stores them if requested. Unless kByLogits, selects by score:
// lane j receives choice j.
template <bool kByLogits, typename T, int kPerLane>
__device__ int32_t ScoreRow(const CudaGate<T>& g, int64_t t, int lane, const float (&x)[kPerLane],
                            const ExpSum& sum, float (&y)[kPerLane]) {
  const auto experts = static_cast<int>(g.logits.cols());
  ForExperts<kPerLane>(lane, [&](int i, int e) {
    y[i] = g.rule.score == ScoreFunction::kSoftmax ? y[i] / sum.sum : Sigmoid(x[i]);
    if (e >= experts) return;
    if (g.score.data() != nullptr) g.score(t, e) = y[i];
    if (!kByLogits && g.expert_bias != nullptr) y[i] += g.expert_bias[e];
  });
  if constexpr (kByLogits) return 0;
  WideKeys<kPerLane> keys(y, experts, lane);
  if (g.rule.num_groups > 0) MaskGroups(g, lane, keys);
  return TakeTopK(keys, static_cast<int>(g.expert.cols()), lane);
}

// A warp owns row t. `count` is in shared memory.
template <bool kByLogits, int kPerLane, typename T>
__device__ void GateRow(const CudaGate<T>& g, int64_t t, int lane, int32_t* count) {
  const auto experts = static_cast<int>(g.logits.cols()), k = static_cast<int>(g.expert.cols());
  const T* const logits = g.logits.row(t);
  float x[kPerLane], y[kPerLane];
  ForExperts<kPerLane>(
      lane, [&](int i, int e) { x[i] = e < experts ? static_cast<float>(logits[e]) : -INFINITY; });
  int32_t expert = 0;
  if constexpr (kByLogits) {
    // Sign and exponent of the float32 that T widens to, and the bits of its fraction that T has.
    constexpr int kValueBits = 9 + (std::is_same_v<T, BFloat16> ? 7 : 10);
    using Keys =
        std::conditional_t<sizeof(T) == 2, PackedKeys<kPerLane, kValueBits>, WideKeys<kPerLane>>;
    expert = TakeTopK(Keys(x, experts, lane), k, lane);
  }
  const bool wants_scores = !kByLogits || g.score.data() != nullptr;
  const bool sums =
      g.rule.score == ScoreFunction::kSoftmax && (wants_scores || g.weight.data() != nullptr);
  ExpSum sum;
  if (sums || g.log_sum_exp != nullptr) sum = ExpAndSum(x, lane, y);
  if (g.log_sum_exp != nullptr && lane == 0) {
    g.log_sum_exp[t] =
        static_cast<float>(static_cast<double>(sum.max) + log(static_cast<double>(sum.sum)));
  }
  if (wants_scores) {
    const int32_t by_score = ScoreRow<kByLogits>(g, t, lane, x, sum, y);
    if constexpr (!kByLogits) expert = by_score;
  }
  if (lane < k && g.expert.data() != nullptr) g.expert(t, lane) = expert;
  if (lane == 0 && g.slot_offset != nullptr) g.slot_offset[t + 1] = (t + 1) * k;
  if (lane < k && g.count != nullptr) atomicAdd(&count[expert], 1);
  if (g.weight.data() == nullptr) return;
  const float weight = WeightOf(g, logits, sum, expert, lane);
  if (lane < k) g.weight(t, lane) = weight;
}

template <bool kByLogits, int kPerLane, typename T>
__global__ void __launch_bounds__(kGateThreads<kPerLane>, kGateBlocks<kPerLane>)
    GateKernel(CudaGate<T> g) {
  MOE_SHARED_ARRAY(int32_t, count, kMaxExperts);
  const auto experts = static_cast<unsigned>(g.logits.cols());
  for (unsigned e = threadIdx.x; e < experts; e += blockDim.x) count[e] = 0;
  __syncthreads();
  ForRows<kWarpLanes>(g.logits.rows(), [&](int64_t t, int lane) {
    GateRow<kByLogits, kPerLane>(g, t, lane, count);
  });
  if (g.count == nullptr) return;
  __syncthreads();
  for (unsigned e = threadIdx.x; e < experts; e += blockDim.x) {
    if (count[e] == 0) continue;
    ::cuda::atomic_ref<int64_t, ::cuda::thread_scope_device>(g.count[e])
        .fetch_add(count[e], ::cuda::memory_order_relaxed);
  }
}

// Zeroes `count` elements, unless there is no array.
cudaError_t Zero(int64_t* array, int64_t count, cudaStream_t stream) {
  if (array == nullptr) return cudaSuccess;
  return cudaMemsetAsync(array, 0, static_cast<size_t>(count) * sizeof(*array), stream);
}

template <bool kByLogits, int kPerLane, typename T>
cudaError_t LaunchGate(const CudaGate<T>& gate, cudaStream_t stream) {
  constexpr int kThreads = kGateThreads<kPerLane>, kRows = kThreads / kWarpLanes;
  const unsigned most = kGateBlocks<kPerLane> * DeviceAttribute(cudaDevAttrMultiProcessorCount);
  const unsigned blocks = std::min(GridBlocks(gate.logits.rows(), kRows), most);
  return Launch(&GateKernel<kByLogits, kPerLane, T>, {dim3(blocks), dim3(kThreads)}, stream, gate);
}

template <bool kByLogits, typename T>
cudaError_t LaunchFor(const CudaGate<T>& gate, cudaStream_t stream) {
  const int64_t experts = gate.logits.cols();
  if (experts <= 4 * kWarpLanes) return LaunchGate<kByLogits, 4>(gate, stream);
  if (experts <= 8 * kWarpLanes) return LaunchGate<kByLogits, 8>(gate, stream);
  if (experts <= 16 * kWarpLanes) return LaunchGate<kByLogits, 16>(gate, stream);
  return LaunchGate<kByLogits, kMaxExperts / kWarpLanes>(gate, stream);
}

template <typename T>
bool IsValid(const CudaGate<T>& gate) {
  const int64_t experts = gate.logits.cols(), k = gate.expert.cols();
  if (experts < 1 || experts > kMaxExperts) return false;
  if (k < 0 || k > std::min<int64_t>(experts, kMaxTopK)) return false;
  if (gate.rule.num_groups == 0) return true;
  return gate.rule.num_groups > 0 && gate.rule.num_groups <= kMaxGroups &&
         experts % gate.rule.num_groups == 0 && gate.rule.group_top_k >= 1 &&
         gate.rule.group_sum >= 1;
}

}  // namespace

template <typename T>
cudaError_t Run(const CudaGate<T>& gate, cudaStream_t stream) {
  if (!IsValid(gate)) return cudaErrorInvalidValue;
  cudaError_t error = Zero(gate.count, gate.logits.cols(), stream);
  if (error == cudaSuccess) error = Zero(gate.slot_offset, 1, stream);
  if (error != cudaSuccess) return error;
  if (gate.logits.rows() == 0) return cudaSuccess;
  const bool by_logits = gate.expert_bias == nullptr && gate.rule.num_groups == 0;
  return by_logits ? LaunchFor<true>(gate, stream) : LaunchFor<false>(gate, stream);
}

MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, CudaGate, cudaStream_t)

}  // namespace moe::topk_gate
