#include "comm/agreement.h"

#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/hosts.h"
#include "tests/comm/local_ranks.h"

namespace moe {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

// What a rank was given.
struct Given {
  std::vector<AgreedValue> values;
  std::vector<AgreedBytes> bytes;
};

// The statuses of ranks that were given this, as texts; "OK" for kOk.
std::vector<std::string> Compare(const std::vector<Given>& given) {
  std::vector<std::string> said(given.size());
  testing::RunLocalRanks(static_cast<int>(given.size()), [&](std::unique_ptr<Communicator> world) {
    const Given& mine = given[world->rank()];
    said[world->rank()] = CheckAgreement(mine.values, mine.bytes, *world).ToString();
    return absl::OkStatus();
  });
  return said;
}

TEST(AgreementTest, EqualValuesAgree) {
  const Given one = {.values = {{.name = "--seed", .text = "1"}, {.name = "--lr", .text = ""}}};
  EXPECT_THAT(Compare({one, one, one}), Each("OK"));
  EXPECT_THAT(Compare({one}), Each("OK"));
  EXPECT_THAT(Compare({{}, {}}), Each("OK"));
}

TEST(AgreementTest, EveryRankNamesTheFirstValueThatDiffersTwoRanksAndTheirHosts) {
  const Given one = {.values = {{.name = "--topk", .text = "2"},
                                {.name = "--seed", .text = "1"},
                                {.name = "--lr", .text = "0.1"}}};
  Given other = one;
  other.values[1].text = "7";
  other.values[2].text = "0.2";
  const std::string host = HostName();
  EXPECT_THAT(
      Compare({one, one, other, one}),
      Each(absl::StrCat("INVALID_ARGUMENT: ranks 0 (host ", host, ") and 2 (host ", host,
                        ") were given a different --seed: 1 and 7, expected the same on all: as a "
                        "flag, or in the environment of every host")));
}

TEST(AgreementTest, ValuesThatPeopleCannotReadAreNotShown) {
  const auto said = [](const AgreedValue& a, const AgreedValue& b) {
    return Compare({{.values = {a}}, {.values = {b}}});
  };
  EXPECT_THAT(said({.name = "text (--data)", .text = "12", .shown = false},
                   {.name = "text (--data)", .text = "13", .shown = false}),
              Each(HasSubstr("a different text (--data), expected the same on all")));
  EXPECT_THAT(
      said({.name = "--prompt", .text = "a"}, {.name = "--prompt", .text = std::string(41, 'b')}),
      Each(HasSubstr("a different --prompt, expected")));
  EXPECT_THAT(said({.name = "--save", .text = ""}, {.name = "--save", .text = "ck"}),
              Each(HasSubstr("a different --save: none and ck, expected")));
}

TEST(AgreementTest, WhatFollowsFromAnotherValueIsNamedBehindIt) {
  const AgreedValue preset = {.name = "--activation", .text = "clamped", .derived = true};
  const AgreedValue plain = {.name = "--activation", .text = "swiglu"};
  const AgreedValue mixtral = {.name = "--router", .text = "mixtral"};
  const AgreedValue gpt = {.name = "--router", .text = "gpt-oss"};
  EXPECT_THAT(Compare({{.values = {plain, mixtral}}, {.values = {preset, gpt}}}),
              Each(HasSubstr("a different --router: mixtral and gpt-oss,")));
  EXPECT_THAT(Compare({{.values = {plain, gpt}}, {.values = {preset, gpt}}}),
              Each(HasSubstr("a different --activation: swiglu and clamped,")));
}

TEST(AgreementTest, ListsOfDifferentThingsAreRefused) {
  const AgreedValue eval = {.name = "command", .text = "eval"};
  const AgreedValue split = {.name = "--split", .text = "all"};
  const AgreedValue seed = {.name = "--seed", .text = "1"};
  EXPECT_THAT(Compare({{.values = {eval, split}}, {.values = {{"command", "train"}}}}),
              Each(HasSubstr("a different command: eval and train,")));
  EXPECT_THAT(Compare({{.values = {eval, split}}, {.values = {eval, seed}}}),
              Each(HasSubstr("a different --split,")));
  for (const auto& ranks : {std::vector<Given>{{.values = {eval}}, {.values = {eval, split}}},
                            {{.values = {eval, split}}, {.values = {eval}}}}) {
    EXPECT_THAT(Compare(ranks), Each(HasSubstr("a different --split,")));
  }
  EXPECT_THAT(Compare({{.values = {eval}}, {}}), Each(HasSubstr("a different command,")));
}

// Parts of odd sizes, of several blocks of a MiB, one of them empty; byte i of all is i * 7.
struct File {
  explicit File(uint64_t number) : identity(number) {
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint8_t>(i * 7);
  }
  Given given() const {
    const absl::Span<const uint8_t> bytes = all;
    return {.bytes = {{.name = "weights (--weights)",
                       .parts = {bytes.first(5), {}, bytes.subspan(5)},
                       .forms = "F32,F32,BF16",
                       .identity = identity}}};
  }

  uint64_t identity;
  std::vector<uint8_t> all = std::vector<uint8_t>((size_t{5} << 20) + 3);
};

TEST(AgreementTest, FilesAreComparedByteByByteHoweverManyRanksShareEach) {
  const File a(1), b(2), c(3);
  EXPECT_THAT(Compare({a.given(), b.given(), b.given(), c.given(), b.given()}), Each("OK"));
  for (const size_t at : {size_t{0}, size_t{5}, size_t{3} << 20, a.all.size() - 1}) {
    File changed(4);
    changed.all[at] ^= 1;
    EXPECT_THAT(Compare({a.given(), b.given(), changed.given(), changed.given()}),
                Each(AllOf(HasSubstr("ranks 0 (host "), HasSubstr(" and 2 (host "),
                           HasSubstr("a different weights (--weights), expected the same on all"),
                           Not(HasSubstr("as a flag")))))
        << at;
  }
}

TEST(AgreementTest, BlocksThatChangedPlacesAreNoticed) {
  File a(1), b(2);
  a.all[5] ^= 1;  // begins the first block of the last part
  b.all[5 + (size_t{1} << 20)] ^= 1;
  EXPECT_THAT(Compare({a.given(), b.given()}), Each(HasSubstr("a different weights (--weights),")));
}

TEST(AgreementTest, OneFileThatAllRanksMapIsNotRead) {
  const File a(1);
  File same_identity(1);
  same_identity.all[0] ^= 1;  // cannot be, and nobody looks
  EXPECT_THAT(Compare({a.given(), same_identity.given()}), Each("OK"));
}

TEST(AgreementTest, FilesOfOtherSizesAndFormsAreRefused) {
  const File a(1), b(2);
  Given shorter = b.given(), other_type = b.given(), moved = b.given();
  shorter.bytes[0].parts[2].remove_suffix(1);
  other_type.bytes[0].forms = "F32,F32,F16";
  std::swap(moved.bytes[0].parts[0], moved.bytes[0].parts[2]);
  for (const Given& other : {shorter, other_type, moved}) {
    EXPECT_THAT(Compare({a.given(), other}), Each(HasSubstr("a different weights (--weights),")));
  }
}

// Ranks that went through other numbers of rounds would not meet.
TEST(AgreementTest, FilesOfOtherNumbersOfBlocksAreRefusedUnread) {
  const uint8_t byte = 0;
  const auto given = [&](size_t parts, uint64_t identity) {
    return Given{.bytes = {{.name = "model",
                            .parts = std::vector<absl::Span<const uint8_t>>(parts, {&byte, 1}),
                            .identity = identity}}};
  };
  EXPECT_THAT(Compare({given(200, 1), given(600, 2)}),
              Each(HasSubstr("a different model, expected")));
}

// 65,536 blocks are hashed: of 140,000 parts every third.
TEST(AgreementTest, OfManyBlocksSomeAreCompared) {
  const std::vector<uint8_t> bytes(140'000);
  std::vector<uint8_t> changed = bytes;
  const auto given = [](const std::vector<uint8_t>& all, uint64_t identity) {
    Given result = {.bytes = {{.name = "model", .parts = {}, .identity = identity}}};
    for (const uint8_t& byte : all) result.bytes[0].parts.emplace_back(&byte, 1);
    return result;
  };
  EXPECT_THAT(Compare({given(bytes, 1), given(changed, 2)}), Each("OK"));
  changed[3 * 46'000] = 1;
  EXPECT_THAT(Compare({given(bytes, 1), given(changed, 2)}),
              Each(HasSubstr("a different model, expected")));
}

}  // namespace
}  // namespace moe
