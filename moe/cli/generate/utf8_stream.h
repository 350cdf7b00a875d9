// Bytes that come one by one as text.
#ifndef MOE_MOE_CLI_GENERATE_UTF8_STREAM_H_
#define MOE_MOE_CLI_GENERATE_UTF8_STREAM_H_

#include <cstdint>
#include <string>

namespace moe::cli {

// What it gives out, put together, is UTF-8: a character comes with its last byte, and U+FFFD
// stands for each longest run of bytes that begins no character (Unicode 15, section 3.9).
class Utf8Stream {
 public:
  std::string Take(uint8_t byte);
  std::string End();  // of a character that is not complete

 private:
  std::string part_;              // of a character
  int missing_ = 0;               // bytes of it
  uint8_t least_ = 0, most_ = 0;  // of its next byte
};

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_GENERATE_UTF8_STREAM_H_
