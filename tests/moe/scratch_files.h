// Scratch files of this process that a test damages.
#ifndef MOE_TESTS_MOE_SCRATCH_FILES_H_
#define MOE_TESTS_MOE_SCRATCH_FILES_H_

#include <filesystem>
#include <string>
#include <system_error>

#include <absl/strings/match.h>
#include <absl/strings/string_view.h>
#include <gtest/gtest.h>
#include <unistd.h>

namespace moe::testing {

// Shortens the open files whose names have `name` in them to nothing.
inline void ShortenOpenFiles(absl::string_view name) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    const std::string target = std::filesystem::read_symlink(entry.path(), ignored).string();
    if (!absl::StrContains(target, name)) continue;
    EXPECT_EQ(::truncate(entry.path().c_str(), 0), 0);
  }
}

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_SCRATCH_FILES_H_
