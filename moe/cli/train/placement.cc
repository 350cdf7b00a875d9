#include "moe/cli/train/placement.h"

#include <algorithm>
#include <set>
#include <vector>

#include <absl/strings/str_cat.h>

#include "comm/hosts.h"
#include "comm/mesh/mesh_shape.h"

namespace moe::cli {

absl::StatusOr<std::string> PlacementText(const lm::TrainConfig& config,
                                          absl::Span<const uint64_t> hosts) {
  const int ranks = static_cast<int>(hosts.size());
  const MeshShape& mesh = config.trainer.session.mesh;
  int groups = 0, crossing = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::vector<int> members = RanksOf(mesh, MeshGroup::kExpert, ranks, rank);
    if (members.front() != rank) continue;
    std::vector<uint64_t> of_group;
    for (const int member : members) of_group.push_back(hosts[member]);
    const auto nodes = NodesOf(config.model.moe.dispatcher.node_size, of_group);
    if (!nodes.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("--node-size: ", nodes.status().message()));
    }
    ++groups;
    crossing += std::count(of_group.begin(), of_group.end(), of_group[0]) !=
                static_cast<int64_t>(of_group.size());
  }
  const size_t count = std::set<uint64_t>(hosts.begin(), hosts.end()).size();
  if (count == 1) return "";
  if (mesh.expert == 1) return absl::StrCat("hosts  ", count, "\n");
  return absl::StrCat("hosts  ", count, "; ",
                      crossing == 0 ? "no expert-parallel group crosses"
                      : crossing == groups
                          ? "all expert-parallel groups cross"
                          : absl::StrCat(crossing, " of ", groups, " expert-parallel groups cross"),
                      " hosts\n");
}

}  // namespace moe::cli
