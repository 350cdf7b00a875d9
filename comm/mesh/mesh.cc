#include "comm/mesh/mesh.h"

#include <utility>

#include "kernels/base/caught.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

// The groups that communicate beside the world, in each lane in the order of their Splits, which is
// the same on all ranks. Those `of_one` are split even where they have one rank, since a backend's
// own collectives serve it.
constexpr struct {
  MeshGroup group;
  MeshLane lane;
  bool of_one = true;
} kSplits[] = {
    {MeshGroup::kExpert, MeshLane::kForward},
    {MeshGroup::kExpertBlock, MeshLane::kForward},
    {MeshGroup::kExpertTensor, MeshLane::kForward, false},
    {MeshGroup::kTensor, MeshLane::kForward, false},
    {MeshGroup::kPipeline, MeshLane::kForward, false},
    {MeshGroup::kExpert, MeshLane::kExchange},
    {MeshGroup::kStage, MeshLane::kGradients},
    {MeshGroup::kData, MeshLane::kGradients},
    {MeshGroup::kExpertData, MeshLane::kGradients},
    {MeshGroup::kExpertTensor, MeshLane::kGradients, false},
    {MeshGroup::kExpertHolders, MeshLane::kGradients},
    {MeshGroup::kStage, MeshLane::kWeights},
    {MeshGroup::kData, MeshLane::kWeights},
    {MeshGroup::kExpertData, MeshLane::kWeights},
    {MeshGroup::kExpertHolders, MeshLane::kWeights},
};

constexpr MeshGroup kFamilies[][3] = {
    {MeshGroup::kWorld, MeshGroup::kStage, MeshGroup::kData},
    {MeshGroup::kExpertBlock, MeshGroup::kExpert, MeshGroup::kExpert},
    {MeshGroup::kExpertData, MeshGroup::kExpertHolders, MeshGroup::kExpertHolders},
};

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> SplitGroup(Communicator& world,
                                                         const MeshShape& shape, MeshGroup group) {
  const int rank = world.rank();
  return world.Split(RanksOf(shape, group, world.size(), rank).front(), rank);
}

absl::StatusOr<std::unique_ptr<Mesh>> Mesh::Create(std::unique_ptr<Communicator> world,
                                                   const MeshShape& shape) {
  const int rank = world->rank(), ranks = world->size();
  MOE_RETURN_IF_ERROR(CheckMeshShape(shape, ranks));
  std::unique_ptr<Mesh> mesh(new Mesh(shape));
  for (int g = 0; g < static_cast<int>(MeshGroup::kCount); ++g) {
    const auto group = static_cast<MeshGroup>(g);
    mesh->positions_[group] = PositionIn(shape, group, ranks, rank);
  }
  mesh->groups_[static_cast<size_t>(MeshLane::kForward)][MeshGroup::kWorld] = std::move(world);
  MOE_RETURN_IF_ERROR(mesh->Open(MeshLane::kForward));
  MOE_RETURN_IF_ERROR(mesh->Open(MeshLane::kGradients));
  return mesh;
}

absl::Status Mesh::Open(MeshLane lane) {
  for (const auto& row : kSplits) {
    if (row.lane != lane || (!row.of_one && size(row.group) == 1)) continue;
    MOE_RETURN_IF_ERROR(Open(row.group, lane));
  }
  return absl::OkStatus();
}

absl::Status Mesh::Open(MeshGroup group, MeshLane lane) {
  auto& split = groups_[static_cast<size_t>(lane)][Canonical(group)];
  if (split != nullptr) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(split, NewGroup(group));
  return absl::OkStatus();
}

// Groups of a family contain each other, so that those of one size have the same ranks.
MeshGroup Mesh::Canonical(MeshGroup group) const {
  for (const auto& family : kFamilies) {
    bool member = false;
    for (const MeshGroup each : family) member = member || each == group;
    if (!member) continue;
    for (const MeshGroup each : family) {
      if (size(each) == size(group)) return each;
    }
  }
  return group;
}

Communicator& Mesh::group(MeshGroup group, MeshLane lane) {
  Communicator* const communicator = groups_[static_cast<size_t>(lane)][Canonical(group)].get();
  MOE_CHECK(communicator != nullptr);
  return *communicator;
}

void Mesh::Abort(absl::Status reason) {
  // The others share its fate.
  Caught([&] {
    world().Abort(std::move(reason));
    return absl::OkStatus();
  }).IgnoreError();
}

}  // namespace moe
