// The partials of a norm's weight, by hand.
#include "moe/lm/dense.h"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "moe/run/session.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/layer_harness.h"

namespace moe::lm {
namespace {

// Norms of one value each, which are 1: the weight's gradient is the sum of dy. On a grid of
// quarters 0.75 is 3, its halves of 0.375 are 2 each.
constexpr ExactGrid kGrid = {.unit_log2 = -2, .max_terms = 4};
std::vector<float> X() {
  return {1, 2, 4};
}
std::vector<float> Dy() {
  return {0.375f, 0.25f, 0.125f};
}

// Sum of the partials of `segments`: of rows, or of groups of one row.
int64_t SumOf(const std::vector<int64_t>& segments, bool of_rows) {
  int64_t sum = 0;
  testing::RunSessions(1, {}, [&](Session& session) -> absl::Status {
    const Context& context = session.context();
    ParameterStore store(DType::kFloat32, 5);
    MOE_ASSIGN_OR_RETURN(const auto norm, Norm<float>::Create("norm.weight", 1, 0, store));
    Parameter& weight = *store.parameters().front();
    GridTally tally;
    weight.set_sum([&] { return GradAccumulator({&sum, 1}, kGrid, &tally); });
    std::vector<float> x = X(), dy = Dy(), y(3), dx(3);
    const int64_t rows = of_rows ? 3 : 1, cols = 3 / rows;
    const auto view = [&](std::vector<float>& of) {
      return MatrixView<float>(of.data(), rows, cols);
    };
    const Pass pass = {.context = context};
    NormSaved<float> saved;
    MOE_RETURN_IF_ERROR(norm.Forward(pass, view(x), view(y), saved));
    const auto ready = [](Parameter&) {
      return absl::OkStatus();
    };
    if (of_rows) {
      return norm.Backward(pass, saved, segments, view(dy), view(dx), Write::kOverwrite, ready);
    }
    return norm.GroupsBackward(pass, saved, segments, view(dy), view(dx), ready);
  });
  return sum;
}

TEST(NormTest, EachSegmentOfRowsIsRoundedToTheGridOnce) {
  EXPECT_EQ(SumOf({0, 3}, true), 3);
  EXPECT_EQ(SumOf({0, 1, 1, 3}, true), 4);
}

TEST(NormTest, EachSegmentOfGroupsIsRoundedToTheGridOnce) {
  EXPECT_EQ(SumOf({0, 3}, false), 3);
  EXPECT_EQ(SumOf({0, 1, 1, 3}, false), 4);
}

}  // namespace
}  // namespace moe::lm
