// The text of tokens, as they come.
#ifndef MOE_MOE_CLI_GENERATE_TOKEN_TEXT_H_
#define MOE_MOE_CLI_GENERATE_TOKEN_TEXT_H_

#include <cstdint>
#include <string>
#include <utility>

#include "moe/cli/generate/utf8_stream.h"
#include "moe/io/tokenizer_file.h"

namespace moe::cli {

// The concatenated output is the tokens' bytes as UTF-8, in whole characters (Utf8Stream): what
// `tokenizers` decodes, but for runs of fallback bytes that are no UTF-8, of which it replaces each
// byte.
class TokenText {
 public:
  explicit TokenText(TokenTable table) : table_(std::move(table)) {}

  std::string Take(int32_t id);
  std::string End() { return utf8_.End(); }  // U+FFFD if a character is incomplete

 private:
  TokenTable table_;
  Utf8Stream utf8_;
  bool begun_ = false;  // a token of the text has come
};

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_GENERATE_TOKEN_TEXT_H_
