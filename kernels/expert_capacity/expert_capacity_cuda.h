// Slots over capacity, found on the device. Internal: plain C++ above expert_capacity_cuda.cu
// (nvcc, no Abseil).
#ifndef MOE_KERNELS_EXPERT_CAPACITY_EXPERT_CAPACITY_CUDA_H_
#define MOE_KERNELS_EXPERT_CAPACITY_EXPERT_CAPACITY_CUDA_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"

namespace moe::expert_capacity {

// One call; pointers are to device memory. The slots of every expert and token group have been
// sorted (kernels/expert_sort, its micro-batches being the groups): those of an expert lie
// together, group after group, ascending within one.
struct CudaExpertCapacity {
  int32_t num_experts = 0;      // E
  int32_t groups = 0;           // G token groups
  const int64_t* capacity;      // [G] slots that an expert keeps of a group, >= 0
  const int64_t* expert_begin;  // [E + 1] rows of an expert
  const int32_t* count;         // [G, E] slots by group and expert
  const int32_t* slot_of_row;   // [expert_begin[E]]
  // The choice order of a group, or the largest weights if null: a slot's key is its choice times
  // the group's tokens, plus its token's place in the group.
  const int32_t* token_of_row;   // [rows]
  const int64_t* slot_offset;    // [T + 1]
  const int64_t* group_offsets;  // [G + 1] tokens

  float* weight;           // [slots] becomes 0 where dropped
  uint8_t* dropped;        // [slots] becomes 1 where dropped, else is left alone
  int64_t* dropped_slots;  // [1] += how many
};

// Enqueues one kernel: a block an expert and group. The same slots every time; integers are all
// that blocks add up. Errors: cudaErrorInvalidValue if E < 1, G < 1 or E * G > 2^31 - 1; else the
// launch's.
cudaError_t Run(const CudaExpertCapacity& capacity, cudaStream_t stream);

}  // namespace moe::expert_capacity

#endif  // MOE_KERNELS_EXPERT_CAPACITY_EXPERT_CAPACITY_CUDA_H_
