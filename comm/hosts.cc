#include "comm/hosts.h"

#include <array>
#include <fstream>
#include <functional>
#include <numeric>

#include <absl/strings/str_cat.h>
#include <unistd.h>

#include "kernels/base/divisors.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

// "net:[4026531840]"; "" where it cannot be read.
std::string NamespaceOf(const char* path) {
  std::array<char, 64> text = {};
  const ssize_t size = ::readlink(path, text.data(), text.size() - 1);
  return size < 0 ? "" : text.data();
}

}  // namespace

uint64_t HostId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  if (!std::getline(file, id)) {
    std::array<char, 256> name = {};
    if (gethostname(name.data(), name.size() - 1) != 0) return 0;
    id = name.data();
  }
  return std::hash<std::string>{}(
      absl::StrCat(id, NamespaceOf("/proc/self/ns/net"), NamespaceOf("/proc/self/ns/pid")));
}

std::string HostName() {
  std::array<char, 256> name = {'?'};
  (void)gethostname(name.data(), name.size() - 1);
  return name.data();
}

absl::StatusOr<std::vector<uint64_t>> HostsOf(uint64_t host, Communicator& comm, Stream& stream,
                                              const Site& site) {
  const auto mine = static_cast<int64_t>(host);
  std::vector<int64_t> all(comm.size());
  MOE_RETURN_IF_ERROR(comm.AllGather<int64_t>({&mine, 1}, absl::MakeSpan(all), stream, site));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  return std::vector<uint64_t>(all.begin(), all.end());
}

std::string NearestNodeSizes(int wanted, int ranks) {
  const auto [below, above] = DivisorsNextTo(wanted, ranks);
  if (below == 0) return absl::StrCat(above);
  return above == 0 ? absl::StrCat(below) : absl::StrCat(below, " or ", above);
}

absl::StatusOr<Nodes> NodesOf(int node_size, absl::Span<const uint64_t> hosts) {
  const int ranks = static_cast<int>(hosts.size());
  int inside = ranks;  // divides R and every rank before which another host begins
  for (int r = 1; r < ranks; ++r) {
    if (hosts[r] != hosts[r - 1]) inside = std::gcd(inside, r);
  }
  if (node_size == 0) return Nodes{.size = inside, .of_rank = {hosts.begin(), hosts.end()}};
  Nodes nodes = {.size = node_size, .of_rank = {}};
  for (int r = 0; r < ranks; ++r) {
    if (r % node_size != 0 && hosts[r] != hosts[r - 1]) {
      return absl::InvalidArgumentError(absl::StrCat(
          "nodes of ", node_size, " ranks: ranks ", r - 1, " and ", r, " of a group of ", ranks,
          " are on different hosts, expected nodes of ", NearestNodeSizes(node_size, inside)));
    }
    nodes.of_rank.push_back(r / node_size);
  }
  return nodes;
}

}  // namespace moe
