// kernels/bias: biases of grouped rows and their gradients.
#include "kernels/bias/bias.h"

#include <string>
#include <vector>

#include "kernels/bias/bias_cpu.h"
#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using testing::Matrix;
using testing::RandomFloats;
using testing::SameBits;
using testing::SimdTarget;
using testing::TestStream;

using Biases = std::vector<std::vector<float>>;

template <typename T>
absl::Status Add(MatrixView<T> y, const std::vector<int64_t>& offsets, const Biases& biases,
                 TestStream& stream) {
  const std::vector<absl::Span<const float>> spans(biases.begin(), biases.end());
  return AddBias<T>(y, offsets, spans, *stream);
}

Biases RandomBiases(int64_t groups, int64_t cols, uint64_t seed) {
  Biases biases;
  for (int64_t g = 0; g < groups; ++g) {
    biases.push_back(RandomFloats(cols, seed + static_cast<uint64_t>(g)));
  }
  return biases;
}

TEST(AddBiasTest, EveryRowTakesTheBiasOfItsGroup) {
  TestStream stream;
  Matrix<float> y(4, 2, 1.0f);
  // Group 1 is empty, and so is the last one.
  ASSERT_TRUE(
      Add(y.view(), {0, 1, 1, 4, 4}, {{10, 20}, {-1, -1}, {30, 40}, {-1, -1}}, stream).ok());
  EXPECT_EQ(y.values(), (std::vector<double>{11, 21, 31, 41, 31, 41, 31, 41}));
  EXPECT_TRUE(y.edges_intact());
}

// 1 + 2^-8 lies between two bfloat16 numbers, and so does the sum of two of them.
TEST(AddBiasTest, BFloat16IsTheFloat32SumRoundedOnce) {
  TestStream stream;
  Matrix<BFloat16> y(1, 2, 1.0f);
  ASSERT_TRUE(Add(y.view(), {0, 1}, {{0x1.02p0f, 0x1.018p-7f}}, stream).ok());
  EXPECT_EQ(y(0, 0), 0x1.00p1);  // 2 + 2^-7: ties to even
  EXPECT_EQ(y(0, 1), 0x1.02p0);  // the bias itself is not rounded before
  const int64_t rows = 5, cols = 37;
  y = Matrix<BFloat16>::Random(rows, cols, 1);
  auto y32 = y.As<float>();
  const Biases biases = RandomBiases(2, cols, 2);
  ASSERT_TRUE(Add(y.view(), {0, 2, rows}, biases, stream).ok());
  ASSERT_TRUE(Add(y32.view(), {0, 2, rows}, biases, stream).ok());
  EXPECT_TRUE(SameBits(y, y32.As<BFloat16>()));
  EXPECT_TRUE(y.edges_intact());
}

template <typename T>
class BiasTest : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(BiasTest, Types);

TYPED_TEST(BiasTest, AddHasTheBitsOfTheReferenceOnEveryTargetAndAnyNumberOfThreads) {
  using T = TypeParam;
  const int64_t rows = 600;  // some groups are more than one range of rows
  const std::vector<int64_t> offsets = {0, 0, 7, 520, 521, rows};
  for (const int64_t cols : {1, 7, 16, 31, 64, 77}) {
    const auto before = Matrix<T>::Random(rows, cols, 1);
    const Biases biases = RandomBiases(5, cols, 2);
    auto expected = before;
    for (size_t g = 0; g < biases.size(); ++g) {
      AddBiasReference<T>(expected.view(offsets[g], offsets[g + 1]), biases[g].data());
    }
    for (const std::string& target : gemm::SimdTargets()) {
      const SimdTarget use(target);
      for (const int threads : {1, 3}) {
        TestStream stream(threads);
        auto y = before;
        ASSERT_TRUE(Add(y.view(), offsets, biases, stream).ok());
        EXPECT_TRUE(SameBits(y, expected)) << target << " " << cols;
        EXPECT_TRUE(y.edges_intact());
      }
    }
  }
}

TYPED_TEST(BiasTest, GradientHasTheBitsOfTheReferenceOnEveryTargetAndAnyNumberOfThreads) {
  using T = TypeParam;
  for (const int64_t cols : {1, 7, 16, 63, 64, 65, 300}) {  // up to 5 blocks of columns
    const auto dy = Matrix<T>::Random(41, cols, 1);
    const auto old = RandomFloats(cols, 2);
    for (const Write write : {Write::kOverwrite, Write::kAdd}) {
      auto expected = old;
      BiasGradientReference<T>(dy.view(), expected.data(), write);
      for (const std::string& target : gemm::SimdTargets()) {
        const SimdTarget use(target);
        for (const int threads : {1, 3}) {
          TestStream stream(threads);
          auto d_bias = old;
          d_bias.push_back(-7.0f);  // a guard
          ASSERT_TRUE(
              BiasGradient<T>(dy.view(), absl::MakeSpan(d_bias).first(old.size()), write, *stream)
                  .ok());
          EXPECT_EQ(d_bias.back(), -7.0f);
          d_bias.pop_back();
          EXPECT_TRUE(SameBits(d_bias, expected)) << target << " " << cols;
        }
      }
    }
  }
}

// From 2^24 on floats are even: it absorbs a 1 that is added to it, not a sum of two. (1 + 1) +
// 2^24 + 1 is a tie that goes to 2^24 + 4; in descending order the sum is 2^24.
TEST(BiasGradientTest, SumsInAscendingRowsFromZeroOrTheOldValue) {
  TestStream stream;
  Matrix<float> dy(4, 2);
  const float first[] = {1, 1, 0x1p24f, 1}, second[] = {0x1p24f, 1, 1, -0x1p24f};
  for (int64_t n = 0; n < 4; ++n) {
    dy.at(n, 0) = first[n];
    dy.at(n, 1) = second[n];
  }
  std::vector<float> d_bias = {0.5f, 2.0f};
  ASSERT_TRUE(
      BiasGradient<float>(dy.view(), absl::MakeSpan(d_bias), Write::kOverwrite, *stream).ok());
  EXPECT_EQ(d_bias, (std::vector<float>{0x1p24f + 4, 0}));
  d_bias = {0.5f, 2.0f};
  ASSERT_TRUE(BiasGradient<float>(dy.view(), absl::MakeSpan(d_bias), Write::kAdd, *stream).ok());
  // 2 + 2^24 is exact, + 1 and + 1 are both rounded to 2^24 + 4. Added last, the 2 would stay 2.
  EXPECT_EQ(d_bias, (std::vector<float>{0x1p24f + 4, 4}));
}

TYPED_TEST(BiasTest, NothingToAddLeavesZerosOrTheOldValue) {
  using T = TypeParam;
  TestStream stream;
  Matrix<T> none(0, 3), flat(3, 0);
  std::vector<float> d_bias = {1, 2, 3};
  ASSERT_TRUE(BiasGradient<T>(none.view(), absl::MakeSpan(d_bias), Write::kAdd, *stream).ok());
  EXPECT_EQ(d_bias, (std::vector<float>{1, 2, 3}));
  ASSERT_TRUE(
      BiasGradient<T>(none.view(), absl::MakeSpan(d_bias), Write::kOverwrite, *stream).ok());
  EXPECT_EQ(d_bias, (std::vector<float>{0, 0, 0}));
  EXPECT_TRUE(BiasGradient<T>(flat.view(), {}, Write::kOverwrite, *stream).ok());
  EXPECT_TRUE(Add(none.view(), {0, 0}, {d_bias}, stream).ok());
  EXPECT_TRUE(Add(none.view(), {0}, {}, stream).ok());
  EXPECT_TRUE(Add(flat.view(), {0, 3}, {{}}, stream).ok());
  EXPECT_TRUE(none.edges_intact());
  EXPECT_TRUE(flat.edges_intact());
}

TEST(AddBiasTest, OffsetsAndSpansAreReadBeforeTheCallReturns) {
  auto stream = MakeStream({.kind = DeviceKind::kCpu});
  ASSERT_TRUE(stream.ok());
  Matrix<float> y(3, 2, 1.0f);
  const std::vector<float> a = {1, 2}, b = {10, 20};
  std::vector<int64_t> offsets = {0, 1, 3};
  std::vector<absl::Span<const float>> spans = {a, b};
  ASSERT_TRUE(AddBias<float>(y.view(), offsets, spans, **stream).ok());
  offsets.assign(3, -1000000);
  spans.assign(2, {});
  ASSERT_TRUE((*stream)->Synchronize().ok());
  EXPECT_EQ(y.values(), (std::vector<double>{2, 3, 11, 21, 11, 21}));
}

TEST(BiasArgumentsTest, ShapesMustAgreeAndOffsetsAscend) {
  TestStream stream;
  Matrix<float> y(2, 3, 1.0f);
  const auto refused = [](const absl::Status& status, const std::string& message) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(testing::Message(status), message);
  };
  const std::vector<float> b = {1, 2, 3};
  refused(Add(y.view(), {0, 2}, {{1, 2}}, stream), "AddBias: bias is [2], expected [3]");
  refused(Add(y.view(), {0, 2}, {b, b}, stream), "AddBias: 2 offsets for 2 biases, expected 3");
  refused(Add(y.view(), {}, {}, stream), "AddBias: 0 offsets for 0 biases, expected 1");
  refused(Add(y.view(), {0, 3}, {b}, stream),
          "AddBias: offsets run from 0 to 3, expected 0 to 2 rows");
  refused(Add(y.view(), {0, 3, 2}, {b, b}, stream),
          "AddBias: offsets[1] = 3 is above offsets[2] = 2, expected ascending");
  refused(Add(MatrixView<float>(y.view().data(), 2, 3, 2), {0, 2}, {b}, stream),
          "AddBias: y is [2, 3] with stride 2, expected [2, 3]");
  std::vector<float> d_bias(2);
  refused(BiasGradient<float>(y.view(), absl::MakeSpan(d_bias), Write::kAdd, *stream),
          "BiasGradient: d_bias is [2], expected [3]");
  EXPECT_EQ(y.values(), std::vector<double>(6, 1.0));    // refused before any row changed
  EXPECT_TRUE(Add(y.view(), {0, 2}, {b}, stream).ok());  // the stream stays usable
}

}  // namespace
}  // namespace moe
