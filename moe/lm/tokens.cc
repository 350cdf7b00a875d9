#include "moe/lm/tokens.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>

#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>

#include "kernels/base/status_macros.h"
#include "moe/lm/data_kind.h"

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

// Memory aligns nothing.
template <typename V>
V ValueAt(const uint8_t* bytes) {
  V value;
  std::memcpy(&value, bytes, sizeof(V));
  return value;
}
template <typename Id>
Id IdAt(const uint8_t* bytes, int64_t place) {
  return ValueAt<Id>(bytes + place * static_cast<int64_t>(sizeof(Id)));
}

constexpr char kMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', '\0', '\0'};
constexpr uint64_t kVersion = 1;
constexpr int64_t kHeadBytes = sizeof(kMagic) + 8 + 1 + 8 + 8;

// By Megatron's number, from 1; none for real numbers.
constexpr struct {
  const char* name;
  std::optional<TokenType> type;
} kTypes[] = {{"uint8", TokenType::kU8},  {"int8", TokenType::kI8},   {"int16", TokenType::kI16},
              {"int32", TokenType::kI32}, {"int64", TokenType::kI64}, {"float64", std::nullopt},
              {"float32", std::nullopt},  {"uint16", TokenType::kU16}};

// One behind the other, as long as they say.
class IndexReader {
 public:
  IndexReader(const std::string& path, absl::Span<const uint8_t> index)
      : path_(path), index_(index) {}

  absl::StatusOr<TokenType> Read(int64_t bin_bytes) const;

 private:
  absl::Status Malformed(absl::string_view reason) const {
    return absl::DataLossError(absl::StrCat(path_, ": ", reason));
  }
  template <typename V>
  V ValueAt(int64_t place) const {
    return lm::ValueAt<V>(index_.data() + place);
  }
  absl::StatusOr<TokenType> ReadHead() const;
  absl::Status CheckSequences(int64_t sequences, int64_t id_bytes, int64_t bin_bytes) const;
  absl::Status CheckDocuments(int64_t sequences, int64_t bounds) const;

  const std::string& path_;
  const absl::Span<const uint8_t> index_;
};

absl::StatusOr<TokenType> IndexReader::ReadHead() const {
  const auto size = static_cast<int64_t>(index_.size());
  if (size < kHeadBytes) {
    return Malformed(absl::StrCat(size, " bytes, expected at least ", kHeadBytes));
  }
  if (std::memcmp(index_.data(), kMagic, sizeof(kMagic)) != 0) {
    return Malformed("does not begin with MMIDIDX and two zeros, expected a Megatron index");
  }
  const auto version = ValueAt<uint64_t>(sizeof(kMagic));
  if (version != kVersion) {
    return Malformed(absl::StrCat("version ", version, ", expected ", kVersion));
  }
  const int code = index_[sizeof(kMagic) + 8];
  if (code < 1 || code > static_cast<int>(std::size(kTypes))) {
    return Malformed(absl::StrCat("type ", code, " of an id, expected 1 to ", std::size(kTypes)));
  }
  const auto& [name, type] = kTypes[code - 1];
  if (type.has_value()) return *type;
  return Malformed(absl::StrCat("ids of type ", name, ", expected integers"));
}

absl::Status IndexReader::CheckSequences(int64_t sequences, int64_t id_bytes,
                                         int64_t bin_bytes) const {
  int64_t expected = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    const auto ids = ValueAt<int32_t>(kHeadBytes + s * 4);
    const auto begin = ValueAt<int64_t>(kHeadBytes + sequences * 4 + s * 8);
    if (ids < 0) {
      return Malformed(absl::StrCat("sequence ", s, " has ", ids, " ids, expected 0 or more"));
    }
    if (begin != expected) {
      return Malformed(absl::StrCat("sequence ", s, " begins at byte ", begin, ", expected ",
                                    expected, ", behind the one before it"));
    }
    if (ids > (bin_bytes - begin) / id_bytes) {
      return Malformed(absl::StrCat("sequence ", s, " has ", ids, " ids at byte ", begin,
                                    ", the .bin ends at byte ", bin_bytes));
    }
    expected += ids * id_bytes;
  }
  if (expected == bin_bytes) return absl::OkStatus();
  return Malformed(absl::StrCat("all sequences have ", expected, " bytes, the .bin ", bin_bytes));
}

absl::Status IndexReader::CheckDocuments(int64_t sequences, int64_t bounds) const {
  const int64_t first = kHeadBytes + sequences * 12;
  int64_t last = 0;
  for (int64_t d = 0; d < bounds; ++d) {
    const auto bound = ValueAt<int64_t>(first + d * 8);
    if (bound < last || bound > sequences || (d == 0 && bound != 0)) {
      return Malformed(absl::StrCat("document ", d, " begins with sequence ", bound,
                                    ", expected them to ascend from 0 to ", sequences));
    }
    last = bound;
  }
  if (bounds > 0 && last == sequences) return absl::OkStatus();
  return Malformed(
      absl::StrCat("its documents end with sequence ", last, ", expected ", sequences));
}

absl::StatusOr<TokenType> IndexReader::Read(int64_t bin_bytes) const {
  MOE_ASSIGN_OR_RETURN(const TokenType type, ReadHead());
  const auto size = static_cast<uint64_t>(index_.size());
  const auto sequences = ValueAt<uint64_t>(kHeadBytes - 16);
  const auto bounds = ValueAt<uint64_t>(kHeadBytes - 8);
  // Neither can be so large that what follows overflows.
  const bool possible = sequences <= size / 12 && bounds <= size / 8;
  const uint64_t expected = kHeadBytes + (possible ? sequences * 12 + bounds * 8 : size);
  if (size != expected) {
    return Malformed(absl::StrCat(size, " bytes, expected ",
                                  possible ? absl::StrCat(expected) : std::string("more"), " for ",
                                  sequences, " sequences and ", bounds, " bounds of documents"));
  }
  MOE_RETURN_IF_ERROR(CheckSequences(static_cast<int64_t>(sequences), SizeOf(type), bin_bytes));
  MOE_RETURN_IF_ERROR(
      CheckDocuments(static_cast<int64_t>(sequences), static_cast<int64_t>(bounds)));
  return type;
}

bool IsThere(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
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

absl::StatusOr<TokenType> ParseTokenIndex(const std::string& path, absl::Span<const uint8_t> index,
                                          int64_t bin_bytes) {
  return IndexReader(path, index).Read(bin_bytes);
}

std::string TokenPairOf(const std::string& path) {
  absl::string_view prefix = path;
  if (!absl::ConsumeSuffix(&prefix, ".idx")) absl::ConsumeSuffix(&prefix, ".bin");
  const bool both = IsThere(absl::StrCat(prefix, ".bin")) && IsThere(absl::StrCat(prefix, ".idx"));
  return both ? std::string(prefix) : "";
}

absl::StatusOr<TokenFile> OpenTokenFile(const std::string& path, TokenType plain,
                                        int64_t vocab_size) {
  absl::string_view prefix = path;
  if (!absl::ConsumeSuffix(&prefix, ".idx")) absl::ConsumeSuffix(&prefix, ".bin");
  const std::string index_path = absl::StrCat(prefix, ".idx");
  const bool pair = IsThere(index_path) && (prefix.size() < path.size() || !IsThere(path));
  TokenFile tokens = {
      .path = pair ? absl::StrCat(prefix, ".bin") : path, .type = plain, .file = {}};
  MOE_ASSIGN_OR_RETURN(tokens.file, MappedFile::Open(tokens.path));
  const absl::Span<const uint8_t> ids = tokens.file.bytes();
  const auto bytes = static_cast<int64_t>(ids.size());
  if (pair) {
    MOE_ASSIGN_OR_RETURN(const MappedFile index, MappedFile::Open(index_path));
    MOE_ASSIGN_OR_RETURN(tokens.type, ParseTokenIndex(index_path, index.bytes(), bytes));
  } else {
    MOE_RETURN_IF_ERROR(CheckPlainTokens(path, ids, plain, vocab_size));
    if (bytes % SizeOf(plain) != 0) {
      return absl::DataLossError(absl::StrCat(path, ": ", bytes, " bytes, expected a multiple of ",
                                              SizeOf(plain), ", the size of an id"));
    }
  }
  if (bytes > 0) return tokens;
  return absl::InvalidArgumentError(absl::StrCat("'", tokens.path, "' is empty, expected ids"));
}

}  // namespace moe::lm
