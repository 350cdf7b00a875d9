// Training data: bytes of text or ids of tokens from files, cut into sequences, ordered by a seed.
#ifndef MOE_MOE_LM_TEXT_DATA_H_
#define MOE_MOE_LM_TEXT_DATA_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "gating/routing.h"
#include "moe/io/file.h"
#include "moe/lm/tokens.h"

namespace moe::lm {

// Entries of folders that are not read, counted by reason.
struct SkippedFiles {
  int64_t hidden = 0;   // files and folders whose names begin with a dot
  int64_t links = 0;    // symbolic links
  int64_t special = 0;  // devices, pipes, sockets
  int64_t utf16 = 0;
  int64_t binary = 0;  // files with NUL bytes, or in a format that is no text
  int64_t empty = 0;
};
// "3 files skipped: 2 hidden, 1 symbolic link".
std::string TextOf(const SkippedFiles& skipped);

// The tokens of a set of files, split into those to train on and those held out. A token of text is
// a byte.
struct Corpus {
  Tokens all;                      // in the order of the files
  Tokens train, held_out;          // parts of `all`
  std::vector<std::string> files;  // files that were read, in order
  SkippedFiles skipped;
  const char* unit = "byte";  // name of a token's unit in messages; or "token"
  uint64_t xxh3 = 0;          // HashTokens
  // Memory of the tokens.
  std::vector<uint8_t> text;
  std::vector<MappedFile> mapped;
};

// Every 20th block of 16,384 tokens of all files together is held out, whatever the layout: blocks
// 1, 21, 41, ..., counted from 0. The second block is the first held out, so that little more than
// one block of tokens is enough.
inline constexpr int64_t kHeldOutBlock = 16 << 10;
inline constexpr int64_t kHeldOutEvery = 20;
inline constexpr int64_t kFirstHeldOut = 1;

// Reads files and, in name order (by bytes), folders (recursively). Entries of folders that
// SkippedFiles counts are skipped; a path named in `paths` may be hidden or a symbolic link.
// kNotFound for a path that does not exist (named); kDataLoss for a named file that is no text
// (data_kind.h); kInvalidArgument if a named file or the whole text is empty or a split is shorter
// than one sequence of sequence_length + 1 bytes (names both lengths; 0: splits may be empty); the
// system's own error if a file cannot be read.
absl::StatusOr<Corpus> ReadCorpus(absl::Span<const std::string> paths, int64_t sequence_length);

// The same of a text in memory, without a file.
absl::StatusOr<Corpus> CorpusOf(std::vector<uint8_t> text, int64_t sequence_length);

// As ReadCorpus, for files of token ids (tokens.h), in the order given, mapped: every id is checked
// once. Errors: those of OpenTokenFile; kInvalidArgument, naming file and place, for an id outside
// [0, vocab_size), and for too few ids.
struct TokenFilesOptions {
  std::vector<std::string> paths = {};
  TokenType plain = TokenType::kU16;  // type of ids in files without an index
  int64_t vocab_size = 0;
};
absl::StatusOr<Corpus> ReadTokenFiles(const TokenFilesOptions& options, int64_t sequence_length);

// XXH3 of the bytes of the training tokens and of the held-out tokens.
uint64_t HashTokens(const Corpus& corpus);

// Non-overlapping sequences: sequence i predicts tokens [i*S + 1, i*S + S] from
// [i*S, i*S + S - 1].
int64_t SequenceCount(const Tokens& all, int64_t sequence_length);
void CopySequence(const Tokens& all, int64_t sequence, absl::Span<int32_t> tokens,
                  absl::Span<int32_t> targets);

// What the ends of documents do to the sequences that hold them, as Megatron-LM's flags of these
// names. An end is a token of its own document.
struct DocumentOptions {
  bool reset_position_ids = false;    // positions begin at 0 behind it
  bool reset_attention_mask = false;  // tokens behind it do not attend to it or to those before it
  bool eod_mask_loss = false;         // it has no loss: what follows it is another document

  bool any() const { return reset_position_ids || reset_attention_mask || eod_mask_loss; }
};

// The sequences of one micro-batch as a model takes them, at most `most`; reused for every
// micro-batch.
class SequenceBatch {
 public:
  // ends: ids of the tokens that end a document.
  SequenceBatch(int64_t sequence_length, int64_t most, DocumentOptions documents = {},
                std::vector<int32_t> ends = {})
      : length_(sequence_length),
        documents_(documents),
        ends_(std::move(ends)),
        sequence_offsets_(static_cast<size_t>(most) + 1),
        tokens_(static_cast<size_t>(most * sequence_length)),
        targets_(tokens_.size()),
        row_loss_(tokens_.size()) {
    for (size_t i = 0; i < sequence_offsets_.size(); ++i) {
      sequence_offsets_[i] = static_cast<int64_t>(i) * length_;
    }
  }

  // Loads these sequences of `all`, or none; the first is sequence `first_sequence` over all ranks.
  void Load(const Tokens& all, absl::Span<const int64_t> sequences, int64_t first_sequence) {
    count_ = static_cast<int64_t>(sequences.size());
    first_token_ = first_sequence * length_;
    const auto length = static_cast<size_t>(length_);
    for (size_t i = 0; i < sequences.size(); ++i) {
      CopySequence(all, sequences[i], absl::MakeSpan(tokens_).subspan(i * length, length),
                   absl::MakeSpan(targets_).subspan(i * length, length));
    }
    micro_batch_offsets_[1] = size();
    losses_ = size();
    if (documents_.any()) CutDocuments();
  }

  int64_t size() const { return count_ * length_; }  // tokens
  absl::Span<const int32_t> tokens() const { return Filled(absl::MakeConstSpan(tokens_)); }
  // Those of tokens that have a loss, all or loss_rows().
  absl::Span<const int32_t> targets() const {
    return absl::MakeConstSpan(targets_).first(static_cast<size_t>(losses_));
  }
  absl::Span<float> row_loss() {
    return absl::MakeSpan(row_loss_).first(static_cast<size_t>(losses_));
  }
  absl::Span<const int32_t> loss_rows() const { return loss_rows_; }
  // The sequences as one micro-batch; borrows memory of this object.
  Batch batch(int64_t step, Mode mode) const {
    const auto count = static_cast<size_t>(count_);
    return {.sequence_offsets = absl::MakeConstSpan(sequence_offsets_).first(count + 1),
            .micro_batch_offsets = micro_batch_offsets_,
            .first_global_token = first_token_,
            .attention_offsets = documents_.reset_attention_mask
                                     ? absl::MakeConstSpan(document_offsets_)
                                     : absl::Span<const int64_t>(),
            .position_offsets = documents_.reset_position_ids
                                    ? absl::MakeConstSpan(document_offsets_)
                                    : absl::Span<const int64_t>(),
            .step = step,
            .mode = mode};
  }

 private:
  template <typename T>
  absl::Span<T> Filled(absl::Span<T> all) const {
    return all.first(static_cast<size_t>(size()));
  }

  // document_offsets_ and, with eod_mask_loss, loss_rows_ and their targets.
  void CutDocuments();

  const int64_t length_;
  const DocumentOptions documents_;
  const std::vector<int32_t> ends_;
  int64_t count_ = 0, first_token_ = 0, losses_ = 0;
  std::vector<int64_t> sequence_offsets_, micro_batch_offsets_ = {0, 0};
  std::vector<int64_t> document_offsets_;  // of sequences, and of documents in them
  std::vector<int32_t> loss_rows_;
  std::vector<int32_t> tokens_, targets_;
  std::vector<float> row_loss_;
};

// The global order of training sequences: epoch e is a permutation that depends on (seed, e) alone.
// A global batch takes the next `batch` sequences; an incomplete last batch of an epoch is dropped.
// Ranks read disjoint parts because they take disjoint places of the order.
class Sampler {
 public:
  Sampler(int64_t sequences, int64_t batch, uint64_t seed)
      : sequences_(sequences), batch_(batch), seed_(seed) {}
  int64_t batches_per_epoch() const { return sequences_ / batch_; }
  // Sequence at place `index` in [0, batch) of the batch of `step` (from 0).
  int64_t At(int64_t step, int64_t index);

 private:
  void Shuffle(int64_t epoch);
  const int64_t sequences_, batch_;
  const uint64_t seed_;
  int64_t epoch_ = -1;
  std::vector<int64_t> order_;
};

}  // namespace moe::lm

#endif  // MOE_MOE_LM_TEXT_DATA_H_
