// Token ids in memory, in the type in which a file stores them, and files of ids that another
// program made: Megatron's pairs, and plain arrays.
//
// A pair, as Megatron-LM's megatron/core/datasets/indexed_dataset.py writes it: PREFIX.bin holds
// ids alone, PREFIX.idx describes them. Its fields, little-endian, without gaps:
//
//   9 bytes    "MMIDIDX" and two zeros
//   uint64     version, 1
//   uint8      type of an id: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 6 float64, 7 float32,
//              8 uint16
//   uint64     S, sequences
//   uint64     D, documents, plus one
//   int32 [S]  ids of each sequence
//   int64 [S]  offset of each in PREFIX.bin, in bytes: sequences are contiguous
//   int64 [D]  the first sequence of each document, ascending from 0, and S
//
// A plain array holds ids alone, as numpy's tofile writes it. A file that shows signs of another
// format is refused (data_kind.h).
#ifndef MOE_MOE_LM_TOKENS_H_
#define MOE_MOE_LM_TOKENS_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/io/file.h"

namespace moe::lm {

enum class TokenType : uint8_t { kU8, kI8, kU16, kI16, kU32, kI32, kI64 };

int64_t SizeOf(TokenType type);  // bytes

// Several arrays of ids, concatenated. Little-endian, of any alignment; borrowed.
class Tokens {
 public:
  struct Piece {
    int64_t first = 0;  // place of the piece's first id among all ids
    TokenType type = TokenType::kU8;
    absl::Span<const uint8_t> bytes;
  };

  // Appends a whole number of ids.
  void Add(absl::Span<const uint8_t> bytes, TokenType type);

  int64_t size() const { return size_; }
  absl::Span<const Piece> pieces() const { return pieces_; }
  // out = ids [first, first + out.size()), all of which must exist and fit 32 bits.
  void Copy(int64_t first, absl::Span<int32_t> out) const;

 private:
  std::vector<Piece> pieces_;  // no piece is empty
  int64_t size_ = 0;
};

// Place and value of the first id outside [0, vocab_size); -1: there is none.
struct StrayToken {
  int64_t place = -1;
  int64_t id = 0;
};
StrayToken FindStray(absl::Span<const uint8_t> bytes, TokenType type, int64_t vocab_size);

// Type of the ids in a PREFIX.bin of `bin_bytes`, from PREFIX.idx. kDataLoss "<path>: what is, what
// was expected": anything but the format above with ids of an integer type, or another length of
// PREFIX.bin.
absl::StatusOr<TokenType> ParseTokenIndex(const std::string& path, absl::Span<const uint8_t> index,
                                          int64_t bin_bytes);

// PREFIX, if `path` is PREFIX, PREFIX.bin or PREFIX.idx and the two files exist; otherwise empty.
std::string TokenPairOf(const std::string& path);

struct TokenFile {
  std::string path;  // path of the file of ids
  TokenType type = TokenType::kU16;
  MappedFile file;
};

// `path` is PREFIX, PREFIX.bin or PREFIX.idx of a pair, or an array of `plain` ids below
// vocab_size: a file of any name that has no PREFIX.idx. kNotFound, kPermissionDenied,
// kUnavailable: as MappedFile::Open. kInvalidArgument: a folder, no ids in it, or ids of another
// type than `plain`. kDataLoss: malformed, or of another format.
absl::StatusOr<TokenFile> OpenTokenFile(const std::string& path, TokenType plain,
                                        int64_t vocab_size);

}  // namespace moe::lm

#endif  // MOE_MOE_LM_TOKENS_H_
