// All MoE layers of a public model in a program's own store, and back into files.
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "moe/hf/hf_save.h"
#include "moe/hf/hf_weights.h"
#include "moe/hf/model_rule.h"
#include "moe/run/session.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/hf/golden_model.h"
#include "tests/moe/io/io_test.h"
#include "tests/moe/status_is.h"

namespace moe::hf {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::RunLocalRanks;
using enum absl::StatusCode;
using testing::StatusIs;

absl::StatusOr<std::vector<LayerWeights>> FindAll(const std::string& model,
                                                  const std::string& files) {
  MOE_ASSIGN_OR_RETURN(const HfConfig config, ReadHfConfig(model + "/config.json"));
  MOE_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(files));
  return LayerWeights::FindAll(config, std::move(checkpoint));
}

// The layers of a model on one rank.
struct Layers {
  std::unique_ptr<Session> session;
  std::unique_ptr<ParameterStore> store;
  std::vector<std::unique_ptr<MoeLayer<float>>> layers;
  std::vector<StoredLayer> stored;
  HfConfig config;

  absl::Status Load(const std::string& folder, int expert_parallel,
                    std::unique_ptr<Communicator> world) {
    MOE_ASSIGN_OR_RETURN(session,
                         Session::Create({.mesh = {.expert = expert_parallel}}, std::move(world)));
    const Context& context = session->context();
    store = std::make_unique<ParameterStore>(DType::kFloat32, 1, context);
    store->set_use(StoreUse::kReading);
    MOE_ASSIGN_OR_RETURN(const auto all, FindAll(folder, folder));
    for (const LayerWeights& weights : all) {
      config = weights.config();
      const std::string prefix = absl::StrCat("block", weights.layer(), ".");
      MOE_ASSIGN_OR_RETURN(layers.emplace_back(),
                           MoeLayer<float>::Create(config.moe, prefix, *store, context));
      MOE_RETURN_IF_ERROR(weights.Load(*store, *context.compute, *context.host, prefix));
      stored.push_back({.layer = weights.layer(), .prefix = prefix});
    }
    return absl::OkStatus();
  }
};

class HfLayersTest : public IoTest {
 protected:
  void ExpectTensorsOf(const std::string& folder) const {
    const auto all = FindAll(folder, folder), saved = FindAll(folder, root_.string());
    ASSERT_TRUE(saved.ok()) << saved.status();
    ASSERT_EQ(saved->size(), all->size());
    size_t count = 0;
    for (size_t n = 0; n < all->size(); ++n) {
      for (size_t i = 0; i < (*all)[n].tensors().size(); ++i) {
        const CheckpointTensor& here = (*saved)[n].tensors()[i].found;
        const CheckpointTensor& there = (*all)[n].tensors()[i].found;
        EXPECT_EQ(here.tensor->type, there.tensor->type);
        EXPECT_EQ(here.file->Data(*here.tensor), there.file->Data(*there.tensor))
            << there.tensor->name;
        ++count;
      }
    }
    EXPECT_EQ(Checkpoint::Open(root_.string())->Names().size(), count);
  }
};

TEST_F(HfLayersTest, AllLayersOfAModelComeBackByteForByteFromAnyLayout) {
  for (const std::string& family : ModelTypes()) {
    for (const auto& [ranks, expert_parallel, shard_bytes] :
         {std::tuple(1, 1, kMaxShardBytes), {3, 3, int64_t{3000}}, {4, 2, kMaxShardBytes}}) {
      RunLocalRanks(ranks, [&](std::unique_ptr<Communicator> world) -> absl::Status {
        Layers layers;
        MOE_RETURN_IF_ERROR(layers.Load(GoldenFolder(family), expert_parallel, std::move(world)));
        return SaveLayers(layers.config, layers.stored, *layers.store, layers.session->context(),
                          {.folder = root_.string(), .max_shard_bytes = shard_bytes});
      });
      EXPECT_EQ(fs::exists(Path("model.safetensors.index.json")), shard_bytes == 3000);
      ExpectTensorsOf(GoldenFolder(family));
      for (const auto& file : fs::directory_iterator(root_)) fs::remove(file);
    }
  }
}

// Rank 1 alone lacks its part, or has a weight that the type of the files has not.
TEST_F(HfLayersTest, WhatCannotBeSavedIsSaidOnEveryRankAndLeavesNoFile) {
  for (const bool lacks : {true, false}) {
    RunLocalRanks(2, [&](std::unique_ptr<Communicator> world) -> absl::Status {
      const int rank = world->rank();
      Layers layers;
      MOE_RETURN_IF_ERROR(layers.Load(GoldenFolder("mixtral"), 2, std::move(world)));
      if (rank == 1 && lacks) layers.stored[1].prefix = "other.";
      Parameter* const last = layers.store->Find("block1.experts.3.down_proj.weight");
      EXPECT_EQ(last != nullptr, rank == 1);
      if (last != nullptr) last->master()[0] = 1e6;
      const absl::Status status =
          SaveLayers(layers.config, layers.stored, *layers.store, layers.session->context(),
                     {.folder = root_.string(), .type = DType::kFloat16});
      EXPECT_EQ(status.code(), rank == (lacks ? 1 : 0) ? kInvalidArgument : kAborted) << status;
      if (lacks) {
        EXPECT_THAT(std::string(status.message()),
                    HasSubstr(rank == 0 ? "rank 1 has no 'block1.experts.2.gate_up_proj.weight'"
                                        : "'other.experts.2.gate_up_proj.weight' is not in the"));
      } else if (rank == 0) {
        EXPECT_THAT(std::string(status.message()), HasSubstr("has the weight 1e+06"));
      }
      return absl::OkStatus();
    });
    EXPECT_EQ(NumFiles(), 0);
  }
}

// Two ranks have the halves of every expert: none has a tensor of the model.
TEST_F(HfLayersTest, PartsOfTensorParallelRanksAreRefused) {
  RunLocalRanks(2, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(HfConfig config, ReadHfConfig(GoldenFolder("mixtral") + "/config.json"));
    config.moe.ffn_hidden_size = 32;
    MOE_ASSIGN_OR_RETURN(
        const auto session,
        Session::Create({.mesh = {.expert_tensor = 2}, .tensor_leaves = 2}, std::move(world)));
    ParameterStore store(DType::kFloat32, 1, session->context());
    MOE_RETURN_IF_ERROR(
        MoeLayer<float>::Create(config.moe, "block0.", store, session->context()).status());
    EXPECT_THAT(
        SaveLayers(config, {{.layer = 0, .prefix = "block0."}}, store, session->context(),
                   {.folder = root_.string()}),
        StatusIs(kUnimplemented, "gate_up_proj.weight' is cut among tensor-parallel ranks"));
    return absl::OkStatus();
  });
  EXPECT_EQ(NumFiles(), 0);
}

TEST_F(HfLayersTest, ALayerThatTheFilesLackIsNamed) {
  fs::copy(GoldenFolder("qwen3_moe"), root_);
  Write("config.json", Changed("qwen3_moe", R"({"num_hidden_layers": 3})"));
  EXPECT_THAT(FindAll(root_.string(), root_.string()),
              StatusIs(kDataLoss, "tensor 'model.layers.2.mlp.gate.weight': is missing"));
}

}  // namespace
}  // namespace moe::hf
