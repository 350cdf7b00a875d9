// How the M micro-batches of a step are dealt to R ranks.
#ifndef MOE_MOE_RUN_MICRO_BATCHES_H_
#define MOE_MOE_RUN_MICRO_BATCHES_H_

#include <algorithm>
#include <cstdint>

namespace moe {

// A contiguous range of the global batch's micro-batches.
struct MicroBatchRange {
  int64_t begin = 0, end = 0;
};

// Those of `rank`, balanced: [M r / R, M (r + 1) / R).
inline MicroBatchRange MicroBatchesOf(int rank, int ranks, int64_t micro_batches) {
  return {micro_batches * rank / ranks, micro_batches * (rank + 1) / ranks};
}

// How many rounds every rank runs, ceil(M / R) and at least one: a rank with no micro-batch left
// joins the exchanges with zero tokens.
inline int64_t RoundsOf(int ranks, int64_t micro_batches) {
  return std::max<int64_t>(1, (micro_batches + ranks - 1) / ranks);
}

}  // namespace moe

#endif  // MOE_MOE_RUN_MICRO_BATCHES_H_
