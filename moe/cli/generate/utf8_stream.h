// Converts single bytes to text.
#ifndef MOE_MOE_CLI_GENERATE_UTF8_STREAM_H_
#define MOE_MOE_CLI_GENERATE_UTF8_STREAM_H_

#include <cstdint>
#include <string>

namespace moe::cli {

// The concatenated output is UTF-8: a character is returned with its last byte, and U+FFFD replaces
// each longest run of bytes that does not form a character (Unicode 15, section 3.9).
class Utf8Stream {
 public:
  std::string Take(uint8_t byte);
  std::string End();  // U+FFFD if a character is incomplete

 private:
  std::string part_;              // incomplete character
  int missing_ = 0;               // its missing bytes
  uint8_t least_ = 0, most_ = 0;  // range of its next byte
};

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_GENERATE_UTF8_STREAM_H_
