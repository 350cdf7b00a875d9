// Internal: plain C++ above expert_rows_cuda.cu (nvcc, no Abseil). Pointers are to device memory;
// Run enqueues one kernel, none for no rows, and returns the error of its launch.
#ifndef MOE_KERNELS_EXPERT_SORT_EXPERT_ROWS_CUDA_H_
#define MOE_KERNELS_EXPERT_SORT_EXPERT_ROWS_CUDA_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/expert_sort/expert_run.h"

namespace moe::expert_sort {

// The group of each slot that is the first of its token to have it, else -1.
struct CudaSlotGroups {
  int64_t tokens = 0;
  const int64_t* slot_offset;  // [T + 1]
  const int32_t* expert;       // [S]
  const uint8_t* dropped;      // [S] 1 = dropped; nullptr = none
  int32_t num_experts = 0;
  const int32_t* group_of_expert;  // [E]
  int32_t* first_group;            // [S]
};
cudaError_t Run(const CudaSlotGroups& slots, cudaStream_t stream);

// TokensToSend (expert_rows.h), sorted by first_group.
struct CudaSentPlaces {
  int64_t tokens = 0;
  const int64_t* slot_offset;      // [T + 1]
  const int32_t* expert;           // [S]
  const int32_t* group_of_expert;  // [E]
  const int32_t* first_group;      // [S]
  const int32_t* sent_row;         // [S] of the slots that have a first_group
  const int64_t* group_begin;      // [G] the first of each
  const int32_t* row_of_slot;      // [S]
  int32_t* place;                  // [rows of the kept slots]
};
cudaError_t Run(const CudaSentPlaces& places, cudaStream_t stream);

// OrderExpertRows (expert_rows.h).
struct CudaExpertRows {
  const ExpertRun* runs;  // [num_runs]
  int32_t num_runs = 0;
  int32_t most_rows = 0;    // of a run
  const int32_t* received;  // nullptr: source is not written
  int32_t *return_order, *return_place, *source;
};
cudaError_t Run(const CudaExpertRows& rows, cudaStream_t stream);

}  // namespace moe::expert_sort

#endif  // MOE_KERNELS_EXPERT_SORT_EXPERT_ROWS_CUDA_H_
