#include "moe/lm/text_data.h"

#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "moe/run/micro_batches.h"
#include "tests/moe/io/io_test.h"
#include "tests/moe/status_is.h"

namespace moe::lm {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using enum absl::StatusCode;
using ::moe::testing::StatusIs;

constexpr int64_t kPeriod = kHeldOutBlock * kHeldOutEvery;

using TextDataTest = IoTest;

// A text whose bytes tell their place: never 0, and blocks differ.
std::string Text(int64_t bytes) {
  std::string text(bytes, '\0');
  for (int64_t i = 0; i < bytes; ++i) {
    text[i] = static_cast<char>(1 + (i * 7 + i / kHeldOutBlock * 13) % 251);
  }
  return text;
}

std::string Bytes(const Tokens& tokens) {
  std::vector<int32_t> ids(tokens.size());
  tokens.Copy(0, absl::MakeSpan(ids));
  return {ids.begin(), ids.end()};
}

Tokens Of(const std::vector<uint8_t>& text) {
  Tokens tokens;
  tokens.Add(text, TokenType::kU8);
  return tokens;
}

TEST_F(TextDataTest, HoldsOutTheSecondBlockOfEveryTwenty) {
  const std::string text = Text(2 * kPeriod + 5);
  const auto corpus = ReadCorpus({Write("a", text)}, 16).value();
  std::string train, held_out;
  for (int64_t block = 0; block <= 2 * kHeldOutEvery; ++block) {
    const std::string part = text.substr(block * kHeldOutBlock, kHeldOutBlock);
    (block == 1 || block == 21 ? held_out : train) += part;
  }
  EXPECT_EQ(Bytes(corpus.train), train);
  EXPECT_EQ(Bytes(corpus.held_out), held_out);
}

TEST_F(TextDataTest, BlocksRunAcrossFiles) {
  const std::string text = Text(kPeriod);
  const std::string first = Write("a", text.substr(0, 1001));
  const std::string second = Write("b", text.substr(1001));
  const auto whole = ReadCorpus({Write("whole", text)}, 16);
  const auto parts = ReadCorpus({first, second}, 16);
  ASSERT_TRUE(whole.ok()) << whole.status();
  ASSERT_TRUE(parts.ok()) << parts.status();
  EXPECT_EQ(Bytes(parts->train), Bytes(whole->train));
  EXPECT_EQ(Bytes(parts->held_out), Bytes(whole->held_out));
  EXPECT_EQ(parts->xxh3, whole->xxh3);
  EXPECT_THAT(parts->files, ElementsAre(first, second));
}

TEST_F(TextDataTest, WalksFoldersInNameOrderAndSkipsWhatIsNoText) {
  const std::string text = Text(kPeriod);
  fs::create_directories(root_ / "text/c");
  const std::string b = Write("text/b", text);
  const std::string c = Write("text/c/z", text);
  const std::string upper = Write("text/Z", text);  // by bytes: before the small letters
  Write("text/nul", std::string("a\0b", 3));
  Write("text/zip", "PK\x03\x04 without a NUL");
  Write("text/utf16", std::string("\xff\xfe"
                                  "a\0",
                                  4));
  Write("text/empty", "");
  fs::create_directories(root_ / "text/.git");
  Write("text/.git/config", text);
  Write("text/c/.hidden", text);
  ASSERT_EQ(mkfifo(Path("text/pipe").c_str(), 0600), 0);
  const std::string outside = Write("outside", text);
  fs::create_symlink(outside, root_ / "text/a_link");
  fs::create_directory_symlink(root_ / "text/c", root_ / "text/folder_link");
  const auto corpus = ReadCorpus({Path("text")}, 16).value();
  EXPECT_THAT(corpus.files, ElementsAre(upper, b, c));
  EXPECT_EQ(TextOf(corpus.skipped),
            "9 files skipped: 2 hidden, 2 symbolic links, 1 special, 1 UTF-16, 2 binary, "
            "1 empty");
  EXPECT_EQ(TextOf(SkippedFiles{}), "0 files skipped");
  EXPECT_EQ(corpus.train.size() + corpus.held_out.size(), 3 * kPeriod);
}

TEST_F(TextDataTest, NamedSymbolicLinksAreFollowed) {
  const std::string text = Text(kPeriod);
  fs::create_symlink(Write("file", text), root_ / "file_link");
  fs::create_directory(root_ / "folder");
  Write("folder/a", text);
  fs::create_directory_symlink(root_ / "folder", root_ / "folder_link");
  const std::string file_link = Path("file_link");
  const std::string folder_link = Path("folder_link");
  const auto corpus = ReadCorpus({file_link, folder_link}, 16).value();
  EXPECT_THAT(corpus.files, ElementsAre(file_link, folder_link + "/a"));
}

TEST_F(TextDataTest, NamedPathsMustHoldText) {
  const std::string missing = Path("missing");
  EXPECT_EQ(ReadCorpus({missing}, 16).status().code(), kNotFound);
  EXPECT_THAT(std::string(ReadCorpus({missing}, 16).status().message()), HasSubstr(missing));
  const std::string empty = Write("empty", "");
  EXPECT_EQ(ReadCorpus({empty}, 16).status().code(), kInvalidArgument);
  EXPECT_THAT(std::string(ReadCorpus({empty}, 16).status().message()), HasSubstr("is empty"));
  EXPECT_EQ(ReadCorpus({"/dev/null"}, 16).status().code(), kInvalidArgument);
  fs::create_directory(root_ / "folder");
  EXPECT_EQ(ReadCorpus({Path("folder")}, 16).status().code(), kInvalidArgument);
  fs::create_symlink(empty, root_ / "folder/link");
  EXPECT_THAT(ReadCorpus({Path("folder")}, 16),
              StatusIs(kInvalidArgument, "no text in 1 path(s), 1 file skipped: 1 symbolic link"));
  EXPECT_EQ(ReadCorpus({}, 16).status().code(), kInvalidArgument);
}

// They were trained on as bytes.
TEST_F(TextDataTest, NamedFilesThatAreNoTextAreRefusedWithWhatToDo) {
  const std::string text = Text(kPeriod);
  const std::string zeros("\7\0\7\0", 4);
  const auto refused = [&](const std::string& path, const std::string& says) {
    EXPECT_THAT(ReadCorpus({path}, 16), StatusIs(kDataLoss, path + ": is " + says));
  };
  refused(Write("train.bin", text + zeros),
          "binary, with NUL bytes, expected text: --tokens reads token ids");
  refused(Write("model.safetensors", std::string("\x2\0\0\0\0\0\0\0{}", 10)),
          "a safetensors file, expected text: weights are no text");
  refused(Write("ids.npy", "\x93NUMPY" + zeros), "numpy's .npy");
  refused(Write("text.gz", "\x1f\x8b\x08"), "compressed by gzip, expected text: decompress it");
  refused(Write("text.txt", std::string("\xff\xfe"
                                        "a\0",
                                        4)),
          "UTF-16, expected text: iconv -f UTF-16 -t UTF-8");
  const std::string prefix = Path("c_text_document");
  EXPECT_THAT(std::string(ReadCorpus({prefix}, 16).status().message()), Not(HasSubstr("--tokens")));
  for (const char* const end : {".bin", ".idx"}) Write("c_text_document" + std::string(end), zeros);
  for (const char* const end : {".bin", ".idx"}) {
    refused(prefix + end, "of a Megatron pair, expected text: --tokens " + prefix + " reads it");
  }
  EXPECT_THAT(ReadCorpus({prefix}, 16),
              StatusIs(kNotFound,
                       "does not exist, expected a text file or a folder of them: "
                       "--tokens " +
                           prefix + " reads"));
}

// The message's own bound is the true one: a byte less is refused, that many are enough.
TEST_F(TextDataTest, TextMustReachOneSequenceInBothSplits) {
  for (const int64_t length : {int64_t{1}, int64_t{128}, kHeldOutBlock, int64_t{40000}}) {
    const int64_t held_out_blocks = (length + 1 + kHeldOutBlock - 1) / kHeldOutBlock;
    const int64_t least =
        kHeldOutBlock + (held_out_blocks - 1) * (kPeriod - kHeldOutBlock) + length + 1;
    const auto enough = ReadCorpus({Write("text", Text(least))}, length).value();
    EXPECT_EQ(SequenceCount(enough.held_out, length), 1);
    const absl::Status status = ReadCorpus({Write("text", Text(least - 1))}, length).status();
    EXPECT_THAT(status, StatusIs(kInvalidArgument, std::to_string(least) + " bytes or more"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(length + 1) + " bytes"));
  }
}

TEST(SequenceTest, CountsSequencesThatHaveATargetForEveryToken) {
  const std::vector<uint8_t> text(100, 'x');
  const auto count = [&](int64_t bytes, int64_t length) {
    return SequenceCount(Of({text.begin(), text.begin() + bytes}), length);
  };
  EXPECT_EQ(count(0, 4), 0);
  EXPECT_EQ(count(1, 4), 0);
  EXPECT_EQ(count(4, 4), 0);
  EXPECT_EQ(count(5, 4), 1);
  EXPECT_EQ(count(8, 4), 1);
  EXPECT_EQ(count(9, 4), 2);
  EXPECT_EQ(count(100, 1), 99);
}

TEST(SequenceTest, TargetsAreTheNextBytes) {
  const std::vector<uint8_t> text = {10, 11, 12, 13, 14, 15, 255};
  std::vector<int32_t> tokens(3), targets(3);
  CopySequence(Of(text), 1, absl::MakeSpan(tokens), absl::MakeSpan(targets));
  EXPECT_THAT(tokens, ElementsAre(13, 14, 15));
  EXPECT_THAT(targets, ElementsAre(14, 15, 255));  // bytes above 127 stay positive
}

TEST(SequenceTest, DocumentsAreCutBehindTheirEnds) {
  const std::vector<uint8_t> text = {5, 0, 7, 8, 9, 3, 4, 0, 6};  // two sequences of four
  const auto load = [&](const DocumentOptions& documents) {
    SequenceBatch batch(4, 2, documents, {0, 9});
    batch.Load(Of(text), {1, 0}, 0);  // 9 3 4 0, 5 0 7 8
    return batch;
  };
  SequenceBatch one = load({.reset_position_ids = true, .eod_mask_loss = true});
  const Batch batch = one.batch(0, Mode::kTraining);
  EXPECT_THAT(batch.sequence_offsets, ElementsAre(0, 4, 8));
  EXPECT_THAT(batch.position_offsets, ElementsAre(0, 1, 4, 6, 8));
  EXPECT_THAT(batch.attention_offsets, ElementsAre());
  EXPECT_THAT(one.tokens(), ElementsAre(9, 3, 4, 0, 5, 0, 7, 8));
  EXPECT_THAT(one.loss_rows(), ElementsAre(1, 2, 4, 6, 7));
  EXPECT_THAT(one.targets(), ElementsAre(4, 0, 0, 8, 9));
  EXPECT_EQ(one.row_loss().size(), 5u);
  EXPECT_EQ(one.size(), 8);
  const std::vector<int64_t> none;
  one.Load(Of(text), none, 0);  // a rank without a micro-batch
  EXPECT_THAT(one.batch(0, Mode::kTraining).position_offsets, ElementsAre(0));
  EXPECT_EQ(one.targets().size(), 0u);
  SequenceBatch other = load({.reset_attention_mask = true});
  EXPECT_THAT(other.batch(0, Mode::kTraining).attention_offsets, ElementsAre(0, 1, 4, 6, 8));
  EXPECT_THAT(other.targets(), ElementsAre(3, 4, 0, 6, 0, 7, 8, 9));
}

// The sequences that `rank` reads in one step, as training does.
std::vector<int64_t> SequencesOf(Sampler& sampler, int rank, int ranks, int64_t micro_batches,
                                 int64_t micro_batch_size, int64_t step) {
  std::vector<int64_t> sequences;
  const MicroBatchRange mine = MicroBatchesOf(rank, ranks, micro_batches);
  for (int64_t i = mine.begin * micro_batch_size; i < mine.end * micro_batch_size; ++i) {
    sequences.push_back(sampler.At(step, i));
  }
  return sequences;
}

TEST(SamplerTest, AnEpochReadsEverySequenceOnceButForAnIncompleteLastBatch) {
  for (const auto& [sequences, batches] : {std::pair(24, 6), {10, 2}}) {
    Sampler sampler(sequences, 4, 7);
    ASSERT_EQ(sampler.batches_per_epoch(), batches);
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
      std::set<int64_t> seen;
      for (int64_t step = epoch * batches; step < (epoch + 1) * batches; ++step) {
        for (int64_t i = 0; i < 4; ++i) seen.insert(sampler.At(step, i));
      }
      EXPECT_EQ(std::ssize(seen), 4 * batches);
      EXPECT_GE(*seen.begin(), 0);
      EXPECT_LT(*seen.rbegin(), sequences);
    }
  }
}

TEST(SamplerTest, OneSequenceIsReadEveryStep) {
  Sampler sampler(1, 1, 7);
  EXPECT_EQ(sampler.At(0, 0), 0);
  EXPECT_EQ(sampler.At(41, 0), 0);
}

TEST(SamplerTest, EpochsAndSeedsDiffer) {
  const auto order = [](uint64_t seed, int64_t epoch) {
    Sampler sampler(64, 64, seed);
    std::vector<int64_t> v;
    for (int64_t i = 0; i < 64; ++i) v.push_back(sampler.At(epoch, i));
    return v;
  };
  EXPECT_EQ(order(7, 0), order(7, 0));
  EXPECT_NE(order(7, 0), order(7, 1));
  EXPECT_NE(order(7, 0), order(8, 0));
}

TEST(SamplerTest, GoingBackGivesTheSameOrder) {
  Sampler sampler(10, 2, 7);
  const int64_t early = sampler.At(1, 1);
  sampler.At(12, 0);
  EXPECT_EQ(sampler.At(1, 1), early);
}

// Every place of a shuffle of n = 8 is equally likely. Over k = 4000 epochs a count has mean
// k / 8 = 500 and standard deviation sqrt(k/8 * 7/8) = 20.9; six of them are exceeded by one of 64
// counts about once in 10^7 seeds, and the seed is fixed.
TEST(SamplerTest, ShufflesEvenly) {
  Sampler sampler(8, 8, 99);
  std::map<std::pair<int64_t, int64_t>, int> count;
  for (int64_t epoch = 0; epoch < 4000; ++epoch) {
    for (int64_t place = 0; place < 8; ++place) ++count[{place, sampler.At(epoch, place)}];
  }
  for (int64_t place = 0; place < 8; ++place) {
    for (int64_t sequence = 0; sequence < 8; ++sequence) {
      EXPECT_NEAR((count[{place, sequence}]), 500, 126) << place << " " << sequence;
    }
  }
}

TEST(SamplerTest, RanksReadDisjointPartsOfOneOrder) {
  constexpr int64_t kMicroBatches = 6;
  constexpr int64_t kSize = 3;
  Sampler alone(100, kMicroBatches * kSize, 7);
  for (const int ranks : {1, 2, 3, 4, 5, 6, 8}) {
    for (int64_t step = 0; step < 12; ++step) {
      std::vector<int64_t> together;
      for (int rank = 0; rank < ranks; ++rank) {
        Sampler sampler(100, kMicroBatches * kSize, 7);
        const auto part = SequencesOf(sampler, rank, ranks, kMicroBatches, kSize, step);
        together.insert(together.end(), part.begin(), part.end());
      }
      EXPECT_EQ(together, SequencesOf(alone, 0, 1, kMicroBatches, kSize, step)) << ranks;
      EXPECT_EQ(std::set<int64_t>(together.begin(), together.end()).size(), together.size());
    }
  }
}

TEST(MicroBatchesOfTest, RangesAreContiguousAndBalanced) {
  EXPECT_EQ(MicroBatchesOf(1, 3, 7).begin, 2);
  EXPECT_EQ(MicroBatchesOf(1, 3, 7).end, 4);
  for (const int ranks : {1, 2, 3, 5, 8}) {
    for (const int64_t micro_batches : {1, 3, 8, 13}) {
      int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const MicroBatchRange range = MicroBatchesOf(rank, ranks, micro_batches);
        EXPECT_EQ(range.begin, next);
        EXPECT_GE(range.end - range.begin, micro_batches / ranks);
        EXPECT_LE(range.end - range.begin, (micro_batches + ranks - 1) / ranks);
        next = range.end;
      }
      EXPECT_EQ(next, micro_batches);
    }
  }
}

}  // namespace
}  // namespace moe::lm
