// Which ranks are of one node, from the hosts that they run on.
#include "comm/hosts.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

namespace moe {
namespace {

using Hosts = std::vector<uint64_t>;

TEST(NodesOfTest, NodesAreHostsWithoutASize) {
  const auto size = [](const Hosts& hosts) {
    const auto nodes = NodesOf(0, hosts);
    EXPECT_EQ(nodes->of_rank, hosts);
    return nodes->size;
  };
  EXPECT_EQ(size({5}), 1);
  EXPECT_EQ(size({5, 5, 5}), 3);
  EXPECT_EQ(size({5, 5, 9, 9}), 2);
  EXPECT_EQ(size({5, 5, 5, 5, 9, 9}), 2);
  EXPECT_EQ(size({5, 5, 5, 9}), 1);
  EXPECT_EQ(size({5, 9, 5, 9}), 1);  // --map-by node
  EXPECT_EQ(size({5, 5, 9, 9, 5, 5, 9, 9}), 2);
  EXPECT_EQ(size({5, 5, 5, 5, 9, 9, 9, 9}), 4);
}

TEST(NodesOfTest, AGivenSizeStandsForHosts) {
  EXPECT_EQ(NodesOf(2, Hosts{5, 5, 5, 5})->of_rank, (Hosts{0, 0, 1, 1}));
  EXPECT_EQ(NodesOf(1, Hosts{5, 9, 5, 9})->of_rank, (Hosts{0, 1, 2, 3}));
  EXPECT_EQ(NodesOf(3, Hosts{5, 5, 5, 5})->of_rank, (Hosts{0, 0, 0, 1}));
  EXPECT_EQ(NodesOf(2, Hosts{5, 5, 5, 5, 9, 9})->size, 2);
}

TEST(NodesOfTest, RefusesNodesOfTwoHosts) {
  const auto refusal = [](int size, const Hosts& hosts) {
    const auto nodes = NodesOf(size, hosts);
    EXPECT_EQ(nodes.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(nodes.status().message());
  };
  EXPECT_EQ(
      refusal(2, {5, 5, 5, 9}),
      "nodes of 2 ranks: ranks 2 and 3 of a group of 4 are on different hosts, expected nodes "
      "of 1");
  EXPECT_EQ(
      refusal(3, {5, 5, 5, 5, 9, 9, 9, 9}),
      "nodes of 3 ranks: ranks 3 and 4 of a group of 8 are on different hosts, expected nodes "
      "of 2 or 4");
  EXPECT_EQ(
      refusal(2, {5, 9, 5, 9}),
      "nodes of 2 ranks: ranks 0 and 1 of a group of 4 are on different hosts, expected nodes "
      "of 1");
}

// Processes of two containers of one machine have one boot id.
TEST(HostIdTest, ANetworkOfItsOwnIsAHostOfItsOwn) {
  const uint64_t mine = HostId();
  EXPECT_EQ(HostId(), mine);
  const pid_t child = fork();
  if (child == 0) {
    if (unshare(CLONE_NEWNET) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) _exit(2);
    _exit(HostId() == mine ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WEXITSTATUS(status) == 2) GTEST_SKIP() << "network namespaces are not allowed here";
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace moe
