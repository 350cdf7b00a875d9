// comm/extremes.h on threads.
#include "comm/extremes.h"

#include <limits>

#include <gtest/gtest.h>

#include "tests/comm/local_ranks.h"

namespace moe {
namespace {

constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

TEST(ExtremesTest, AreTheLeastAndTheLargestOnEveryRank) {
  for (const int ranks : {1, 3, 8}) {
    testing::RunLocalRanks(ranks, [&](std::unique_ptr<Communicator> world) -> absl::Status {
      const int64_t rank = world->rank(), last = ranks - 1;
      const auto stream = MakeInlineStream();
      const int64_t values[] = {7, rank, -rank, rank == last ? kLeast : kMost};
      const auto extremes = ExtremesOverRanks(values, *world, *stream);
      if (!extremes.ok()) return extremes.status();
      EXPECT_EQ(extremes->size(), 4u);
      const auto expect = [&](int i, int64_t least, int64_t most) {
        EXPECT_EQ((*extremes)[i].least, least) << ranks << " " << i;
        EXPECT_EQ((*extremes)[i].most, most) << ranks << " " << i;
        EXPECT_EQ((*extremes)[i].same(), least == most) << ranks << " " << i;
      };
      expect(0, 7, 7);
      expect(1, 0, last);
      expect(2, -last, 0);
      expect(3, kLeast, ranks == 1 ? kLeast : kMost);
      return absl::OkStatus();
    });
  }
}

}  // namespace
}  // namespace moe
