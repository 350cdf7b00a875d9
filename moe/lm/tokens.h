// Token ids where they lie in memory, in the type that a file gives them, and files of them that
// another program made: Megatron's pairs, and plain arrays.
//
// A pair, as Megatron-LM's megatron/core/datasets/indexed_dataset.py writes it: PREFIX.bin holds
// nothing but ids, PREFIX.idx says which. Little-endian, one behind the other:
//
//   9 bytes    "MMIDIDX" and two zeros
//   uint64     version, 1
//   uint8      type of an id: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 6 float64, 7 float32,
//              8 uint16
//   uint64     S, sequences
//   uint64     D, documents, plus one
//   int32 [S]  ids of each sequence
//   int64 [S]  where each begins in PREFIX.bin, in bytes: they lie one behind the other
//   int64 [D]  the first sequence of each document, ascending from 0, and S
//
// A plain array is nothing but ids, as numpy's tofile writes it. What shows that a file is none is
// refused (data_kind.h).
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

// One array of ids behind another, read as one. Little-endian, aligned to nothing; borrowed.
class Tokens {
 public:
  struct Piece {
    int64_t first = 0;  // place of its first id among all
    TokenType type = TokenType::kU8;
    absl::Span<const uint8_t> bytes;
  };

  // A whole number of ids.
  void Add(absl::Span<const uint8_t> bytes, TokenType type);

  int64_t size() const { return size_; }
  absl::Span<const Piece> pieces() const { return pieces_; }
  // out = ids [first, first + out.size()), all of which are there and fit 32 bits.
  void Copy(int64_t first, absl::Span<int32_t> out) const;

 private:
  std::vector<Piece> pieces_;  // none is empty
  int64_t size_ = 0;
};

// The place of the first id outside [0, vocab_size), and that id; -1: there is none.
struct StrayToken {
  int64_t place = -1;
  int64_t id = 0;
};
StrayToken FindStray(absl::Span<const uint8_t> bytes, TokenType type, int64_t vocab_size);

// The type of ids in a PREFIX.bin of `bin_bytes`, as PREFIX.idx says it. kDataLoss "<path>: what
// is, what was expected": anything but the above with ids of an integer type, or another length of
// PREFIX.bin.
absl::StatusOr<TokenType> ParseTokenIndex(const std::string& path, absl::Span<const uint8_t> index,
                                          int64_t bin_bytes);

// PREFIX, where `path` is PREFIX, PREFIX.bin or PREFIX.idx and the two files are there; else empty.
std::string TokenPairOf(const std::string& path);

struct TokenFile {
  std::string path;  // of the ids
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
