#include "moe/lm/text_data.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/xxh3.h"
#include "moe/io/file.h"
#include "moe/lm/data_kind.h"

namespace moe::lm {
namespace {

namespace fs = std::filesystem;

absl::Status ReadError(const char* what, const fs::path& path, const std::error_code& error) {
  return FileError(what, path.string(), error.value(), FileFault::kRead);
}

absl::StatusOr<std::vector<uint8_t>> ReadFile(const fs::path& path) {
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (file == nullptr) return ReadError("open", path, {errno, std::generic_category()});
  std::vector<uint8_t> bytes;
  std::vector<uint8_t> part(size_t{1} << 16);
  while (const size_t n = std::fread(part.data(), 1, part.size(), file.get())) {
    bytes.insert(bytes.end(), part.begin(), part.begin() + static_cast<int64_t>(n));
  }
  if (std::ferror(file.get())) return ReadError("read", path, {errno, std::generic_category()});
  return bytes;
}

// These add the text of files to a corpus, in order.
void Append(const fs::path& path, const std::vector<uint8_t>& bytes, Corpus& corpus) {
  corpus.text.insert(corpus.text.end(), bytes.begin(), bytes.end());
  corpus.files.push_back(path.string());
}

absl::Status ReadFolder(const fs::path& folder, Corpus& corpus) {
  std::vector<std::string> names;
  std::error_code error = RealFileSystem().List(folder.string(), names);
  if (error) return ReadError("list", folder, error);
  std::sort(names.begin(), names.end());  // by bytes: the same order on every machine
  for (const std::string& name : names) {
    if (name.front() == '.') {
      ++corpus.skipped.hidden;
      continue;
    }
    const fs::path path = folder / name;
    const fs::file_status status = fs::symlink_status(path, error);
    if (error) return ReadError("look at", path, error);
    if (fs::is_directory(status)) {
      MOE_RETURN_IF_ERROR(ReadFolder(path, corpus));
      continue;
    }
    if (!fs::is_regular_file(status)) {
      ++(fs::is_symlink(status) ? corpus.skipped.links : corpus.skipped.special);
      continue;
    }
    MOE_ASSIGN_OR_RETURN(const std::vector<uint8_t> bytes, ReadFile(path));
    switch (TextKindOf(bytes)) {
      case TextKind::kText:
        Append(path, bytes, corpus);
        break;
      case TextKind::kUtf16:
        ++corpus.skipped.utf16;
        break;
      case TextKind::kBinary:
        ++corpus.skipped.binary;
        break;
      case TextKind::kEmpty:
        ++corpus.skipped.empty;
        break;
    }
  }
  return absl::OkStatus();
}

// A path that the user named: it must hold text.
absl::Status ReadNamed(const std::string& name, Corpus& corpus) {
  std::error_code error;
  const fs::file_status status = fs::status(name, error);  // follows a symbolic link
  if (status.type() == fs::file_type::not_found) {
    const std::string pair = TokenPairOf(name);
    return absl::NotFoundError(absl::StrCat(
        "'", name, "' does not exist, expected a text file or a folder of them",
        pair.empty() ? "" : absl::StrCat(": --tokens ", pair, " reads ", pair, ".bin and .idx")));
  }
  if (error) return ReadError("look at", name, error);
  if (fs::is_directory(status)) return ReadFolder(name, corpus);
  if (!fs::is_regular_file(status)) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", name, "' is a device or pipe, expected a text file or a folder of them"));
  }
  MOE_ASSIGN_OR_RETURN(const std::vector<uint8_t> bytes, ReadFile(name));
  if (bytes.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("'", name, "' is empty, expected text"));
  }
  MOE_RETURN_IF_ERROR(CheckText(name, bytes));
  Append(name, bytes, corpus);
  return absl::OkStatus();
}

// Deals the tokens of all files out. kInvalidArgument if either part is too short.
absl::Status Split(absl::Span<const Tokens::Piece> files, int64_t sequence_length, Corpus& corpus) {
  int64_t size = 0;  // so far
  for (const Tokens::Piece& file : files) {
    corpus.all.Add(file.bytes, file.type);
    const int64_t width = SizeOf(file.type);
    for (absl::Span<const uint8_t> left = file.bytes; !left.empty();) {
      const int64_t block = size / kHeldOutBlock;
      const int64_t count =
          std::min((block + 1) * kHeldOutBlock - size, static_cast<int64_t>(left.size()) / width);
      Tokens& part = block % kHeldOutEvery == kFirstHeldOut ? corpus.held_out : corpus.train;
      part.Add(left.first(count * width), file.type);
      left.remove_prefix(count * width);
      size += count;
    }
  }
  corpus.xxh3 = HashTokens(corpus);
  const int64_t sequence = sequence_length + 1;
  if (sequence_length < 1 ||
      (corpus.train.size() >= sequence && corpus.held_out.size() >= sequence)) {
    return absl::OkStatus();
  }
  // Where the held-out part reaches its n-th token; by then there is more to train on.
  const int64_t full_blocks = (sequence - 1) / kHeldOutBlock;
  const int64_t least =
      kFirstHeldOut * kHeldOutBlock + full_blocks * (kHeldOutEvery - 1) * kHeldOutBlock + sequence;
  const auto counted = [&](int64_t count) {
    return absl::StrCat(count, " ", corpus.unit, "s");
  };
  return absl::InvalidArgumentError(
      absl::StrCat("the text is ", counted(size), ": ", corpus.train.size(), " to train on and ",
                   corpus.held_out.size(), " held out, expected at least one sequence of ",
                   counted(sequence), " in each, so a text of ", counted(least), " or more"));
}

absl::Status SplitText(int64_t sequence_length, Corpus& corpus) {
  return Split({{.type = TokenType::kU8, .bytes = corpus.text}}, sequence_length, corpus);
}

// Each piece's hash is the seed of the next.
uint64_t HashOf(const Tokens& tokens, uint64_t hash) {
  for (const Tokens::Piece& piece : tokens.pieces()) {
    hash = Xxh3(piece.bytes.data(), piece.bytes.size(), hash);
  }
  return hash;
}

}  // namespace

std::string TextOf(const SkippedFiles& skipped) {
  std::vector<std::string> reasons;
  int64_t all = 0;
  for (const auto& [count, reason] :
       {std::pair(skipped.hidden, "hidden"),
        std::pair(skipped.links, skipped.links == 1 ? "symbolic link" : "symbolic links"),
        std::pair(skipped.special, "special"), std::pair(skipped.utf16, "UTF-16"),
        std::pair(skipped.binary, "binary"), std::pair(skipped.empty, "empty")}) {
    if (count > 0) reasons.push_back(absl::StrCat(count, " ", reason));
    all += count;
  }
  return absl::StrCat(all, all == 1 ? " file" : " files", " skipped", reasons.empty() ? "" : ": ",
                      absl::StrJoin(reasons, ", "));
}

absl::StatusOr<Corpus> ReadCorpus(absl::Span<const std::string> paths, int64_t sequence_length) {
  Corpus corpus;
  for (const std::string& path : paths) MOE_RETURN_IF_ERROR(ReadNamed(path, corpus));
  if (corpus.text.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("no text in ", paths.size(), " path(s), ",
                                                   TextOf(corpus.skipped),
                                                   ", expected text files"));
  }
  MOE_RETURN_IF_ERROR(SplitText(sequence_length, corpus));
  return corpus;
}

absl::StatusOr<Corpus> CorpusOf(std::vector<uint8_t> text, int64_t sequence_length) {
  Corpus corpus;
  corpus.text = std::move(text);
  MOE_RETURN_IF_ERROR(SplitText(sequence_length, corpus));
  return corpus;
}

absl::StatusOr<Corpus> ReadTokenFiles(const TokenFilesOptions& options, int64_t sequence_length) {
  Corpus corpus;
  corpus.unit = "token";
  std::vector<Tokens::Piece> files;
  for (const std::string& path : options.paths) {
    MOE_ASSIGN_OR_RETURN(TokenFile file, OpenTokenFile(path, options.plain, options.vocab_size));
    const absl::Span<const uint8_t> bytes = file.file.bytes();
    if (const StrayToken stray = FindStray(bytes, file.type, options.vocab_size);
        stray.place >= 0) {
      return absl::InvalidArgumentError(absl::StrCat("'", file.path, "': token ", stray.place,
                                                     " is ", stray.id, ", expected 0 to ",
                                                     options.vocab_size - 1));
    }
    files.push_back({.type = file.type, .bytes = bytes});
    corpus.files.push_back(file.path);
    corpus.mapped.push_back(std::move(file.file));
  }
  MOE_RETURN_IF_ERROR(Split(files, sequence_length, corpus));
  return corpus;
}

uint64_t HashTokens(const Corpus& corpus) {
  return HashOf(corpus.held_out, HashOf(corpus.train, 0));
}

int64_t SequenceCount(const Tokens& all, int64_t sequence_length) {
  return std::max<int64_t>(0, (all.size() - 1) / sequence_length);
}

void CopySequence(const Tokens& all, int64_t sequence, absl::Span<int32_t> tokens,
                  absl::Span<int32_t> targets) {
  const int64_t first = sequence * static_cast<int64_t>(tokens.size());
  all.Copy(first, tokens);
  all.Copy(first + 1, targets);
}

void SequenceBatch::CutDocuments() {
  document_offsets_.assign(1, 0);
  loss_rows_.clear();
  for (int64_t t = 0; t < size(); ++t) {
    const bool end = std::find(ends_.begin(), ends_.end(), tokens_[t]) != ends_.end();
    if (end || (t + 1) % length_ == 0) document_offsets_.push_back(t + 1);
    if (!documents_.eod_mask_loss || end) continue;
    targets_[loss_rows_.size()] = targets_[t];
    loss_rows_.push_back(static_cast<int32_t>(t));
  }
  if (documents_.eod_mask_loss) losses_ = std::ssize(loss_rows_);
}

int64_t Sampler::At(int64_t step, int64_t index) {
  const int64_t batches = batches_per_epoch();
  if (const int64_t epoch = step / batches; epoch != epoch_) Shuffle(epoch);
  return order_[step % batches * batch_ + index];
}

// Fisher and Yates, from the back. A 64-bit number x picks floor(x n / 2^64) of n places: no place
// is likelier than another by more than n / 2^64.
void Sampler::Shuffle(int64_t epoch) {
  epoch_ = epoch;
  order_.resize(sequences_);
  std::iota(order_.begin(), order_.end(), int64_t{0});
  for (int64_t last = sequences_ - 1; last > 0; --last) {
    const std::array<uint32_t, 4> r = Random4({.seed = seed_,
                                               .purpose = RandomPurpose::kShuffle,
                                               .step = static_cast<uint64_t>(epoch),
                                               .item = static_cast<uint64_t>(last)});
    const uint64_t x = static_cast<uint64_t>(r[0]) << 32 | r[1];
    const auto wide = static_cast<unsigned __int128>(x) * static_cast<uint64_t>(last + 1);
    std::swap(order_[last], order_[static_cast<int64_t>(wide >> 64)]);
  }
}

}  // namespace moe::lm
