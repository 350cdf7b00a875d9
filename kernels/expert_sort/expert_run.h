// Positions of the rows of one source for one expert, in every order that the experts' rank uses.
// Plain C++, for kernels too.
#ifndef MOE_KERNELS_EXPERT_SORT_EXPERT_RUN_H_
#define MOE_KERNELS_EXPERT_SORT_EXPERT_RUN_H_

#include <cstdint>

namespace moe {

// The rows are contiguous in every order.
struct ExpertRun {
  int32_t source, local;  // source rank, and local expert of this rank
  int32_t rows;
  int32_t expert_row, return_row;  // the first row, of all N
  int32_t chunk_row;               // first row of the chunk, in both orders
  int32_t received;                // the first row, by (source, expert)
  int32_t source_row;              // received rows of the chunk before the source's
  int32_t source_rows;             // received rows of the source in the chunk
};

}  // namespace moe

#endif  // MOE_KERNELS_EXPERT_SORT_EXPERT_RUN_H_
