// Scratch files of this process that a test damages.
#ifndef MOE_TESTS_MOE_SCRATCH_FILES_H_
#define MOE_TESTS_MOE_SCRATCH_FILES_H_

#include <filesystem>
#include <string>
#include <system_error>

#include <absl/strings/match.h>
#include <absl/strings/string_view.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

namespace moe::testing {

// Leaves nothing to read in the open files whose names have `name` in them, whatever is written to
// them now or later.
inline void LoseOpenFiles(absl::string_view name) {
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  ASSERT_GE(nothing, 0);
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    const std::string target = std::filesystem::read_symlink(entry.path(), ignored).string();
    if (!absl::StrContains(target, name)) continue;
    EXPECT_GE(::dup3(nothing, std::stoi(entry.path().filename().string()), O_CLOEXEC), 0);
  }
  ::close(nothing);
}

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_SCRATCH_FILES_H_
