#include "moe/io/tokenizer_file.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>
#include <limits>
#include <optional>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/io/bounded_json.h"
#include "moe/io/file.h"

namespace moe {
namespace {

using Json = nlohmann::json;
using FirstSpaces = TokenTable::FirstSpaces;

// Gemma's has 33 MB, and two texts for each of 580,000 merges.
constexpr JsonLimits kLimits = {.max_bytes = int64_t{256} << 20, .max_values = int64_t{1} << 23};

template <typename... Parts>
absl::Status Malformed(absl::string_view file, const Parts&... parts) {
  return absl::DataLossError(absl::StrCat(file, ": ", parts...));
}

template <typename... Parts>
absl::Status Unsupported(absl::string_view file, const Parts&... parts) {
  return absl::UnimplementedError(absl::StrCat(file, ": ", parts...));
}

// The member of an object; nullptr: there is none, or it is null.
const Json* Find(const Json& object, const char* key) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

std::string TextOf(const Json& object, const char* key) {
  const Json* const text = Find(object, key);
  return text != nullptr && text->is_string() ? text->get<std::string>() : "";
}

// The elements of a list; none without it.
std::vector<Json> Listed(const Json& object, const char* key) {
  const Json* const list = Find(object, key);
  if (list == nullptr || !list->is_array()) return {};
  return *list;
}

// Byte-level BPE writes bytes that print as themselves, and the others, in order, from U+0100 on.
constexpr int kByteCharacters = 256 + 68;
std::array<int, kByteCharacters> ByteOfCharacter() {
  std::array<int, kByteCharacters> bytes = {};
  bytes.fill(-1);
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool prints = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
    bytes[prints ? byte : next++] = byte;
  }
  return bytes;
}

// A token that has a character which stands for no byte is text.
std::string FromByteLevel(const std::string& token) {
  static const std::array<int, kByteCharacters> kBytes = ByteOfCharacter();
  std::string bytes;
  for (size_t i = 0; i < token.size(); ++i) {
    int character = static_cast<uint8_t>(token[i]);
    if (character >= 0xE0) return token;  // three bytes or more: above U+07FF
    if (character >= 0xC0 && ++i < token.size()) {
      character = (character & 0x1F) << 6 | (static_cast<uint8_t>(token[i]) & 0x3F);
    }
    if (character >= kByteCharacters || kBytes[character] < 0) return token;
    bytes += static_cast<char>(kBytes[character]);
  }
  return bytes;
}

// "<0xE2>" is a byte.
std::string FromByteFallback(const std::string& token) {
  constexpr size_t kSize = 6, kDigits = 3;
  if (token.size() != kSize || !absl::StartsWith(token, "<0x") || token.back() != '>') return token;
  uint8_t byte = 0;
  const char* const end = token.data() + kSize - 1;
  const auto [read, error] = std::from_chars(token.data() + kDigits, end, byte, 16);
  return error == std::errc() && read == end ? std::string(1, static_cast<char>(byte)) : token;
}

// What a tokenizer's decoder does to each token, and to the beginning of a text.
class Decoder {
 public:
  static absl::StatusOr<Decoder> Parse(absl::string_view file, const Json& json) {
    const Json* const decoder = Find(json, "decoder");
    if (decoder == nullptr) return Unsupported(file, "has no decoder, expected one of bytes");
    Decoder parsed;
    if (TextOf(*decoder, "type") != "Sequence") {
      MOE_RETURN_IF_ERROR(parsed.Add(file, *decoder));
      return parsed;
    }
    for (const Json& step : Listed(*decoder, "decoders")) {
      MOE_RETURN_IF_ERROR(parsed.Add(file, step));
    }
    return parsed;
  }

  std::string BytesOf(std::string token) const {
    for (const auto& [from, to] : replaced_) token = absl::StrReplaceAll(token, {{from, to}});
    return byte_fallback_ ? FromByteFallback(token) : byte_level_ ? FromByteLevel(token) : token;
  }
  FirstSpaces first_spaces() const { return first_spaces_; }

 private:
  absl::Status Add(absl::string_view file, const Json& step) {
    const std::string type = TextOf(step, "type");
    const bool replaces = type == "Replace" || type == "Metaspace";
    // Tokens are texts until they are bytes, and one text behind Fuse.
    const bool in_order = !stripped_ && !(replaces && (byte_fallback_ || byte_level_ || fused_)) &&
                          !(byte_level_ || (fused_ && type != "Strip"));
    if (!in_order) return Unsupported(file, "the decoder has a step '", Shown(type), "' too late");
    if (type == "ByteLevel") {
      byte_level_ = true;
      return byte_fallback_ ? Unsupported(file, "the decoder has two steps for bytes")
                            : absl::OkStatus();
    }
    if (type == "ByteFallback") {
      byte_fallback_ = true;
    } else if (type == "Fuse") {
      fused_ = true;
    } else if (type == "Replace") {
      const Json* const pattern = Find(step, "pattern");
      const std::string from = pattern == nullptr ? "" : TextOf(*pattern, "String");
      if (from.empty()) return Unsupported(file, "the decoder replaces a pattern, expected a text");
      replaced_.emplace_back(from, TextOf(step, "content"));
    } else if (type == "Metaspace") {
      const std::string from = TextOf(step, "replacement");
      if (from.empty()) return Malformed(file, "a step 'Metaspace' has no 'replacement'");
      replaced_.emplace_back(from, " ");
      const bool keeps = TextOf(step, "prepend_scheme") == "never";
      if (!keeps) first_spaces_ = FirstSpaces::kAllGo;
    } else if (type == "Strip") {
      const Json* const start = Find(step, "start");
      const Json* const stop = Find(step, "stop");
      const bool first_space = fused_ && TextOf(step, "content") == " " && start != nullptr &&
                               *start == 1 && (stop == nullptr || *stop == 0);
      if (!first_space) return Unsupported(file, "the decoder strips more than the first space");
      stripped_ = true;
      first_spaces_ = FirstSpaces::kFirstGoes;
    } else {
      return Unsupported(file, "the decoder has a step '", Shown(type),
                         "', expected ByteLevel, Replace, ByteFallback, Fuse, Metaspace or Strip");
    }
    return absl::OkStatus();
  }

  std::vector<std::pair<std::string, std::string>> replaced_;
  bool byte_level_ = false, byte_fallback_ = false, fused_ = false, stripped_ = false;
  FirstSpaces first_spaces_ = FirstSpaces::kStay;
};

absl::StatusOr<int32_t> IdOf(absl::string_view file, const std::string& token, const Json* id) {
  const auto number =
      id == nullptr ? std::nullopt : IntegerWithin(*id, 0, std::numeric_limits<int32_t>::max());
  if (number.has_value()) return static_cast<int32_t>(*number);
  return Malformed(file, "token '", Shown(token), "' has the id ",
                   id == nullptr ? "null" : Shown(id->dump()), ", expected one in [0, 2^31)");
}

}  // namespace

absl::StatusOr<TokenTable> TokenTable::Parse(absl::string_view file, absl::string_view document) {
  MOE_ASSIGN_OR_RETURN(const Json json, ParseBoundedJson(file, document, kLimits));
  const Json* const model = Find(json, "model");
  if (model == nullptr || !model->is_object()) {
    return Malformed(file, "there is no object 'model', expected a tokenizer.json");
  }
  if (const std::string type = TextOf(*model, "type"); type != "BPE") {
    return Unsupported(file, "the model is '", Shown(type), "', expected BPE");
  }
  MOE_ASSIGN_OR_RETURN(const Decoder decoder, Decoder::Parse(file, json));
  std::vector<Token> added, learnt;
  for (const Json& token : Listed(json, "added_tokens")) {
    const std::string content = TextOf(token, "content");
    MOE_ASSIGN_OR_RETURN(const int32_t id, IdOf(file, content, Find(token, "id")));
    const Json* const special = Find(token, "special");
    const bool is_text = special == nullptr || *special != true;
    added.push_back({id, is_text ? decoder.BytesOf(content) : ""});
  }
  const Json* const vocabulary = Find(*model, "vocab");
  if (vocabulary == nullptr || !vocabulary->is_object()) {
    return Malformed(file, "the model has no object 'vocab' of tokens and ids");
  }
  for (const auto& [token, value] : vocabulary->items()) {
    MOE_ASSIGN_OR_RETURN(const int32_t id, IdOf(file, token, &value));
    learnt.push_back({id, decoder.BytesOf(token)});
  }
  const auto ascending = [](const Token& a, const Token& b) {
    return a.id < b.id;
  };
  for (std::vector<Token>* const tokens : {&added, &learnt}) {
    std::sort(tokens->begin(), tokens->end(), ascending);
    const auto twice =
        std::adjacent_find(tokens->begin(), tokens->end(),
                           [](const Token& a, const Token& b) { return a.id == b.id; });
    if (twice != tokens->end()) return Malformed(file, "id ", twice->id, " is of two tokens");
  }
  TokenTable table;
  table.first_spaces_ = decoder.first_spaces();
  // An added token may be in the vocabulary, too.
  std::set_union(added.begin(), added.end(), learnt.begin(), learnt.end(),
                 std::back_inserter(table.tokens_), ascending);
  if (table.tokens_.empty()) return Malformed(file, "there is no token");
  return table;
}

absl::StatusOr<TokenTable> TokenTable::Open(const std::string& path) {
  MOE_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  return Parse(path, file.text());
}

TokenTable TokenTable::OfBytes() {
  TokenTable table;
  for (int32_t id = 0; id < 256; ++id) {
    table.tokens_.push_back({id, std::string(1, static_cast<char>(id))});
  }
  return table;
}

absl::string_view TokenTable::BytesOf(int32_t id) const {
  const auto found =
      std::lower_bound(tokens_.begin(), tokens_.end(), id,
                       [](const Token& token, int32_t wanted) { return token.id < wanted; });
  return found == tokens_.end() || found->id != id ? absl::string_view() : found->bytes;
}

}  // namespace moe
