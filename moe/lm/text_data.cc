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

#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/xxh3.h"
#include "moe/io/file.h"
#include "moe/io/file_system.h"

namespace moe::lm {
namespace {

namespace fs = std::filesystem;

absl::Status FileError(const char* what, const fs::path& path, const std::error_code& error) {
  return absl::ErrnoToStatus(error.value(),
                             absl::StrCat("cannot ", what, " '", path.string(), "'"));
}

absl::StatusOr<std::vector<uint8_t>> ReadFile(const fs::path& path) {
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (file == nullptr) return FileError("open", path, {errno, std::generic_category()});
  std::vector<uint8_t> bytes;
  std::vector<uint8_t> part(size_t{1} << 16);
  while (const size_t n = std::fread(part.data(), 1, part.size(), file.get())) {
    bytes.insert(bytes.end(), part.begin(), part.begin() + static_cast<int64_t>(n));
  }
  if (std::ferror(file.get())) return FileError("read", path, {errno, std::generic_category()});
  return bytes;
}

// Gathers the text of all files, in order.
class Reader {
 public:
  explicit Reader(Corpus& corpus) : corpus_(corpus) {}

  // A path that the user named: it must hold text.
  absl::Status ReadNamed(const std::string& name);
  std::vector<uint8_t>& text() { return text_; }

 private:
  absl::Status ReadFolder(const fs::path& folder);
  void Append(const fs::path& path, const std::vector<uint8_t>& bytes);

  Corpus& corpus_;
  std::vector<uint8_t> text_;
};

absl::Status Reader::ReadNamed(const std::string& name) {
  std::error_code error;
  const fs::file_status status = fs::status(name, error);  // follows a symbolic link
  if (status.type() == fs::file_type::not_found) {
    return absl::NotFoundError(
        absl::StrCat("'", name, "' does not exist, expected a text file or a folder of them"));
  }
  if (error) return FileError("look at", name, error);
  if (fs::is_directory(status)) return ReadFolder(name);
  if (!fs::is_regular_file(status)) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", name, "' is a device or pipe, expected a text file or a folder of them"));
  }
  MOE_ASSIGN_OR_RETURN(const std::vector<uint8_t> bytes, ReadFile(name));
  if (bytes.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("'", name, "' is empty, expected text"));
  }
  Append(name, bytes);
  return absl::OkStatus();
}

absl::Status Reader::ReadFolder(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error = RealFileSystem().List(folder.string(), names);
  if (error) return FileError("list", folder, error);
  std::sort(names.begin(), names.end());  // by bytes: the same order on every machine
  for (const std::string& name : names) {
    const fs::path path = folder / name;
    const fs::file_status status = fs::symlink_status(path, error);
    if (error) return FileError("look at", path, error);
    if (fs::is_directory(status)) {
      MOE_RETURN_IF_ERROR(ReadFolder(path));
      continue;
    }
    std::vector<uint8_t> bytes;
    if (fs::is_regular_file(status)) {
      MOE_ASSIGN_OR_RETURN(bytes, ReadFile(path));
    }
    if (bytes.empty() || std::memchr(bytes.data(), 0, bytes.size()) != nullptr) {
      ++corpus_.skipped_files;
      continue;
    }
    Append(path, bytes);
  }
  return absl::OkStatus();
}

void Reader::Append(const fs::path& path, const std::vector<uint8_t>& bytes) {
  text_.insert(text_.end(), bytes.begin(), bytes.end());
  corpus_.files.push_back(path.string());
}

void SplitText(const std::vector<uint8_t>& text, Corpus& corpus) {
  const auto size = static_cast<int64_t>(text.size());
  for (int64_t block = 0; block * kHeldOutBlockBytes < size; ++block) {
    const int64_t begin = block * kHeldOutBlockBytes;
    const int64_t end = std::min(size, begin + kHeldOutBlockBytes);
    std::vector<uint8_t>& part =
        block % kHeldOutEvery == kFirstHeldOut ? corpus.held_out : corpus.train;
    part.insert(part.end(), text.begin() + begin, text.begin() + end);
  }
}

}  // namespace

absl::StatusOr<Corpus> ReadCorpus(absl::Span<const std::string> paths, int64_t sequence_length) {
  if (sequence_length < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("ReadCorpus: sequence length ", sequence_length, ", expected at least 1"));
  }
  Corpus corpus;
  Reader reader(corpus);
  for (const std::string& path : paths) MOE_RETURN_IF_ERROR(reader.ReadNamed(path));
  const std::vector<uint8_t>& text = reader.text();
  if (text.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("no text in ", paths.size(), " path(s), ",
                                                   corpus.skipped_files,
                                                   " file(s) skipped, expected text files"));
  }
  SplitText(text, corpus);
  const int64_t sequence_bytes = sequence_length + 1;
  const auto train_bytes = static_cast<int64_t>(corpus.train.size());
  const auto held_out_bytes = static_cast<int64_t>(corpus.held_out.size());
  if (train_bytes < sequence_bytes || held_out_bytes < sequence_bytes) {
    // Where the held-out text reaches its n-th byte; by then there is more to train on.
    const int64_t full_blocks = (sequence_bytes - 1) / kHeldOutBlockBytes;
    const int64_t least = kFirstHeldOut * kHeldOutBlockBytes +
                          full_blocks * (kHeldOutEvery - 1) * kHeldOutBlockBytes + sequence_bytes;
    return absl::InvalidArgumentError(
        absl::StrCat("the text is ", text.size(), " bytes: ", train_bytes, " to train on and ",
                     held_out_bytes, " held out, expected at least one sequence of ",
                     sequence_bytes, " bytes in each, so a text of ", least, " bytes or more"));
  }
  return corpus;
}

uint64_t HashText(const Corpus& corpus) {
  const uint64_t train = Xxh3(corpus.train.data(), corpus.train.size());
  return Xxh3(corpus.held_out.data(), corpus.held_out.size(), train);
}

int64_t SequenceCount(absl::Span<const uint8_t> text, int64_t sequence_length) {
  return std::max<int64_t>(0, (static_cast<int64_t>(text.size()) - 1) / sequence_length);
}

void CopySequence(absl::Span<const uint8_t> text, int64_t sequence_length, int64_t sequence,
                  absl::Span<int32_t> tokens, absl::Span<int32_t> targets) {
  const uint8_t* const from = text.data() + sequence * sequence_length;
  std::copy_n(from, sequence_length, tokens.begin());
  std::copy_n(from + 1, sequence_length, targets.begin());
}

Sampler::Sampler(int64_t sequences, int64_t batch, uint64_t seed)
    : sequences_(sequences), batch_(batch), seed_(seed) {}

int64_t Sampler::batches_per_epoch() const {
  return sequences_ / batch_;
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
