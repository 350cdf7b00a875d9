// Drops slots above capacity on the device. Internal: plain C++ above expert_capacity_cuda.cu
// (nvcc, no Abseil).
#ifndef MOE_KERNELS_EXPERT_CAPACITY_EXPERT_CAPACITY_CUDA_H_
#define MOE_KERNELS_EXPERT_CAPACITY_EXPERT_CAPACITY_CUDA_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"

namespace moe::expert_capacity {

// One call; pointers are to device memory. The slots of every expert and token group have been
// sorted (kernels/expert_sort, with groups as its micro-batches): slots of an expert are
// contiguous, by group, ascending within a group.
struct CudaExpertCapacity {
  int32_t num_experts = 0;      // E
  int32_t groups = 0;           // G token groups
  const int64_t* capacity;      // [G] slots that an expert keeps of a group, >= 0
  const int64_t* expert_begin;  // [E + 1] rows of an expert
  const int32_t* count;         // [G, E] slots by group and expert
  const int32_t* slot_of_row;   // [expert_begin[E]]
  // Selects the choice order, or the largest weights if null. In choice order a slot's key is its
  // choice times the group's tokens, plus its token's position in the group.
  const int32_t* token_of_row;   // [rows]
  const int64_t* slot_offset;    // [T + 1]
  const int64_t* group_offsets;  // [G + 1] tokens

  float* weight;           // [slots] becomes 0 where dropped
  uint8_t* dropped;        // [slots] becomes 1 where dropped, else unchanged
  int64_t* dropped_slots;  // [1] the number of dropped slots is added
};

// Enqueues one kernel, one block for each expert and group. Deterministic: blocks add integers
// alone. Errors: cudaErrorInvalidValue if E < 1, G < 1 or E * G > 2^31 - 1; else the launch's.
cudaError_t Run(const CudaExpertCapacity& capacity, cudaStream_t stream);

}  // namespace moe::expert_capacity

#endif  // MOE_KERNELS_EXPERT_CAPACITY_EXPERT_CAPACITY_CUDA_H_
