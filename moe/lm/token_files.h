// Files of token ids that another program made: Megatron's pairs, and plain arrays.
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
// A plain array is nothing but ids, as numpy's tofile writes it.
#ifndef MOE_MOE_LM_TOKEN_FILES_H_
#define MOE_MOE_LM_TOKEN_FILES_H_

#include <cstdint>
#include <string>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/io/file.h"
#include "moe/lm/tokens.h"

namespace moe::lm {

// What PREFIX.idx says of a PREFIX.bin of `bin_bytes`. kDataLoss "<path>: what is, what was
// expected": anything but the above with ids of an integer type, or another length of PREFIX.bin.
struct TokenIndex {
  TokenType type = TokenType::kU16;
  int64_t sequences = 0, documents = 0;
};
absl::StatusOr<TokenIndex> ParseTokenIndex(const std::string& path, absl::Span<const uint8_t> index,
                                           int64_t bin_bytes);

struct TokenFile {
  std::string path;  // of the ids
  TokenType type = TokenType::kU16;
  MappedFile file;
};

// `path` is PREFIX, PREFIX.bin or PREFIX.idx of a pair, or an array of `plain` ids: a file of any
// name that has no PREFIX.idx. kNotFound, kPermissionDenied, kUnavailable: as MappedFile::Open.
// kInvalidArgument: a folder, or no ids in it. kDataLoss: malformed.
absl::StatusOr<TokenFile> OpenTokenFile(const std::string& path, TokenType plain);

}  // namespace moe::lm

#endif  // MOE_MOE_LM_TOKEN_FILES_H_
