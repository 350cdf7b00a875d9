// The CUDA paths of attention.h. Internal: plain C++ between attention.cc and rotary.cc (Abseil)
// and the .cu files (nvcc, no Abseil).
#ifndef MOE_KERNELS_ATTENTION_ATTENTION_CUDA_H_
#define MOE_KERNELS_ATTENTION_ATTENTION_CUDA_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::attention {

// The arguments of CausalAttention, in device memory.
template <typename T>
struct CudaForward {
  MatrixView<const T> q, k, v;      // [T, heads * D]; k and v [T, heads / group * D]
  int heads, group;                 // group: heads of q that share one of k and v
  const int64_t* sequence_offsets;  // [B + 1], from 0 to T
  int64_t sequences;                // B
  MatrixView<T> out;                // [T, heads * D]; overlaps no input
  MatrixView<float> log_sum_exp;    // [T, heads]
};

// The arguments of CausalAttentionBackward, in device memory.
template <typename T>
struct CudaBackward {
  MatrixView<const T> q, k, v, out;
  MatrixView<const float> log_sum_exp;
  MatrixView<const T> d_out;
  int heads, group;
  const int64_t* sequence_offsets;
  int64_t sequences;
  MatrixView<T> d_q, d_k, d_v;  // as q, k and v, overwritten; overlap no input
  MatrixView<float> row_dot;    // [T, heads], scratch
};

constexpr int kMostHeads = 65535;  // the limit of a grid's y dimension

// Heads of BFloat16 and Float16 up to this size use tensor cores.
constexpr int kMostMmaDepth = 256;

// Enqueue on `stream` and return; the error of the launches alone, cudaErrorInvalidConfiguration
// for more than kMostHeads heads. Instantiated for float, BFloat16 and Float16; float32 inside,
// results rounded to T once.
//
// Forward passes over the keys of a row once, with a running maximum (Milakov and Gimelshein, 2018,
// arXiv:1805.02867; Dao et al., 2022, arXiv:2205.14135), the CPU twice: results differ from
// attention.cc's by roundings of float32. As on the CPU, sums run over keys (d_q) or queries (d_k,
// d_v) in ascending order from the sequence's first row, so that a token's bits depend on its own
// sequence only. Later tokens, even a NaN in them, do not change a token's out, log_sum_exp and
// d_q; nor do earlier ones as queries (q, d_out) change its d_k and d_v. Backward computes d_q in
// one pass, and d_k and d_v in another, over all query heads that share them: 7 products against
// forward's 2. Head sizes above 128 recompute the scores for every 128 columns of the result (with
// tensor cores: above 256, and above 128 for d_k and d_v).
//
// Tensor cores multiply operands of type T. Forward rounds exp(score - maximum so far) to T,
// backward the probabilities and the gradients of scores, before the products that add them up.
// Each such rounding is at most u of the value: u is 2^-8 for BFloat16, 2^-11 for Float16 (and
// 2^-25 below 2^-14). Beside float32's roundings, out is within u * sum of p |v| of softmax's, d_v
// within u * sum of p |d_out|, and d_q and d_k within u * scale * sum of |g| |k| (|q|), where g = p
// (d_out . v - d_out . out). log_sum_exp has float32's roundings alone. An addition in a tensor
// core's sum counts as 2 of them. An infinite value may become a NaN.
template <typename T>
cudaError_t Run(const CudaForward<T>& forward, cudaStream_t stream);
template <typename T>
cudaError_t Run(const CudaBackward<T>& backward, cudaStream_t stream);

// The tensor-core paths that Run() calls where FitsMma() holds. q has rows.
template <typename T>
cudaError_t RunMma(const CudaForward<T>& forward, cudaStream_t stream);
template <typename T>
cudaError_t RunMma(const CudaBackward<T>& backward, cudaStream_t stream);  // row_dot is filled

// Whether a block of the current device may have the shared memory that RunMma() takes. Forward
// takes at most 99 KiB, which all have. Backward takes more for heads above 64: devices of compute
// capability 8.6, 8.9 and 12 have no room for it.
template <typename T>
bool FitsMma(const CudaForward<T>&) {
  return true;
}
template <typename T>
bool FitsMma(const CudaBackward<T>& backward);

// The arguments of ApplyRotary, in device memory.
template <typename T>
struct CudaRotary {
  MatrixView<T> x;  // [T, heads * D], D even; in place
  int heads;
  const int64_t* sequence_offsets;  // [B + 1], from 0 to T
  int64_t sequences;                // B
  const float* cosine;              // [N, D / 2], N >= the longest sequence: the CPU's table
  const float* sine;
  float direction;  // the value of a RotaryDirection: 1 or -1
};

// Enqueues on `stream` and returns the launch error alone. The bits are those of rotary.cc: angles
// come from the table, which the host computes in float64. 16-byte accesses where rows begin at
// multiples of 16 bytes and vectors divide D / 2. Instantiated for float, BFloat16 and Float16.
template <typename T>
cudaError_t Run(const CudaRotary<T>& rotary, cudaStream_t stream);

}  // namespace moe::attention

#endif  // MOE_KERNELS_ATTENTION_ATTENTION_CUDA_H_
