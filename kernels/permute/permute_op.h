// Arguments of both paths of permute.h, in the memory of one device. Internal. Plain C++: .cu files
// include it. Functions are instantiated for float, BFloat16 and Float16.
#ifndef MOE_KERNELS_PERMUTE_PERMUTE_OP_H_
#define MOE_KERNELS_PERMUTE_PERMUTE_OP_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::permute {

// GatherRows and GatherScaledRows: out[i] = scale[i] * in[row[i]].
template <typename T>
struct Gather {
  MatrixView<const T> in;        // [T, H]
  const int32_t* source_row;     // [N], -1 = a zero row
  const float* scale = nullptr;  // [N], or nullptr: rows are copied
  MatrixView<T> out;             // [N, H]
};

// CopyRows: out = in.
template <typename T>
struct Copy {
  MatrixView<const T> in;
  MatrixView<T> out;
};

// GatherTokens: out[row_of_slot[s] - first_row] = weight[s] * in[t] for the slots s of token t.
template <typename T>
struct TokenGather {
  MatrixView<const T> in;       // [T, H]
  const int64_t* slot_offset;   // [T + 1]
  const int32_t* row_of_slot;   // [slots]
  const int32_t* token_of_row;  // [N], -1 = a zero row
  int64_t first_row = 0;
  const float* weight = nullptr;  // [slots], or nullptr: rows are copied
  MatrixView<T> out;              // [N, H]

  // The row of slot s, or one that `out` does not have.
  MOE_HOST_DEVICE int64_t RowOf(int64_t s) const { return row_of_slot[s] - first_row; }
  MOE_HOST_DEVICE bool Has(int64_t row) const { return row >= 0 && row < out.rows(); }
};

// GatherRowsOfMany: out[i] = scale[i] * views[view[i]][row[i]]. The array of views is in host
// memory and read before Run returns.
template <typename T>
struct GatherOfMany {
  const MatrixView<const T>* views;  // one [*, H] per rank
  int64_t view_count;
  const int32_t* source_view;    // [N]
  const int32_t* source_row;     // [N], -1 = a zero row
  const float* scale = nullptr;  // [N], or nullptr: rows are copied
  MatrixView<T> out;             // [N, H]
};

// Views that are passed to one launch: 2 of its 4 KiB of arguments.
constexpr int kViewsPerLaunch = 64;

// The specification, in plain loops.
template <typename T>
void Reference(const GatherOfMany<T>& gather);

// The same bits on CUDA: all enqueue on `stream` and return the launch error alone. Rows that
// begin at multiples of 16 bytes are copied 16 bytes at a time, whatever their length; others
// element by element. Each kViewsPerLaunch of many views get a launch of their own, which leaves
// the rows of others unchanged: the table of views needs no device memory and no copy.
template <typename T>
cudaError_t Run(const Gather<T>& gather, cudaStream_t stream);
template <typename T>
cudaError_t Run(const Copy<T>& copy, cudaStream_t stream);
template <typename T>
cudaError_t Run(const TokenGather<T>& gather, cudaStream_t stream);
template <typename T>
cudaError_t Run(const GatherOfMany<T>& gather, cudaStream_t stream);

}  // namespace moe::permute

#endif  // MOE_KERNELS_PERMUTE_PERMUTE_OP_H_
