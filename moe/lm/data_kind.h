// Whether a file is what it is read as: text, or a bare array of token ids. What it is otherwise,
// another format, ids of a wider type, or one for the other, would read as either without an error.
#ifndef MOE_MOE_LM_DATA_KIND_H_
#define MOE_MOE_LM_DATA_KIND_H_

#include <cstdint>
#include <string>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "moe/lm/tokens.h"

namespace moe::lm {

// What the bytes of a file are to whoever reads text.
enum class TextKind : uint8_t {
  kText,  // in UTF-8 or another encoding without NUL bytes
  kEmpty,
  kUtf16,   // by its byte order mark
  kBinary,  // NUL bytes, or another format
};
TextKind TextKindOf(absl::Span<const uint8_t> bytes);

// kDataLoss "<path>: is what it is, expected text: what to do", but for kText and kEmpty.
absl::Status CheckText(const std::string& path, absl::Span<const uint8_t> bytes);

// Of the file's `bytes` at most 192 KiB are read: its beginning, its middle and its end.
//   kDataLoss "<path>: is <format>, expected a bare array of ids: <what to do>": the file begins as
//     a known format does (numpy's .npy, llm.c's tokens, safetensors, a Megatron index, archives),
//     or is 64 bytes or more of text
//   kInvalidArgument, naming the flag: ids of `type` are halves of wider ones. Of 64 or more at
//     even places that are above the upper half of any id below vocab_size, none at an odd place
//     is.
absl::Status CheckPlainTokens(const std::string& path, absl::Span<const uint8_t> bytes,
                              TokenType type, int64_t vocab_size);

}  // namespace moe::lm

#endif  // MOE_MOE_LM_DATA_KIND_H_
