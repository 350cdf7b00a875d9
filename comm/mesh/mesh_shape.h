// Which ranks of a world form a group: arithmetic alone, without communication.
#ifndef MOE_COMM_MESH_MESH_SHAPE_H_
#define MOE_COMM_MESH_MESH_SHAPE_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/status.h>

namespace moe {

// Degrees of parallelism; those of data follow from the number of ranks.
//
// A world of R ranks is `pipeline` stages of S = R / pipeline ranks. Rank q of stage p is rank
// p S + q of the world. Within a stage, layers without experts and experts number ranks apart:
//   q = data * tensor + tensor index                                Megatron's order tp-dp-pp
//   q = (expert-data * expert + expert index) * expert_tensor + expert-tensor index    tp-ep-dp-pp
// The tensor indices change fastest, so that tensor groups lie within a node. A tensor group never
// straddles two blocks of experts: tensor divides expert * expert_tensor.
struct MeshShape {
  int tensor = 1, pipeline = 1, expert_tensor = 1, expert = 1;

  bool operator==(const MeshShape&) const = default;
};

// Ranks that differ in the index of the name, and in no other unless said.
enum class MeshGroup : uint8_t {
  kWorld,
  kEnds,   // all ranks of the first and the last stage; of a stage between them, its own
  kStage,  // all ranks of a pipeline stage
  kData,   // hold the same part of matrices that are cut over kTensor
  kTensor,
  kPipeline,
  kExpertBlock,  // together hold every expert of a stage once: kExpert times kExpertTensor
  kExpert,       // exchange tokens
  kExpertTensor,
  kExpertData,     // hold the same part of the same experts
  kExpertHolders,  // hold the same experts, each a part: kExpertTensor times kExpertData
  kCount
};

// Whether ranks of such a group hold experts alike, or what belongs to them.
constexpr bool HoldExperts(MeshGroup group) {
  return group == MeshGroup::kExpertData || group == MeshGroup::kExpertHolders;
}

struct MeshPosition {
  int index = 0, size = 1;
};

// kInvalidArgument unless `ranks` ranks can have this shape; names one near it that they can have.
absl::Status CheckMeshShape(const MeshShape& shape, int ranks);

// Where `rank` of the world is in its group. Of a shape that CheckMeshShape accepts, as RanksOf.
MeshPosition PositionIn(const MeshShape& shape, MeshGroup group, int ranks, int rank);

// The ranks of the group that `rank` is in, ascending.
std::vector<int> RanksOf(const MeshShape& shape, MeshGroup group, int ranks, int rank);

// "tensor 2, expert 4": the degrees above 1; "expert 1" where there is none.
std::string ToString(const MeshShape& shape);

}  // namespace moe

#endif  // MOE_COMM_MESH_MESH_SHAPE_H_
