// Operations on every device of this build: what reaches a CUDA launcher is what the operation was
// given. The kernels' own tests (*_cuda_test.cc) have shapes, layouts and schedules.
#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/adamw/adamw.h"
#include "kernels/bias/bias.h"
#include "kernels/cast/cast.h"
#include "kernels/embedding/embedding.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/swiglu/swiglu.h"
#include "tests/kernels/device_results.h"

namespace moe {
namespace {

using testing::ExpectSameBitsOnEveryDevice;
using testing::Random;
using testing::RandomFloats;
using testing::TestDevice;
using testing::TestDevices;

constexpr int64_t kRows = 7, kCols = 21, kStride = 24;

MatrixView<float> Matrix(const testing::DeviceArray<float>& array) {
  return array.view(kRows, kCols, kStride);
}

TEST(DeviceOpsTest, Biases) {
  for (const Write write : {Write::kOverwrite, Write::kAdd}) {
    ExpectSameBitsOnEveryDevice([&](const TestDevice& device) {
      const auto y = Random(device, kRows * kStride, 1), bias = Random(device, 2 * kCols, 2);
      const auto d_bias = Random(device, kCols, 3);
      const std::vector<absl::Span<const float>> groups = {bias.span().first(kCols),
                                                           bias.span().last(kCols)};
      EXPECT_TRUE(AddBias<float>(Matrix(y), {0, 2, kRows}, groups, device.stream()).ok());
      EXPECT_TRUE(BiasGradient<float>(Matrix(y), d_bias.span(), write, device.stream()).ok());
      return std::tuple(device.Read(y), device.Read(d_bias));
    });
  }
}

TEST(DeviceOpsTest, RmsNorm) {
  for (const Write write_dx : {Write::kOverwrite, Write::kAdd}) {
    const Write write_d_weight = write_dx == Write::kAdd ? Write::kOverwrite : Write::kAdd;
    ExpectSameBitsOnEveryDevice([&](const TestDevice& device) {
      const auto x = Random(device, kRows * kStride, 1), weight = Random(device, kCols, 2);
      const auto y = Random(device, kRows * kStride, 3), rstd = Random(device, kRows, 4);
      const auto dy = Random(device, kRows * kStride, 5), dx = Random(device, kRows * kStride, 6);
      const auto d_weight = Random(device, kCols, 7), sum = Random(device, kRows * kStride, 8);
      Stream& stream = device.stream();
      EXPECT_TRUE(
          RmsNorm<float>(Matrix(x), weight.span(), 1e-5f, Matrix(y), rstd.span(), stream).ok());
      EXPECT_TRUE(RmsNormBackward<float>(Matrix(x), weight.span(), rstd.span(), Matrix(dy),
                                         Matrix(dx), write_dx, d_weight.span(), write_d_weight,
                                         stream)
                      .ok());
      EXPECT_TRUE(AddRows<float>(Matrix(y), Matrix(dx), Matrix(sum), stream).ok());
      return std::tuple(device.Read(y), device.Read(rstd), device.Read(dx), device.Read(d_weight),
                        device.Read(sum));
    });
  }
}

TEST(DeviceOpsTest, FloatsAddedToBFloat16) {
  ExpectSameBitsOnEveryDevice([&](const TestDevice& device) {
    const auto b = Random(device, kRows * kStride, 2);
    const std::vector<float> values = RandomFloats(kRows * kStride, 1);
    const auto a = device.Copy(std::vector<BFloat16>(values.begin(), values.end()));
    const auto sum = Random(device, kRows * kStride, 3);
    const MatrixView<BFloat16> rows = a.view(kRows, kCols, kStride);
    EXPECT_TRUE((AddRows<BFloat16, float>(rows, Matrix(b), rows, device.stream()).ok()));
    EXPECT_TRUE((Cast<BFloat16, float>(a.span(), sum.span(), device.stream()).ok()));
    return std::tuple(device.Read(sum));
  });
}

TEST(DeviceOpsTest, CastsThereAndBack) {
  ExpectSameBitsOnEveryDevice([&](const TestDevice& device) {
    const auto in = Random(device, kCols, 1), back = Random(device, kCols, 2);
    const auto narrow = device.Copy(std::vector<BFloat16>(kCols));
    EXPECT_TRUE((Cast<float, BFloat16>(in.span(), narrow.span(), device.stream()).ok()));
    EXPECT_TRUE((Cast<BFloat16, float>(narrow.span(), back.span(), device.stream()).ok()));
    return std::tuple(device.Read(back));
  });
}

TEST(DeviceOpsTest, AdamW) {
  ExpectSameBitsOnEveryDevice([&](const TestDevice& device) {
    const auto gradient = Random(device, kCols, 1), weight = Random(device, kCols, 2);
    const auto m = Random(device, kCols, 3);
    const auto v = device.Copy(std::vector<float>(kCols, 0.25f));
    Workspace workspace(device.memory());
    EXPECT_TRUE(AdamW({.step = 3}, {gradient.span(), 1}, weight.span(), m.span(), v.span(),
                      workspace, device.stream())
                    .ok());
    return std::tuple(device.Read(weight), device.Read(m), device.Read(v));
  });
}

TEST(DeviceOpsTest, EmbeddingGradient) {
  for (const Write write : {Write::kOverwrite, Write::kAdd}) {
    ExpectSameBitsOnEveryDevice([&](const TestDevice& device) {
      const auto ids = device.Copy<int32_t>({2, 0, 2, 6, 5, 2, 0});
      const auto dx = Random(device, kRows * kStride, 1),
                 d_table = Random(device, kRows * kStride, 2);
      EXPECT_TRUE(
          EmbeddingBackward<float>(ids.span(), Matrix(dx), Matrix(d_table), write, device.stream())
              .ok());
      return std::tuple(device.Read(d_table));
    });
  }
}

// The products of squared ReLU are exact to one rounding each, on every device.
TEST(DeviceOpsTest, PlainActivations) {
  ExpectSameBitsOnEveryDevice([&](const TestDevice& device) {
    const auto gate = Random(device, kRows * kStride, 1), out = Random(device, kRows * kStride, 2);
    const auto d_out = Random(device, kRows * kStride, 3),
               d_gate = Random(device, kRows * kStride, 4);
    Stream& stream = device.stream();
    EXPECT_TRUE(
        ActivationForward<float>(Activation::kRelu2, Matrix(gate), {}, Matrix(out), stream).ok());
    EXPECT_TRUE(ActivationBackward<float>(Activation::kRelu2, Matrix(gate), {}, Matrix(d_out),
                                          Matrix(d_gate), {}, stream)
                    .ok());
    return std::tuple(device.Read(out), device.Read(d_gate));
  });
}

// silu(g) = g / (1 + exp(-g)): each device's exponential is within 2 ulps, and at most six
// roundings follow, so that two devices differ by less than 2 (2 * 2^-23 + 6 * 2^-24) = 20 * 2^-24
// of a value; for d_gate, whose terms may cancel, of |d_out * up| (1 + |gate|).
TEST(DeviceOpsTest, GatedActivations) {
  const double bound = 20 * testing::kFloatRounding;
  const auto gate = RandomFloats(kRows * kStride, 1), up = RandomFloats(kRows * kStride, 2);
  const auto d_out = RandomFloats(kRows * kStride, 3);
  std::vector<std::vector<float>> expected;
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const auto g = device->Copy(gate), u = device->Copy(up), d = device->Copy(d_out);
    const auto out = Random(*device, kRows * kStride, 4),
               d_gate = Random(*device, kRows * kStride, 5);
    const auto d_up = Random(*device, kRows * kStride, 6);
    Stream& stream = device->stream();
    ASSERT_TRUE(
        ActivationForward<float>(Activation::kSwiGlu, Matrix(g), Matrix(u), Matrix(out), stream)
            .ok());
    ASSERT_TRUE(ActivationBackward<float>(Activation::kSwiGlu, Matrix(g), Matrix(u), Matrix(d),
                                          Matrix(d_gate), Matrix(d_up), stream)
                    .ok());
    const std::vector<std::vector<float>> got = {device->Read(out), device->Read(d_gate),
                                                 device->Read(d_up)};
    if (expected.empty()) expected = got;
    for (size_t i = 0; i < gate.size(); ++i) {
      EXPECT_NEAR(got[0][i], expected[0][i], bound * std::abs(expected[0][i]));
      EXPECT_NEAR(got[1][i], expected[1][i],
                  bound * std::abs(d_out[i] * up[i]) * (1 + std::abs(gate[i])));
      EXPECT_NEAR(got[2][i], expected[2][i], bound * std::abs(expected[2][i]));
    }
  }
}

}  // namespace
}  // namespace moe
