#include "comm/mesh/mesh_shape.h"

#include <numeric>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "kernels/base/divisors.h"

namespace moe {
namespace {

// The ranks first, first + stride, ... of a group of `size`, each with the `run` - 1 ranks that
// follow it; of its second half `apart` later.
struct GroupRanks {
  int first = 0, stride = 1, size = 1, apart = 0, run = 1;

  int Rank(int index) const {
    return first + index / run * stride + index % run + (2 * index < size ? 0 : apart);
  }
  int Index(int rank) const {
    const int index = (rank - first) / stride * run + (rank - first) % stride;
    return 2 * index < size ? index : index - apart / stride;
  }
};

GroupRanks GroupOf(const MeshShape& shape, MeshGroup group, int ranks, int rank) {
  const int stage_size = ranks / shape.pipeline;
  const int stage = rank / stage_size * stage_size;  // its first rank
  const int q = rank - stage;
  const int block_size = shape.expert * shape.expert_tensor;
  const int block = stage + q / block_size * block_size;
  switch (group) {
    case MeshGroup::kWorld:
    case MeshGroup::kCount:
      break;
    case MeshGroup::kEnds: {
      const int last = ranks - stage_size;  // its first rank
      if (last == 0 || (stage > 0 && stage < last)) return {stage, 1, stage_size};
      return {0, 1, 2 * stage_size, last - stage_size};
    }
    case MeshGroup::kStage:
      return {stage, 1, stage_size};
    case MeshGroup::kData:
      return {stage + q % shape.tensor, shape.tensor, stage_size / shape.tensor};
    case MeshGroup::kTensor:
      return {rank - q % shape.tensor, 1, shape.tensor};
    case MeshGroup::kPipeline:
      return {q, stage_size, shape.pipeline};
    case MeshGroup::kExpertBlock:
      return {block, 1, block_size};
    case MeshGroup::kExpert:
      return {block + q % shape.expert_tensor, shape.expert_tensor, shape.expert};
    case MeshGroup::kExpertTensor:
      return {rank - q % shape.expert_tensor, 1, shape.expert_tensor};
    case MeshGroup::kExpertData:
      return {stage + q % block_size, block_size, stage_size / block_size};
    case MeshGroup::kExpertHolders: {
      const int share = shape.expert_tensor, first = stage + q % block_size / share * share;
      return {first, block_size, stage_size / shape.expert, 0, share};
    }
  }
  return {0, 1, ranks};
}

// What is wrong with a shape; empty where nothing is.
std::string ProblemOf(const MeshShape& shape, int ranks) {
  const auto problem = [](const char* axis, int size, int whole, const char* what) {
    const bool divides = size >= 1 && whole % size == 0;
    return divides ? std::string()
                   : absl::StrCat(axis, "-parallel size ", size, ", expected a divisor of ", whole,
                                  " ", what);
  };
  std::string text = problem("pipeline", shape.pipeline, ranks, "ranks");
  if (!text.empty()) return text;
  const int stage_size = ranks / shape.pipeline;
  const char* const what = shape.pipeline == 1 ? "ranks" : "ranks of a pipeline stage";
  text = problem("tensor", shape.tensor, stage_size, what);
  if (text.empty()) text = problem("expert", shape.expert, stage_size, what);
  if (!text.empty()) return text;
  text = problem("expert-tensor", shape.expert_tensor, stage_size / shape.expert,
                 "ranks for each expert-parallel index");
  if (!text.empty()) return text;
  const int block_size = shape.expert * shape.expert_tensor;
  return problem("tensor", shape.tensor, block_size, "ranks that hold every expert once");
}

// The divisor of `whole` whose ratio to `size` is nearest to 1; the smaller of two.
int NearestDivisor(int size, int whole) {
  if (size >= 1 && whole % size == 0) return size;
  const auto [below, above] = DivisorsNextTo(size, whole);
  if (below == 0) return above;
  const bool above_is_nearer = above > 0 && int64_t{above} * below < int64_t{size} * size;
  return above_is_nearer ? above : below;
}

// Axis by axis, so that those before the one that does not fit stay.
MeshShape NearestShape(const MeshShape& shape, int ranks) {
  MeshShape near;
  near.pipeline = NearestDivisor(shape.pipeline, ranks);
  const int stage_size = ranks / near.pipeline;
  near.expert = NearestDivisor(shape.expert, stage_size);
  near.expert_tensor = NearestDivisor(shape.expert_tensor, stage_size / near.expert);
  near.tensor =
      std::gcd(NearestDivisor(shape.tensor, stage_size), near.expert * near.expert_tensor);
  return near;
}

}  // namespace

absl::Status CheckMeshShape(const MeshShape& shape, int ranks) {
  const std::string problem = ProblemOf(shape, ranks);
  if (problem.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("Mesh: ", problem, "; near it is ", ToString(NearestShape(shape, ranks))));
}

MeshPosition PositionIn(const MeshShape& shape, MeshGroup group, int ranks, int rank) {
  const GroupRanks of = GroupOf(shape, group, ranks, rank);
  return {of.Index(rank), of.size};
}

std::vector<int> RanksOf(const MeshShape& shape, MeshGroup group, int ranks, int rank) {
  const GroupRanks of = GroupOf(shape, group, ranks, rank);
  std::vector<int> members(static_cast<size_t>(of.size));
  for (int i = 0; i < of.size; ++i) members[static_cast<size_t>(i)] = of.Rank(i);
  return members;
}

std::string ToString(const MeshShape& shape) {
  std::vector<std::string> degrees;
  const auto add = [&](const char* axis, int degree) {
    if (degree > 1) degrees.push_back(absl::StrCat(axis, " ", degree));
  };
  add("tensor", shape.tensor);
  add("pipeline", shape.pipeline);
  add("expert-tensor", shape.expert_tensor);
  add("expert", shape.expert);
  return degrees.empty() ? "expert 1" : absl::StrJoin(degrees, ", ");
}

}  // namespace moe
