// Linear: products of grouped rows by hand, the order of their terms, who reports gradients.
#include "moe/tensor/linear.h"

#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "moe/run/session.h"
#include "moe/state/boxes.h"
#include "moe/tensor/own_rows.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/layer_harness.h"

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

// What ranks have of the products of a layer of queries, keys and values and of one that adds over
// heads, with biases: of sums over ranks each its own rows, gradients of its own parts.
template <typename T>
struct SharedProducts {
  std::vector<T> out, d_x;
  std::map<std::string, std::vector<int64_t>> gradients;  // of whole canonical tensors
};

template <typename T>
void RunShared(int ranks, int leaves, SharedProducts<T>& products) {
  constexpr int64_t kRows = 11, kHidden = 9, kHeads = 8, kWidth = 3, kTimes = 2;
  constexpr int64_t kQueries = kHeads * kTimes * kWidth, kKeys = kHeads * kWidth;
  const auto part = [](const char* name, int64_t rows, int64_t item) -> CanonicalTensor {
    return {.name = name, .rows = rows, .cols = kHidden, .axis = TensorAxis::kRows, .item = item};
  };
  const ParameterSpec qkv = {
      .name = "qkv.weight",
      .rows = kQueries + 2 * kKeys,
      .cols = kHidden,
      .holders = MeshGroup::kData,
      .init_std = 1,
      .parts = {part("q.weight", kQueries, kTimes * kWidth), part("k.weight", kKeys, kWidth),
                part("v.weight", kKeys, kWidth)}};
  const ParameterSpec sum = CutAlong(
      TensorAxis::kColumns, {.name = "o.weight", .rows = kHidden, .cols = kQueries, .init_std = 1},
      kTimes * kWidth);
  std::mutex mu;
  const SessionOptions options = {.mesh = {.tensor = ranks, .expert = ranks},
                                  .tensor_leaves = leaves};
  testing::RunSessions(ranks, options, [&](Session& session) -> absl::Status {
    const Context& context = session.context();
    const TensorShare share = ShareOf(context);
    ParameterStore store(DTypeOf<T>::value, 5);
    MOE_ASSIGN_OR_RETURN(auto up, Linear<T>::Create({{qkv}, true, false, share}, store));
    MOE_ASSIGN_OR_RETURN(auto down, Linear<T>::Create({{sum}, true, false, share}, store));
    std::deque<std::vector<int64_t>> sums;
    GridTally tally;
    for (const auto& p : store.parameters()) {
      if (p->is_vector()) {  // biases start at 0: each its number in the whole tensor
        std::vector<float> values;
        for (size_t i = 0; i < p->parts().size(); ++i) {
          for (int64_t c = p->box(i).col_begin; c < p->box(i).col_end; ++c) {
            values.push_back(0.25f * static_cast<float>(c % 7));
          }
        }
        MOE_RETURN_IF_ERROR(store.WriteMaster(*p, values, *context.host));
      }
      std::vector<int64_t>& gradient = sums.emplace_back(p->size());
      p->set_sum([&] {
        return GradAccumulator(absl::MakeSpan(gradient), {.unit_log2 = -20, .max_terms = 16},
                               &tally);
      });
    }
    const auto matrix = [&](std::vector<T>& memory, int64_t cols) {
      memory.resize(static_cast<size_t>(kRows * cols));
      for (size_t i = 0; i < memory.size(); ++i) {
        memory[i] = T(std::sin(static_cast<float>(i + 1)));
      }
      return MatrixView<T>(memory.data(), kRows, cols);
    };
    std::vector<T> x, d_out, qkv_out, out, d_attended, d_x;
    const int64_t qkv_cols = up.out_features(), queries = qkv_cols * kTimes / (kTimes + 2);
    const OwnRows own = OwnRowsOf(context, kRows);  // where sums over ranks come
    const auto x_view = matrix(x, kHidden), d_out_view = matrix(d_out, kHidden);
    const auto qkv_view = matrix(qkv_out, qkv_cols), out_view = own.Of(matrix(out, kHidden));
    const auto d_attended_view = matrix(d_attended, queries);
    const auto d_x_view = own.Of(matrix(d_x, kHidden));
    const auto ready = [](Parameter&) {
      return absl::OkStatus();
    };
    MOE_RETURN_IF_ERROR(up.template Forward<T>(context, {}, x_view, qkv_view));
    const MatrixView<const T> attended = ColumnRange(qkv_view, 0, queries);
    MOE_RETURN_IF_ERROR(down.template Forward<T>(context, {}, attended, out_view));
    MOE_RETURN_IF_ERROR(down.WeightGradient(context, {}, d_out_view, attended, ready));
    MOE_RETURN_IF_ERROR(down.InputGradient(context, {}, d_out_view, d_attended_view));
    MOE_RETURN_IF_ERROR(up.WeightGradient(context, {}, qkv_view, x_view, ready));
    MOE_RETURN_IF_ERROR(up.InputGradient(context, {}, qkv_view, d_x_view));
    MOE_RETURN_IF_ERROR(context.compute->Synchronize());

    const std::lock_guard<std::mutex> lock(mu);
    const auto put = [&](MatrixView<const T> rows, std::vector<T>& all) {
      all.resize(kRows * kHidden);
      std::copy_n(rows.data(), rows.rows() * kHidden, all.data() + own.begin() * kHidden);
    };
    put(out_view, products.out);
    put(d_x_view, products.d_x);
    for (const auto& p : store.parameters()) {
      for (const BoxInMemory& held : BoxesOf(*p)) {
        auto& whole = products.gradients[held.tensor->name];
        whole.resize(static_cast<size_t>(held.tensor->size()));
        const int64_t* from = sums[static_cast<size_t>(p->index())].data() + held.first;
        for (int64_t r = held.box.row_begin; r < held.box.row_end; ++r) {
          // Of what all ranks hold whole each adds partials of its rows.
          int64_t* to = whole.data() + r * held.tensor->cols + held.box.col_begin;
          for (int64_t c = 0; c < held.box.cols(); ++c) *to++ += *from++;
        }
      }
    }
    return absl::OkStatus();
  });
}

template <typename T>
class SharedLinearTest : public ::testing::Test {};
using SharedTypes = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(SharedLinearTest, SharedTypes);

TYPED_TEST(SharedLinearTest, RanksThatShareWeightsHaveTheBitsOfOne) {
  for (const int leaves : {8, 16}) {
    SharedProducts<TypeParam> one;
    RunShared(1, leaves, one);
    for (const int ranks : {2, 3, 5, 8}) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << leaves << " leaves");
      SharedProducts<TypeParam> got;
      RunShared(ranks, leaves, got);
      const size_t bytes = one.out.size() * sizeof(TypeParam);
      EXPECT_EQ(std::memcmp(got.out.data(), one.out.data(), bytes), 0);
      EXPECT_EQ(std::memcmp(got.d_x.data(), one.d_x.data(), bytes), 0);
      EXPECT_EQ(got.gradients, one.gradients);
    }
  }
}

TEST(TensorShareTest, PartsWithTooFewItemsAreRefusedWithTheMostRanks) {
  const ParameterSpec down =
      CutAlong(TensorAxis::kColumns, {.name = "down.weight", .rows = 2, .cols = 48});
  EXPECT_TRUE(HeldPart(down, {.index = 1, .ranks = 3, .leaves = 8}).ok());
  EXPECT_EQ(HeldPart(down, {.index = 0, .ranks = 4, .leaves = 8}).status().message(),
            "--tp is 4: down.weight has 3 items of 16 columns in 8 leaves, expected some for each "
            "rank: --tp 3");
  // A whole parameter, and one that nobody shares.
  EXPECT_TRUE(HeldPart({.name = "norm.weight", .cols = 3}, {0, 4, 8})->boxes.empty());
  EXPECT_TRUE(HeldPart(down, {})->boxes.empty());
}

}  // namespace
}  // namespace moe
