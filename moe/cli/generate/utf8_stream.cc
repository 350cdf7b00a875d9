#include "moe/cli/generate/utf8_stream.h"

#include <utility>

namespace moe::cli {
namespace {

constexpr char kReplacement[] = "\xEF\xBF\xBD";

}  // namespace

std::string Utf8Stream::Take(uint8_t byte) {
  std::string text;
  if (missing_ > 0) {
    if (byte >= least_ && byte <= most_) {
      part_ += static_cast<char>(byte);
      least_ = 0x80;
      most_ = 0xBF;
      return --missing_ > 0 ? text : std::exchange(part_, "");
    }
    text = End();  // this byte begins another character
  }
  if (byte < 0x80) return text + static_cast<char>(byte);
  if (byte < 0xC2 || byte > 0xF4) return text + kReplacement;
  part_ = static_cast<char>(byte);
  missing_ = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
  // Excludes overlong forms, surrogates and everything above U+10FFFF.
  least_ = byte == 0xE0 ? 0xA0 : byte == 0xF0 ? 0x90 : 0x80;
  most_ = byte == 0xED ? 0x9F : byte == 0xF4 ? 0x8F : 0xBF;
  return text;
}

std::string Utf8Stream::End() {
  part_.clear();
  return std::exchange(missing_, 0) > 0 ? kReplacement : "";
}

}  // namespace moe::cli
