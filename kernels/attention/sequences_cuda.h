// Maps blocks to rows of packed sequences and to heads. Device code.
#ifndef MOE_KERNELS_ATTENTION_SEQUENCES_CUDA_H_
#define MOE_KERNELS_ATTENTION_SEQUENCES_CUDA_H_

#include <cstdint>

#include <math.h>

#include "kernels/base/cuda_kernel.h"

namespace moe::attention {

// Rows [first, last) of a block, at most kRows, and rows [begin, end) of their sequence.
struct Place {
  int64_t begin, end;
  int64_t first, last;
};

// Block slots of sequence s begin at offsets[s] / kRows + s. That gives a sequence as many as its
// rows need, or one more, which is empty. So the grid follows from T and B, and the host need not
// read the offsets.
template <int kRows>
__device__ Place FindPlace(const int64_t* offsets, int64_t sequences, int64_t slot) {
  const auto start = [&](int64_t s) {
    return offsets[s] / kRows + s;
  };
  const int64_t s = cuda::LastStartedBy(slot, sequences, start);
  const int64_t begin = offsets[s], end = offsets[s + 1];
  const int64_t first = cuda::Min(begin + (slot - start(s)) * kRows, end);
  return {begin, end, first, cuda::Min(first + kRows, end)};
}

// Rows [first, last) of a head. A depth of 32 bits takes fewer registers.
template <typename T, typename Depth>
__device__ MatrixView<T> HeadRows(MatrixView<T> m, Depth depth, int head, int64_t first,
                                  int64_t last) {
  const Depth column = depth * head;
  return ColumnRange(RowRange(m, first, last), column, column + depth);
}

// Blocks of queries: blockIdx.y is the key-value head, and neighbours in x are the query heads that
// share it. Later queries have more keys: their blocks start first.
__device__ inline unsigned QuerySlot(int group) {
  return (gridDim.x - 1 - blockIdx.x) / group;
}
__device__ inline int QueryHead(int group) {
  return static_cast<int>(blockIdx.y * group + blockIdx.x % group);
}

// The factor of the products of queries and keys.
template <typename Depth>
__device__ float Scale(Depth depth) {
  return 1.0f / sqrtf(static_cast<float>(depth));
}

// Blocks of kRows rows and `columns` result columns, for `members` of the query heads that share a
// key-value head.
template <int kRows, typename Arguments>
dim3 Grid(const Arguments& a, int members, int columns) {
  const int64_t depth = a.q.cols() / a.heads;
  return dim3(static_cast<unsigned>((a.q.rows() / kRows + a.sequences) * members),
              static_cast<unsigned>(a.heads / a.group),
              static_cast<unsigned>((depth + columns - 1) / columns));
}

}  // namespace moe::attention

#endif  // MOE_KERNELS_ATTENTION_SEQUENCES_CUDA_H_
