#include "moe/lm/tokens.h"

#include <algorithm>
#include <cstring>

namespace moe::lm {
namespace {

// run(id of the type that `type` names)
template <typename F>
auto WithTokenType(TokenType type, const F& run) {
  switch (type) {
    case TokenType::kU8:
      return run(uint8_t{0});
    case TokenType::kI8:
      return run(int8_t{0});
    case TokenType::kU16:
      return run(uint16_t{0});
    case TokenType::kI16:
      return run(int16_t{0});
    case TokenType::kU32:
      return run(uint32_t{0});
    case TokenType::kI32:
      return run(int32_t{0});
    case TokenType::kI64:
      break;
  }
  return run(int64_t{0});
}

template <typename Id>
Id IdAt(const uint8_t* bytes, int64_t place) {
  Id id;
  std::memcpy(&id, bytes + place * static_cast<int64_t>(sizeof(Id)), sizeof(Id));
  return id;
}

}  // namespace

int64_t SizeOf(TokenType type) {
  return WithTokenType(type, [](auto id) { return static_cast<int64_t>(sizeof(id)); });
}

void Tokens::Add(absl::Span<const uint8_t> bytes, TokenType type) {
  if (bytes.empty()) return;
  const int64_t count = static_cast<int64_t>(bytes.size()) / SizeOf(type);
  if (!pieces_.empty() && pieces_.back().type == type &&
      pieces_.back().bytes.end() == bytes.data()) {
    absl::Span<const uint8_t>& last = pieces_.back().bytes;
    last = {last.data(), last.size() + bytes.size()};
  } else {
    pieces_.push_back({.first = size_, .type = type, .bytes = bytes});
  }
  size_ += count;
}

void Tokens::Copy(int64_t first, absl::Span<int32_t> out) const {
  auto piece = std::upper_bound(pieces_.begin(), pieces_.end(), first,
                                [](int64_t place, const Piece& p) { return place < p.first; });
  for (--piece; !out.empty(); ++piece) {
    const int64_t begin = first - piece->first;
    const int64_t count =
        std::min(static_cast<int64_t>(piece->bytes.size()) / SizeOf(piece->type) - begin,
                 static_cast<int64_t>(out.size()));
    WithTokenType(piece->type, [&](auto zero) {
      for (int64_t i = 0; i < count; ++i) {
        out[i] = static_cast<int32_t>(IdAt<decltype(zero)>(piece->bytes.data(), begin + i));
      }
    });
    first += count;
    out.remove_prefix(count);
  }
}

StrayToken FindStray(absl::Span<const uint8_t> bytes, TokenType type, int64_t vocab_size) {
  return WithTokenType(type, [&](auto zero) -> StrayToken {
    using Id = decltype(zero);
    const auto count = static_cast<int64_t>(bytes.size() / sizeof(Id));
    for (int64_t i = 0; i < count; ++i) {
      const auto id = static_cast<int64_t>(IdAt<Id>(bytes.data(), i));
      if (id < 0 || id >= vocab_size) return {.place = i, .id = id};
    }
    return {};
  });
}

}  // namespace moe::lm
