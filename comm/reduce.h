// Element-wise reductions in a fixed order: what every backend sums with.
#ifndef MOE_COMM_REDUCE_H_
#define MOE_COMM_REDUCE_H_

#include <cstddef>
#include <cstdint>

#include <absl/types/span.h>

#include "comm/communicator.h"
#include "kernels/base/dtype.h"

namespace moe {

// f32, f64, bf16, f16, i32, i64.
bool IsReducible(DType type);

// outputs[j][i] = inputs[0][i] op inputs[1][i] op ... (in that order) for i in [begin, end), for
// every j. bf16 and f16 are summed in float32 and rounded once; integers wrap around. Works on one
// tile of a few KiB at a time, so an output may be one of the inputs. No allocation.
//   inputs, outputs  arrays of `type`, at least `end` elements each; at least one of each
void ReduceInOrder(absl::Span<const std::byte* const> inputs, absl::Span<std::byte* const> outputs,
                   int64_t begin, int64_t end, DType type, ReduceOp op);

}  // namespace moe

#endif  // MOE_COMM_REDUCE_H_
