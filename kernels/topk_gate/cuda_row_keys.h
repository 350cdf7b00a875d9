// A row of expert scores in the registers of a warp: order-preserving keys, and the search for the
// largest of them. Lane l keeps experts l, l + 32, l + 64 ... Of topk_gate_cuda.cu.
#ifndef MOE_KERNELS_TOPK_GATE_CUDA_ROW_KEYS_H_
#define MOE_KERNELS_TOPK_GATE_CUDA_ROW_KEYS_H_

#include <bit>
#include <cstdint>

#include "kernels/base/cuda_float_keys.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/topk_gate/topk_gate_cuda.h"

namespace moe::topk_gate {

using cuda::kAllLanes;
using cuda::KeyOf;
using cuda::kLowestKey;
using cuda::kNanKey;
using cuda::kNoKey;
using cuda::ValueOf;

// f(i, e) for the experts e = lane + 32 i. Unrolled: arrays that f indexes by i are registers.
template <int kPerLane, typename Function>
__device__ inline void ForExperts(int lane, Function f) {
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int i = 0; i < kPerLane; ++i) f(i, lane + cuda::kWarpLanes * i);
}

// Keys of float32 values that their upper kValueBits decide: those above 11 of expert, the lower
// expert the larger. All differ, so that one reduction finds the next, and what is below the last
// is what is left. They have at most 30 bits: key - last is a negative number, large as unsigned,
// for those below alone.
template <int kPerLane, int kValueBits>
class PackedKeys {
 public:
  __device__ PackedKeys(const float (&value)[kPerLane], int experts, int lane) : lane_(lane) {
    ForExperts<kPerLane>(lane, [&](int i, int e) {
      const auto id = static_cast<uint32_t>(kMaxExperts - e);
      key_[i] = e < experts ? KeyOf(value[i]) >> (32 - kValueBits) << kIdBits | id : kNoKey;
    });
  }

  // The expert of the largest key that is left.
  __device__ int32_t Take() {
    uint32_t best = 0;
    ForExperts<kPerLane>(lane_, [&](int i, int) {
      const uint32_t below = key_[i] - last_;
      best = best < below ? below : best;
    });
    last_ += __reduce_max_sync(kAllLanes, best);
    return kMaxExperts - static_cast<int32_t>(last_ & ((1u << kIdBits) - 1));
  }

 private:
  static constexpr int kIdBits = 11;
  static_assert(kMaxExperts < 1 << kIdBits && kValueBits + kIdBits <= 30);

  const int lane_;
  uint32_t last_ = 1u << (kValueBits + kIdBits);  // above every key
  uint32_t key_[kPerLane];
};

// Keys of float32 values. The value decides in one reduction, the lowest expert in a second.
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

  // The expert of the largest key that is left.
  __device__ int32_t Take() { return TakeAmong(left_).expert; }

  // The largest key of those whose bits of `left` are set, bit i for key i of this lane. Clears
  // the bit of what it returns.
  __device__ Best TakeAmong(uint32_t& left) const {
    uint32_t mine = kNoKey;
    int at = 0;
    ForExperts<kPerLane>(lane_, [&](int i, int) {
      if ((left >> i & 1) == 0 || key_[i] <= mine) return;
      mine = key_[i];
      at = i;
    });
    const uint32_t key = __reduce_max_sync(kAllLanes, mine);
    const auto expert = static_cast<uint32_t>(lane_ + cuda::kWarpLanes * at);
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

// Lane j gets the expert of choice j, j < k.
template <typename Keys>
__device__ inline int32_t TakeTopK(Keys keys, int k, int lane) {
  int32_t mine = 0;
  for (int j = 0; j < k; ++j) {
    const int32_t expert = keys.Take();
    if (lane == j) mine = expert;
  }
  return mine;
}

}  // namespace moe::topk_gate

#endif  // MOE_KERNELS_TOPK_GATE_CUDA_ROW_KEYS_H_
