// kernels/embedding: gradients of the table, in token order.
#include "kernels/embedding/embedding.h"

#include <string>

#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using testing::Matrix;
using testing::SameBits;
using testing::TestStream;

// The specification: float32, tokens in ascending order.
template <typename T>
Matrix<float> Reference(const std::vector<int32_t>& ids, const Matrix<T>& dx, Matrix<float> table) {
  for (int64_t h = 0; h < dx.cols(); ++h) {
    for (size_t t = 0; t < ids.size(); ++t) {
      table.at(ids[t], h) += static_cast<float>(dx(static_cast<int64_t>(t), h));
    }
  }
  return table;
}

std::vector<int32_t> RandomIds(int64_t tokens, int32_t vocabulary) {
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < tokens; ++t) {
    ids.push_back(static_cast<int32_t>(Random4({.item = uint64_t(t)})[0] % uint32_t(vocabulary)));
  }
  return ids;
}

TEST(EmbeddingBackwardTest, AddsTheRowsOfATokenByHand) {
  TestStream stream;
  Matrix<float> dx(3, 2), table(3, 2, 7.0f);
  for (int64_t t = 0; t < 3; ++t) {
    dx.at(t, 0) = static_cast<float>(t + 1);
    dx.at(t, 1) = static_cast<float>(10 * (t + 1));
  }
  const std::vector<int32_t> ids = {2, 0, 2};
  ASSERT_TRUE(
      EmbeddingBackward<float>(ids, dx.view(), table.view(), Write::kOverwrite, *stream).ok());
  EXPECT_EQ(table.values(), (std::vector<double>{2, 20, 0, 0, 4, 40}));
  ASSERT_TRUE(EmbeddingBackward<float>(ids, dx.view(), table.view(), Write::kAdd, *stream).ok());
  EXPECT_EQ(table.values(), (std::vector<double>{4, 40, 0, 0, 8, 80}));
}

TEST(EmbeddingBackwardTest, HasTheBitsOfAscendingTokensOnAnyNumberOfThreads) {
  for (const int64_t cols : {1, 17, 64, 200}) {
    const auto ids = RandomIds(150, 11);
    const auto dx = Matrix<float>::Random(150, cols, 1);
    const auto dx16 = Matrix<BFloat16>::Random(150, cols, 2);
    const auto old = Matrix<float>::Random(11, cols, 3);
    for (const int threads : {1, 2, 3}) {
      TestStream stream(threads);
      Matrix<float> table = old, added = old, table16 = old;
      ASSERT_TRUE(
          EmbeddingBackward<float>(ids, dx.view(), table.view(), Write::kOverwrite, *stream).ok());
      EXPECT_TRUE(SameBits(table, Reference(ids, dx, Matrix<float>(11, cols))));
      EXPECT_TRUE(table.edges_intact());
      ASSERT_TRUE(
          EmbeddingBackward<float>(ids, dx.view(), added.view(), Write::kAdd, *stream).ok());
      EXPECT_TRUE(SameBits(added, Reference(ids, dx, old)));
      ASSERT_TRUE(
          EmbeddingBackward<BFloat16>(ids, dx16.view(), table16.view(), Write::kOverwrite, *stream)
              .ok());
      EXPECT_TRUE(SameBits(table16, Reference(ids, dx16, Matrix<float>(11, cols))));
    }
  }
}

TEST(EmbeddingBackwardTest, NoTokensGiveZero) {
  TestStream stream;
  Matrix<float> dx(0, 4), table(3, 4, 5.0f);
  ASSERT_TRUE(EmbeddingBackward<float>({}, dx.view(), table.view(), Write::kAdd, *stream).ok());
  EXPECT_EQ(table.values(), std::vector<double>(12, 5.0));
  ASSERT_TRUE(
      EmbeddingBackward<float>({}, dx.view(), table.view(), Write::kOverwrite, *stream).ok());
  EXPECT_EQ(table.values(), std::vector<double>(12, 0.0));
}

TEST(EmbeddingBackwardTest, RefusesIdsOutOfRangeAndOtherShapesBeforeWriting) {
  TestStream stream;
  Matrix<float> dx(2, 4), wide(2, 5), table(3, 4, 5.0f);
  const auto call = [&](const std::vector<int32_t>& ids, const Matrix<float>& rows) {
    return EmbeddingBackward<float>(ids, rows.view(), table.view(), Write::kOverwrite, *stream);
  };
  EXPECT_EQ(testing::Message(call({0, 3}, dx)), "EmbeddingBackward: ids[1] is 3, expected 0 to 2");
  EXPECT_EQ(testing::Message(call({-1, 0}, dx)),
            "EmbeddingBackward: ids[0] is -1, expected 0 to 2");
  EXPECT_EQ(call({0, 1, 2}, dx).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(call({0, 1}, wide).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(table.values(), std::vector<double>(12, 5.0));
  EXPECT_TRUE(call({0, 2}, dx).ok());  // the stream stays usable
}

}  // namespace
}  // namespace moe
