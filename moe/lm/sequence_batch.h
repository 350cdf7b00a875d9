// The sequences of one micro-batch, as a model takes them.
#ifndef MOE_MOE_LM_SEQUENCE_BATCH_H_
#define MOE_MOE_LM_SEQUENCE_BATCH_H_

#include <cstdint>
#include <vector>

#include <absl/types/span.h>

#include "gating/routing.h"
#include "moe/lm/text_data.h"

namespace moe::lm {

// Memory for at most `most` sequences of one length, used again and again.
class SequenceBatch {
 public:
  SequenceBatch(int64_t sequence_length, int64_t most)
      : length_(sequence_length),
        sequence_offsets_(most + 1),
        tokens_(most * sequence_length),
        targets_(tokens_.size()),
        row_loss_(tokens_.size()) {
    for (int64_t i = 0; i <= most; ++i) sequence_offsets_[i] = i * length_;
  }

  // These sequences of `all`, or none; the first is sequence `first_sequence` of all ranks'.
  void Load(const Tokens& all, absl::Span<const int64_t> sequences, int64_t first_sequence) {
    count_ = static_cast<int64_t>(sequences.size());
    first_token_ = first_sequence * length_;
    for (int64_t i = 0; i < count_; ++i) {
      CopySequence(all, sequences[i], absl::MakeSpan(tokens_).subspan(i * length_, length_),
                   absl::MakeSpan(targets_).subspan(i * length_, length_));
    }
    micro_batch_offsets_[1] = size();
  }

  int64_t size() const { return count_ * length_; }  // tokens
  absl::Span<const int32_t> tokens() const { return absl::MakeSpan(tokens_).first(size()); }
  absl::Span<const int32_t> targets() const { return absl::MakeSpan(targets_).first(size()); }
  absl::Span<float> row_loss() { return absl::MakeSpan(row_loss_).first(size()); }
  // One micro-batch; borrows.
  Batch batch(int64_t step, Mode mode) const {
    return {.sequence_offsets = absl::MakeSpan(sequence_offsets_).first(count_ + 1),
            .micro_batch_offsets = micro_batch_offsets_,
            .first_global_token = first_token_,
            .step = step,
            .mode = mode};
  }

 private:
  const int64_t length_;
  int64_t count_ = 0, first_token_ = 0;
  std::vector<int64_t> sequence_offsets_, micro_batch_offsets_ = {0, 0};
  std::vector<int32_t> tokens_, targets_;
  std::vector<float> row_loss_;
};

}  // namespace moe::lm

#endif  // MOE_MOE_LM_SEQUENCE_BATCH_H_
