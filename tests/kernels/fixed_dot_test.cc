// kernels/base/fixed_dot: the order of the sums, to the bit.
#include "kernels/base/fixed_dot.h"

#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kernels/op_test.h"

namespace moe::testing {
namespace {

float Fold(const std::vector<float>& s) {
  const auto four = [&](int i) {
    return (s[i] + s[i + 8]) + (s[i + 4] + s[i + 12]);
  };
  return (four(0) + four(2)) + (four(1) + four(3));
}

template <typename T>
float DotInPlainLoops(const std::vector<T>& a, const std::vector<T>& b, bool fused) {
  std::vector<float> s(16, 0.0f);
  for (size_t i = 0; i < a.size(); ++i) {
    const auto x = static_cast<float>(a[i]), y = static_cast<float>(b[i]);
    s[i % 16] = fused ? std::fma(x, y, s[i % 16]) : s[i % 16] + x * y;
  }
  return Fold(s);
}

template <typename T>
float SumInPlainLoops(const std::vector<T>& a) {
  std::vector<float> s(16, 0.0f);
  for (size_t i = 0; i < a.size(); ++i) s[i % 16] += static_cast<float>(a[i]);
  return Fold(s);
}

template <typename T>
std::vector<T> RandomRow(int64_t n, uint64_t seed) {
  return Matrix<T>::Random(1, n, {0, 0, 0}, seed).memory();
}

template <typename T>
class FixedDotTest : public ::testing::Test {};
TYPED_TEST_SUITE(FixedDotTest, StorageTypes);

TYPED_TEST(FixedDotTest, HasTheBitsOfTheContractsOrderAtEveryLengthOnEverySimdTarget) {
  for (const std::string& target : gemm::SimdTargets()) {
    SCOPED_TRACE(target);
    const SimdTarget use(target);
    const bool fused = target != "EMU128";
    for (int64_t n = 0; n <= 70; ++n) {
      const auto a = RandomRow<TypeParam>(n, 1), b = RandomRow<TypeParam>(n, 2);
      EXPECT_EQ(FixedDot(a.data(), b.data(), n), DotInPlainLoops(a, b, fused)) << n;
      EXPECT_EQ(FixedDot(a.data(), a.data(), n), DotInPlainLoops(a, a, fused)) << n;
      EXPECT_EQ(FixedSum(a.data(), n), SumInPlainLoops(a)) << n;
    }
  }
}

// 2^24 + 1 - 2^24 in one partial sum: float32 loses the 1.
TYPED_TEST(FixedDotTest, WideDotKeepsWhatCancellationLeaves) {
  std::vector<TypeParam> a(33, TypeParam(0.0f));
  std::vector<TypeParam> b(33, TypeParam(1.0f));
  a[0] = b[0] = b[32] = TypeParam(4096.0f);
  a[16] = TypeParam(1.0f);
  a[32] = TypeParam(-4096.0f);
  EXPECT_EQ(FixedDot(a.data(), b.data(), 33), 0.0f);
  EXPECT_EQ(WideDot(a.data(), b.data(), 33), 1.0);
  for (const int64_t n : {0, 1, 15, 16, 17, 33, 200}) {
    const auto x = RandomRow<TypeParam>(n, 3);
    const auto y = RandomRow<TypeParam>(n, 4);
    double sum = 0;
    double magnitude = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double term = static_cast<double>(static_cast<float>(x[i])) *
                          static_cast<double>(static_cast<float>(y[i]));
      sum += term;
      magnitude += std::abs(term);
    }
    EXPECT_NEAR(WideDot(x.data(), y.data(), n), sum, static_cast<double>(n) * 0x1p-52 * magnitude);
  }
}

TYPED_TEST(FixedDotTest, ReadsOnlyItsOwnElementsAtAnyAlignment) {
  const int64_t n = 37;
  for (int64_t offset = 0; offset < 5; ++offset) {
    auto row = RandomRow<TypeParam>(n, 3);
    const float expected = SumInPlainLoops(row);
    row.insert(row.begin(), offset, TypeParam(1e30f));
    row.insert(row.end(), 20, TypeParam(kNaN));
    EXPECT_EQ(FixedSum(row.data() + offset, n), expected) << offset;
  }
}

TYPED_TEST(FixedDotTest, NonFiniteElementsShow) {
  for (const int64_t at : {0, 15, 16, 36}) {
    auto row = RandomRow<TypeParam>(37, 4);
    const auto other = RandomRow<TypeParam>(37, 5);
    row[at] = TypeParam(kNaN);
    EXPECT_TRUE(std::isnan(FixedDot(row.data(), other.data(), 37))) << at;
    EXPECT_TRUE(std::isnan(FixedSum(row.data(), 37))) << at;
  }
}

}  // namespace
}  // namespace moe::testing
