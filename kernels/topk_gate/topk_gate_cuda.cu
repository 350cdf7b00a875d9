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

// A row of expert scores is in registers of kLanes neighbouring lanes: lane l holds experts l,
// l + kLanes, l + 2 kLanes ... Two rows share a warp, which halves what a row costs beside its
// experts, if their logits decide, have 16 bits and are at most 256.
template <bool kByLogits, int kMost, typename T>
constexpr int kGateLanes = kByLogits && sizeof(T) == 2 && kMost <= 256 ? kPartials : kWarpLanes;

// A block counts in shared memory and adds to `count` once. So there are only as many blocks as run
// at once, of as many threads and registers as a multiprocessor has: up to 40, 64, 80 or 128 a
// thread, for rows of up to 128, 256, 512 or 1,024 experts; 64 for two rows of 128.
template <int kMost>
constexpr int kGateThreads = kMost <= 256 ? 512 : 256;
template <int kMost, int kLanes>
constexpr int kGateBlocks = (kMost == 128 && kLanes == kWarpLanes) || kMost == 512 ? 3 : 2;

// f(i, e) for the experts e = lane + kLanes i. Unrolled, so that arrays indexed by i are registers.
template <int kPerLane, int kLanes = kWarpLanes, typename Function>
__device__ inline void ForExperts(int lane, Function f) {
  MOE_UNROLL
  for (int i = 0; i < kPerLane; ++i) f(i, lane + kLanes * i);
}

// Keys of values of type T, as float32: their upper bits, then the expert, where a lower id is
// larger, so that all keys differ. Lower bits are lost, which values of 16 bits do not have. Keys
// are below 2^31: key - last is negative, hence large as unsigned, exactly for keys below `last`.
template <int kPerLane, int kLanes, typename T>
class PackedKeys {
 public:
  // Lane j has the expert of choice j, j < k, unless bits that were lost decide.
  struct Choice {
    int32_t expert;
    bool is_certain;  // the same in all lanes of the warp
  };

  // `value` is -infinity beyond the row.
  __device__ PackedKeys(const float (&value)[kPerLane], int experts, int lane) : lane_(lane) {
    ForExperts<kPerLane, kLanes>(lane, [&](int i, int) {
      key_[i] = ValueKey(value[i]) + static_cast<uint32_t>(kLastId - kLanes * i - lane);
    });
    if (__ballot_sync(kAllLanes, Largest() >= kNan) == 0) return;
    ForExperts<kPerLane, kLanes>(lane, [&](int i, int e) {
      if (key_[i] >= kNan) key_[i] = key_[i] - kNan + kBelowNumbers;
      if (e >= experts) key_[i] = kNoKey;
    });
  }

  // Lanes sort their largest keys, then merge in their next ones until none of any row in the warp
  // is among the k.
  __device__ Choice TopK(int k) const {
    uint32_t head = Largest(), top = Sorted(head), least = 0;
    for (;;) {
      head = head == kNoKey ? kNoKey : Below(head);
      least = __shfl_sync(kAllLanes, top, k > 0 ? k - 1 : 0, kLanes);
      if (__ballot_sync(kAllLanes, head > least) == 0) break;
      const uint32_t next = __shfl_xor_sync(kAllLanes, Sorted(head), kLanes - 1);
      top = SortedRuns(top < next ? next : top, kLanes / 2);
    }
    Choice choice = {kLastId - static_cast<int32_t>(top & kLastId), true};
    if constexpr (!kIsExact) {
      const uint32_t next = __shfl_down_sync(kAllLanes, top, 1, kLanes);
      const bool is_close = lane_ < k && (top ^ next) >> kIdBits == 0;
      choice.is_certain =
          __ballot_sync(kAllLanes, is_close || head >> kIdBits == least >> kIdBits) == 0;
    }
    return choice;
  }

 private:
  static constexpr bool kIsExact = sizeof(T) == 2;
  static constexpr int kIdBits = __builtin_ctz(kPerLane * kLanes), kLastId = (1 << kIdBits) - 1;
  static constexpr int kLost = kIdBits + 2;                 // lower bits of a float that no key has
  static constexpr uint32_t kBelowNumbers = 1u << kIdBits;  // and above kNoKey
  static constexpr int32_t kKept = INT32_MAX >> kLost << kLost;  // beside the sign
  static constexpr uint32_t kZero = 1u << 29;
  static constexpr uint32_t kNan = kZero + ((kIsExact ? INT32_MAX : kKept) >> 2);  // above infinity
  static_assert(kLost <= 32 - 9 - 10, "bfloat16 and float16 lose nothing");

  // Without an id; kNan for a NaN.
  __device__ static uint32_t ValueKey(float x) {
    int32_t bits = BitsPlusZero(x);
    if constexpr (!kIsExact) bits &= kKept | INT32_MIN;
    return kZero + static_cast<uint32_t>((bits ^ (bits >> 31 & kKept)) >> 2);
  }
  __device__ uint32_t Largest() const {
    uint32_t largest = kNoKey;
    ForExperts<kPerLane>(lane_,
                         [&](int i, int) { largest = largest < key_[i] ? key_[i] : largest; });
    return largest;
  }
  // The lane's largest key below `last`, kNoKey if there is none.
  __device__ uint32_t Below(uint32_t last) const {
    uint32_t best = kNoKey - last;
    ForExperts<kPerLane>(lane_, [&](int i, int) {
      const uint32_t below = key_[i] - last;
      best = best < below ? below : best;
    });
    return last + best;
  }

  // The larger of this lane's key and that of lane ^ other, or if bit `upper` of the lane is set
  // the smaller.
  __device__ uint32_t Exchanged(uint32_t key, int other, int upper) const {
    const uint32_t theirs = __shfl_xor_sync(kAllLanes, key, other);
    const uint32_t larger = key < theirs ? theirs : key, smaller = key < theirs ? key : theirs;
    return (lane_ & upper) == 0 ? larger : smaller;
  }
  // Bitonic runs of 2 `half` lanes become sorted runs, largest first.
  __device__ uint32_t SortedRuns(uint32_t key, int half) const {
    MOE_UNROLL
    for (; half >= 1; half /= 2) key = Exchanged(key, half, half);
    return key;
  }
  __device__ uint32_t Sorted(uint32_t key) const {
    MOE_UNROLL
    for (int run = 2; run <= kLanes; run *= 2) {
      key = SortedRuns(Exchanged(key, run - 1, run / 2), run / 4);
    }
    return key;
  }

  const int lane_;
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

  // Lane j receives the expert of choice j, j < k.
  __device__ int32_t TopK(int k) const {
    uint32_t left = 0xffffffffu;
    int32_t mine = 0;
    for (int j = 0; j < k; ++j) {
      const int32_t next = TakeAmong(left).expert;
      if (lane_ == j) mine = next;
    }
    return mine;
  }

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
  uint32_t key_[kPerLane];
};

// The divisor of a softmax. The largest number of the row is -infinity if it has none.
struct ExpSum {
  float max = 0;
  float sum = 0;
};

template <int kLanes, int kPerLane>
__device__ float MaxOf(const float (&x)[kPerLane], int lane) {
  float max = -INFINITY;
  ForExperts<kPerLane>(lane, [&](int i, int) { max = fmaxf(max, x[i]); });
  for (int width = kLanes / 2; width >= 1; width /= 2) {
    max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, width));
  }
  return max;
}

// The sum of y = exp(x - max); x is -infinity beyond the row. Lane j computes partial sum j. With
// 32 lanes its terms come alternately from lane j and from lane j + 16, experts j + 32 i and
// j + 16 + 32 i, and the upper lanes' results are not used.
template <int kLanes, int kPerLane>
__device__ float SumOfExp(const float (&x)[kPerLane], float max, int lane, float (&y)[kPerLane]) {
  float partial = 0;
  ForExperts<kPerLane>(lane, [&](int i, int) {
    y[i] = expf(x[i] - max);
    partial += y[i];
    if constexpr (kLanes > kPartials) partial += __shfl_down_sync(kAllLanes, y[i], kPartials);
  });
  const float sum = FoldPartials(partial, kAllLanes);
  return kLanes > kPartials ? __shfl_sync(kAllLanes, sum, 0) : sum;
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

// The weight of the choice of lane j < k, whose logit is given.
template <int kLanes, typename T>
__device__ float WeightOf(const CudaGate<T>& g, float logit, const ExpSum& sum, int lane) {
  const auto k = static_cast<int>(g.expert.cols());
  float weight = lane < k ? ScoreOf(g, logit, sum) : 0.0f;
  if (g.rule.weights == GateWeights::kNormalised) {
    float total = 0;
    for (int j = 0; j < k; ++j) total += __shfl_sync(kAllLanes, weight, j, kLanes);
    total += g.rule.epsilon;
    if (total != 0) weight /= total;
  }
  return weight * g.rule.scale;
}

// Computes the scores of the row, and stores them if requested and the row `is_there`. Unless
// kByLogits, selects by score: lane j receives choice j.
template <bool kByLogits, int kLanes, typename T, int kPerLane>
__device__ int32_t ScoreRow(const CudaGate<T>& g, int64_t t, bool is_there, int lane,
                            const float (&x)[kPerLane], const ExpSum& sum, float (&y)[kPerLane]) {
  const auto experts = static_cast<int>(g.logits.cols());
  ForExperts<kPerLane, kLanes>(lane, [&](int i, int e) {
    if constexpr (sizeof(T) == 2) {
      y[i] = ScoreOf(g, x[i], sum);  // y takes registers meanwhile, which halves of a warp lack
    } else {
      y[i] = g.rule.score == ScoreFunction::kSoftmax ? y[i] / sum.sum : Sigmoid(x[i]);
    }
    if (e >= experts) return;
    if (g.score.data() != nullptr && is_there) g.score(t, e) = y[i];
    if (!kByLogits && g.expert_bias != nullptr) y[i] += g.expert_bias[e];
  });
  if constexpr (kByLogits) {
    return 0;
  } else {
    WideKeys<kPerLane> keys(y, experts, lane);
    if (g.rule.num_groups > 0) MaskGroups(g, lane, keys);
    return keys.TopK(static_cast<int>(g.expert.cols()));
  }
}

// kLanes neighbouring lanes own row t, but store nothing unless it `is_there`. All lanes of a warp
// call this together. `count` is in shared memory.
template <bool kByLogits, int kLanes, int kPerLane, typename T>
__device__ void GateRow(const CudaGate<T>& g, int64_t t, bool is_there, int lane, int32_t* count) {
  const auto experts = static_cast<int>(g.logits.cols()), k = static_cast<int>(g.expert.cols());
  const T* const logits = g.logits.row(t);
  float x[kPerLane], y[kPerLane];
  if (kLanes < kWarpLanes && experts == kLanes * kPerLane) {  // no bounds to compare
    ForExperts<kPerLane, kLanes>(lane, [&](int i, int e) { x[i] = static_cast<float>(logits[e]); });
  } else {
    ForExperts<kPerLane, kLanes>(lane, [&](int i, int e) {
      x[i] = e < experts ? static_cast<float>(logits[e]) : -INFINITY;
    });
  }
  int32_t expert = 0;
  if constexpr (kByLogits && kLanes * kPerLane < kMaxExperts) {
    const auto choice = PackedKeys<kPerLane, kLanes, T>(x, experts, lane).TopK(k);
    expert = choice.expert;
    if constexpr (sizeof(T) > 2) {
      if (!choice.is_certain) expert = WideKeys<kPerLane>(x, experts, lane).TopK(k);
    }
  } else if constexpr (kByLogits) {
    expert = WideKeys<kPerLane>(x, experts, lane).TopK(k);
  }
  const bool wants_scores = !kByLogits || g.score.data() != nullptr;
  const bool sums =
      g.rule.score == ScoreFunction::kSoftmax && (wants_scores || g.weight.data() != nullptr);
  // Reads the logit again: which register of which lane holds it depends on the choice.
  const auto logit_of_choice = [&] {
    return lane < k ? static_cast<float>(logits[expert]) : -INFINITY;
  };
  float logit = kByLogits ? logit_of_choice() : 0.0f;
  ExpSum sum;
  if (sums || g.log_sum_exp != nullptr) {
    sum.max = kByLogits && k > 0 ? fmaxf(__shfl_sync(kAllLanes, logit, 0, kLanes), -INFINITY)
                                 : MaxOf<kLanes>(x, lane);
    sum.sum = SumOfExp<kLanes>(x, sum.max, lane, y);
  }
  if (g.log_sum_exp != nullptr && lane == 0 && is_there) {
    g.log_sum_exp[t] =
        static_cast<float>(static_cast<double>(sum.max) + log(static_cast<double>(sum.sum)));
  }
  if (wants_scores) {
    const int32_t by_score = ScoreRow<kByLogits, kLanes>(g, t, is_there, lane, x, sum, y);
    if constexpr (!kByLogits) expert = by_score;
  }
  const bool is_choice = lane < k && is_there;
  if (is_choice && g.expert.data() != nullptr) g.expert(t, lane) = expert;
  if (lane == 0 && is_there && g.slot_offset != nullptr) g.slot_offset[t + 1] = (t + 1) * k;
  if (is_choice && g.count != nullptr) atomicAdd(&count[expert], 1);
  if (g.weight.data() == nullptr) return;
  if constexpr (!kByLogits) logit = logit_of_choice();
  const float weight = WeightOf<kLanes>(g, logit, sum, lane);
  if (is_choice) g.weight(t, lane) = weight;
}

template <bool kByLogits, int kMost, typename T>
__global__ void __launch_bounds__(kGateThreads<kMost>,
                                  kGateBlocks<kMost, kGateLanes<kByLogits, kMost, T>>)
    GateKernel(CudaGate<T> g) {
  MOE_SHARED_ARRAY(int32_t, count, kMaxExperts);
  const auto experts = static_cast<unsigned>(g.logits.cols());
  for (unsigned e = threadIdx.x; e < experts; e += blockDim.x) count[e] = 0;
  __syncthreads();
  constexpr int kLanes = kGateLanes<kByLogits, kMost, T>, kRows = kWarpLanes / kLanes;
  const int64_t rows = g.logits.rows();
  ForRows<kWarpLanes>((rows + kRows - 1) / kRows, [&](int64_t item, int lane) {
    const int64_t t = item * kRows + lane / kLanes;
    GateRow<kByLogits, kLanes, kMost / kLanes>(g, Min(t, rows - 1), t < rows, lane % kLanes, count);
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

template <bool kByLogits, int kMost, typename T>
cudaError_t LaunchGate(const CudaGate<T>& gate, cudaStream_t stream) {
  constexpr int kThreads = kGateThreads<kMost>, kLanes = kGateLanes<kByLogits, kMost, T>;
  const unsigned most =
      kGateBlocks<kMost, kLanes> * DeviceAttribute(cudaDevAttrMultiProcessorCount);
  const unsigned blocks = std::min(GridBlocks(gate.logits.rows(), kThreads / kLanes), most);
  return Launch(&GateKernel<kByLogits, kMost, T>, {dim3(blocks), dim3(kThreads)}, stream, gate);
}

template <bool kByLogits, typename T>
cudaError_t LaunchFor(const CudaGate<T>& gate, cudaStream_t stream) {
  const int64_t experts = gate.logits.cols();
  if (experts <= 128) return LaunchGate<kByLogits, 128>(gate, stream);
  if (experts <= 256) return LaunchGate<kByLogits, 256>(gate, stream);
  if (experts <= 512) return LaunchGate<kByLogits, 512>(gate, stream);
  return LaunchGate<kByLogits, kMaxExperts>(gate, stream);
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
