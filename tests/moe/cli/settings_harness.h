// Settings of moe train from flags, environment and a file, as tests of the command line make them.
#ifndef MOE_TESTS_MOE_CLI_SETTINGS_HARNESS_H_
#define MOE_TESTS_MOE_CLI_SETTINGS_HARNESS_H_

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "moe/cli/base/config_file.h"
#include "moe/cli/base/train_options.h"

namespace moe::cli::testing {

using Strings = std::vector<std::string>;

// With `document` in a configuration file, unless it is "".
inline absl::StatusOr<Settings> Load(Strings args, const Strings& environment = {},
                                     const std::string& document = "",
                                     Strings* warnings = nullptr) {
  const std::string file = ::testing::TempDir() + "/options_" + std::to_string(getpid()) + ".json";
  if (!document.empty()) {
    std::ofstream(file) << document;
    args.insert(args.end(), {"--config", file});
  }
  Strings unread;
  auto settings = LoadTrainSettings(args, environment, warnings != nullptr ? *warnings : unread);
  std::remove(file.c_str());
  return settings;
}

inline std::string ErrorOf(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  const std::string message(status.message());
  EXPECT_THAT(message, ::testing::Not(::testing::HasSubstr("\n")));
  return message;
}

inline std::string LoadError(const Strings& args, const Strings& environment = {},
                             const std::string& document = "") {
  return ErrorOf(Load(args, environment, document).status());
}

inline absl::StatusOr<TrainOptions> Make(Strings args, const World& world = {.ranks = 4}) {
  args.insert(args.end(), {"--data", "text"});
  auto settings = Load(args);
  if (!settings.ok()) return settings.status();
  return MakeTrainOptions(*settings, world);
}

}  // namespace moe::cli::testing

#endif  // MOE_TESTS_MOE_CLI_SETTINGS_HARNESS_H_
