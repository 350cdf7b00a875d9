// kernels/bias: biases of grouped rows and their gradients, on every device.
#include "kernels/bias/bias.h"

#include <vector>

#include "kernels/bias/bias_op.h"
#include "tests/kernels/device_memory.h"

namespace moe::testing {
namespace {

using Biases = std::vector<std::vector<float>>;

// Waits for the stream, because the copies of the biases are destroyed on return.
template <typename T>
absl::Status Add(const TestDevice& device, MatrixView<T> y, const std::vector<int64_t>& offsets,
                 const Biases& biases) {
  std::vector<DeviceArray<float>> copies;
  std::vector<absl::Span<const float>> spans;
  for (const std::vector<float>& bias : biases) {
    copies.push_back(device.Copy(bias));
    spans.push_back(copies.back().span());
  }
  absl::Status status = AddBias<T>(y, offsets, spans, device.stream());
  status.Update(device.stream().Synchronize());
  return status;
}

// y with the biases added on the device.
template <typename T>
Matrix<T> Added(const TestDevice& device, const Matrix<T>& y, const std::vector<int64_t>& offsets,
                const Biases& biases) {
  const auto rows = device.Copy(y);
  EXPECT_OK(Add(device, rows.view(), offsets, biases));
  return device.Read(rows);
}

template <typename T>
std::vector<float> Gradient(const TestDevice& device, const Matrix<T>& dy,
                            const std::vector<float>& old, Write write) {
  const auto rows = device.Copy(dy);
  const auto d_bias = device.Copy(old);
  EXPECT_OK(BiasGradient<T>(rows.view(), d_bias.span(), write, device.stream()));
  return device.Read(d_bias);
}

// For the rows of some segments, with offsets that only the device knows if it has its own memory.
std::vector<float> Gradient(const TestDevice& device, const Matrix<float>& dy,
                            const std::vector<int64_t>& segments) {
  const auto rows = device.Copy(dy);
  const auto there = device.Copy(segments);
  const auto d_bias = device.Copy(std::vector<float>(dy.cols(), 7));
  const auto offsets =
      device.is_cpu() ? GroupOffsets(segments) : GroupOffsets::OnDevice(there.span(), {});
  EXPECT_OK(
      BiasGradient<float>(rows.view(), offsets, d_bias.span(), Write::kOverwrite, device.stream()));
  return device.Read(d_bias);
}

template <typename T>
class BiasTest : public ::testing::Test {};
TYPED_TEST_SUITE(BiasTest, StorageTypes);

TYPED_TEST(BiasTest, EveryRowTakesTheBiasOfItsGroup) {
  ForEachDevice([](const TestDevice& device) {
    // Group 1 is empty, and so is the last one.
    const auto y = Added(device, Matrix<TypeParam>(4, 2, 1.0f), {0, 1, 1, 4, 4},
                         {{10, 20}, {-1, -1}, {30, 40}, {-1, -1}});
    EXPECT_EQ(y.values(), (std::vector<double>{11, 21, 31, 41, 31, 41, 31, 41}));
    EXPECT_TRUE(y.edges_intact());
  });
}

TYPED_TEST(BiasTest, OffsetsThatTheDeviceAloneKnowsMayEndBeforeTheRows) {
  ForEachDevice([](const TestDevice& device) {
    if (device.is_cpu()) return;
    const auto rows = device.Copy(Matrix<TypeParam>(5, 2, 1.0f));
    const auto offsets = device.Copy(std::vector<int64_t>{0, 1, 1, 4});
    const auto bias = device.Copy(std::vector<float>{10, 20}),
               more = device.Copy(std::vector<float>{30, 40});
    ASSERT_OK(AddBias<TypeParam>(rows.view(), GroupOffsets::OnDevice(offsets.span(), {}),
                                 {bias.span(), bias.span(), more.span()}, device.stream()));
    EXPECT_EQ(device.Read(rows).values(),
              (std::vector<double>{11, 21, 31, 41, 31, 41, 31, 41, 1, 1}));
  });
}

// 1 + 2^-8 is halfway between two bfloat16 numbers, and so is the sum of two of them.
TEST(AddBiasTest, BFloat16IsTheFloat32SumRoundedOnce) {
  ForEachDevice([](const TestDevice& device) {
    const auto y = Added(device, Matrix<BFloat16>(1, 2, 1.0f), {0, 1}, {{0x1.02p0f, 0x1.018p-7f}});
    EXPECT_EQ(y(0, 0), 0x1.00p1);  // 2 + 2^-7: ties to even
    EXPECT_EQ(y(0, 1), 0x1.02p0);  // the bias itself is not rounded before
  });
}

template <typename T>
void ExpectTheReference(const TestDevice& device, const Matrix<T>& before,
                        const std::vector<int64_t>& offsets) {
  SCOPED_TRACE(::testing::Message() << before.rows() << " x " << before.cols());
  Biases biases;
  for (const uint64_t seed : {2, 3, 4, 5, 6}) biases.push_back(RandomFloats(before.cols(), seed));
  auto expected = before;
  for (size_t g = 0; g < biases.size(); ++g) {
    bias::Reference(bias::Add<T>{expected.view(offsets[g], offsets[g + 1]), biases[g].data()});
  }
  EXPECT_TRUE(SameBits(Added(device, before, offsets, biases), expected));
  for (const Write write : {Write::kOverwrite, Write::kAdd}) {
    auto want = biases[0];
    bias::Reference(bias::Gradient<T>{before.view(), want.data(), write});
    EXPECT_TRUE(SameBits(Gradient(device, before, biases[0], write), want));
  }
}

TYPED_TEST(BiasTest, HasTheBitsOfTheReferenceForAnyShapeAndLayout) {
  ForEachDevice(Simd::kAll, [](const TestDevice& device) {
    for (const int64_t cols : {1, 7, 16, 31, 63, 64, 65, 277, 1049}) {
      for (const MatrixLayout layout : kLayouts) {
        ExpectTheReference(device, Matrix<TypeParam>::Random(19, cols, layout, 1),
                           {0, 0, 3, 11, 12, 19});
      }
    }
    // Some groups are more than one range of rows, and the columns more than one block of them.
    for (const int64_t cols : {7, 77}) {
      ExpectTheReference(device, Matrix<TypeParam>::Random(600, cols, 1), {0, 0, 7, 520, 521, 600});
    }
  });
}

// From 2^24 on floats are even: adding a 1 has no effect there, but adding a sum of two has. (1 +
// 1) + 2^24 + 1 is a tie that rounds to 2^24 + 4; in descending order the sum is 2^24.
TEST(BiasGradientTest, SumsInAscendingRowsFromZeroOrTheOldValue) {
  const auto dy = Matrix<float>::Of(4, 2, {1, 0x1p24f, 1, 1, 0x1p24f, 1, 1, -0x1p24f});
  ForEachDevice([&](const TestDevice& device) {
    EXPECT_EQ(Gradient(device, dy, {0.5f, 2.0f}, Write::kOverwrite),
              (std::vector<float>{0x1p24f + 4, 0}));
    // 2 + 2^24 is exact, + 1 and + 1 are both rounded to 2^24 + 4. Added last, the 2 would stay 2.
    EXPECT_EQ(Gradient(device, dy, {0.5f, 2.0f}, Write::kAdd),
              (std::vector<float>{0x1p24f + 4, 4}));
  });
}

TEST(BiasGradientTest, OfTheRowsOfSomeSegments) {
  const auto dy = Matrix<float>::Of(4, 1, {1, 10, 100, 1000});
  ForEachDevice([&](const TestDevice& device) {
    EXPECT_EQ(Gradient(device, dy, {1, 1, 3}), (std::vector<float>{110}));
    EXPECT_EQ(Gradient(device, dy, {2, 2}), (std::vector<float>{0}));
  });
}

TYPED_TEST(BiasTest, NothingToAddLeavesZerosOrTheOldValue) {
  using T = TypeParam;
  ForEachDevice([](const TestDevice& device) {
    const Matrix<T> none(0, 3), flat(3, 0);
    EXPECT_EQ(Gradient(device, none, {1, 2, 3}, Write::kAdd), (std::vector<float>{1, 2, 3}));
    EXPECT_EQ(Gradient(device, none, {1, 2, 3}, Write::kOverwrite), (std::vector<float>{0, 0, 0}));
    EXPECT_TRUE(Gradient(device, flat, {}, Write::kOverwrite).empty());
    EXPECT_TRUE(Added(device, none, {0, 0}, {{1, 2, 3}}).edges_intact());
    EXPECT_TRUE(Added(device, none, {0}, {}).edges_intact());
    EXPECT_TRUE(Added(device, flat, {0, 3}, {{}}).edges_intact());
  });
}

TEST(AddBiasTest, OffsetsAndSpansAreReadBeforeTheCallReturns) {
  auto stream = MakeStream({.kind = DeviceKind::kCpu}).value();
  Matrix<float> y(3, 2, 1.0f);
  const std::vector<float> a = {1, 2}, b = {10, 20};
  std::vector<int64_t> offsets = {0, 1, 3};
  std::vector<absl::Span<const float>> spans = {a, b};
  ASSERT_OK(AddBias<float>(y.view(), offsets, spans, *stream));
  offsets.assign(3, -1000000);
  spans.assign(2, {});
  ASSERT_OK(stream->Synchronize());
  EXPECT_EQ(y.values(), (std::vector<double>{2, 3, 11, 21, 11, 21}));
}

TEST(BiasArgumentsTest, ShapesMustAgreeAndOffsetsAscend) {
  ForEachDevice([&](const TestDevice& device) {
    const auto rows = device.Copy(Matrix<float>(2, 3, 1.0f));
    const MatrixView<float> y = rows.view();
    const std::vector<float> b = {1, 2, 3};
    ExpectRefused(Add(device, y, {0, 2}, {{1, 2}}), "AddBias: bias is [2], expected [3]");
    ExpectRefused(Add(device, y, {0, 2}, {b, b}), "AddBias: 2 offsets for 2 biases, expected 3");
    ExpectRefused(Add(device, y, {}, {}), "AddBias: 0 offsets for 0 biases, expected 1");
    ExpectRefused(Add(device, y, {0, 3}, {b}),
                  "AddBias: offsets run from 0 to 3, expected 0 to 2 rows");
    ExpectRefused(Add(device, y, {0, 3, 2}, {b, b}),
                  "AddBias: offsets[1] = 3 is above offsets[2] = 2, expected ascending");
    ExpectRefused(Add(device, MatrixView<float>(y.data(), 2, 3, 2), {0, 2}, {b}),
                  "AddBias: y is [2, 3] with stride 2, expected [2, 3]");
    const auto d_bias = device.Copy<float>({0, 0});
    ExpectRefused(BiasGradient<float>(y, d_bias.span(), Write::kAdd, device.stream()),
                  "BiasGradient: d_bias is [2], expected [3]");
    // Refused before any row changed.
    EXPECT_EQ(device.Read(rows).values(), std::vector<double>(6, 1.0));
    EXPECT_OK(Add(device, y, {0, 2}, {b}));  // the stream stays usable
  });
}

}  // namespace
}  // namespace moe::testing
