// Token ids where they lie in memory, in the type that a file gives them.
#ifndef MOE_MOE_LM_TOKENS_H_
#define MOE_MOE_LM_TOKENS_H_

#include <cstdint>
#include <vector>

#include <absl/types/span.h>

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

}  // namespace moe::lm

#endif  // MOE_MOE_LM_TOKENS_H_
