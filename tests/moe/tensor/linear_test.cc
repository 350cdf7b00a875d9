// Linear: products of grouped rows by hand, the order of their terms, who reports gradients.
#include "moe/tensor/linear.h"

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "moe/run/session.h"
#include "tests/comm/local_ranks.h"

namespace moe {
namespace {

using ::testing::ElementsAre;

MATCHER_P4(IsTree, extent, item, parts, first_times, "") {
  return arg.cut.leaves == 8 && arg.cut.extent == extent && arg.cut.item == item &&
         arg.parts == parts && arg.first_times == first_times;
}

TEST(TreeOfTest, IsOfTheIndexThatTensorParallelismWouldCut) {
  const auto part = [](int64_t rows, int64_t cols, TensorAxis axis, int64_t item) {
    return CanonicalTensor{.rows = rows, .cols = cols, .axis = axis, .item = item};
  };
  // Four heads of queries of width 6, two of keys and of values.
  const std::vector<CanonicalTensor> qkv = {part(24, 5, TensorAxis::kRows, 12),
                                            part(12, 5, TensorAxis::kRows, 6),
                                            part(12, 5, TensorAxis::kRows, 6)};
  EXPECT_THAT(TreeOf(qkv, TensorAxis::kRows, 8), IsTree(12, 6, 3, 2));
  const std::vector<CanonicalTensor> gate_up = {part(32, 5, TensorAxis::kRows, 16),
                                                part(32, 5, TensorAxis::kRows, 16)};
  EXPECT_THAT(TreeOf(gate_up, TensorAxis::kRows, 8), IsTree(32, 16, 2, 1));
  const std::vector<CanonicalTensor> down = {part(5, 32, TensorAxis::kColumns, 16)};
  EXPECT_THAT(TreeOf(down, TensorAxis::kColumns, 8), IsTree(32, 16, 1, 1));
  // Chains: the other index, and what is not cut.
  EXPECT_EQ(TreeOf(qkv, TensorAxis::kColumns, 8).cut.leaves, 1);
  EXPECT_EQ(TreeOf(down, TensorAxis::kRows, 8).cut.leaves, 1);
  const std::vector<CanonicalTensor> whole = {part(5, 32, TensorAxis::kNone, 1)};
  EXPECT_EQ(TreeOf(whole, TensorAxis::kColumns, 8).cut.leaves, 1);
}

// One rank, weights [2, 3] of whole numbers, and the gradients that they get.
class LinearTest : public ::testing::Test {
 protected:
  void SetUp() override {
    testing::RunLocalRanks(1, [this](std::unique_ptr<Communicator> world) -> absl::Status {
      MOE_ASSIGN_OR_RETURN(session_, Session::Create({}, std::move(world)));
      return absl::OkStatus();
    });
  }
  const Context& context() const { return session_->context(); }

  void Write(Parameter& parameter, std::vector<float> values) {
    ASSERT_TRUE(store_.WriteMaster(parameter, values, *context().host).ok());
    std::vector<float>& sum = sums_.emplace_back(values.size());
    parameter.set_sum([&sum] { return GradAccumulator(absl::MakeSpan(sum)); });
  }
  Linear<float> Make(bool pack) {
    const auto weight = [pack](const char* expert) {
      return ParameterSpec{.name = absl::StrCat(expert, pack, ".up.weight"), .rows = 2, .cols = 3};
    };
    absl::StatusOr<Linear<float>> linear = Linear<float>::Create(
        {.weights = {weight("a"), weight("b")}, .biases = true, .pack = pack}, store_);
    Write(*linear->weights()[0], {1, 2, 3, 4, 5, 6});
    Write(*linear->weights()[1], {10, 20, 30, 40, 50, 60});
    Write(*linear->biases()[0], {100, 200});
    Write(*linear->biases()[1], {1000, 2000});
    return *std::move(linear);
  }
  // The names of what was reported.
  std::vector<std::string> AddGradients(const Linear<float>& linear, const LinearRows& rows,
                                        MatrixView<const float> dy, MatrixView<const float> x) {
    std::vector<std::string> names;
    EXPECT_TRUE(linear
                    .WeightGradient(context(), rows, dy, x,
                                    [&](Parameter& parameter) {
                                      names.push_back(parameter.spec().name);
                                      return absl::OkStatus();
                                    })
                    .ok());
    return names;
  }

  std::unique_ptr<Session> session_;
  ParameterStore store_{DType::kFloat32, 1};
  std::deque<std::vector<float>> sums_;
};

TEST_F(LinearTest, EachWeightTakesItsRows) {
  std::vector<float> x = {1, 0, 0, 0, 1, 0, 0, 0, 1}, y(6), dx(9);
  const std::vector<int64_t> offsets = {0, 1, 3};
  const LinearRows rows = {.first = 0, .last = 2, .offsets = offsets};
  for (const bool pack : {false, true}) {
    const Linear<float> linear = Make(pack);
    ASSERT_TRUE(linear
                    .Forward<float>(context(), rows, MatrixView<const float>(x.data(), 3, 3),
                                    MatrixView<float>(y.data(), 3, 2))
                    .ok());
    EXPECT_THAT(y, ElementsAre(101, 204, 1020, 2050, 1030, 2060));
    ASSERT_TRUE(linear
                    .InputGradient(context(), rows, MatrixView<const float>(x.data(), 3, 2),
                                   MatrixView<float>(dx.data(), 3, 3))
                    .ok());
    EXPECT_THAT(dx, ElementsAre(1, 2, 3, 0, 0, 0, 10, 20, 30));
    EXPECT_EQ(linear.packed_bytes() > 0, pack);
  }
}

// Row 2 alone is weight 1's; rows 0 and 1 are two segments of weight 0.
TEST_F(LinearTest, GradientsAreOfTheirSegmentsAndReportedOnceTheyAreAdded) {
  const Linear<float> linear = Make(false);
  std::vector<float> dy = {1, 2, 10, 20, 100, 200}, x = {1, 0, 0, 0, 1, 0, 0, 0, 1};
  const std::vector<int64_t> segments = {0, 1, 2, 3, 3};
  const LinearRows rows = {.first = 0, .last = 2, .segments = segments};
  EXPECT_THAT(AddGradients(linear, rows, {dy.data(), 3, 2}, {x.data(), 3, 3}),
              ElementsAre("a0.up.bias", "b0.up.bias", "a0.up.weight", "b0.up.weight"));
  EXPECT_THAT(sums_[0], ElementsAre(1, 10, 0, 2, 20, 0));
  EXPECT_THAT(sums_[1], ElementsAre(0, 0, 100, 0, 0, 200));
  EXPECT_THAT(sums_[2], ElementsAre(11, 22));
  EXPECT_THAT(sums_[3], ElementsAre(100, 200));
  // A round without rows.
  EXPECT_EQ(AddGradients(linear, {.first = 1, .last = 2}, {}, {}).size(), 2);
}

TEST_F(LinearTest, ATiedWeightIsReportedByItsOwner) {
  Parameter* const embedding = *store_.Add({.name = "embedding", .rows = 2, .cols = 3});
  Write(*embedding, {1, 2, 3, 4, 5, 6});
  const auto linear = Linear<float>::Tied(*embedding, {.rows = 2, .cols = 3}, false).value();
  std::vector<float> dy = {1, 2}, x = {1, 10, 100};
  EXPECT_THAT(AddGradients(linear, {}, {dy.data(), 1, 2}, {x.data(), 1, 3}), ElementsAre());
  EXPECT_THAT(sums_[0], ElementsAre(1, 10, 100, 2, 20, 200));
}

}  // namespace
}  // namespace moe
