// The order of summation that products share whose reduced index tensor parallelism cuts.
#ifndef MOE_MOE_TENSOR_TENSOR_TREE_H_
#define MOE_MOE_TENSOR_TENSOR_TREE_H_

#include <cstdint>

#include "kernels/grouped_gemm/gemm_options.h"
#include "moe/run/context.h"
#include "moe/state/canonical_tensor.h"

namespace moe {

// How a product adds its terms whose reduced index is `parts` parts of `extent` values, the first
// perhaps `first_times` as many, cut by items.
inline GemmTree TensorTree(const Context& context, int64_t extent, int64_t item = kCutItem,
                           int parts = 1, int64_t first_times = 1) {
  return {{context.tensor_leaves, extent, item}, parts, first_times};
}

}  // namespace moe

#endif  // MOE_MOE_TENSOR_TENSOR_TREE_H_
