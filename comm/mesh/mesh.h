// The groups of a world's ranks, and their communicators.
#ifndef MOE_COMM_MESH_MESH_H_
#define MOE_COMM_MESH_MESH_H_

#include <memory>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "comm/communicator.h"
#include "comm/mesh/group_map.h"
#include "comm/mesh/mesh_shape.h"

namespace moe {

// Lanes of a group may exchange at the same time: each has communicators of its own.
enum class MeshLane : uint8_t {
  kForward,    // on the compute stream, and the exchange stream of a device
  kExchange,   // on the exchange stream of the CPU; opened where that is a queue
  kGradients,  // on the gradients' stream
  kWeights,    // on the stream of gathered weights; opened where weights are in parts
  kCount
};

// A communicator of this rank's group in a mesh of `world`. Collective over the world, blocks the
// host.
absl::StatusOr<std::unique_ptr<Communicator>> SplitGroup(Communicator& world,
                                                         const MeshShape& shape, MeshGroup group);

class Mesh {
 public:
  // Collective over `world`. kInvalidArgument unless its ranks can have the shape (CheckMeshShape).
  static absl::StatusOr<std::unique_ptr<Mesh>> Create(std::unique_ptr<Communicator> world,
                                                      const MeshShape& shape);

  // Makes the communicators of a lane that Create leaves out; a lane that is open costs a
  // comparison. Collective over the world.
  absl::Status Open(MeshLane lane);
  // The same of one group, which no lane has by itself.
  absl::Status Open(MeshGroup group, MeshLane lane);

  // Groups of the same ranks share communicators. Today's pairs, others are a bug of the caller's:
  // kWorld, kExpert, kExpertBlock and, of several ranks, kTensor, kExpertTensor and kPipeline
  // forward; kStage, kData, kExpertData, kExpertHolders and, of several ranks, kExpertTensor for
  // gradients; once they are open, the first four for weights, kEnds for gradients, and kExpert for
  // exchanges.
  Communicator& group(MeshGroup group, MeshLane lane = MeshLane::kForward);
  Communicator& world() { return group(MeshGroup::kWorld); }
  // SplitGroup, for a use of the caller's own.
  absl::StatusOr<std::unique_ptr<Communicator>> NewGroup(MeshGroup group) {
    return SplitGroup(world(), shape_, group);
  }

  // Index of this rank in its group, and ranks of the group; also for groups without communicators.
  int index(MeshGroup group) const { return positions_[group].index; }
  int size(MeshGroup group) const { return positions_[group].size; }

  // The first of {kWorld, kStage, kData}, of {kExpertBlock, kExpert} or of {kExpertData,
  // kExpertHolders} that has the ranks of `group`; any other group is itself.
  MeshGroup Canonical(MeshGroup group) const;

  // Aborts every group.
  void Abort(absl::Status reason);

 private:
  explicit Mesh(const MeshShape& shape) : shape_(shape) {}

  const MeshShape shape_;
  GroupMap<MeshPosition> positions_;
  GroupMap<std::unique_ptr<Communicator>> groups_[static_cast<size_t>(MeshLane::kCount)];
};

}  // namespace moe

#endif  // MOE_COMM_MESH_MESH_H_
