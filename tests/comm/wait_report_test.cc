#include "comm/wait_report.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace moe {
namespace {

std::string Late(const std::vector<int>& missing, const std::vector<std::string>& hosts) {
  return std::string(
      LateError("here", missing, absl::Seconds(2), absl::Seconds(1), hosts).message());
}

TEST(WaitReportTest, RanksThatAreWaitedForAreNamedOnceWithTheirHostsWhereThereAreSeveral) {
  EXPECT_EQ(Late({3, 0, 3}, {}), "here: waited 2s for ranks 0, 3, deadline 1s");
  EXPECT_EQ(Late({2}, {"a", "a", "a"}), "here: waited 2s for rank 2, deadline 1s");
  EXPECT_EQ(Late({2}, {"a", "a", "b"}), "here: waited 2s for rank 2 (host b), deadline 1s");
  EXPECT_EQ(Late({1, 0}, {"a", "b"}),
            "here: waited 2s for ranks 0 (host a), 1 (host b), deadline 1s");
}

}  // namespace
}  // namespace moe
