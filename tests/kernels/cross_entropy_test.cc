// kernels/cross_entropy: losses and their gradients, on every device.
#include "kernels/cross_entropy/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "tests/kernels/device_memory.h"
#include "tests/kernels/gradcheck.h"

namespace moe::testing {
namespace {

double ReferenceLoss(const double* logits, int64_t n, int64_t target) {
  double max = -HUGE_VAL, sum = 0;
  for (int64_t v = 0; v < n; ++v) max = std::max(max, logits[v]);
  for (int64_t v = 0; v < n; ++v) sum += std::exp(logits[v] - max);
  return max + std::log(sum) - logits[target];
}

// In the first and last columns and between.
std::vector<int32_t> Targets(int64_t tokens, int64_t vocabulary) {
  std::vector<int32_t> target = {0, static_cast<int32_t>(vocabulary - 1)};
  for (int64_t t = 2; t < tokens; ++t) target.push_back(static_cast<int32_t>(t * 7 % vocabulary));
  target.resize(static_cast<size_t>(tokens));
  return target;
}

template <typename T>
struct Result {
  absl::Status status;
  std::vector<float> loss;
  Matrix<T> d_logits;
};

// Gradients are computed in the layout of `d_logits`; without columns none are requested.
template <typename T>
Result<T> Compute(const TestDevice& device, const Matrix<float>& logits,
                  const std::vector<int32_t>& targets, float scale, const Matrix<T>& d_logits) {
  const auto from = device.Copy(logits);
  const auto target = device.Copy(targets);
  const auto loss = device.Copy(std::vector<float>(targets.size(), -1.0f));
  const auto to = device.Copy(d_logits);
  absl::Status status =
      CrossEntropy<T>(from.view(), target.span(), scale, loss.span(),
                      to.cols == 0 ? MatrixView<T>() : to.view(), device.stream());
  return {status, device.Read(loss), device.Read(to)};
}

// With gradients [T, V] in `layout`.
template <typename T>
Result<T> Compute(const TestDevice& device, const Matrix<float>& logits,
                  const std::vector<int32_t>& targets, float scale, MatrixLayout layout = {}) {
  auto result =
      Compute(device, logits, targets, scale, Matrix<T>(logits.rows(), logits.cols(), layout));
  EXPECT_OK(result.status) << result.status;
  return result;
}

template <typename T>
class CrossEntropyTest : public ::testing::Test {};
TYPED_TEST_SUITE(CrossEntropyTest, StorageTypes);

TYPED_TEST(CrossEntropyTest, EqualLogitsByHand) {
  using T = TypeParam;
  ForEachDevice([](const TestDevice& device) {
    const auto got = Compute<T>(device, Matrix<float>(2, 4, 3.0f), {2, 0}, 0.5f);
    for (const float loss : got.loss) EXPECT_FLOAT_EQ(loss, std::log(4.0f));
    EXPECT_EQ(got.d_logits.values(),
              (std::vector<double>{0.125, 0.125, -0.375, 0.125, -0.375, 0.125, 0.125, 0.125}));
  });
}

// An exponential has 2 roundings, and up to 16 for the difference in its exponent: |x - max| < 16.
// The sum has further 4 * (n / 1024 + 1) additions in a thread, 5 in its warp and 7 of warps on
// CUDA, n / 16 + 4 on the CPU. The loss, below 24, is log(sum) - (x_target - max): 16 roundings for
// either term and 24 for their difference. A gradient below 1 has the roundings of its exponential,
// those of the sum and 3. BFloat16 adds one rounding, of up to 2^-8 of the value.
TYPED_TEST(CrossEntropyTest, MatchesFloat64ForAnyWidth) {
  using T = TypeParam;
  constexpr int64_t kRows = 3;
  const float scale = 0.25f;
  const double storage = std::is_same_v<T, BFloat16> ? 0x1p-8 : sizeof(T) == 2 ? 0x1p-11 : 0;
  const double underflow = std::is_same_v<T, Float16> ? 0x1p-25 : 0;
  const auto check = [&](const TestDevice& device, int64_t cols, MatrixLayout in,
                         MatrixLayout out) {
    const auto logits = Matrix<float>::Random(kRows, cols, in, 1, 2);
    const auto target = Targets(kRows, cols);
    const auto got = Compute<T>(device, logits, target, scale, out);
    EXPECT_TRUE(got.d_logits.edges_intact());
    const double n = static_cast<double>(cols);
    const double sum_roundings = 18 + (device.is_cpu() ? n / 16 + 4 : 4 * (n / 1024 + 1) + 12);
    for (int64_t t = 0; t < kRows; ++t) {
      const float* const x = logits.view().row(t);
      const double max = *std::max_element(x, x + cols), min = *std::min_element(x, x + cols);
      ASSERT_LT(max - min, 16);
      double sum = 0;
      for (int64_t v = 0; v < cols; ++v) sum += std::exp(x[v] - max);
      EXPECT_NEAR(got.loss[t], std::log(sum) - (x[target[t]] - max),
                  (sum_roundings + 16 + 16 + 24) * kFloatRounding);
      for (int64_t v = 0; v < cols; ++v) {
        const double p = std::exp(x[v] - max) / sum, minus = v == target[t] ? 1 : 0;
        const double expected = scale * (p - minus);
        const double bound = scale * (p * (18 + sum_roundings) + 3 * (p + minus)) * kFloatRounding;
        EXPECT_NEAR(got.d_logits(t, v), expected,
                    bound + storage * (std::abs(expected) + bound) + underflow)
            << v << " of " << cols;
      }
    }
  };
  ForEachDevice(Simd::kAll, [&](const TestDevice& device) {
    for (const int64_t cols : {1, 4, 16, 37, 257, 1281}) {
      check(device, cols, kLayouts[0], kLayouts[1]);
      check(device, cols, kLayouts[3], kLayouts[4]);
    }
  });
}

// Probabilities have a relative error below 18 + 18 + n / 16 + 8 roundings (see above); p - 1 is
// below 1.
TEST(CrossEntropyFloat64Test, GradientMatchesFiniteDifferences) {
  const int64_t n = 37;
  const float scale = 0.25f;
  const auto logits = Matrix<float>::Random(3, n, 2, 2);
  const auto target = Targets(3, n);
  const auto total = [&](const std::vector<double>& x) {
    double sum = 0;
    for (int64_t t = 0; t < 3; ++t) sum += ReferenceLoss(x.data() + t * n, n, target[t]);
    return double{scale} * sum;
  };
  const TestDevice device{Device()};
  ExpectGradient(total, logits.values(),
                 Compute<float>(device, logits, target, scale).d_logits.values(),
                 double{scale} * 48 * kFloatRounding, "d_logits");
}

// 1290 columns: neighbouring rows without gaps differ in their alignment. Several draws, because
// sums in another order often round alike. A device's losses and gradients are compared with its
// own: the loss alone, those of a row alone, gradients in T and gradients in place. CPUs with fused
// multiply-add have the same.
TYPED_TEST(CrossEntropyTest, ARowHasTheSameBitsInAnyLayoutAndBatch) {
  using T = TypeParam;
  const int64_t rows = 3, cols = 1290;
  const auto target = Targets(rows, cols);
  std::map<uint64_t, Result<float>> on_cpu;  // by draw
  ForEachDevice([&](const TestDevice& device) {
    for (const uint64_t draw : {1, 2}) {
      const auto logits = Matrix<float>::Random(rows, cols, kLayouts[0], draw, 3);
      const auto wide = Compute<float>(device, logits, target, 0.01f, kLayouts[0]);
      if (device.is_cpu()) {
        const Result<float>& first = on_cpu.try_emplace(draw, wide).first->second;
        EXPECT_TRUE(SameBits(wide.loss, first.loss));
        EXPECT_TRUE(SameBits(wide.d_logits, first.d_logits));
      }
      const Matrix<T> d_logits = wide.d_logits.template As<T>();
      for (const auto& [in, out] : {kLayoutPairs[0], kLayoutPairs[1], kLayoutPairs[3]}) {
        const auto same = Matrix<float>::Random(rows, cols, in, draw, 3);
        const auto got = Compute<T>(device, same, target, 0.01f, out);
        EXPECT_TRUE(SameBits(got.loss, wide.loss));
        EXPECT_TRUE(SameBits(got.d_logits, d_logits));
        const auto loss_alone = Compute(device, same, target, 0.01f, Matrix<T>());
        EXPECT_OK(loss_alone.status);
        EXPECT_TRUE(SameBits(loss_alone.loss, wide.loss));
      }
      const auto alone = Compute<T>(device, logits.Rows(2, 3), {target[2]}, 0.01f);
      EXPECT_EQ(alone.loss, std::vector<float>{wide.loss[2]});
      EXPECT_TRUE(SameBits(alone.d_logits, d_logits, 2));
    }
  });
}

// 200 rows are more than one task of the CPU has.
TEST(CrossEntropyFloat32Test, GradientsMayOverwriteTheLogits) {
  ForEachDevice([](const TestDevice& device) {
    for (const MatrixLayout layout : {kLayouts[1], kLayouts[3]}) {
      for (const auto& [rows, cols] : {std::pair{3, 1281}, std::pair{200, 101}}) {
        if (rows > 3 && !device.is_cpu()) continue;
        const auto logits = Matrix<float>::Random(rows, cols, layout, 3, 2);
        const auto target = Targets(rows, cols);
        const auto want = Compute<float>(device, logits, target, 0.25f, layout);
        const auto in_place = device.Copy(logits);
        const auto targets = device.Copy(target);
        const auto loss = device.Copy(std::vector<float>(target.size()));
        ASSERT_OK(CrossEntropy<float>(in_place.view(), targets.span(), 0.25f, loss.span(),
                                      in_place.view(), device.stream()));
        EXPECT_TRUE(SameBits(device.Read(in_place), want.d_logits));
        EXPECT_TRUE(SameBits(device.Read(loss), want.loss));
      }
    }
  });
}

TYPED_TEST(CrossEntropyTest, LargeLogitsDoNotOverflowAndNonFiniteOnesShow) {
  using T = TypeParam;
  ForEachDevice([](const TestDevice& device) {
    for (const int64_t at : {0, 16, 18}) {  // body and tail
      Matrix<float> logits(1, 19);
      logits.at(0, at) = 1e30f;
      const auto large = Compute<T>(device, logits, {1}, 1.0f);
      EXPECT_EQ(large.loss[0], 1e30f);
      EXPECT_EQ(large.d_logits(0, at), 1);
      EXPECT_EQ(large.d_logits(0, 1), -1);
      for (const float bad : {kNaN, kInfinity}) {
        logits.at(0, at) = bad;
        const auto got = Compute<T>(device, logits, {1}, 1.0f);
        EXPECT_FALSE(std::isfinite(got.loss[0])) << bad;
        EXPECT_TRUE(std::isnan(got.d_logits(0, 1))) << bad;
      }
    }
  });
}

// The CPU refuses it. On CUDA an access out of bounds would reach the memory next to the row.
TYPED_TEST(CrossEntropyTest, ATargetOutOfRangeIsRefusedOrMakesItsOwnRowNaN) {
  using T = TypeParam;
  ForEachDevice([](const TestDevice& device) {
    for (const int32_t bad : {-1, 5, INT32_MIN, INT32_MAX}) {
      const auto logits = Matrix<float>::Random(3, 5, kLayouts[4], 5);
      auto got = Compute(device, logits, {1, bad, 4}, 1.0f, Matrix<T>(3, 5, kLayouts[4]));
      if (device.is_cpu()) {
        EXPECT_EQ(Message(got.status),
                  "CrossEntropy: target[1] is " + std::to_string(bad) + ", expected 0 to 4");
        continue;
      }
      auto want = Compute<T>(device, logits, {1, 0, 4}, 1.0f, kLayouts[4]);
      EXPECT_TRUE(std::isnan(got.loss[1])) << bad;
      got.loss[1] = want.loss[1];
      EXPECT_EQ(got.loss, want.loss);
      for (int64_t v = 0; v < 5; ++v) {
        EXPECT_TRUE(std::isnan(got.d_logits(1, v))) << bad;
        got.d_logits.at(1, v) = want.d_logits.at(1, v);  // NaNs do not compare equal
      }
      EXPECT_TRUE(SameBits(got.d_logits, want.d_logits)) << bad;
    }
  });
}

TYPED_TEST(CrossEntropyTest, TakesNoRows) {
  using T = TypeParam;
  ForEachDevice([](const TestDevice& device) {
    EXPECT_TRUE(Compute<T>(device, Matrix<float>(0, 5), {}, 1.0f).loss.empty());
    EXPECT_OK(device.stream().Synchronize());
    if (!device.is_cpu()) {  // where no target is in range
      EXPECT_TRUE(std::isnan(Compute<T>(device, Matrix<float>(1, 0), {0}, 1.0f).loss[0]));
    }
  });
}

TEST(CrossEntropyArgumentsTest, RefusesOtherShapes) {
  const TestDevice device{Device()};
  const Matrix<float> logits(2, 5);
  ExpectRefused(Compute(device, logits, {0}, 1, Matrix<float>(2, 5)).status,
                "CrossEntropy: target is [1], expected [2]");
  const std::vector<int32_t> target = {0, 1};
  std::vector<float> loss(1);
  ExpectRefused(
      CrossEntropy<float>(logits.view(), target, 1, absl::MakeSpan(loss), {}, device.stream()),
      "CrossEntropy: loss is [1], expected [2]");
  EXPECT_EQ(Compute(device, logits, target, 1, Matrix<float>(3, 5)).status.code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace moe::testing
