#include <limits>

#include <cuda/atomic>

#include "kernels/base/cuda_block_scan.h"
#include "kernels/base/cuda_float_keys.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/expert_capacity/expert_capacity_cuda.h"

namespace moe::expert_capacity {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

constexpr int kThreads = 256;
constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;

// The slots of one expert and group.
struct Segment {
  int32_t expert, group;
  int64_t first_row;
  int32_t rows;
};

// The block's segment, returned to all of its threads. `rows` is 0, without a search, if the
// segment is within capacity.
__device__ inline Segment SegmentOfBlock(const CudaExpertCapacity& c) {
  MOE_SHARED_ARRAY(int32_t, rows_before, 1);
  const auto expert = static_cast<int32_t>(blockIdx.x % static_cast<unsigned>(c.num_experts));
  const auto group = static_cast<int32_t>(blockIdx.x / static_cast<unsigned>(c.num_experts));
  const auto rows_of = [&](int g) {
    return c.count[int64_t{g} * c.num_experts + expert];
  };
  const int32_t rows = rows_of(group);
  if (rows <= c.capacity[group]) return {expert, group, 0, 0};
  ForPrefixSums<kThreads>(group + 1, rows_of, [&](int g, int32_t before, int32_t) {
    if (g == group) rows_before[0] = before;
  });
  __syncthreads();
  return {expert, group, c.expert_begin[expert] + rows_before[0], rows};
}

// The slot with the smaller key is kept first; of equal keys the lower row.
__device__ inline uint32_t Key(const CudaExpertCapacity& c, const Segment& segment, int row) {
  const int64_t at = segment.first_row + row;
  const int64_t slot = c.slot_of_row[at];
  if (c.token_of_row == nullptr) return ~KeyOf(c.weight[slot]);
  const int64_t token = c.token_of_row[at];
  const int64_t begin = c.group_offsets[segment.group];
  const int64_t tokens = c.group_offsets[segment.group + 1] - begin;
  return static_cast<uint32_t>((slot - c.slot_offset[token]) * tokens + token - begin);
}

// The key of the last slot that is kept, and how many slots with that key are kept.
struct Threshold {
  uint32_t key;
  int32_t equal;
};

// Determines the `kept`-th smallest key digit by digit, from the highest.
__device__ inline Threshold FindThreshold(const CudaExpertCapacity& c, const Segment& segment,
                                          int32_t kept) {
  MOE_SHARED_ARRAY(int32_t, count, kDigits);
  MOE_SHARED_ARRAY(Threshold, found, 1);
  Threshold threshold = {0, kept};
  for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    for (auto d = static_cast<int>(threadIdx.x); d < kDigits; d += kThreads) count[d] = 0;
    __syncthreads();
    for (auto row = static_cast<int>(threadIdx.x); row < segment.rows; row += kThreads) {
      const uint32_t key = Key(c, segment, row);
      // Counts keys whose higher digits match; a 64-bit shift is defined for the first digit, too.
      if ((uint64_t{key} ^ threshold.key) >> (shift + kDigitBits) != 0) continue;
      atomicAdd(&count[(key >> shift) % kDigits], 1);
    }
    __syncthreads();
    ForPrefixSums<kThreads>(
        kDigits, [&](int d) { return count[d]; },
        [&](int d, int32_t before, int32_t mine) {
          if (before >= threshold.equal || before + mine < threshold.equal) return;
          found[0] = {threshold.key | static_cast<uint32_t>(d) << shift, threshold.equal - before};
        });
    __syncthreads();
    threshold = found[0];
  }
  return threshold;
}

__global__ void __launch_bounds__(kThreads) CapacityKernel(CudaExpertCapacity c) {
  const Segment segment = SegmentOfBlock(c);
  if (segment.rows == 0) return;  // the whole block
  const auto kept = static_cast<int32_t>(c.capacity[segment.group]);
  const Threshold last = kept > 0 ? FindThreshold(c, segment, kept) : Threshold{0, 0};
  // Weights are keys and change here: comparisons with other rows are done, and only a row's own
  // thread reads its weight again.
  ForPrefixSums<kThreads>(
      segment.rows, [&](int row) { return Key(c, segment, row) == last.key ? 1 : 0; },
      [&](int row, int32_t equal_before, int32_t equal) {
        if (equal != 0 ? equal_before < last.equal : Key(c, segment, row) < last.key) return;
        const int32_t slot = c.slot_of_row[segment.first_row + row];
        c.dropped[slot] = 1;
        c.weight[slot] = 0.0f;
      });
  if (threadIdx.x != 0) return;
  ::cuda::atomic_ref<int64_t, ::cuda::thread_scope_device>(*c.dropped_slots)
      .fetch_add(segment.rows - kept, ::cuda::memory_order_relaxed);
}

}  // namespace

cudaError_t Run(const CudaExpertCapacity& capacity, cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max();
  if (capacity.num_experts < 1 || capacity.groups < 1) return cudaErrorInvalidValue;
  const int64_t blocks = int64_t{capacity.num_experts} * capacity.groups;
  if (blocks > kMaxBlocks) return cudaErrorInvalidValue;
  return Launch(&CapacityKernel, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)}, stream,
                capacity);
}

}  // namespace moe::expert_capacity
