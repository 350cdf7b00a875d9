// Matrix products of rows grouped by expert, with a summation order that is part of the contract.
#ifndef MOE_KERNELS_GROUPED_GEMM_GROUPED_GEMM_H_
#define MOE_KERNELS_GROUPED_GEMM_GROUPED_GEMM_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/group_offsets.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"
#include "kernels/grouped_gemm/gemm_options.h"

namespace moe {

// Group g owns rows [offsets[g], offsets[g + 1]) and weight[g]. Offsets run from 0 to N; those that
// only a device knows may end before N, and rows after the last group are not touched then. Groups
// may be empty. All weights have one shape. T (float, BFloat16 or Float16) is the storage type of
// the inputs; every product is accumulated in float32.
//
// Order of summation: an output element adds its terms in ascending order of the reduced index, in
// chains of 128 (256 for BFloat16). A chain starts from 0 with one fused multiply-add a term; the
// sums of chains are added in order, in float32, and rounded to the output type once at the end. So
// rounding errors grow with the square root of 128 + K / 128 and not of K. BFloat16 has two orders
// (GemmOptions::bfloat16_order), one for each instruction that does more than a multiply-add:
//   dot   AVX-512's dot product: terms are added in pairs, the second first, an odd last one paired
//         with zeros
//   tile  AMX's tiles: no chains of 256; terms are added in blocks of 32, the last one filled up
//         with zeros. In a block the even terms are a chain from 0 on, the odd ones another. Their
//         sum is added to that of the blocks before, from 0 or the old value on: 16 + K / 32 steps.
// On x86 subnormal factors and sums of both count as zeros. An element therefore has the same bits
// for any number of rows or threads, on any SIMD width, with or without any of these instructions,
// in body or tail; the reference is a loop over std::fma. (Which NaN an element becomes is not part
// of this.)
//
// Trees: ranks that share the reduced index of a product each hold some of its terms. For their sum
// to have the bits of one rank, forward products and input gradients take a GemmTree: each leaf is
// a sum as above, with pairs or blocks of BFloat16 from the first value of the leaf in each part
// on; a node is the float32 sum of its left and its right child, or the one that is not empty; the
// root is rounded to the output type once. In BFloat16 products subnormal numbers count as zeros in
// sums of nodes, too, on x86.
//
// CPU: runs on stream.threads(), packed and vectorised where the CPU has fused multiply-add (AVX2,
// AVX-512 or NEON, and dot products or tiles, chosen at run time); elsewhere as that loop, far
// slower. Cost: each weight is read and packed once for every 512 rows (forward) or 252 rows
// (gradients) of its group, in tiles for 512, of deep trees for fewer; an input gradient of up to 6
// rows reads float32 weights in place, and so does a forward product in tiles of up to 32 rows and
// whole blocks, without a tree. packed_weights.h has forward products whose weights stay packed
// from call to call: at few rows twice as fast.
//
// CUDA: float32 by the same chains, with the CPU's bits; 16-bit types on tensor cores, 16 terms at
// a time in ascending order, within (terms + 1) * 2^-23 of the sum of their magnitudes. There too a
// row's bits depend on that row and its group's weight alone. The weights of all groups must be at
// equal distances, as in one slab [L, O, K]. If `options` select cuBLAS, gemm_cublas.h has the
// contract, and weights may be anywhere. A tree is a launch for each leaf that is not empty, whose
// last step adds the sum to the nodes that wait for it; each part of a leaf of a 16-bit type begins
// with 16 terms of its own. A node has the same bits wherever its rows begin, and on Hopper GPUs
// the bits of other GPUs' instructions; cuBLAS computes none.
//
// All views are memory of stream.device() and stay valid until the stream passes this point,
// including device offsets; host offsets [L + 1] and the weight views themselves are read before
// the call returns.
// `workspace` provides packing buffers, up to 1.5 MiB a thread, for trees 2.5 MiB, for tiles
// 3.5 MiB, more for a tree over so many terms that 32 rows in tiles take more than 1 MiB. On an
// inline stream they are released when the call returns. On a queued CPU stream they stay in use
// until the caller, once the stream has passed, releases a mark from before the call. On CUDA it is
// device memory and holds the offsets of several groups that only the host knows, and nodes of a
// tree of n leaves, log2(n) float32 matrices of the output's shape, likewise until the caller
// releases such a mark.
// Errors: kInvalidArgument if shapes disagree, offsets do not ascend, a tree does not match the
// reduced index or, on CUDA, weights are not a slab or cuBLAS is selected for groups that the host
// does not know; kResourceExhausted; kUnimplemented on CUDA in a build without it.

// y[n, o] = sum_k x[n, k] * weight[g][o, k].   x [N, K], weight[g] [O, K], y [N, O].
// TOut, here and below: T, or float where that is a 16-bit type (nodes of a tree, logits).
template <typename T, typename TOut = T>
absl::Status GroupedGemm(MatrixView<const T> x, const GroupOffsets& offsets,
                         absl::Span<const MatrixView<const T>> weight, MatrixView<TOut> y,
                         Workspace& workspace, Stream& stream, GemmOptions options = {},
                         GemmTree tree = {});

// dx[n, k] = sum_o dy[n, o] * weight[g][o, k].   dy [N, O], weight[g] [O, K], dx [N, K].
template <typename T, typename TOut = T>
absl::Status GroupedGemmInputGradient(MatrixView<const T> dy, const GroupOffsets& offsets,
                                      absl::Span<const MatrixView<const T>> weight,
                                      MatrixView<TOut> dx, Workspace& workspace, Stream& stream,
                                      GemmOptions options = {}, GemmTree tree = {});

// The dense layer is one group: y = x * weight^T, dx = dy * weight.
template <typename T, typename TOut = T>
absl::Status Gemm(MatrixView<const T> x, MatrixView<const T> weight, MatrixView<TOut> y,
                  Workspace& workspace, Stream& stream, GemmOptions options = {},
                  GemmTree tree = {});
template <typename T, typename TOut = T>
absl::Status GemmInputGradient(MatrixView<const T> dy, MatrixView<const T> weight,
                               MatrixView<TOut> dx, Workspace& workspace, Stream& stream,
                               GemmOptions options = {}, GemmTree tree = {});

}  // namespace moe

#endif  // MOE_KERNELS_GROUPED_GEMM_GROUPED_GEMM_H_
