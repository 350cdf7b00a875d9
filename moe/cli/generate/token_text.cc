#include "moe/cli/generate/token_text.h"

namespace moe::cli {

std::string TokenText::Take(int32_t id) {
  std::string bytes(table_.BytesOf(id));
  if (!begun_ && !bytes.empty()) {
    begun_ = true;
    using enum TokenTable::FirstSpaces;
    if (table_.first_spaces() == kFirstGoes && bytes[0] == ' ') bytes.erase(0, 1);
    if (table_.first_spaces() == kAllGo) std::erase(bytes, ' ');
  }
  std::string text;
  for (const char byte : bytes) text += utf8_.Take(static_cast<uint8_t>(byte));
  return text;
}

}  // namespace moe::cli
