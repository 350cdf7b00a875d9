// moe/cli/base/weight_offload.h: what the two flags give. What they refuse together is in
// generate.sh.
#include "moe/cli/base/weight_offload.h"

#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "moe/cli/base/common_settings.h"
#include "tests/moe/status_is.h"

namespace moe::cli {
namespace {

absl::StatusOr<std::optional<WeightFileOptions>> Given(
    const std::vector<std::pair<std::string, std::string>>& flags) {
  Table table;
  AddDeviceSetting(table);
  AddWeightOffloadSettings(table);
  Settings settings(table);
  for (const auto& [name, value] : flags) {
    const absl::Status set =
        settings.Set(*settings.Find(name), {value}, Origin::kFlag, "--" + name);
    if (!set.ok()) return set;
  }
  return WeightOffloadOf(settings);
}

TEST(WeightOffloadTest, AFolderAndASize) {
  EXPECT_FALSE(Given({})->has_value());
  const auto given = Given({{"offload", "weights:file=/a=b"}, {"weight-memory", "1.5GiB"}});
  ASSERT_TRUE(given.ok()) << given.status();
  EXPECT_EQ((*given)->folder, "/a=b");
  EXPECT_EQ((*given)->memory_bytes, int64_t{3} << 29);
  EXPECT_EQ((*Given({{"offload", "weights:file=a"}, {"weight-memory", "1e300"}}))->memory_bytes,
            int64_t{1} << 60);
}

TEST(WeightOffloadTest, NotFromGpus) {
  EXPECT_THAT(Given({{"offload", "weights:file=a"}, {"weight-memory", "1GiB"}, {"device", "cuda"}}),
              ::moe::testing::StatusIs(absl::StatusCode::kInvalidArgument,
                                       "expected none: weights are not offloaded from GPUs yet"));
}

}  // namespace
}  // namespace moe::cli
