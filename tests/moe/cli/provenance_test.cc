// Information on build and machine in results.
#include "moe/cli/base/provenance.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/moe/io/io_test.h"

namespace moe::cli {
namespace {

using ::testing::MatchesRegex;

TEST(ProvenanceTest, HasEveryKeyInOrderAndAValueForEach) {
  const Facts facts = Provenance();
  std::vector<std::string> keys;
  for (const auto& [key, value] : facts) {
    keys.push_back(key);
    EXPECT_NE(value, "") << key;
  }
  EXPECT_THAT(keys, ::testing::ElementsAre("version", "commit", "build", "features", "host", "cpu",
                                           "cores", "simd", "date"));
  std::map<std::string, std::string> value(facts.begin(), facts.end());
  EXPECT_THAT(value["version"], MatchesRegex("[0-9]+[.][0-9]+[.][0-9]+"));
  EXPECT_THAT(value["commit"], MatchesRegex("unknown|[0-9a-f]{12}[+]?"));
  EXPECT_THAT(value["cores"], MatchesRegex("[1-9][0-9]*"));
  EXPECT_THAT(value["date"], MatchesRegex("20[0-9]{2}-[01][0-9]-[0-3][0-9]T[0-9:]{8}Z"));
  char host[256] = {};
  ASSERT_EQ(gethostname(host, sizeof(host) - 1), 0);
  EXPECT_EQ(value["host"], host);
}

TEST(ProvenanceTest, BeginsWithTheBuild) {
  const Facts all = Provenance(), build = BuildFacts();
  ASSERT_GE(all.size(), build.size());
  EXPECT_TRUE(std::equal(build.begin(), build.end(), all.begin()));
}

class ProcValueTest : public IoTest {};

TEST_F(ProcValueTest, IsTheFirstOfItsKey) {
  const std::string path =
      Write("proc", "processor\t: 0\nmodel name\t: A CPU: 2 GHz\nmodel name\t: B\n");
  EXPECT_EQ(ProcValue(path, "model name"), "A CPU: 2 GHz");
  EXPECT_EQ(ProcValue(path, "model"), "");
  EXPECT_THAT(ProcValue(path + ".none", "model name"), ::testing::IsEmpty());
}

}  // namespace
}  // namespace moe::cli
