// Where the rows of one source for one expert are, in every order that they have at the experts'
// rank. Plain C++, for kernels too.
#ifndef MOE_KERNELS_EXPERT_SORT_EXPERT_RUN_H_
#define MOE_KERNELS_EXPERT_SORT_EXPERT_RUN_H_

#include <cstdint>

namespace moe {

// They are neighbours in each.
struct ExpertRun {
  int32_t source, local;  // rank, and expert of this one
  int32_t rows;
  int32_t expert_row, return_row;  // the first, of all N
  int32_t chunk_row;               // first of the chunk, in both
  int32_t received;                // the first, by (source, expert)
  int32_t source_row;              // received rows of the chunk before the source's
  int32_t source_rows;             // received rows of the source in the chunk
};

}  // namespace moe

#endif  // MOE_KERNELS_EXPERT_SORT_EXPERT_RUN_H_
