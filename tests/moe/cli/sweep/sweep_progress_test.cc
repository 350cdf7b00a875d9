// What a sweep says of how far it is.
#include <cstdio>
#include <string>

#include <gtest/gtest.h>

#include "moe/cli/sweep/sweep_output.h"

namespace moe::cli {
namespace {

// What a terminal of `columns` is shown as point 7 of 36 starts.
std::string ShownOn(size_t columns) {
  std::FILE* const file = std::tmpfile();
  {
    SweepProgress progress({.points = 36, .to_run = 30}, {.present = true, .columns = columns},
                           file);
    progress.Start(7, "E=16 k=2 cf=1.25");
  }
  std::string text(200, '\0');
  std::rewind(file);
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  return text;
}

TEST(SweepProgressTest, TheEtaIsSeenOnNarrowTerminals) {
  EXPECT_EQ(ShownOn(80), "\r[ 7/36] E=16 k=2 cf=1.25 eta --:--:--\033[K\n");
  EXPECT_EQ(ShownOn(38), "\r[ 7/36] E=16 k=2 cf=1.25 eta --:--:--\033[K\n");
  EXPECT_EQ(ShownOn(37), "\r[ 7/36] eta --:--:-- E=16 k=2 cf=1.2\033[K\n");
  EXPECT_EQ(ShownOn(21), "\r[ 7/36] eta --:--:--\033[K\n");
}

}  // namespace
}  // namespace moe::cli
