// What a file that is read as a bare array of token ids must not be: another format, with a header
// or of text, or ids of a wider type. All of these read as ids without an error.
#ifndef MOE_MOE_LM_PLAIN_TOKENS_H_
#define MOE_MOE_LM_PLAIN_TOKENS_H_

#include <cstdint>
#include <string>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "moe/lm/tokens.h"

namespace moe::lm {

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

#endif  // MOE_MOE_LM_PLAIN_TOKENS_H_
