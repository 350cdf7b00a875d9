#include "moe/cli/generate/utf8_stream.h"

#include <cstdio>
#include <string>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "moe/cli/base/terminal.h"

namespace moe::cli {
namespace {

// The text returned with each byte, separated by bars; then the text at the end.
std::string Streamed(const std::string& bytes) {
  Utf8Stream stream;
  std::string text;
  for (const char byte : bytes) text += stream.Take(static_cast<uint8_t>(byte)) + "|";
  return text + stream.End();
}

TEST(Utf8StreamTest, ACharacterComesWithItsLastByte) {
  EXPECT_EQ(Streamed("a\n"), "a|\n|");
  EXPECT_EQ(Streamed("\xC3\xA9"), "|\xC3\xA9|");
  EXPECT_EQ(Streamed("\xE2\x82\xAC"), "||\xE2\x82\xAC|");
  EXPECT_EQ(Streamed("\xF0\x9F\x98\x80"), "|||\xF0\x9F\x98\x80|");
}

TEST(Utf8StreamTest, WhatIsNoCharacterIsReplaced) {
  const std::string r = "\xEF\xBF\xBD";
  EXPECT_EQ(Streamed("\x80\xFF"), r + "|" + r + "|");
  EXPECT_EQ(Streamed("\xC3"), "|" + r);
  EXPECT_EQ(Streamed("\xE2\x82z"), "||" + r + "z|");
  EXPECT_EQ(Streamed("\xE2\x82\xC3\xA9"), "||" + r + "|\xC3\xA9|");
  EXPECT_EQ(Streamed("\xC0\xAF"), r + "|" + r + "|");  // overlong
  EXPECT_EQ(Streamed("\xE0\x80"), "|" + r + r + "|");  // overlong
  EXPECT_EQ(Streamed("\xED\xA0"), "|" + r + r + "|");  // a surrogate
  EXPECT_EQ(Streamed("\xF4\x90"), "|" + r + r + "|");  // above U+10FFFF
}

TEST(TextForTest, ATerminalIsNotSteered) {
  const std::string text = "\x1b[31mred\x7f\r\n\t\xc2\x9b\xc3\xa9\xff" + std::string(1, '\0');
  const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY);
  if (terminal < 0 || ::grantpt(terminal) != 0 || ::unlockpt(terminal) != 0) {
    GTEST_SKIP() << "no terminals here";
  }
  std::FILE* const shown = std::fopen(::ptsname(terminal), "r+");
  ASSERT_NE(shown, nullptr);
  EXPECT_EQ(TextFor(shown, text), "\\x1b[31mred\\x7f\\x0d\n\t\\u009b\xc3\xa9\xff\\x00");
  std::fclose(shown);
  ::close(terminal);
  std::FILE* const file = std::tmpfile();
  EXPECT_EQ(TextFor(file, text), text);
  std::fclose(file);
}

}  // namespace
}  // namespace moe::cli
