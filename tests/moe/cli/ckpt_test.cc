// moe ckpt, on checkpoints made by the writer.
#include "moe/cli/ckpt/ckpt.h"

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "comm/local/local_world.h"
#include "moe/checkpoint/retention.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/cli/base/command.h"
#include "tests/moe/checkpoint/checkpoint_harness.h"
#include "tests/moe/checkpoint/faulty_files.h"
#include "tests/moe/io/io_test.h"

namespace moe::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CkptTest : public IoTest {
 protected:
  std::string Folder() const { return Path("run/checkpoints"); }
  std::string Step(int64_t step) const { return Folder() + "/" + StepFolderName(step); }
  void Save(int64_t step, const std::string& run = "") {
    CheckpointOptions options = {
        .folder = Folder(), .keep = 99, .first_step = step - 1, .files = &disk_};
    ASSERT_TRUE(::moe::testing::Save(options, 2, ::moe::testing::Cut::kRows, step, run).ok());
  }
  void Damage(int64_t step) {
    std::fstream file(Step(step) + "/shard-00001-of-00002.safetensors",
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end).put('x');
  }

  // Runs the command; returns its exit code and sets out_ and error_.
  int Ckpt(std::vector<std::string> args) {
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    const ExitCode code = CkptCommand({.program = "moe", .args = std::move(args)});
    out_ = ::testing::internal::GetCapturedStdout();
    error_ = ::testing::internal::GetCapturedStderr();
    return static_cast<int>(code);
  }
  std::vector<std::string> Column(const char* key) const {
    std::vector<std::string> values;
    for (const Json& row : Json::parse(out_)) {
      values.push_back(row[key].is_string() ? row[key].get<std::string>() : row[key].dump());
    }
    return values;
  }

  ::moe::testing::FaultyFiles disk_;
  std::string out_, error_;
};

TEST_F(CkptTest, LsShowsEveryStep) {
  Save(1);
  Save(2);
  fs::remove(Step(1) + "/manifest.json");
  for (const std::string& dir : {Path("run"), Folder()}) {
    EXPECT_EQ(Ckpt({"ls", dir, "-o", "json"}), 0) << error_;
    EXPECT_THAT(Column("step"), ElementsAre("1", "2"));
    EXPECT_THAT(Column("status"), ElementsAre("damaged", "ok"));
    EXPECT_THAT(Column("tensors"), ElementsAre("null", "4"));
    EXPECT_THAT(Column("files"), ElementsAre("null", "2"));
  }
  EXPECT_EQ(Ckpt({"ls", Path("run")}), 0);
  EXPECT_THAT(out_, HasSubstr("damaged"));
  EXPECT_EQ(Ckpt({"ls", Path("none")}), 2);
  EXPECT_THAT(error_, HasSubstr("expected a folder that is there"));
}

TEST_F(CkptTest, VerifyFindsDamage) {
  Save(1);
  Save(2);
  EXPECT_EQ(Ckpt({"verify", Path("run"), "--threads", "2"}), 0) << error_;
  Damage(1);
  EXPECT_EQ(Ckpt({"verify", Step(2)}), 0) << error_;
  EXPECT_EQ(Ckpt({"verify", Step(1)}), 3);
  EXPECT_THAT(error_, HasSubstr("box 'weight' v [2,5) x [0,7) has hash"));
  EXPECT_EQ(Ckpt({"verify", "-o", "json", Path("run")}), 3);
  EXPECT_THAT(Column("status"), ElementsAre("damaged", "ok"));
  fs::remove(Step(2) + "/manifest.json");
  EXPECT_EQ(Ckpt({"verify", Step(2)}), 3);
  EXPECT_EQ(Ckpt({"verify", Step(3)}), 2);
  EXPECT_EQ(Ckpt({"verify", Path("none")}), 2);
}

TEST_F(CkptTest, DiffTakesRunsByTheirNewestCheckpoint) {
  Save(1);
  Save(2);
  EXPECT_EQ(Ckpt({"diff", Path("run"), Step(1)}), 1);
  EXPECT_THAT(error_, HasSubstr("A is " + Step(2) + ", B is " + Step(1) + "\n"));
  EXPECT_EQ(Ckpt({"diff", Path("run"), Step(2)}), 0) << error_;
  EXPECT_EQ(Ckpt({"diff", Step(2), Step(2)}), 0);
  EXPECT_THAT(error_, ::testing::Not(HasSubstr("A is")));
  fs::remove(Step(2) + "/manifest.json");
  EXPECT_EQ(Ckpt({"diff", Path("run"), Step(1)}), 0) << error_;
  EXPECT_THAT(error_, HasSubstr("warning: "));
  EXPECT_EQ(Ckpt({"diff", Path("none"), Step(1)}), 2);
}

TEST_F(CkptTest, DiffNamesTheStatesThatDiffer) {
  Save(1);
  Save(2);
  EXPECT_EQ(Ckpt({"diff", Step(1), Step(1)}), 0) << error_;
  EXPECT_EQ(Ckpt({"diff", Step(1), Step(2), "-o", "json"}), 1);
  EXPECT_THAT(error_, HasSubstr("8 of 8 states of tensors differ"));
  EXPECT_THAT(Column("state"),
              ElementsAre("value", "m", "master", "v", "share", "m", "master", "v"));
  EXPECT_THAT(Column("different"), ElementsAre("3", "6", "6", "6", "4", "35", "35", "35"));
  EXPECT_EQ(Column("max_abs")[0], "10000.0");
  Damage(2);
  EXPECT_EQ(Ckpt({"diff", Step(1), Step(2)}), 3);
  EXPECT_EQ(Ckpt({"diff", Step(1), Step(3)}), 2);
}

TEST_F(CkptTest, PruneKeepsTheNewestThatAreReadable) {
  for (int64_t step = 1; step <= 6; ++step) Save(step);
  fs::remove(Step(2) + "/shard-00000-of-00002.safetensors");
  fs::remove(Step(5) + "/manifest.json");
  EXPECT_EQ(
      Ckpt({"prune", Path("run"), "--keep", "2", "--keep-every", "3", "--dry-run", "-o", "json"}),
      0)
      << error_;
  EXPECT_THAT(Column("status"),
              ElementsAre("removed", "removed", "kept", "kept", "damaged", "kept"));
  EXPECT_TRUE(fs::exists(Step(1)));
  EXPECT_THAT(error_, HasSubstr("warning: not counted among the checkpoints that stay: " + Step(5) +
                                " is passed over: "));
  EXPECT_EQ(Ckpt({"prune", Path("run"), "--keep", "2", "--keep-every", "3"}), 0) << error_;
  const auto steps = ListSteps(Folder()).value();
  EXPECT_THAT(steps, ElementsAre(3, 4, 5, 6));
  EXPECT_EQ(Ckpt({"prune", Path("run"), "--keep", "0"}), 2);
}

TEST_F(CkptTest, PruneRemovesWhatIsTheRunsAlone) {
  for (int64_t step = 1; step <= 3; ++step) Save(step);
  std::ofstream(Step(1) + "/thesis.txt") << "mine";
  fs::remove(Step(2) + "/manifest.json");
  EXPECT_EQ(Ckpt({"prune", Path("run"), "--keep", "1", "-o", "json"}), 0) << error_;
  EXPECT_THAT(ListSteps(Folder()).value(), ElementsAre(1, 2, 3));
  EXPECT_EQ(Read(Step(1) + "/thesis.txt"), "mine");
  EXPECT_EQ(error_, "moe ckpt: warning: not removed, since not of this run: '" + Step(1) +
                        "' holds 'thesis.txt'; '" + Step(2) + "' has no manifest\n");
}

TEST_F(CkptTest, PruneIsOfTheRunOfTheNewest) {
  for (int64_t step = 1; step <= 4; ++step) Save(step, step == 2 ? "another" : "ours");
  EXPECT_EQ(Ckpt({"prune", Path("run"), "--keep", "1", "-o", "json"}), 0) << error_;
  EXPECT_THAT(ListSteps(Folder()).value(), ElementsAre(2, 4));
  EXPECT_EQ(error_, "moe ckpt: warning: not removed, since not of this run: '" + Step(2) +
                        "' is of another run\n");
}

// Meanwhile another run may remove its old ones.
TEST_F(CkptTest, AFolderThatIsRemovedMeanwhileIsNoError) {
  for (int64_t step = 1; step <= 3; ++step) Save(step);
  const auto plan = PlanRetention(Folder(), {1, 2, 3}, {.keep = 1, .run = "", .damaged_steps = {}});
  EXPECT_THAT(plan.removed, ElementsAre(1, 2));
  fs::remove_all(Step(1));
  EXPECT_TRUE(RemoveStep(Folder(), 1).ok());
  EXPECT_THAT(
      PlanRetention(Folder(), {1, 2, 3}, {.keep = 1, .run = "", .damaged_steps = {}}).removed,
      ElementsAre(2));
}

// Texts of an untrusted file do not control the terminal.
TEST_F(CkptTest, ControlCharactersAreShownNotSent) {
  Save(1);
  CheckpointManifest manifest = ReadManifest(Step(1)).value();
  manifest.created = "now\x1b[2J\xc2\x9b";
  std::ofstream(Step(1) + "/manifest.json") << SerializeManifest(manifest).value();
  for (const char* const form : {"table", "csv", "md"}) {
    EXPECT_EQ(Ckpt({"ls", Path("run"), "-o", form}), 0) << error_;
    EXPECT_THAT(out_, HasSubstr("now\\x1b[2J\\u009b")) << form;
    EXPECT_EQ(out_.find('\x1b'), std::string::npos) << form;
  }
  EXPECT_EQ(Ckpt({"ls", Path("gone\x1b[2J")}), 2);
  EXPECT_THAT(error_, HasSubstr("gone\\x1b[2J"));
}

TEST_F(CkptTest, DistancesAreInUlps) {
  const float one = 1.0f, nan = std::numeric_limits<float>::quiet_NaN();
  const auto save = [&](const char* folder, const std::vector<float>& values, int64_t rows) {
    auto writer = CheckpointWriter::Create({.folder = Path(folder), .files = &disk_}, 0, 1);
    const CanonicalTensor tensor = {
        .name = "w", .rows = rows, .cols = static_cast<int64_t>(values.size()) / rows};
    const StatePart part = {
        .tensor = &tensor,
        .state = "master",
        .box = {.row_end = tensor.rows, .col_end = tensor.cols},
        .data = MatrixView<const float>(values.data(), tensor.rows, tensor.cols)};
    EXPECT_TRUE((*writer)->Start({.step = 1, .sections = {}}, {&part, 1}).ok());
    const auto world = MakeLocalWorld({.ranks = 1});
    EXPECT_TRUE((*writer)->Publish(*world[0], *MakeInlineStream()).ok());
    return CheckpointReader::Open(Path(folder) + "/" + StepFolderName(1)).value();
  };
  CheckpointReader a = save("a", {one, 0.0f, nan, 5.0f}, 2);
  CheckpointReader b =
      save("b", {std::nextafter(std::nextafter(one, 2.0f), 2.0f), -0.0f, nan, 5.0f}, 2);
  CheckpointReader tiny =
      save("tiny", {one, std::numeric_limits<float>::denorm_min(), nan, 5.0f}, 2);
  CheckpointReader negative =
      save("negative", {one, -std::numeric_limits<float>::denorm_min(), nan, 5.0f}, 2);
  CheckpointReader wide = save("wide", {one, 0.0f, nan, 5.0f}, 1);

  auto found = ckpt::Diff(a, b).value();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].elements, 4);
  EXPECT_EQ(found[0].different, 2);
  EXPECT_EQ(found[0].max_ulps, 2u);
  EXPECT_EQ(found[0].max_abs, 2 * std::ldexp(1.0, -23));
  found = ckpt::Diff(tiny, negative).value();
  EXPECT_EQ(found[0].max_ulps, 2u);  // zero is between them
  found = ckpt::Diff(a, a).value();
  EXPECT_EQ(found[0].different, 0);
  found = ckpt::Diff(a, wide).value();
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].only, "A");
  EXPECT_EQ(found[1].only, "B");
}

}  // namespace
}  // namespace moe::cli
