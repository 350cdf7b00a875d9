// Sorting of one rank's slots on the device: the home side of a DispatchPlan
// (dispatch/dispatch_plan.h) without host synchronisation; and the rows that are exchanged between
// ranks. Internal: plain C++ above expert_sort_cuda.cu (nvcc, no Abseil). Pointers are to device
// memory.
#ifndef MOE_KERNELS_EXPERT_SORT_EXPERT_SORT_CUDA_H_
#define MOE_KERNELS_EXPERT_SORT_EXPERT_SORT_CUDA_H_

#include <cstdint>

#include "kernels/base/cub_scratch.h"
#include "kernels/base/cuda_types.h"
#include "kernels/expert_sort/expert_run.h"

namespace moe::expert_sort {

constexpr int kMaxExperts = 1024;
// Slots of one block. A chunk belongs to one micro-batch.
constexpr int64_t kChunkSlots = 1024;

// SortByExpert (expert_sort.h). A slot is kept if its expert is in 0 .. E - 1 (others are identity
// experts) and it is not dropped.
struct CudaExpertSort {
  int64_t slots = 0;                 // S
  const int32_t* expert;             // [S]
  const uint8_t* dropped = nullptr;  // [S] 1 = dropped; nullptr = none
  int32_t num_experts = 0;           // E
  const int32_t* order = nullptr;    // [E] the order of the experts' rows; nullptr: by id

  // Micro-batch b has the slots slot_offset[micro_batch_offsets[b]] .. [b + 1], all of S together.
  int32_t micro_batches = 1;           // B
  const int64_t* micro_batch_offsets;  // [B + 1], in tokens
  const int64_t* slot_offset;          // [T + 1]
  int64_t padded_rows = 0;             // P; 0 = no padding
  int64_t most_rows = 0;               // M: S, with padding E * B * P

  int32_t* row_of_slot;  // [S] -1 = not kept
  int32_t* slot_of_row;  // [M] -1 = empty
  // [E + 1] first row of each expert, in `order`; the last entry is the number of rows
  int64_t* expert_begin;
  int64_t* segment_begin;  // [E * B + 1] first row of each expert's slots of each micro-batch
  int32_t* count;          // [B, E] kept slots
  int32_t* scratch;        // [ScratchElements]
};

// The most chunks that the slots can form: every micro-batch has at least one.
inline int64_t MaxChunks(const CudaExpertSort& sort) {
  return sort.slots / kChunkSlots + sort.micro_batches;
}
// The counts of each expert's chunks, and 0.
inline int64_t TableElements(const CudaExpertSort& sort) {
  return sort.num_experts * MaxChunks(sort) + 1;
}
// The table, then what its sums need.
inline int64_t ScratchElements(const CudaExpertSort& sort) {
  const int64_t table = TableElements(sort);
  return table + ScanScratchBytes(table) / static_cast<int64_t>(sizeof(int32_t));
}

// Enqueues on `stream` (count by chunk, sum the counts, place the slots) and returns.
// Stable and deterministic: results do not depend on the order of atomics. An expert with more than
// padded_rows kept slots in a micro-batch, which a DispatchPlan refuses, is visible in `count`; the
// slots beyond get no row (-1), and nothing is written out of bounds.
// Errors: cudaErrorInvalidValue, before anything is enqueued, if S is negative or E not in 1 ..
// kMaxExperts, B < 1, padded_rows < 0, or there are 2^31 slots, padded rows or elements of the
// table; else the launch's.
cudaError_t Run(const CudaExpertSort& sort, cudaStream_t stream);

// The token of every sorted row, and the row's own number: the indices of gathers into and out of
// expert order where one rank holds all experts.
struct CudaRowTokens {
  int64_t most_rows = 0;       // M; nothing is launched for 0
  const int32_t* slot_of_row;  // [M]
  int64_t tokens = 0;          // T > 0
  const int64_t* slot_offset;  // [T + 1]
  int32_t* token_of_row;       // [M] -1 = empty
  int32_t* own_row;            // [M] 0, 1, 2, ...
};

// This and the functions below enqueue one kernel, or none without rows, and return its launch
// error.
cudaError_t Run(const CudaRowTokens& rows, cudaStream_t stream);

// The group of each slot that is its token's first slot in that group, else -1.
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
  const int32_t* sent_row;         // [S] for slots that have a first_group
  const int64_t* group_begin;      // [G] first row of each group
  const int32_t* row_of_slot;      // [S]
  int32_t* place;                  // [rows of the kept slots]
};
cudaError_t Run(const CudaSentPlaces& places, cudaStream_t stream);

// OrderExpertRows (expert_rows.h).
struct CudaExpertRows {
  const ExpertRun* runs;  // [num_runs]
  int32_t num_runs = 0;
  int32_t most_rows = 0;    // maximum over the runs
  const int32_t* received;  // nullptr: source is not written
  int32_t *return_order, *return_place, *source;
};
cudaError_t Run(const CudaExpertRows& rows, cudaStream_t stream);

}  // namespace moe::expert_sort

#endif  // MOE_KERNELS_EXPERT_SORT_EXPERT_SORT_CUDA_H_
