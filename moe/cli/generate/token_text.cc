#include "moe/cli/generate/token_text.h"

#include <algorithm>

#include <absl/strings/string_view.h>

namespace moe::cli {

std::string TokenText::Take(int32_t id) {
  absl::string_view bytes = table_.BytesOf(id);
  if (!begun_ && !bytes.empty()) {
    begun_ = true;
    const auto spaces = static_cast<int64_t>(std::min(bytes.find_first_not_of(' '), bytes.size()));
    bytes.remove_prefix(static_cast<size_t>(std::min(spaces, table_.first_spaces())));
  }
  std::string text;
  for (const char byte : bytes) text += utf8_.Take(static_cast<uint8_t>(byte));
  return text;
}

}  // namespace moe::cli
