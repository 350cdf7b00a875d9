// Training on a CUDA device: the CPU's loss within rounding, and the same bits from every layout.
#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <gtest/gtest.h>

#include "kernels/base/cuda_devices.h"
#include "moe/lm/training_loop.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/layer_harness.h"
#include "tests/moe/lm/train_harness.h"

namespace moe::lm {
namespace {

using ::moe::testing::DeviceRows;
using ::moe::testing::Layout;
using ::moe::testing::RunLocalRanks;
using testing::ExpectSameTrace;
using testing::Trace;
using testing::TrainIn;

// `config` is a device's.
void ExpectTheCpusLoss(TrainConfig config) {
  const Trace cuda = TrainIn(config);
  config.trainer.session.device = DeviceKind::kCpu;
  const Trace cpu = TrainIn(config);
  ASSERT_TRUE(cuda.status.ok()) << cuda.status;
  ASSERT_EQ(cuda.loss.size(), cpu.loss.size());
  // A loss is a mean of logarithms near ln 256. Sums in another order differ by some roundings of
  // the storage type in each of a dozen operations in a row, and two steps of AdamW, whose first
  // moves every weight by about the learning rate whatever the gradient's size, keep that order of
  // magnitude.
  const double unit = config.trainer.dtype == DType::kFloat32 ? 0x1p-24 : 0x1p-9;
  for (size_t i = 0; i < cpu.loss.size(); ++i) {
    EXPECT_NEAR(cuda.loss[i], cpu.loss[i], 16 * unit * std::log(256.0)) << i;
  }
}

class DeviceTrainTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto devices = CudaDevices(); !devices.ok()) GTEST_SKIP() << devices.status();
  }

  static TrainConfig Config(DType dtype) {
    TrainConfig config = testing::SmallConfig();
    config.trainer.dtype = dtype;
    config.steps = 2;
    config.sequence_length = 8;
    config.trainer.micro_batches = 3;
    config.evaluation.sequences = 3;
    config.model.num_layers = 2;
    config.model.moe_layer_freq = 2;  // a dense layer and a mixture
    config.model.moe.shared_expert_ffn_hidden_size = 8;
    config.trainer.session.device = DeviceKind::kCuda;
    return config;
  }
};

TEST_F(DeviceTrainTest, LossIsTheCpusWithinRounding) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    SCOPED_TRACE(NameOf(dtype));
    ExpectTheCpusLoss(Config(dtype));
  }
}

TEST_F(DeviceTrainTest, JitterAndGatedSharedExpertsTrainAsOnTheCpu) {
  TrainConfig config = Config(DType::kFloat32);
  config.model.moe.gated_shared_expert = true;
  config.model.moe.router.gate = "switch";
  config.model.moe.router.top_k = 1;
  config.model.moe.router.input_jitter = 0.1f;
  ExpectTheCpusLoss(config);
}

TEST_F(DeviceTrainTest, EveryLayoutHasTheBitsOfOneRank) {
  const Layout layouts[] = {
      {.ranks = 2, .expert_parallel = 1},
      {.ranks = 3, .expert_parallel = 3, .overlap = 2},
      {.ranks = 4, .expert_parallel = 2, .all_reduce = AllReduceAlgorithm::kDirect},
  };
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Trace one = TrainIn(Config(dtype));
    for (const Layout& layout : layouts) {
      if (dtype != DType::kFloat32 && layout.ranks != 3) continue;  // sums are of one type
      SCOPED_TRACE(::testing::PrintToString(layout));
      ExpectSameTrace(TrainIn(Config(dtype), layout), one);
    }
  }
}

// Leaves of every product of a model: several parts, some without a term.
TEST_F(DeviceTrainTest, TreesHaveTheCpusLossAndTheBitsOfOneRank) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    SCOPED_TRACE(NameOf(dtype));
    TrainConfig config = Config(dtype);
    const Trace chains = TrainIn(config);
    config.trainer.session.tensor_leaves = 4;
    ExpectTheCpusLoss(config);
    const Trace one = TrainIn(config);
    // rounding to bfloat16 hides the order of so few terms
    EXPECT_TRUE(dtype != DType::kFloat32 || one.weights != chains.weights);
    ExpectSameTrace(TrainIn(config, {.ranks = 2, .expert_parallel = 2, .overlap = 2}), one);
  }
}

// Ranks that share matrices of attention, dense and shared networks, experts and the output layer;
// widths of which no rank has the same number; float32 by the CPU's chains, bfloat16 by both kinds
// of tensor cores' instructions. What ranks do to their own rows: a gate of the shared expert,
// capacity of all rows, biases behind sums, and identities.
TrainConfig TensorConfig(TrainConfig config) {
  config.model.hidden_size = 32;
  config.model.num_attention_heads = 8;
  config.model.num_query_groups = 4;
  config.model.kv_channels = 8;
  config.model.qk_norm = QkNorm::kHead;
  config.model.dense_ffn_hidden_size = 72;  // five items, the last of 8
  config.model.moe.ffn_hidden_size = 40;    // three items, the last of 8
  config.model.moe.shared_expert_ffn_hidden_size = 64;
  config.model.moe.gated_shared_expert = true;
  config.model.moe.projection_biases = true;
  RouterConfig& router = config.model.moe.router;
  router.num_experts = 6;
  router.num_zero_experts = 1;
  router.capacity_factor = 1.5f;
  config.trainer.session.tensor_leaves = 4;
  config.steps = 1;
  return config;
}

TEST_F(DeviceTrainTest, RanksThatShareMatricesHaveTheBitsOfOneRank) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    SCOPED_TRACE(NameOf(dtype));
    const TrainConfig config = TensorConfig(Config(dtype));
    if (dtype == DType::kFloat32) ExpectTheCpusLoss(config);
    const Trace one = TrainIn(config);
    for (const Layout& layout :
         {Layout{.ranks = 2, .expert_parallel = 2, .tensor = 2},
          {.ranks = 3, .expert_parallel = 3, .tensor = 3},
          {.ranks = 2, .expert_parallel = 1, .expert_tensor = 2},
          {.ranks = 4, .expert_parallel = 2, .overlap = 2, .tensor = 2, .expert_tensor = 2}}) {
      if (dtype != DType::kFloat32 && layout.ranks == 2) continue;  // fewer parts of the same
      SCOPED_TRACE(::testing::PrintToString(layout));
      ExpectSameTrace(TrainIn(config, layout), one);
    }
  }
}

// A rank whose rows begin elsewhere would multiply by another kernel.
TEST_F(DeviceTrainTest, PartsOfHalfVectorsAreRefusedIn16Bits) {
  TrainConfig config = TensorConfig(Config(DType::kBFloat16));
  config.model.dense_ffn_hidden_size = 140;
  const Layout layout = {.ranks = 2, .expert_parallel = 2, .tensor = 2};
  const absl::Status status = TrainIn(config, layout).status;
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_TRUE(absl::StrContains(status.message(), "has 140 rows in items of 16")) << status;
}

// Saved and resumed, too: what ranks have in parts is the device's.
TEST_F(DeviceTrainTest, ZeroHasTheBitsOfRanksThatKeepAll) {
  const std::string folder = ::testing::TempDir() + "device_zero";
  for (const auto& [dtype, zero] : {std::pair(DType::kFloat32, ZeroStage::kOptimizer),
                                    std::pair(DType::kBFloat16, ZeroStage::kWeights)}) {
    SCOPED_TRACE(NameOf(dtype));
    TrainConfig config = Config(dtype);
    config.trainer.bucket_bytes = 8000;
    const Trace one = TrainIn(config);
    config.trainer.zero = zero;
    ExpectSameTrace(TrainIn(config, {.ranks = 2}), one);
    if (zero != ZeroStage::kWeights) continue;  // of this one the device has the fewest bytes
    std::filesystem::remove_all(folder);
    config.checkpoints.folder = folder;
    config.steps = 1;
    ASSERT_TRUE(TrainIn(config, {.ranks = 4, .expert_parallel = 2}).status.ok());
    config.steps = 2;
    config.checkpoints.resume = TrainCheckpoints::Resume::kAuto;
    EXPECT_EQ(TrainIn(config, {.ranks = 3}).weights, one.weights);
  }
  std::filesystem::remove_all(folder);
}

// What a router learns from whole steps lives on the host.
TEST_F(DeviceTrainTest, BiasesOfExpertsAndCapacity) {
  TrainConfig config = Config(DType::kFloat32);
  RouterConfig& router = config.model.moe.router;
  router.gate = "deepseek-v3";
  router.num_zero_experts = 1;
  router.num_groups = 3;
  router.group_top_k = 2;
  router.bias_update_rate = 0.05f;
  router.load_balancing = LoadBalancing::kGlobalAuxLoss;
  const Trace biased = TrainIn(config);
  ExpectSameTrace(TrainIn(config, {.ranks = 2, .expert_parallel = 2}), biased);

  config = Config(DType::kBFloat16);
  config.model.moe.router.capacity_factor = 1.0;
  config.model.moe.router.pad_to_capacity = true;
  const Trace padded = TrainIn(config);
  ExpectSameTrace(TrainIn(config, {.ranks = 3, .expert_parallel = 3}), padded);
}

// A master there is no memory of the host; an expert bias is.
TEST_F(DeviceTrainTest, MastersOnTheDeviceAreNotAdopted) {
  const auto host = MakeInlineStream();
  ParameterStore store(DType::kFloat32, 1, {.host = host.get(), .memory = *CudaMemory(0)});
  std::vector<float> values = {1, 2};
  Parameter& weight = **store.Add({.name = "w", .cols = 2});
  EXPECT_TRUE(absl::IsUnimplemented(store.Adopt(weight, absl::MakeSpan(values))));
  Parameter& bias = **store.Add({.name = "b", .cols = 2, .trainable = false, .host_state = true});
  EXPECT_TRUE(store.Adopt(bias, absl::MakeSpan(values)).ok());
  EXPECT_EQ(bias.master().data(), values.data());
}

// The host learns of it behind the passes, before a weight moves.
TEST_F(DeviceTrainTest, ALogitThatIsNotFiniteEndsAStepAndAnEvaluation) {
  for (const bool evaluates : {false, true}) {
    RunLocalRanks(1, [&](std::unique_ptr<Communicator> world) -> absl::Status {
      MOE_ASSIGN_OR_RETURN(
          const auto trainer,
          moe::Trainer::Create(::moe::testing::Options({}, DeviceKind::kCuda), std::move(world)));
      MOE_ASSIGN_OR_RETURN(auto* const layer,
                           trainer->AddMoeLayer<float>("mlp.", ::moe::testing::LayerConfig()));
      Parameter& gate = *layer->parameters().front();
      const std::vector<float> bad(gate.size(), std::numeric_limits<float>::quiet_NaN());
      const Context& context = trainer->context();
      MOE_RETURN_IF_ERROR(trainer->parameters().WriteMaster(gate, bad, *context.compute));
      absl::Status end;
      if (evaluates) {
        MOE_RETURN_IF_ERROR(trainer->BeginEvaluation(1));
        MOE_ASSIGN_OR_RETURN(const Round round, trainer->BeginRound());
        MOE_ASSIGN_OR_RETURN(auto x, DeviceRows::Create(::moe::testing::kTokens, context));
        MOE_ASSIGN_OR_RETURN(auto y, DeviceRows::Create(::moe::testing::kTokens, context));
        MOE_RETURN_IF_ERROR(x.Write(::moe::testing::Rows(round), context));
        MOE_RETURN_IF_ERROR(layer->Forward(round, x.view(), y.view()));
        end = trainer->EndStep();
      } else {
        end = ::moe::testing::RunStep(*trainer, *layer);
      }
      EXPECT_EQ(end, absl::DataLossError("layer 0: the router's logit of token 0 for expert 0 is "
                                         "not finite: look at x and the router's weight and bias"));
      return absl::OkStatus();
    });
  }
}

// Through cuBLAS, whose sums have an order of their own.
TEST_F(DeviceTrainTest, EveryChoiceOfProductsTrains) {
  TrainConfig config = Config(DType::kBFloat16);
  config.trainer.session.numerics = Numerics::kFast;
  config.trainer.session.grouped_gemm = GroupedGemmKernel::kMma;
  const Trace mma = TrainIn(config);
  for (const auto& [kernel, ranks] :
       {std::pair(GroupedGemmKernel::kAuto, 1), std::pair(GroupedGemmKernel::kAuto, 2),
        std::pair(GroupedGemmKernel::kCublas, 2)}) {
    config.trainer.session.grouped_gemm = kernel;
    const Trace other = TrainIn(config, {.ranks = ranks, .expert_parallel = ranks});
    ASSERT_TRUE(other.status.ok()) << other.status;
    for (size_t i = 0; i < mma.loss.size(); ++i) {
      EXPECT_NEAR(other.loss[i], mma.loss[i], 16 * 0x1p-9 * std::log(256.0)) << i;
    }
  }
  config.trainer.session.numerics = Numerics::kLayoutInvariant;
  EXPECT_EQ(TrainIn(config).status.code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace moe::lm
