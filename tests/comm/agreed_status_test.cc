// comm/agreed_status.h on threads.
#include "comm/agreed_status.h"

#include <memory>
#include <set>

#include <absl/strings/cord.h>
#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "tests/comm/local_ranks.h"

namespace moe {
namespace {

// What each of four ranks is told, where those of `failing` have an error of their own.
void ExpectAgreed(const std::set<int>& failing, const absl::Status& expected) {
  testing::RunLocalRanks(4, [&](std::unique_ptr<Communicator> world) {
    absl::Status mine;
    if (failing.count(world->rank()) != 0) {
      mine = absl::DataLossError(absl::StrCat("shard ", world->rank()));
      mine.SetPayload("one", absl::Cord("1"));
      mine.SetPayload("two", absl::Cord(""));
    }
    EXPECT_EQ(AgreedStatus(mine, *world, *MakeInlineStream()), expected);
    return absl::OkStatus();
  });
}

TEST(AgreedStatusTest, IsThatOfTheFirstRankThatFails) {
  const auto with_payloads = [](absl::Status status) {
    status.SetPayload("one", absl::Cord("1"));
    status.SetPayload("two", absl::Cord(""));
    return status;
  };
  ExpectAgreed({}, absl::OkStatus());
  ExpectAgreed({3}, with_payloads(absl::DataLossError("rank 3: shard 3")));
  ExpectAgreed({1, 2}, with_payloads(absl::DataLossError("rank 1: shard 1")));
  ExpectAgreed({0, 1, 2, 3}, with_payloads(absl::DataLossError("shard 0")));
}

}  // namespace
}  // namespace moe
