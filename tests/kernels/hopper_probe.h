// Products of one tile in every layout and width that kernels use, checked on the device.
#ifndef MOE_TESTS_KERNELS_HOPPER_PROBE_H_
#define MOE_TESTS_KERNELS_HOPPER_PROBE_H_

#include <cstdint>

#include "kernels/base/cuda_tensor_map.h"
#include "kernels/base/cuda_types.h"

namespace moe::testing {

// Block i multiplies the one-hot matrices of depth d = (i * step + 21) % kDepth: a [kRows, kDepth]
// is row + 1 at depth d and 0 elsewhere, b [columns, kDepth] likewise, so that every element of the
// product names its row and column.
struct HopperProbe {
  static constexpr int kRows = 64, kDepth = 64, kMaxColumns = 256;

  bool float16 = false;  // else bfloat16
  // Device memory, a matrix for each depth d, one after the other: row by row, or, if the rows of a
  // or the columns of b are contiguous, step by step of the depth.
  const void* a = nullptr;  // [kDepth, kRows, kDepth]
  const void* b = nullptr;  // [kDepth, columns, kDepth]
  bool a_rows_contiguous = false, b_columns_contiguous = false;
  int columns = kMaxColumns;  // 16, 32, 64, 128, 192 or 256
  int blocks = 1, step = 1;
  int* wrong = nullptr;  // device memory; the number of wrong elements is added
};

// Enqueues the products; returns the error of the maps or of the launch.
cudaError_t RunHopperProbe(const HopperProbe& probe, cudaStream_t stream);

// A kernel whose blocks have a multiprocessor each for themselves. Each adds 1 to *begun, waits
// until *stop is not 0, and adds 1 to *ended.
struct Occupant {
  int blocks = 1;
  int64_t most_polls = 0;  // after which a block no longer waits
  int* begun = nullptr;    // these three: pinned memory
  int* stop = nullptr;
  int* ended = nullptr;
};
cudaError_t RunOccupant(const Occupant& occupant, cudaStream_t stream);

}  // namespace moe::testing

#endif  // MOE_TESTS_KERNELS_HOPPER_PROBE_H_
