// What a network keeps from forward to backward, by hand.
#include "moe/layer/experts.h"

#include <memory>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "moe/run/session.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/layer_harness.h"

namespace moe {
namespace {

using ::testing::ElementsAre;

// Rows 1 and -1 through max(2 x, 0) * 3, whose gradient by each output is 1.
struct OneNetwork {
  int64_t kept_bytes = 0;  // by forward
  std::vector<float> out, d_rows, d_up, d_down;

  // gate_up_0: the first row's product, as a backward finds it.
  static OneNetwork Run(bool keep_hidden, float gate_up_0) {
    OneNetwork got = {.out = {0, 0}, .d_rows = {0, 0}, .d_up = {0}, .d_down = {0}};
    testing::RunSessions(1, {}, [&](Session& session) -> absl::Status {
      const Context& context = session.context();
      ParameterStore store(DType::kFloat32, 1);
      MOE_ASSIGN_OR_RETURN(const auto network,
                           Experts<float>::Create({.hidden_size = 1,
                                                   .ffn_hidden_size = 1,
                                                   .activation = Activation::kRelu,
                                                   .keep_hidden = keep_hidden},
                                                  {"mlp."}, MeshGroup::kData, store));
      const auto write = [&](int p, float value, std::vector<float>& sum) {
        Parameter& parameter = *store.parameters()[p];
        parameter.set_sum([&sum] { return GradAccumulator(absl::MakeSpan(sum)); });
        return store.WriteMaster(parameter, {value}, *context.host);
      };
      MOE_RETURN_IF_ERROR(write(0, 2, got.d_up));
      MOE_RETURN_IF_ERROR(write(1, 3, got.d_down));

      const std::vector<float> x = {1, -1}, dy = {1, 1};
      const std::vector<int64_t> offsets = {0, 2};
      const LinearRows rows = {.offsets = offsets};
      const MatrixView<const float> d_out(dy.data(), 2, 1);
      const StashHandle stash = session.stashes().Take();
      ExpertsSaved<float> saved;
      MOE_RETURN_IF_ERROR(network->Prepare({x.data(), 2, 1}, stash->device(), saved));
      MOE_RETURN_IF_ERROR(network->Forward(context, rows, saved, {got.out.data(), 2, 1}));
      got.kept_bytes = stash->device().used_bytes();
      saved.gate_up(0, 0) = gate_up_0;

      const WorkspaceScope scope(*context.workspace);
      MOE_RETURN_IF_ERROR(network->PrepareBackward(*context.workspace, saved));
      MOE_RETURN_IF_ERROR(
          network->InputGradient(context, rows, saved, d_out, {got.d_rows.data(), 2, 1}));
      return network->WeightGradient(context, offsets, saved, d_out,
                                     [](Parameter&) { return absl::OkStatus(); });
    });
    return got;
  }
};

TEST(ExpertsTest, HiddenIsKeptOrMadeAgain) {
  for (const bool keep : {true, false}) {
    SCOPED_TRACE(keep);
    const OneNetwork got = OneNetwork::Run(keep, /*gate_up_0=*/2);
    EXPECT_THAT(got.out, ElementsAre(6, 0));
    EXPECT_THAT(got.d_rows, ElementsAre(6, 0));
    EXPECT_THAT(got.d_up, ElementsAre(3));
    EXPECT_THAT(got.d_down, ElementsAre(2));
    EXPECT_EQ(got.kept_bytes, keep ? 128 : 64);  // arrays of eight bytes, each in 64
  }
}

TEST(ExpertsTest, HiddenThatIsMadeAgainIsOfWhatBackwardFinds) {
  EXPECT_THAT(OneNetwork::Run(true, /*gate_up_0=*/5).d_down, ElementsAre(2));
  EXPECT_THAT(OneNetwork::Run(false, /*gate_up_0=*/5).d_down, ElementsAre(5));
}

}  // namespace
}  // namespace moe
