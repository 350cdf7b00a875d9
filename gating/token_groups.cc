#include "gating/token_groups.h"

#include <algorithm>

#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

absl::StatusOr<absl::Span<const int64_t>> CopyOffsets(absl::string_view name,
                                                      absl::Span<const int64_t> offsets,
                                                      int64_t tokens, Workspace& workspace) {
  const int64_t whole[] = {0, tokens};
  if (offsets.empty()) offsets = whole;
  if (offsets.front() != 0 || offsets.back() != tokens ||
      !std::is_sorted(offsets.begin(), offsets.end())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Batch.", name, " has ", offsets.size(), " entries from ", offsets.front(), " to ",
        offsets.back(), ", expected ascending ones from 0 to ", tokens, " (the tokens)"));
  }
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> copy,
                       workspace.Array<int64_t>(static_cast<int64_t>(offsets.size())));
  std::copy(offsets.begin(), offsets.end(), copy.begin());
  return copy;
}

// Group ends within micro-batch [begin, end), appended to `ends`; returns how many.
absl::StatusOr<size_t> CutMicroBatch(TokenGroup group, absl::Span<const int64_t> sequences,
                                     int64_t begin, int64_t end, absl::Span<int64_t> ends) {
  size_t count = 0;
  if (begin == end) return count;
  if (group.tokens == TokenGroup::kMicroBatch) {
    ends[count++] = end;
    return count;
  }
  if (group.tokens > 0) {
    if ((end - begin) % group.tokens != 0) {
      return absl::InvalidArgumentError(absl::StrCat("token group of ", group.tokens,
                                                     " tokens, expected a divisor of ", end - begin,
                                                     " (the tokens of a micro-batch)"));
    }
    for (int64_t t = begin + group.tokens; t <= end; t += group.tokens) ends[count++] = t;
    return count;
  }
  const auto* const first = std::lower_bound(sequences.begin(), sequences.end(), begin);
  const auto* const last = std::lower_bound(first, sequences.end(), end);
  if (*first != begin || *last != end) {
    return absl::InvalidArgumentError(
        absl::StrCat("Batch.sequence_offsets: a sequence crosses the micro-batch of tokens ", begin,
                     " .. ", end, ", expected micro-batches of whole sequences"));
  }
  int64_t previous = begin;
  for (const auto* s = first; s <= last; ++s) {
    if (*s > previous) ends[count++] = previous = *s;  // a sequence of no tokens is no group
  }
  return count;
}

}  // namespace

absl::StatusOr<Batch> CopyBatch(const Batch& batch, int64_t tokens, Workspace& workspace) {
  Batch copy = batch;
  copy.padding_mask = {};
  copy.attention_offsets = copy.position_offsets = {};
  MOE_ASSIGN_OR_RETURN(copy.sequence_offsets,
                       CopyOffsets("sequence_offsets", batch.sequence_offsets, tokens, workspace));
  MOE_ASSIGN_OR_RETURN(
      copy.micro_batch_offsets,
      CopyOffsets("micro_batch_offsets", batch.micro_batch_offsets, tokens, workspace));
  return copy;
}

absl::StatusOr<TokenGroups> MakeTokenGroups(TokenGroup group, const Batch& batch,
                                            Workspace& workspace) {
  const absl::Span<const int64_t> cuts = batch.micro_batch_offsets;
  const size_t blocks =
      group.tokens > 0 ? static_cast<size_t>(cuts.back() / group.tokens) : size_t{0};
  const size_t most = std::max({cuts.size() - 1, batch.sequence_offsets.size() - 1, blocks});
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> offsets,
                       workspace.Array<int64_t>(static_cast<int64_t>(most) + 1));
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> micro_batch,
                       workspace.Array<int64_t>(static_cast<int64_t>(cuts.size())));
  size_t count = 0;
  offsets[0] = micro_batch[0] = 0;
  for (size_t b = 0; b + 1 < cuts.size(); ++b) {
    MOE_ASSIGN_OR_RETURN(const size_t added,
                         CutMicroBatch(group, batch.sequence_offsets, cuts[b], cuts[b + 1],
                                       offsets.subspan(count + 1)));
    count += added;
    micro_batch[b + 1] = static_cast<int64_t>(count);
  }
  return TokenGroups{offsets.first(count + 1), micro_batch};
}

}  // namespace moe
