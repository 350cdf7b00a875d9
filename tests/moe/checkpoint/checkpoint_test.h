// A folder of checkpoints of its own for every test.
#ifndef MOE_TESTS_MOE_CHECKPOINT_CHECKPOINT_TEST_H_
#define MOE_TESTS_MOE_CHECKPOINT_CHECKPOINT_TEST_H_

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <absl/status/status.h>

#include "moe/checkpoint/reader.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/checkpoint/writer.h"
#include "tests/moe/checkpoint/faulty_files.h"
#include "tests/moe/io/io_test.h"

namespace moe {

class CheckpointTest : public IoTest {
 protected:
  std::string Folder() const { return Path("run/checkpoints"); }
  std::string Step(int64_t step) const { return Folder() + "/" + StepFolderName(step); }
  CheckpointOptions Options(int64_t first_step = 0) {
    return {.folder = Folder(), .first_step = first_step, .files = &disk_};
  }

  std::vector<std::string> Names(const std::string& folder) const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  std::string ErrorOfOpen(int64_t step, absl::StatusCode code = absl::StatusCode::kDataLoss) const {
    const absl::Status status = CheckpointReader::Open(Step(step)).status();
    EXPECT_EQ(status.code(), code) << status;
    return std::string(status.message());
  }
  void Rewrite(const std::string& path, const std::string& bytes) const {
    std::filesystem::remove(path);
    std::ofstream(path, std::ios::binary) << bytes;
  }

  testing::FaultyFiles disk_;
};

}  // namespace moe

#endif  // MOE_TESTS_MOE_CHECKPOINT_CHECKPOINT_TEST_H_
