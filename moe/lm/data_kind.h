// Checks that a file is what it is read as: text, or a bare array of token ids. Other content
// (another format, ids of a wider type, one of the two for the other) would be read without an
// error.
#ifndef MOE_MOE_LM_DATA_KIND_H_
#define MOE_MOE_LM_DATA_KIND_H_

#include <cstdint>
#include <string>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "moe/lm/tokens.h"

namespace moe::lm {

// Kind of a file's bytes, as text.
enum class TextKind : uint8_t {
  kText,  // text in UTF-8 or another encoding without NUL bytes
  kEmpty,
  kUtf16,   // recognised by its byte order mark
  kBinary,  // NUL bytes, or another format
};
TextKind TextKindOf(absl::Span<const uint8_t> bytes);

// kDataLoss "<path>: is what it is, expected text: what to do", except for kText and kEmpty.
absl::Status CheckText(const std::string& path, absl::Span<const uint8_t> bytes);

// Reads at most 192 KiB of the file's `bytes`: its beginning, its middle and its end.
//   kDataLoss "<path>: is <format>, expected a bare array of ids: <what to do>": the file begins as
//     a known format does (numpy's .npy, llm.c's tokens, safetensors, a Megatron index, archives),
//     or is 64 bytes or more of text
//   kInvalidArgument, naming the flag: ids of `type` are halves of wider ones: at least 64 at even
//     places are above the upper half of any id below vocab_size, and none at an odd place is.
absl::Status CheckPlainTokens(const std::string& path, absl::Span<const uint8_t> bytes,
                              TokenType type, int64_t vocab_size);

}  // namespace moe::lm

#endif  // MOE_MOE_LM_DATA_KIND_H_
