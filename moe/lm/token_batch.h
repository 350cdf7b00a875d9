// The argument checks of the reference model's passes.
#ifndef MOE_MOE_LM_TOKEN_BATCH_H_
#define MOE_MOE_LM_TOKEN_BATCH_H_

#include <cstddef>
#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "gating/routing.h"

namespace moe::lm {

// kInvalidArgument, named after `function`, unless targets and losses are as many as the tokens,
// ids lie in [0, vocab_size) and the batch's offsets ascend from 0 to the number of tokens.
// Found before any exchange with other ranks.
absl::Status CheckTokenBatch(const char* function, absl::Span<const int32_t> tokens,
                             absl::Span<const int32_t> targets, const Batch& batch,
                             int64_t vocab_size, size_t losses);

}  // namespace moe::lm

#endif  // MOE_MOE_LM_TOKEN_BATCH_H_
