// Sizes of the scratch of cuda_cub.h, from shapes alone: CUB tells its own sizes on a device.
#ifndef MOE_KERNELS_BASE_CUB_SCRATCH_H_
#define MOE_KERNELS_BASE_CUB_SCRATCH_H_

#include <cstdint>

namespace moe {

// Bytes for ExclusiveSum of n values: a state of 8 bytes for each tile of at least 512 and for 32
// more, twice, and as much for alignment. CUB refuses a scratch that is too small.
inline int64_t ScanScratchBytes(int64_t n) {
  return (n / 512 + 128) * 16;
}

// Bytes for SortPairs of n pairs: a copy of them, and 256 counters of 4 bytes for each tile of at
// least 1,024 and for each of four digits.
inline int64_t SortScratchBytes(int64_t n) {
  return n * 8 + (n / 1024 + 16) * 1024;
}

}  // namespace moe

#endif  // MOE_KERNELS_BASE_CUB_SCRATCH_H_
