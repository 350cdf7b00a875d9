// Products of rows and the gate of a shared expert on every device of this build.
#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/product/product.h"
#include "kernels/row_gate/row_gate.h"
#include "tests/kernels/device_results.h"

namespace moe {
namespace {

using testing::ExpectSameBitsOnEveryDevice;
using testing::RandomFloats;
using testing::TestDevice;
using testing::TestDevices;

constexpr int64_t kRows = 70, kCols = 21, kStride = 24;  // more rows than a task of the CPU has

template <typename T>
testing::DeviceArray<T> Random(const TestDevice& device, int64_t n, uint64_t seed) {
  const auto values = RandomFloats(n, seed);
  return device.Copy(std::vector<T>(values.begin(), values.end()));
}

template <typename T>
MatrixView<T> Matrix(const testing::DeviceArray<T>& array) {
  return array.view(kRows, kCols, kStride);
}

template <typename T>
std::vector<float> Floats(const TestDevice& device, const testing::DeviceArray<T>& array) {
  const std::vector<T> values = device.Read(array);
  return {values.begin(), values.end()};
}

template <typename T>
class DeviceRowsTest : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(DeviceRowsTest, Types);

TYPED_TEST(DeviceRowsTest, ProductsByHand) {
  using T = TypeParam;
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const auto a = device->Copy<T>({T(1.0f), T(2.0f), T(-3.0f), T(4.0f)});
    const auto b = device->Copy<float>({2, 0.5f, 1, -0.25f});
    const auto out = device->Copy(std::vector<T>(4, T(10.0f)));
    const auto multiply = [&](const auto& to, Write write) {
      return MultiplyRows<T>(a.view(2, 2, 2), b.view(2, 2, 2), to.view(2, 2, 2), write,
                             device->stream());
    };
    ASSERT_TRUE(multiply(out, Write::kAdd).ok());
    EXPECT_EQ(Floats(*device, out), (std::vector<float>{12, 11, 7, 9}));
    ASSERT_TRUE(multiply(out, Write::kOverwrite).ok());
    EXPECT_EQ(Floats(*device, out), (std::vector<float>{2, 1, -3, -1}));
    ASSERT_TRUE(multiply(a, Write::kOverwrite).ok());
    EXPECT_EQ(Floats(*device, a), Floats(*device, out));
  }
}

TYPED_TEST(DeviceRowsTest, ProductsHaveTheSameBits) {
  using T = TypeParam;
  for (const Write write : {Write::kOverwrite, Write::kAdd}) {
    ExpectSameBitsOnEveryDevice([&](const TestDevice& device) {
      const auto a = Random<T>(device, kRows * kStride, 1);
      const auto b = Random<float>(device, kRows * kStride, 2);
      const auto from = Random<float>(device, kRows * kStride, 3);
      const auto out = Random<T>(device, kRows * kStride, 4);
      const auto out_of_floats = Random<T>(device, kRows * kStride, 5);
      Stream& stream = device.stream();
      EXPECT_TRUE(MultiplyRows<T>(Matrix(a), Matrix(b), Matrix(out), write, stream).ok());
      EXPECT_TRUE(
          (MultiplyRows<T, float>(Matrix(from), Matrix(b), Matrix(out_of_floats), write, stream)
               .ok()));
      return std::tuple(Floats(device, out), Floats(device, out_of_floats));
    });
  }
}

TYPED_TEST(DeviceRowsTest, GateByHand) {
  using T = TypeParam;
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const auto rows = device->Copy<T>({T(2.0f), T(4.0f), T(-6.0f), T(8.0f), T(5.0f), T(7.0f)});
    const auto logit = device->Copy<float>({0, 1000, -1000});
    const auto gate = device->Copy<float>({-1, -1, -1});
    const auto y = device->Copy(std::vector<T>(6, T(10.0f)));
    Stream& stream = device->stream();
    ASSERT_TRUE(
        RowGate<T>(rows.view(3, 2, 2), logit.span(), gate.span(), y.view(3, 2, 2), stream).ok());
    EXPECT_EQ(device->Read(gate), (std::vector<float>{0.5f, 1, 0}));
    EXPECT_EQ(Floats(*device, y), (std::vector<float>{1, 2, -6, 8, 0, 0}));

    const auto weight = device->Copy<T>({T(1.0f), T(-2.0f)});
    const auto dy = device->Copy<T>({T(1.0f), T(0.5f), T(3.0f), T(1.0f), T(9.0f), T(9.0f)});
    const auto d_rows = device->Copy(std::vector<T>(6, T(10.0f)));
    const auto dx = device->Copy(std::vector<T>(6, T(10.0f)));
    const auto d_logit = device->Copy<float>({-1, -1, -1});
    ASSERT_TRUE(RowGateBackward<T>({.rows = rows.view(3, 2, 2),
                                    .gate = gate.span(),
                                    .weight = weight.view(1, 2, 2),
                                    .dy = dy.view(3, 2, 2),
                                    .d_rows = d_rows.view(3, 2, 2),
                                    .d_logit = d_logit.span(),
                                    .dx = dx.view(3, 2, 2)},
                                   stream)
                    .ok());
    // (1 * 2 + 0.5 * 4) * 0.5 * 0.5; a gate of 0 or 1 has no slope.
    EXPECT_EQ(device->Read(d_logit), (std::vector<float>{1, 0, 0}));
    EXPECT_EQ(Floats(*device, d_rows), (std::vector<float>{0.5f, 0.25f, 3, 1, 0, 0}));
    EXPECT_EQ(Floats(*device, dx), (std::vector<float>{11, 8, 10, 10, 10, 10}));

    const auto terms = device->Copy<float>({1, -1, 2}), d_weight = device->Copy<float>({100, 200});
    for (const Write write : {Write::kAdd, Write::kOverwrite}) {
      ASSERT_TRUE(
          RowGateWeightGradient<T>(rows.view(3, 2, 2), terms.span(), d_weight.span(), write, stream)
              .ok());
      EXPECT_EQ(device->Read(d_weight), write == Write::kAdd ? (std::vector<float>{118, 210})
                                                             : (std::vector<float>{18, 10}));
    }
  }
}

TYPED_TEST(DeviceRowsTest, GateGradientsHaveTheSameBits) {
  using T = TypeParam;
  for (const Write write : {Write::kOverwrite, Write::kAdd}) {
    ExpectSameBitsOnEveryDevice([&](const TestDevice& device) {
      std::vector<float> gates;
      for (const float g : RandomFloats(kRows, 1)) gates.push_back(std::abs(g) / (1 + std::abs(g)));
      const auto gate = device.Copy(gates), d_logit = Random<float>(device, kRows, 2);
      const auto rows = Random<T>(device, kRows * kStride, 3);
      const auto weight = Random<T>(device, kCols, 4), dy = Random<T>(device, kRows * kStride, 5);
      const auto d_rows = Random<T>(device, kRows * kStride, 6);
      const auto dx = Random<T>(device, kRows * kStride, 7);
      const auto d_weight = Random<float>(device, kCols, 8);
      EXPECT_TRUE(RowGateBackward<T>({.rows = Matrix(rows),
                                      .gate = gate.span(),
                                      .weight = weight.view(1, kCols, kCols),
                                      .dy = Matrix(dy),
                                      .d_rows = Matrix(d_rows),
                                      .d_logit = d_logit.span(),
                                      .dx = Matrix(dx)},
                                     device.stream())
                      .ok());
      EXPECT_TRUE(RowGateWeightGradient<T>(Matrix(rows), d_logit.span(), d_weight.span(), write,
                                           device.stream())
                      .ok());
      return std::tuple(Floats(device, d_rows), device.Read(d_logit), Floats(device, dx),
                        device.Read(d_weight));
    });
  }
}

// Each device's exponential is within 2 ulps of float64, so that a gate is the sigmoid rounded to
// float32, or its neighbour where the sigmoid is nearly halfway: less than 2 roundings' worth. A
// product has one more.
TEST(DeviceRowGateTest, GatesAreWithinAnUlpOfFloat64) {
  const auto logits = RandomFloats(kRows, 1, 4), values = RandomFloats(kRows * kStride, 2);
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const auto logit = device->Copy(logits), gate = Random<float>(*device, kRows, 3);
    const auto rows = device->Copy(values), y = Random<float>(*device, kRows * kStride, 4);
    ASSERT_TRUE(
        RowGate<float>(Matrix(rows), logit.span(), gate.span(), Matrix(y), device->stream()).ok());
    const auto gates = device->Read(gate), products = device->Read(y);
    for (int64_t t = 0; t < kRows; ++t) {
      const double sigmoid = 1 / (1 + std::exp(-double{logits[t]}));
      EXPECT_NEAR(gates[t], sigmoid, 2 * testing::kFloatRounding * sigmoid);
      for (int64_t i = t * kStride; i < t * kStride + kCols; ++i) {
        const double product = sigmoid * double{values[i]};
        EXPECT_NEAR(products[i], product, 3 * testing::kFloatRounding * std::abs(product));
      }
    }
  }
}

TEST(DeviceRowGateTest, TakesNoRowsAndRefusesWrongShapes) {
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    Stream& stream = device->stream();
    const MatrixView<float> none(nullptr, 0, 2), two(nullptr, 2, 2), wide(nullptr, 2, 3);
    const auto numbers = device->Copy<float>({1, 2});
    EXPECT_TRUE(MultiplyRows<float>(none, none, none, Write::kAdd, stream).ok());
    EXPECT_TRUE(RowGate<float>(none, {}, {}, none, stream).ok());
    EXPECT_TRUE(
        RowGateWeightGradient<float>(none, {}, numbers.span(), Write::kOverwrite, stream).ok());
    EXPECT_EQ(device->Read(numbers), (std::vector<float>{0, 0}));

    EXPECT_EQ(testing::Message(MultiplyRows<float>(two, wide, two, Write::kAdd, stream)),
              "MultiplyRows: b is [2, 3] with stride 3, expected [2, 2]");
    EXPECT_EQ(testing::Message(RowGate<float>(two, {}, numbers.span(), two, stream)),
              "RowGate: logit is [0], expected [2]");
    EXPECT_EQ(testing::Message(RowGateBackward<float>({.rows = two, .gate = {}}, stream)),
              "RowGateBackward: gate is [0], expected [2]");
    EXPECT_EQ(testing::Message(
                  RowGateWeightGradient<float>(wide, {}, numbers.span(), Write::kAdd, stream)),
              "RowGateWeightGradient: d_logit is [0], expected [2]");
  }
}

}  // namespace
}  // namespace moe
