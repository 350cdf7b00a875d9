// Optimiser state in a scratch file: its pages, what fails, and the bytes that stay in memory.
#include "moe/zero/offload.h"

#include <csignal>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <system_error>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include "moe/io/file.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/layer_harness.h"
#include "tests/moe/status_is.h"

namespace moe {
namespace {

namespace fs = std::filesystem;
using ::moe::testing::StatusIs;
using enum absl::StatusCode;

std::string FolderForScratch() {
  const std::string folder = absl::StrCat(::testing::TempDir(), "offload_test_", ::getpid());
  fs::create_directories(folder);
  return folder;
}

// Path by which this process reaches its open scratch file of a rank, which has no name.
std::string OpenScratch(int rank) {
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    const std::string target = fs::read_symlink(entry.path(), ignored).string();
    if (absl::StrContains(target, absl::StrCat("moe-optimizer-rank-", rank, "-"))) {
      return entry.path().string();
    }
  }
  return "";
}

// Limits the size of files that this process writes, for its lifetime.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    std::signal(SIGXFSZ, SIG_IGN);
    EXPECT_EQ(::getrlimit(RLIMIT_FSIZE, &before_), 0);
    const rlimit small = {bytes, before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  }
  ~FileSizeLimit() { EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &before_), 0); }

 private:
  rlimit before_ = {};
};

std::unique_ptr<StateFile> MakeFile(absl::Span<const int64_t> pages) {
  auto file = StateFile::Create({.folder = FolderForScratch()}, 7, pages);
  EXPECT_TRUE(file.ok()) << file.status();
  return *std::move(file);
}

TEST(StateFileTest, HasNoNameAndBeginsWithZeros) {
  const auto file = MakeFile({100, 5000, 1});
  EXPECT_TRUE(fs::is_empty(FolderForScratch()));
  for (size_t page = 0; page < 3; ++page) {
    const auto bytes = file->Acquire(page, StateUse::kUpdate);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    for (const std::byte b : *bytes) ASSERT_EQ(b, std::byte{0});
    file->Release();
  }
}

// Any order of pages and uses, against memory: passes in order, as of steps, and leaps.
TEST(StateFileTest, PagesHaveWhatWasWrittenLast) {
  for (const size_t count : {1u, 2u, 3u, 7u}) {
    SCOPED_TRACE(count);
    std::vector<int64_t> sizes;
    for (size_t p = 0; p < count; ++p) sizes.push_back(static_cast<int64_t>(3000 * p + 10));
    const auto file = MakeFile(sizes);
    std::vector<uint8_t> expected(count, 0);
    std::mt19937 random(static_cast<uint32_t>(count));
    for (int i = 0; i < 400; ++i) {
      const bool in_order = (i / 50) % 2 == 0;
      const size_t page = in_order ? static_cast<size_t>(i) % count : random() % count;
      const auto use = static_cast<StateUse>(random() % 3);
      const auto bytes = file->Acquire(page, use);
      ASSERT_TRUE(bytes.ok()) << bytes.status();
      ASSERT_GE(std::ssize(*bytes), sizes[page]);
      if (use != StateUse::kOverwrite) {
        for (const std::byte b : *bytes) ASSERT_EQ(b, std::byte{expected[page]}) << i;
      }
      if (use != StateUse::kRead) {
        expected[page] = static_cast<uint8_t>(random());
        std::memset(bytes->data(), expected[page], bytes->size());
      }
      file->Release();
    }
  }
}

TEST(StateFileTest, NoRoomIsAnErrorThatNamesPathAndBytes) {
  const FileSizeLimit limit(8192);
  const auto file = StateFile::Create({.folder = FolderForScratch()}, 7, {4096, 10'000});
  EXPECT_THAT(file.status(), StatusIs(kUnavailable, "cannot reserve 16384 bytes for '"));
  EXPECT_THAT(file.status(), StatusIs(kUnavailable, "/moe-optimizer-rank-7-"));
  EXPECT_EQ(FileFaultOf(file.status()), FileFault::kWrite);
  EXPECT_TRUE(fs::is_empty(FolderForScratch()));
}

TEST(StateFileTest, AFolderThatIsNotThereIsNamed) {
  const auto file = StateFile::Create({.folder = "/no/such"}, 0, {1});
  EXPECT_THAT(file.status(), StatusIs(kNotFound, "there is no folder '/no/such'"));
}

TEST(StateFileTest, AFileThatWasShortenedCannotBeRead) {
  const auto file = MakeFile({4096, 4096, 4096});
  ASSERT_TRUE(file->Acquire(0, StateUse::kOverwrite).ok());
  file->Release();
  ASSERT_EQ(::truncate(OpenScratch(7).c_str(), 5000), 0);
  const absl::Status read = file->Acquire(2, StateUse::kRead).status();
  EXPECT_THAT(read, StatusIs(kUnavailable, "it has no byte 8192, expected 12288"));
  EXPECT_EQ(FileFaultOf(read), FileFault::kRead);
  EXPECT_EQ(file->Acquire(0, StateUse::kRead).status(), read);  // for good
}

TEST(StateFileTest, AWriteThatFailsIsTheErrorOfALaterPage) {
  const auto file = MakeFile({4096, 4096, 4096});
  const FileSizeLimit limit(4096);
  absl::Status status;
  for (int i = 0; status.ok() && i < 6; ++i) {
    status = file->Acquire(static_cast<size_t>(i) % 3, StateUse::kUpdate).status();
    if (status.ok()) file->Release();
  }
  EXPECT_THAT(status, StatusIs(kUnavailable, "cannot write '"));
  EXPECT_EQ(FileFaultOf(status), FileFault::kWrite);
}

TEST(ScratchMemoryTest, IsMemoryUntilThereIsNoRoom) {
  const auto memory = ScratchMemory(FolderForScratch(), "copy");
  const auto buffer = Buffer::Allocate(10'000, *memory, "a copy");
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  for (const std::byte b : buffer->span<std::byte>()) ASSERT_EQ(b, std::byte{0});
  std::memset(buffer->data(), 7, 10'000);
  EXPECT_TRUE(fs::is_empty(FolderForScratch()));
  const FileSizeLimit limit(8192);
  EXPECT_THAT(Buffer::Allocate(10'000, *memory, "a copy").status(),
              StatusIs(kResourceExhausted, "cannot reserve 10000 bytes"));
}

// Parameters of 300 columns, whose row groups are of 13 rows, and a vector.
absl::Status AddParameters(Trainer& trainer, int count) {
  for (int i = 0; i < count; ++i) {
    MOE_RETURN_IF_ERROR(trainer.parameters()
                            .Add({.name = absl::StrCat("p", i), .rows = 1000, .cols = 300})
                            .status());
  }
  return trainer.parameters().Add({.name = "norm", .cols = 30}).status();
}

TEST(PagesTest, TileWhatARankKeepsAtRowGroups) {
  testing::RunTrainers({.ranks = 3}, {}, [&](Trainer& trainer) -> absl::Status {
    MOE_RETURN_IF_ERROR(AddParameters(trainer, 2));
    const auto buckets =
        MakeBuckets(trainer.parameters(),
                    {.bucket_bytes = int64_t{1} << 30,
                     .element_bytes = 8,
                     .placement = PlacementOf(ZeroStage::kOptimizer, OffloadTo::kFile)},
                    *trainer.context().mesh);
    for (const int64_t page_bytes : {1, 100'000, 1 << 30}) {
      for (const ParameterBucket& bucket : buckets) {
        int64_t end = bucket.kept().begin;
        for (const ElementRange page : PagesOf(bucket, 12, page_bytes)) {
          EXPECT_EQ(page.begin, end);
          EXPECT_EQ(CutNear(bucket, page.begin), page.begin);
          EXPECT_LE(12 * page.size(), page_bytes + 12 * 13 * 300);
          EXPECT_GT(page.size(), 0);
          end = page.end;
        }
        EXPECT_EQ(end, bucket.kept().end);
      }
    }
    return absl::OkStatus();
  });
}

// Bytes an element of what N ranks share, as docs/parallelism.md lists them, within 2 %.
TEST(OffloadTest, ARankKeepsAsManyBytesAsTheFormulaSays) {
  struct Case {
    DType dtype;
    ZeroStage zero;
    double bytes;  // bytes an element in memory, with 2 ranks
  };
  for (const Case& c : {Case{DType::kFloat32, ZeroStage::kNone, 4 + 8},
                        Case{DType::kFloat32, ZeroStage::kGradients, 4 + 8 / 2.0},
                        Case{DType::kBFloat16, ZeroStage::kNone, 2 + 8},
                        Case{DType::kBFloat16, ZeroStage::kOptimizer, 2 + 8}}) {
    SCOPED_TRACE(absl::StrCat(NameOf(c.dtype), " ", static_cast<int>(c.zero)));
    constexpr int64_t kPageBytes = 200'000;
    const TrainerOptions options = {
        .dtype = c.dtype,
        .zero = c.zero,
        .offload = {.optimizer = OffloadTo::kFile,
                    .file = {.folder = FolderForScratch(), .page_bytes = kPageBytes}},
        .bucket_bytes = 1 << 21};
    testing::RunTrainers({.ranks = 2}, options, [&](Trainer& trainer) -> absl::Status {
      MOE_RETURN_IF_ERROR(AddParameters(trainer, 5));
      for (int64_t r = 0; r < trainer.rounds(); ++r) {
        MOE_ASSIGN_OR_RETURN(const Round round, trainer.BeginRound());
        const auto all = trainer.parameters().parameters();
        for (auto p = all.rbegin(); p != all.rend(); ++p) {
          MOE_RETURN_IF_ERROR(trainer.MarkReady(round, **p));
        }
      }
      MOE_RETURN_IF_ERROR(trainer.Step({.learning_rate = 1e-3}).status());
      double expected = c.bytes * 5 * 1000 * 300 + 2 * kPageBytes;
      if (c.zero == ZeroStage::kGradients) expected += 2 * 8 * 1000 * 300;  // two buckets
      const Trainer::StateBytes bytes = trainer.state_bytes();
      EXPECT_NEAR(static_cast<double>(bytes.allocated) / expected, 1, 0.02);
      EXPECT_NEAR(static_cast<double>(bytes.formula) / expected, 1, 0.02);
      return absl::OkStatus();
    });
  }
}

TEST(OffloadTest, ACudaDeviceKeepsItsState) {
  for (const OffloadTo to : {OffloadTo::kHost, OffloadTo::kFile}) {
    testing::RunLocalRanks(1, [&](std::unique_ptr<Communicator> world) {
      EXPECT_THAT(
          Trainer::Create({.session = {.device = DeviceKind::kCuda}, .offload = {.optimizer = to}},
                          std::move(world))
              .status(),
          StatusIs(kUnimplemented, "not offloaded from CUDA devices"));
      return absl::OkStatus();
    });
  }
}

}  // namespace
}  // namespace moe
