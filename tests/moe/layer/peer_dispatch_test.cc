// Direct dispatch between simulated GPUs of one process, through a whole layer and its gradients.
#include <cstdint>
#include <string>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "kernels/base/log.h"
#include "tests/cusim/fake_streams.h"
#include "tests/moe/cli/verify/verify_case.h"

namespace moe {
namespace {

using verify::ExpectHolds;
using verify::ProblemSpec;

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

  static ProblemSpec Spec() {
    ProblemSpec spec = {.micro_batch_tokens = {6, 5, 0, 7, 3}};
    spec.layer.router = {.num_experts = 7, .top_k = 2, .hidden_size = 12, .aux_loss_coeff = 0.01f};
    spec.layer.ffn_hidden_size = 8;
    return spec;
  }

  std::string log_;
};

constexpr auto kDirect = DispatchAlgorithm::kDirect;

TEST_F(PeerDispatchTest, HoldsOverTwoAndThreeDevices) {
  for (const int devices : {2, 3}) {
    for (const uint32_t seed : {1, 2}) {
      SCOPED_TRACE(absl::StrCat(devices, " devices, seed ", seed));
      const cusim::ScopedMachine machine({.devices = devices});
      cusim::SeedStreams(seed);
      ExpectHolds(
          Spec(),
          {{.ranks = devices, .expert_parallel = devices, .dispatch = kDirect},
           {.ranks = devices, .expert_parallel = devices, .dispatch = kDirect, .overlap = 3},
           // More ranks than devices: peers on this one and on others. Then two groups.
           {.ranks = 4, .expert_parallel = 4, .dispatch = kDirect, .overlap = 2},
           {.ranks = 4, .expert_parallel = 2, .dispatch = kDirect}});
    }
  }
  const cusim::ScopedMachine machine({.devices = 3});
  ProblemSpec narrow = Spec();
  narrow.dtype = DType::kBFloat16;
  ExpectHolds(narrow, {{.ranks = 3, .expert_parallel = 3, .dispatch = kDirect, .overlap = 2}});
  EXPECT_EQ(log_, "");  // it did not run staged
}

// The first pair in the order of ranks, and once, whatever the number of layers.
TEST_F(PeerDispatchTest, RunsStagedAndNamesThePairThatCannot) {
  const cusim::ScopedMachine machine({.devices = 3, .no_peers = {{2, 0}, {1, 2}}});
  ExpectHolds(Spec(), {{.ranks = 3, .expert_parallel = 3, .dispatch = kDirect},
                       {.ranks = 3, .expert_parallel = 3, .dispatch = kDirect, .overlap = 2}});
  EXPECT_EQ(
      log_,
      "direct dispatch without peer memory, running staged: AllocatePeerBuffer: CUDA device 1 "
      "cannot read the memory of CUDA device 2");
}

}  // namespace
}  // namespace moe
