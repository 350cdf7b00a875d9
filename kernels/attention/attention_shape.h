// What the operations on packed sequences share.
#ifndef MOE_KERNELS_ATTENTION_ATTENTION_SHAPE_H_
#define MOE_KERNELS_ATTENTION_ATTENTION_SHAPE_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/strings/string_view.h>

#include "kernels/attention/attention.h"

namespace moe {

// kInvalidArgument unless the heads divide `cols` and the sequences cover `rows`.
absl::Status CheckAttentionShape(absl::string_view function, const AttentionShape& shape,
                                 int64_t rows, int64_t cols);

// Rows of the longest sequence; 0 without sequences.
int64_t LongestSequence(const AttentionShape& shape);

}  // namespace moe

#endif  // MOE_KERNELS_ATTENTION_ATTENTION_SHAPE_H_
