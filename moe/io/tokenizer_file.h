// What the ids of a tokenizer stand for, from Hugging Face's tokenizer.json: ids to text, not back.
#ifndef MOE_MOE_IO_TOKENIZER_FILE_H_
#define MOE_MOE_IO_TOKENIZER_FILE_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

namespace moe {

// Name of the file in the folder of a model or of a run.
inline constexpr char kTokenizerName[] = "tokenizer.json";

// The bytes of each token, as the file's decoder has them: of byte-level BPE (GPT-2, Llama 3,
// Qwen) and of SentencePiece's pieces with byte fallback (Llama 2, Mistral, Gemma).
class TokenTable {
 public:
  // Of a tokenizer.json, which is not trusted; `file` is its name in messages. kDataLoss "<file>:
  // what is, what was expected": malformed JSON, members that are missing or of another kind, ids
  // that are not in [0, 2^31) or are two tokens'. kUnimplemented: a model that is not BPE, a
  // decoder that is not made of ByteLevel, Replace, ByteFallback, Fuse, Metaspace and a Strip of
  // the first space. kResourceExhausted without memory. Cost: that of the document as JSON values.
  static absl::StatusOr<TokenTable> Parse(absl::string_view file, absl::string_view document);
  // Also errors of MappedFile::Open.
  static absl::StatusOr<TokenTable> Open(const std::string& path);
  // 256 ids, each of them a byte.
  static TokenTable OfBytes();

  // The bytes of a token; empty for special ones, which are no text, and for ids of no token.
  absl::string_view BytesOf(int32_t id) const;
  int64_t num_ids() const { return tokens_.empty() ? 0 : int64_t{tokens_.back().id} + 1; }
  // What becomes of the spaces of a text's first token.
  enum class FirstSpaces : uint8_t { kStay, kFirstGoes, kAllGo };
  FirstSpaces first_spaces() const { return first_spaces_; }

 private:
  struct Token {
    int32_t id = 0;
    std::string bytes;
  };

  std::vector<Token> tokens_;  // ascending
  FirstSpaces first_spaces_ = FirstSpaces::kStay;
};

}  // namespace moe

#endif  // MOE_MOE_IO_TOKENIZER_FILE_H_
