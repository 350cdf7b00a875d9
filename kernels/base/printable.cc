#include "kernels/base/printable.h"

#include <cstdint>

#include <absl/strings/str_cat.h>

namespace moe {

std::string Printable(absl::string_view text) {
  std::string printable;
  printable.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<uint8_t>(text[i]);
    const auto next = static_cast<uint8_t>(i + 1 < text.size() ? text[i + 1] : 0);
    if ((byte < ' ' && byte != '\n' && byte != '\t') || byte == 0x7f) {
      absl::StrAppend(&printable, "\\x", absl::Hex(byte, absl::kZeroPad2));
    } else if (byte == 0xc2 && next >= 0x80 && next <= 0x9f) {
      absl::StrAppend(&printable, "\\u", absl::Hex(next, absl::kZeroPad4));
      ++i;
    } else {
      printable.push_back(text[i]);
    }
  }
  return printable;
}

}  // namespace moe
