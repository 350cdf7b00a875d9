// Memory of x, y, dy and dx: what may be in the memory of what, and what is refused.
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/comm/local_ranks.h"
#include "tests/moe/layer_harness.h"
#include "tests/moe/status_is.h"

namespace moe {
namespace {

using testing::kHidden;
using testing::RunLocalRanks;
using testing::StatusIs;
using enum absl::StatusCode;

constexpr int64_t kCallRows = 6;

struct LayerKind {
  const char* name;
  MoeLayerConfig config = {
      .router = {.num_experts = 4, .top_k = 2, .hidden_size = kHidden, .aux_loss_coeff = 0.1f},
      .ffn_hidden_size = 12};
  // In the same memory: y and x in evaluation, dx and dy.
  bool forward_in_place = true, backward_in_place = true;
};

std::vector<LayerKind> LayerKinds() {
  std::vector<LayerKind> kinds(6);
  kinds[0].name = "routed experts";
  kinds[1].name = "a shared expert";
  kinds[1].config.shared_expert_ffn_hidden_size = 8;
  kinds[1].backward_in_place = false;
  kinds[2] = kinds[1];
  kinds[2].name = "a gated shared expert";
  kinds[2].config.gated_shared_expert = true;
  kinds[3].name = "identity experts";
  kinds[3].config.router.gate = "longcat";
  kinds[3].config.router.num_zero_experts = 2;
  kinds[3].forward_in_place = kinds[3].backward_in_place = false;
  kinds[4].name = "weights on the input";
  kinds[4].config.router.gate = "llama4";
  kinds[5].name = "direct dispatch";
  kinds[5].config.dispatcher.algorithm = DispatchAlgorithm::kDirect;
  return kinds;
}

// One rank, whose call 0 has kCallRows rows of values, and call 1 has memory for twice as many.
struct MemoryRank : testing::LayerRank {
  std::vector<float> values;

  absl::Status Create(const MoeLayerConfig& config, std::unique_ptr<Communicator> world) {
    values = testing::RowValues(kCallRows, world->rank());
    MOE_RETURN_IF_ERROR(LayerRank::Create(config, testing::LayerDevice(), {}, std::move(world),
                                          {kCallRows, 2 * kCallRows}));
    return x[0].Write(values, context());
  }
  absl::Status Forward(MatrixView<const float> from, MatrixView<float> to, Stash* stash) {
    return layer->Forward({.context = context(), .stash = stash}, from, to);
  }
  absl::Status Backward(MatrixView<const float> dy, Stash* stash, MatrixView<float> into) {
    return layer->Backward({.context = context(), .stash = stash}, dy, into,
                           [](Parameter&) { return absl::OkStatus(); });
  }
  absl::StatusOr<std::vector<float>> Read(testing::DeviceRows& rows) {
    std::vector<float> read(values.size());
    MOE_RETURN_IF_ERROR(rows.Read(read, context()));
    return read;
  }
};

void ForEachKind(absl::FunctionRef<absl::Status(const LayerKind&, MemoryRank&)> body) {
  for (const LayerKind& kind : LayerKinds()) {
    SCOPED_TRACE(kind.name);
    RunLocalRanks(2, [&](std::unique_ptr<Communicator> world) -> absl::Status {
      MemoryRank rank;
      MOE_RETURN_IF_ERROR(rank.Create(kind.config, std::move(world)));
      return body(kind, rank);
    });
  }
}

TEST(LayerMemoryTest, EvaluationWorksInPlaceUnlessAnIdentityExpertReadsX) {
  ForEachKind([](const LayerKind& kind, MemoryRank& rank) -> absl::Status {
    const MatrixView<float> x = rank.x[0].view();
    if (!kind.forward_in_place) {
      EXPECT_THAT(rank.Forward(x, x, nullptr),
                  StatusIs(kInvalidArgument,
                           "y is in the memory of x, expected memory of its own, since an identity "
                           "expert reads x"));
      return absl::OkStatus();
    }
    MOE_RETURN_IF_ERROR(rank.Forward(x, rank.y[0].view(), nullptr));
    MOE_ASSIGN_OR_RETURN(const std::vector<float> expected, rank.Read(rank.y[0]));
    MOE_RETURN_IF_ERROR(rank.Forward(x, x, nullptr));
    MOE_ASSIGN_OR_RETURN(const std::vector<float> in_place, rank.Read(rank.x[0]));
    testing::ExpectSameBits("y", in_place, expected);
    return absl::OkStatus();
  });
}

TEST(LayerMemoryTest, GradientInPlaceIsThatOfMemoryOfItsOwnOrRefused) {
  ForEachKind([](const LayerKind& kind, MemoryRank& rank) -> absl::Status {
    const MatrixView<float> dy = rank.y[0].view();
    std::vector<float> of_its_own;
    for (const bool in_place : {false, true}) {
      const StashHandle taken = rank.Take();
      Stash* const stash = taken.get();
      MOE_RETURN_IF_ERROR(rank.Forward(rank.x[0].view(), dy, stash));
      const absl::Status status = rank.Backward(dy, stash, in_place ? dy : rank.dx[0].view());
      if (in_place && !kind.backward_in_place) {
        EXPECT_THAT(status, StatusIs(kInvalidArgument, "dx is in the memory of dy"));
        continue;
      }
      MOE_RETURN_IF_ERROR(status);
      MOE_ASSIGN_OR_RETURN(const auto dx, rank.Read(in_place ? rank.y[0] : rank.dx[0]));
      if (in_place) testing::ExpectSameBits("dx", dx, of_its_own);
      of_its_own = dx;
    }
    return absl::OkStatus();
  });
}

// Backward reads x, whatever the layer is.
TEST(LayerMemoryTest, OverlapIsRefusedWhereBackwardMayFollow) {
  ForEachKind([](const LayerKind&, MemoryRank& rank) -> absl::Status {
    const MatrixView<float> x = rank.x[0].view(), y = rank.y[0].view();
    const MatrixView<float> twice = rank.x[1].view();
    const MatrixView<float> first = RowRange<float>(twice, 0, kCallRows);
    const MatrixView<float> next = RowRange<float>(twice, 1, kCallRows + 1);
    const StashHandle taken = rank.Take();
    Stash* const stash = taken.get();
    EXPECT_THAT(rank.Forward(x, x, stash),
                StatusIs(kInvalidArgument,
                         "y is in the memory of x, expected memory of its own, since Backward "
                         "reads x"));
    for (Stash* const of_call : {stash, static_cast<Stash*>(nullptr)}) {
      EXPECT_THAT(rank.Forward(first, next, of_call),
                  StatusIs(kInvalidArgument, "y is partly in the memory of x"));
    }
    MOE_RETURN_IF_ERROR(rank.Forward(x, y, stash));  // what was refused has left no trace
    EXPECT_THAT(rank.Backward(y, stash, x),
                StatusIs(kInvalidArgument, "dx is in the memory of x, expected memory of its own"));
    EXPECT_THAT(rank.Backward(next, stash, first),
                StatusIs(kInvalidArgument, "dx is partly in the memory of dy"));
    return rank.Backward(y, stash, rank.dx[0].view());
  });
}

// All gradients of one rank. moved_by: x is in other memory in backward, with this added to its
// first value.
std::vector<std::vector<float>> GradientsOf(const MoeLayerConfig& config,
                                            std::optional<float> moved_by) {
  std::vector<std::vector<float>> gradients;
  RunLocalRanks(1, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    MemoryRank rank;
    MOE_RETURN_IF_ERROR(rank.Create(config, std::move(world)));
    const StashHandle stash = rank.Take();
    const MatrixView<float> y = rank.y[0].view();
    MOE_RETURN_IF_ERROR(rank.Forward(rank.x[0].view(), y, stash.get()));
    if (moved_by.has_value()) {
      std::vector<float> other = rank.values;
      other.resize(2 * other.size());
      other[0] += *moved_by;
      MOE_RETURN_IF_ERROR(rank.x[1].Write(other, rank.context()));
      MOE_RETURN_IF_ERROR(rank.x[0].Write(std::vector<float>(rank.values.size()), rank.context()));
      const Pass pass = {.context = rank.context(), .stash = stash.get()};
      EXPECT_THAT(rank.layer->MoveInput(pass, rank.x[1].view()),
                  StatusIs(kInvalidArgument, "x is [12, 8], expected [6, 8]"));
      MOE_RETURN_IF_ERROR(
          rank.layer->MoveInput(pass, RowRange<float>(rank.x[1].view(), 0, kCallRows)));
    }
    MOE_RETURN_IF_ERROR(rank.Backward(y, stash.get(), rank.dx[0].view()));
    MOE_ASSIGN_OR_RETURN(gradients.emplace_back(), rank.Read(rank.dx[0]));
    return rank.ReadGradients(gradients);
  });
  return gradients;
}

TEST(LayerMemoryTest, BackwardReadsTheXThatWasMoved) {
  for (const LayerKind& kind : LayerKinds()) {
    SCOPED_TRACE(kind.name);
    const auto expected = GradientsOf(kind.config, std::nullopt);
    EXPECT_EQ(GradientsOf(kind.config, 0), expected);
    EXPECT_NE(GradientsOf(kind.config, 1), expected);
  }
}

TEST(LayerMemoryTest, RowsWithoutMemoryAreRefusedAndNoRowsNeedNone) {
  RunLocalRanks(1, [](std::unique_ptr<Communicator> world) -> absl::Status {
    MemoryRank rank;
    MOE_RETURN_IF_ERROR(rank.Create(LayerKind{}.config, std::move(world)));
    const MatrixView<float> x = rank.x[0].view(), y = rank.y[0].view();
    const MatrixView<float> null(nullptr, kCallRows, kHidden), none(nullptr, 0, kHidden);
    const StashHandle taken = rank.Take();
    Stash* const stash = taken.get();
    EXPECT_THAT(rank.Forward(null, y, stash),
                StatusIs(kInvalidArgument, "x [6, 8] is null, expected its memory"));
    EXPECT_THAT(rank.Forward(x, null, nullptr), StatusIs(kInvalidArgument, "y [6, 8] is null"));
    const MatrixView<float> negative(x.data(), -1, kHidden);
    EXPECT_THAT(rank.Forward(negative, negative, nullptr), StatusIs(kInvalidArgument, "x [-1, 8]"));
    MOE_RETURN_IF_ERROR(rank.Forward(x, y, stash));
    EXPECT_THAT(rank.Backward(null, stash, x), StatusIs(kInvalidArgument, "dy [6, 8] is null"));
    EXPECT_THAT(rank.Backward(y, stash, null), StatusIs(kInvalidArgument, "dx [6, 8] is null"));
    MOE_RETURN_IF_ERROR(rank.Backward(y, stash, rank.dx[0].view()));
    MOE_RETURN_IF_ERROR(rank.Forward(none, none, stash));
    MOE_RETURN_IF_ERROR(rank.Backward(none, stash, none));
    return rank.context().compute->Synchronize();
  });
}

}  // namespace
}  // namespace moe
