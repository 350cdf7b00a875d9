// Token embedding.
#ifndef MOE_KERNELS_EMBEDDING_EMBEDDING_H_
#define MOE_KERNELS_EMBEDDING_EMBEDDING_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"
#include "kernels/exact_sum/grad_accumulator.h"

namespace moe {

// d_table[v, :] (+)= sum over t with ids[t] == v, ascending, of dx[t, :], in float32.
//   ids [T] in [0, V), checked at the call;  dx [T, H];  d_table [V, H]. kOverwrite zeroes rows
//   whose id does not occur.
// (The forward pass is GatherRows of the table by ids.)
// Errors: kInvalidArgument if shapes disagree or an id is out of range. On CUDA ids are device
// memory, and tokens whose id is out of range are left out instead; 25 bytes a token of `workspace`
// are used meanwhile.
template <typename T>
absl::Status EmbeddingBackward(absl::Span<const int32_t> ids, MatrixView<const T> dx,
                               MatrixView<float> d_table, Write write, Workspace& workspace,
                               Stream& stream);

// Adds EmbeddingBackward as one partial (grad_accumulator.h) to `grad`, the sum of a table [V, H].
// Exact sums on the CPU read and write the rows of the ids alone, with the same bits, and zero an
// empty sum before. Errors of EmbeddingBackward.
template <typename T>
absl::Status AddEmbeddingGradient(absl::Span<const int32_t> ids, MatrixView<const T> dx,
                                  const GradAccumulator& grad, Workspace& workspace,
                                  Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_EMBEDDING_EMBEDDING_H_
