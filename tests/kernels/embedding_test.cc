// kernels/embedding: gradients of the table, in token order, on every device.
#include "kernels/embedding/embedding.h"

#include <vector>

#include "tests/kernels/device_memory.h"

namespace moe::testing {
namespace {

// Half of the tokens have one id, the others any.
std::vector<int32_t> RandomIds(int64_t tokens, int32_t vocabulary) {
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < tokens; ++t) {
    const auto random = Random4({.seed = 3, .item = static_cast<uint64_t>(t)});
    const auto id = static_cast<int32_t>(random[0] % static_cast<uint32_t>(vocabulary));
    ids.push_back(random[1] % 2 == 0 ? vocabulary / 2 : id);
  }
  return ids;
}

template <typename T>
Matrix<float> Gradient(const TestDevice& device, const std::vector<int32_t>& ids,
                       const Matrix<T>& dx, const Matrix<float>& old, Write write) {
  const auto token = device.Copy(ids);
  const auto rows = device.Copy(dx);
  const auto table = device.Copy(old);
  Workspace workspace(device.memory());
  EXPECT_OK(EmbeddingBackward<T>(token.span(), rows.view(), table.view(), write, workspace,
                                 device.stream()));
  return device.Read(table);
}

template <typename T>
class EmbeddingBackwardTest : public ::testing::Test {};
TYPED_TEST_SUITE(EmbeddingBackwardTest, StorageTypes);

TYPED_TEST(EmbeddingBackwardTest, AddsTheRowsOfATokenByHand) {
  using T = TypeParam;
  ForEachDevice([](const TestDevice& device) {
    std::vector<int32_t> ids = {2, 0, 2};
    auto dx = Matrix<T>::Of(3, 2, {1, 10, 2, 20, 3, 30});
    if (!device.is_cpu()) {  // the host does not know that the last two ids are out of range
      ids.insert(ids.end(), {-1, 3});
      dx = Matrix<T>::Of(5, 2, {1, 10, 2, 20, 3, 30, 4, 40, 5, 50});
    }
    const auto table = Gradient(device, ids, dx, Matrix<float>(3, 2, 7.0f), Write::kOverwrite);
    EXPECT_EQ(table.values(), (std::vector<double>{2, 20, 0, 0, 4, 40}));
    EXPECT_EQ(Gradient(device, ids, dx, table, Write::kAdd).values(),
              (std::vector<double>{4, 40, 0, 0, 8, 80}));
  });
}

// Sums of many terms, float32, tokens in ascending order: another order would change the bits.
TYPED_TEST(EmbeddingBackwardTest, HasTheBitsOfAscendingTokensForAnyShapeAndLayout) {
  using T = TypeParam;
  const auto check = [](const TestDevice& device, int64_t tokens, int32_t vocabulary, int64_t cols,
                        MatrixLayout in, MatrixLayout out) {
    const auto ids = RandomIds(tokens, vocabulary);
    const auto dx = Matrix<T>::Random(tokens, cols, in, 1);
    const auto old = Matrix<float>::Random(vocabulary, cols, out, 2);
    for (const Write write : {Write::kOverwrite, Write::kAdd}) {
      auto want = write == Write::kAdd ? old : Matrix<float>(vocabulary, cols, out);
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t h = 0; h < cols; ++h) want.at(ids[t], h) += static_cast<float>(dx.at(t, h));
      }
      EXPECT_TRUE(SameBits(Gradient(device, ids, dx, old, write), want))
          << tokens << " tokens, " << vocabulary << " x " << cols;
    }
  };
  ForEachDevice([&](const TestDevice& device) {
    for (const auto& [in, out] : kLayoutPairs) {
      check(device, 40, 5, 37, in, out);
      check(device, 300, 67, 16, in, out);
    }
    for (const int64_t cols : {1, 17, 64, 200}) check(device, 150, 11, cols, {}, {});
    check(device, 100, 5, 1100, kLayouts[0], kLayouts[0]);  // three blocks of columns
    check(device, 2500, 33, 4, kLayouts[0], kLayouts[0]);   // runs of many ids
  });
}

TYPED_TEST(EmbeddingBackwardTest, NoTokensGiveZerosAndATableMayBeEmpty) {
  using T = TypeParam;
  ForEachDevice([](const TestDevice& device) {
    const Matrix<T> none(0, 4);
    const Matrix<float> table(3, 4, 5.0f);
    EXPECT_EQ(Gradient(device, {}, none, table, Write::kAdd).values(),
              std::vector<double>(12, 5.0));
    EXPECT_EQ(Gradient(device, {}, none, table, Write::kOverwrite).values(),
              std::vector<double>(12, 0.0));
    EXPECT_TRUE(
        Gradient(device, {}, none, Matrix<float>(0, 4), Write::kOverwrite).values().empty());
    EXPECT_TRUE(Gradient(device, {}, Matrix<T>(0, 0), Matrix<float>(1, 0), Write::kOverwrite)
                    .values()
                    .empty());
    EXPECT_OK(device.stream().Synchronize());
  });
}

// Two partials of 12 tokens in a table of 9 rows: what the grid makes of them is that of whole
// partials, in an empty sum and in one that is not.
TEST(EmbeddingGradientTest, ExactSumsHaveTheBitsOfWholePartials) {
  constexpr int32_t kVocabulary = 9;
  constexpr int64_t kTokens = 12, kCols = 5;
  constexpr ExactGrid kGrid = {.unit_log2 = -8, .max_terms = 4};
  const auto stream = MakeInlineStream();
  Workspace workspace;
  const auto dx = Matrix<float>::Random(kTokens, kCols, {}, 1);
  for (const bool was_empty : {true, false}) {
    std::vector<int64_t> sum(kVocabulary * kCols, 3), want(sum.size(), was_empty ? 0 : 3);
    GridTally tally, want_tally;
    bool empty = was_empty;
    const GradAccumulator grad(absl::MakeSpan(sum), kGrid, &tally, &empty);
    for (const int64_t first : {int64_t{0}, int64_t{4}}) {
      const auto rows = RowRange(dx.view(), first, kTokens);
      const std::vector<int32_t> ids = RandomIds(rows.rows(), kVocabulary);
      std::vector<float> partial(want.size());
      ASSERT_OK(EmbeddingBackward<float>(ids, rows, {partial.data(), kVocabulary, kCols},
                                         Write::kOverwrite, workspace, *stream));
      ASSERT_OK(
          ExactAccumulate(kGrid, partial, absl::MakeSpan(want), Write::kAdd, &want_tally, *stream));
      ASSERT_OK(AddEmbeddingGradient<float>(ids, rows, grad, workspace, *stream));
    }
    EXPECT_EQ(sum, want);
    EXPECT_FALSE(empty);
    EXPECT_GT(tally.inexact, 0);
    EXPECT_EQ(tally.inexact, want_tally.inexact);
    EXPECT_EQ(tally.largest, want_tally.largest);
  }
  std::vector<int64_t> sum(3 * kCols);
  GridTally tally;
  ExpectRefused(AddEmbeddingGradient<float>(std::vector<int32_t>{3}, RowRange(dx.view(), 0, 1),
                                            GradAccumulator(absl::MakeSpan(sum), kGrid, &tally),
                                            workspace, *stream),
                "EmbeddingBackward: ids[0] is 3, expected 0 to 2");
}

TEST(EmbeddingArgumentsTest, RefusesIdsOutOfRangeAndOtherShapesBeforeWriting) {
  const TestDevice device{Device()};
  const auto table = device.Copy(Matrix<float>(3, 4, 5.0f));
  const auto call = [&](const std::vector<int32_t>& ids, int64_t cols) {
    const auto dx = device.Copy(Matrix<float>(2, cols));
    Workspace workspace;
    return EmbeddingBackward<float>(ids, dx.view(), table.view(), Write::kOverwrite, workspace,
                                    device.stream());
  };
  ExpectRefused(call({0, 3}, 4), "EmbeddingBackward: ids[1] is 3, expected 0 to 2");
  ExpectRefused(call({-1, 0}, 4), "EmbeddingBackward: ids[0] is -1, expected 0 to 2");
  EXPECT_EQ(call({0, 1, 2}, 4).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(call({0, 1}, 5).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device.Read(table).values(), std::vector<double>(12, 5.0));
  EXPECT_OK(call({0, 2}, 4));  // the stream stays usable
}

}  // namespace
}  // namespace moe::testing
