// Direct dispatch between simulated GPUs of one process, through a whole layer and its gradients.
#include <cstdint>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "kernels/base/log.h"
#include "tests/cusim/fake_streams.h"
#include "tests/moe/layer_harness.h"

namespace moe {
namespace {

using testing::ExpectSameBits;
using testing::LayerResult;
using testing::LayerWork;
using testing::Layout;
using testing::RunLayer;

std::string* logged = nullptr;  // by rank 0 alone

class PeerDispatchTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(testing::LayerDevice(), DeviceKind::kCuda) << "run with MOE_TEST_DEVICE=cuda";
    logged = &log_;
    SetLogCallback([](LogLevel, absl::string_view message) {
      logged->append(message.data(), message.size());
    });
  }
  void TearDown() override { SetLogCallback(nullptr); }

  static LayerWork Work() {
    MoeLayerConfig config;
    config.router = {.num_experts = 7, .top_k = 2, .hidden_size = 12, .aux_loss_coeff = 0.01f};
    config.ffn_hidden_size = 8;
    return testing::MakeWork(config, {6, 5, 0, 7, 3});
  }

  std::string log_;
};

template <typename T>
void ExpectTheBitsOfOneRank(const LayerWork& work, const std::vector<Layout>& layouts) {
  const LayerResult one = RunLayer<T>(work, {}, Numerics::kLayoutInvariant);
  for (const Layout& layout : layouts) {
    SCOPED_TRACE(::testing::PrintToString(layout));
    ExpectSameBits(RunLayer<T>(work, layout, Numerics::kLayoutInvariant), one);
  }
}

constexpr auto kDirect = DispatchAlgorithm::kDirect;

TEST_F(PeerDispatchTest, HasTheBitsOfOneRankOverTwoAndThreeDevices) {
  for (const int devices : {2, 3}) {
    for (const uint32_t seed : {1, 2}) {
      SCOPED_TRACE(absl::StrCat(devices, " devices, seed ", seed));
      const cusim::ScopedMachine machine({.devices = devices});
      cusim::SeedStreams(seed);
      ExpectTheBitsOfOneRank<float>(
          Work(),
          {{.ranks = devices, .expert_parallel = devices, .dispatch = kDirect},
           {.ranks = devices, .expert_parallel = devices, .dispatch = kDirect, .overlap = 3},
           // More ranks than devices: peers on this one and on others. Then two groups.
           {.ranks = 4, .expert_parallel = 4, .dispatch = kDirect, .overlap = 2},
           {.ranks = 4, .expert_parallel = 2, .dispatch = kDirect}});
    }
  }
  const cusim::ScopedMachine machine({.devices = 3});
  ExpectTheBitsOfOneRank<BFloat16>(
      Work(), {{.ranks = 3, .expert_parallel = 3, .dispatch = kDirect, .overlap = 2}});
  EXPECT_EQ(log_, "");  // it did not run staged
}

// The first pair in the order of ranks, and once, whatever the number of layers.
TEST_F(PeerDispatchTest, RunsStagedAndNamesThePairThatCannot) {
  const cusim::ScopedMachine machine({.devices = 3, .no_peers = {{2, 0}, {1, 2}}});
  ExpectTheBitsOfOneRank<float>(
      Work(), {{.ranks = 3, .expert_parallel = 3, .dispatch = kDirect},
               {.ranks = 3, .expert_parallel = 3, .dispatch = kDirect, .overlap = 2}});
  EXPECT_EQ(
      log_,
      "direct dispatch without peer memory, running staged: AllocatePeerBuffer: CUDA device 1 "
      "cannot read the memory of CUDA device 2");
}

}  // namespace
}  // namespace moe
