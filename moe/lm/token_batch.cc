#include "moe/lm/token_batch.h"

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"

namespace moe::lm {
namespace {

absl::Status CheckIds(const char* function, const char* name, absl::Span<const int32_t> ids,
                      int64_t vocab_size) {
  for (size_t t = 0; t < ids.size(); ++t) {
    if (ids[t] < 0 || ids[t] >= vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat(function, ": ", name, "[", t, "] is ", ids[t],
                                                     ", expected 0 to ", vocab_size - 1));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckOffsets(const char* function, const char* name, absl::Span<const int64_t> offsets,
                          int64_t tokens) {
  bool good = !offsets.empty() && offsets.front() == 0 && offsets.back() == tokens;
  for (size_t i = 1; good && i < offsets.size(); ++i) good = offsets[i - 1] <= offsets[i];
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(function, ": ", name, " [", offsets.size(),
                                                 "], expected to ascend from 0 to ", tokens));
}

}  // namespace

absl::Status CheckTokenBatch(const char* function, absl::Span<const int32_t> tokens,
                             absl::Span<const int32_t> targets, const Batch& batch,
                             int64_t vocab_size, size_t losses) {
  if (targets.size() != tokens.size() || losses != tokens.size()) {
    return absl::InvalidArgumentError(absl::StrCat(function, ": tokens [", tokens.size(),
                                                   "], targets [", targets.size(), "], row_loss [",
                                                   losses, "], expected equal lengths"));
  }
  const auto count = static_cast<int64_t>(tokens.size());
  // Without tokens there may be no sequences; without micro-batches the call is one.
  if (count > 0 || !batch.sequence_offsets.empty()) {
    MOE_RETURN_IF_ERROR(CheckOffsets(function, "sequence_offsets", batch.sequence_offsets, count));
  }
  if (!batch.micro_batch_offsets.empty()) {
    MOE_RETURN_IF_ERROR(
        CheckOffsets(function, "micro_batch_offsets", batch.micro_batch_offsets, count));
  }
  MOE_RETURN_IF_ERROR(CheckIds(function, "tokens", tokens, vocab_size));
  return CheckIds(function, "targets", targets, vocab_size);
}

}  // namespace moe::lm
