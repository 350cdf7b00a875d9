// comm/mesh: which ranks form a group, and their communicators on threads.
#include "comm/mesh/mesh.h"

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/comm/local_ranks.h"

namespace moe {
namespace {

using ::testing::HasSubstr;

constexpr int kGroups = static_cast<int>(MeshGroup::kCount);

// Indices of a rank, counted up digit by digit in the order of mesh_shape.h rather than divided.
struct Indices {
  int pipeline, data, tensor, expert_data, expert, expert_tensor;
  bool end;  // of the pipeline
};

std::vector<Indices> IndicesOf(const MeshShape& shape, int ranks) {
  const int stage = ranks / shape.pipeline;
  std::vector<Indices> all;
  for (int p = 0; p < shape.pipeline; ++p) {
    const size_t first = all.size();
    for (int d = 0; d < stage / shape.tensor; ++d) {
      for (int t = 0; t < shape.tensor; ++t) {
        all.push_back(
            {.pipeline = p, .data = d, .tensor = t, .end = p == 0 || p + 1 == shape.pipeline});
      }
    }
    size_t at = first;
    for (int d = 0; d < stage / shape.expert / shape.expert_tensor; ++d) {
      for (int e = 0; e < shape.expert; ++e) {
        for (int t = 0; t < shape.expert_tensor; ++t, ++at) {
          all[at].expert_data = d;
          all[at].expert = e;
          all[at].expert_tensor = t;
        }
      }
    }
  }
  return all;
}

// Whether two ranks are in one group: all other indices are equal.
bool Together(MeshGroup group, const Indices& a, const Indices& b) {
  const bool stage = a.pipeline == b.pipeline;
  const bool block = stage && a.expert_data == b.expert_data;
  switch (group) {
    case MeshGroup::kEnds:
      return stage || (a.end && b.end);
    case MeshGroup::kStage:
      return stage;
    case MeshGroup::kData:
      return stage && a.tensor == b.tensor;
    case MeshGroup::kTensor:
      return stage && a.data == b.data;
    case MeshGroup::kPipeline:
      return a.data == b.data && a.tensor == b.tensor;
    case MeshGroup::kExpertBlock:
      return block;
    case MeshGroup::kExpert:
      return block && a.expert_tensor == b.expert_tensor;
    case MeshGroup::kExpertTensor:
      return block && a.expert == b.expert;
    case MeshGroup::kExpertData:
      return stage && a.expert == b.expert && a.expert_tensor == b.expert_tensor;
    case MeshGroup::kExpertHolders:
      return stage && a.expert == b.expert;
    default:
      return true;
  }
}

void ExpectGroupsOf(const MeshShape& shape, int ranks) {
  const std::vector<Indices> all = IndicesOf(shape, ranks);
  for (int g = 0; g < kGroups; ++g) {
    const auto group = static_cast<MeshGroup>(g);
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<int> members;
      int index = 0;
      for (int other = 0; other < ranks; ++other) {
        if (!Together(group, all[rank], all[other])) continue;
        if (other == rank) index = static_cast<int>(members.size());
        members.push_back(other);
      }
      const MeshPosition position = PositionIn(shape, group, ranks, rank);
      const bool same = RanksOf(shape, group, ranks, rank) == members && position.index == index &&
                        position.size == static_cast<int>(members.size());
      ASSERT_TRUE(same) << ToString(shape) << ", " << ranks << " ranks, group " << g << ", rank "
                        << rank;
    }
  }
}

TEST(MeshShapeTest, GroupsAreThoseOfEnumeration) {
  int shapes = 0;
  for (int ranks = 1; ranks <= 24; ++ranks) {
    for (int pipeline = 1; pipeline <= ranks; ++pipeline) {
      for (int tensor = 1; tensor <= ranks; ++tensor) {
        for (int expert_tensor = 1; expert_tensor <= ranks; ++expert_tensor) {
          for (int expert = 1; expert <= ranks; ++expert) {
            const int block = expert * expert_tensor;
            const bool valid = ranks % pipeline == 0 && ranks / pipeline % tensor == 0 &&
                               ranks / pipeline % block == 0 && block % tensor == 0;
            const MeshShape shape = {tensor, pipeline, expert_tensor, expert};
            ASSERT_EQ(CheckMeshShape(shape, ranks).ok(), valid) << ToString(shape) << " " << ranks;
            if (!valid) continue;
            ++shapes;
            ExpectGroupsOf(shape, ranks);
          }
        }
      }
    }
  }
  EXPECT_GT(shapes, 500);
}

TEST(MeshShapeTest, ARefusalNamesAShapeThatFits) {
  const auto error = [](const MeshShape& shape, int ranks) {
    return std::string(CheckMeshShape(shape, ranks).message());
  };
  EXPECT_EQ(error({.expert = 3}, 8),
            "Mesh: expert-parallel size 3, expected a divisor of 8 ranks; near it is expert 4");
  EXPECT_EQ(error({.expert = 0}, 6),
            "Mesh: expert-parallel size 0, expected a divisor of 6 ranks; near it is expert 1");
  EXPECT_EQ(error({.tensor = 4, .pipeline = 2}, 12),
            "Mesh: tensor-parallel size 4, expected a divisor of 6 ranks of a pipeline stage; near "
            "it is pipeline 2");
  EXPECT_EQ(error({.tensor = 4, .expert = 2}, 8),
            "Mesh: tensor-parallel size 4, expected a divisor of 2 ranks that hold every expert "
            "once; near it is tensor 2, expert 2");
  EXPECT_THAT(error({.expert_tensor = 3, .expert = 2}, 8), HasSubstr("expected a divisor of 4 "));
  for (int ranks = 1; ranks <= 16; ++ranks) {
    for (int size = 0; size <= 20; ++size) {
      const std::string text = error({.expert = size}, ranks);
      if (text.empty()) continue;
      const int near = std::stoi(text.substr(text.rfind(' ')));
      EXPECT_TRUE(CheckMeshShape({.expert = near}, ranks).ok()) << text;
    }
  }
}

// Runs body(mesh or error) on every rank of a new world.
void OnMesh(int ranks, const MeshShape& shape,
            const std::function<void(absl::StatusOr<std::unique_ptr<Mesh>>, Stream&)>& body) {
  testing::RunLocalRanks(ranks, [&](std::unique_ptr<Communicator> world) {
    const auto stream = MakeInlineStream();
    body(Mesh::Create(std::move(world), shape), *stream);
    return absl::OkStatus();
  });
}

std::vector<int> Members(Communicator& group, int world_rank, Stream& stream) {
  const int32_t mine = world_rank;
  std::vector<int32_t> members(static_cast<size_t>(group.size()), -1);
  EXPECT_TRUE(group.AllGather<int32_t>({&mine, 1}, absl::MakeSpan(members), stream).ok());
  return {members.begin(), members.end()};
}

TEST(MeshTest, CommunicatorsHaveTheRanksOfTheirGroups) {
  for (const auto& each : std::vector<std::pair<int, MeshShape>>{
           {1, {}},
           {3, {}},
           {3, {.expert = 3}},
           {6, {.expert = 2}},
           {8, {.tensor = 2, .expert = 4}},
           {8, {.tensor = 2, .pipeline = 2, .expert_tensor = 2}}}) {
    const int ranks = each.first;
    const MeshShape shape = each.second;
    OnMesh(ranks, shape, [&](absl::StatusOr<std::unique_ptr<Mesh>> made, Stream& stream) {
      ASSERT_TRUE(made.ok()) << made.status();
      Mesh& mesh = **made;
      const int rank = mesh.world().rank();
      ASSERT_TRUE(mesh.Open(MeshLane::kWeights).ok());
      Communicator* const weights = &mesh.group(MeshGroup::kData, MeshLane::kWeights);
      ASSERT_TRUE(mesh.Open(MeshLane::kWeights).ok());  // once is enough
      EXPECT_EQ(&mesh.group(MeshGroup::kData, MeshLane::kWeights), weights);
      ASSERT_TRUE(mesh.Open(MeshGroup::kEnds, MeshLane::kGradients).ok());
      for (const auto& [group, lane] : {std::pair(MeshGroup::kExpert, MeshLane::kForward),
                                        std::pair(MeshGroup::kExpertBlock, MeshLane::kForward),
                                        std::pair(MeshGroup::kExpertTensor, MeshLane::kForward),
                                        std::pair(MeshGroup::kExpertTensor, MeshLane::kGradients),
                                        std::pair(MeshGroup::kTensor, MeshLane::kForward),
                                        std::pair(MeshGroup::kEnds, MeshLane::kGradients),
                                        std::pair(MeshGroup::kStage, MeshLane::kGradients),
                                        std::pair(MeshGroup::kData, MeshLane::kGradients),
                                        std::pair(MeshGroup::kExpertData, MeshLane::kGradients),
                                        std::pair(MeshGroup::kExpertHolders, MeshLane::kGradients),
                                        std::pair(MeshGroup::kExpertHolders, MeshLane::kWeights),
                                        std::pair(MeshGroup::kStage, MeshLane::kWeights),
                                        std::pair(MeshGroup::kData, MeshLane::kWeights),
                                        std::pair(MeshGroup::kExpertData, MeshLane::kWeights)}) {
        if (group == MeshGroup::kTensor && shape.tensor == 1) continue;  // it has none
        if (group == MeshGroup::kExpertTensor && shape.expert_tensor == 1) continue;
        Communicator& communicator = mesh.group(group, lane);
        EXPECT_EQ(Members(communicator, rank, stream), RanksOf(shape, group, ranks, rank));
        EXPECT_EQ(communicator.rank(), mesh.index(group));
        EXPECT_EQ(communicator.size(), mesh.size(group));
      }
    });
  }
}

TEST(MeshTest, GroupsOfTheSameRanksShareCommunicators) {
  OnMesh(4, {.expert = 4}, [](absl::StatusOr<std::unique_ptr<Mesh>> made, Stream&) {
    Mesh& mesh = **made;
    constexpr MeshLane kGradients = MeshLane::kGradients;
    EXPECT_EQ(&mesh.group(MeshGroup::kStage, kGradients),
              &mesh.group(MeshGroup::kData, kGradients));
    EXPECT_EQ(&mesh.group(MeshGroup::kExpertBlock), &mesh.group(MeshGroup::kExpert));
    EXPECT_EQ(mesh.Canonical(MeshGroup::kData), MeshGroup::kWorld);
    EXPECT_EQ(mesh.Canonical(MeshGroup::kExpert), MeshGroup::kExpertBlock);
    EXPECT_NE(&mesh.world(), &mesh.group(MeshGroup::kData, kGradients));
  });
  // Experts that every rank holds stay apart from what else every rank holds.
  OnMesh(2, {}, [](absl::StatusOr<std::unique_ptr<Mesh>> made, Stream&) {
    EXPECT_EQ((*made)->Canonical(MeshGroup::kExpertData), MeshGroup::kExpertData);
  });
  OnMesh(4, {.tensor = 2, .expert = 2}, [](absl::StatusOr<std::unique_ptr<Mesh>> made, Stream&) {
    EXPECT_EQ((*made)->Canonical(MeshGroup::kData), MeshGroup::kData);
    EXPECT_EQ((*made)->Canonical(MeshGroup::kStage), MeshGroup::kWorld);
  });
}

TEST(MeshTest, AShapeThatDoesNotFitIsRefusedOnEveryRank) {
  OnMesh(4, {.expert = 3}, [](absl::StatusOr<std::unique_ptr<Mesh>> mesh, Stream&) {
    EXPECT_EQ(mesh.status().code(), absl::StatusCode::kInvalidArgument);
  });
}

TEST(MeshTest, GradientGroupsOverlapTokenExchange) {
  OnMesh(4, {.expert = 2}, [](absl::StatusOr<std::unique_ptr<Mesh>> made, Stream& stream) {
    Mesh& mesh = **made;
    const auto second = MakeStream({}).value();
    std::vector<int64_t> dense(100, 1), expert(100, 1), tokens(100, 1);
    const auto sum = [](std::vector<int64_t>& values, Communicator& group, Stream& on) {
      ASSERT_TRUE(group.AllReduce(absl::MakeSpan(values), ReduceOp::kSum, on).ok());
    };
    sum(dense, mesh.group(MeshGroup::kStage, MeshLane::kGradients), *second);
    sum(expert, mesh.group(MeshGroup::kExpertData, MeshLane::kGradients), *second);
    sum(tokens, mesh.group(MeshGroup::kExpert), stream);
    ASSERT_TRUE(second->Synchronize().ok());
    EXPECT_THAT(dense, ::testing::Each(4));
    EXPECT_THAT(expert, ::testing::Each(2));
    EXPECT_THAT(tokens, ::testing::Each(2));
  });
}

TEST(MeshTest, AbortReachesEveryGroup) {
  OnMesh(4, {.expert = 2}, [](absl::StatusOr<std::unique_ptr<Mesh>> made, Stream&) {
    Mesh& mesh = **made;
    Communicator& gradients = mesh.group(MeshGroup::kStage, MeshLane::kGradients);
    Communicator& experts = mesh.group(MeshGroup::kExpert);
    if (mesh.world().rank() == 3) mesh.Abort(absl::InternalError("stop"));
    EXPECT_EQ(gradients.Barrier().code(), absl::StatusCode::kAborted);
    EXPECT_EQ(experts.Barrier().code(), absl::StatusCode::kAborted);
  });
}

}  // namespace
}  // namespace moe
