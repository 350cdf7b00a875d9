// Settings of moe train from flags, environment and a file, as tests of the command line make them.
#ifndef MOE_TESTS_MOE_CLI_SETTINGS_HARNESS_H_
#define MOE_TESTS_MOE_CLI_SETTINGS_HARNESS_H_

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "moe/cli/base/config_file.h"
#include "moe/cli/train/train_options.h"

namespace moe::cli::testing {

using Strings = std::vector<std::string>;

// A configuration file that is gone with the object.
class ConfigFile {
 public:
  explicit ConfigFile(const std::string& document) {
    static int count = 0;
    path_ = ::testing::TempDir() + "/options_" + std::to_string(getpid()) + "_" +
            std::to_string(count++) + ".json";
    std::ofstream(path_) << document;
  }
  ~ConfigFile() { std::filesystem::remove(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline absl::StatusOr<Settings> Load(const Strings& args, const Strings& environment = {},
                                     const std::string& document = "") {
  const ConfigFile file(document.empty() ? "{}" : document);
  Strings all = args;
  if (!document.empty()) all.insert(all.end(), {"--config", file.path()});
  Strings warnings;
  return LoadTrainSettings(all, environment, warnings);
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

inline absl::StatusOr<TrainOptions> Make(Strings args, const World& world = {.ranks = 4},
                                         const std::string& document = "") {
  args.insert(args.end(), {"--data", "text"});
  auto settings = Load(args, {}, document);
  if (!settings.ok()) return settings.status();
  return MakeTrainOptions(*settings, world);
}

inline std::string MakeError(const Strings& args, const World& world = {.ranks = 4},
                             const std::string& document = "") {
  return ErrorOf(Make(args, world, document).status());
}

}  // namespace moe::cli::testing

#endif  // MOE_TESTS_MOE_CLI_SETTINGS_HARNESS_H_
