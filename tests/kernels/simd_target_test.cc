// Operations on every SIMD target that this CPU has: the vector code of each is run, and gives the
// bits of the best one (attention_test and grouped_gemm_test do the same for theirs).
#include <cmath>
#include <string>

#include "kernels/activation/activation.h"
#include "kernels/adamw/adamw.h"
#include "kernels/attention/attention.h"
#include "kernels/base/fixed_dot.h"
#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/exact_sum/exact_sum.h"
#include "kernels/exact_sum/scaled_sum.h"
#include "kernels/norm/rms_norm.h"
#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using testing::Matrix;
using testing::RandomFloats;
using testing::SimdTarget;
using testing::TestStream;

constexpr int64_t kRows = 3;
constexpr int64_t kColumns[] = {1, 7, 16, 31, 64, 77};

using Values = std::vector<double>;

void Append(const Values& from, Values& to) {
  to.insert(to.end(), from.begin(), from.end());
}
void Append(const std::vector<float>& from, Values& to) {
  to.insert(to.end(), from.begin(), from.end());
}

// Results of operations that round the same way without fused multiply-add.
template <typename T>
Values Unfused() {
  Values all;
  TestStream stream;
  Workspace workspace;
  for (const int64_t n : kColumns) {
    const auto a = Matrix<T>::Random(kRows, n, 1), b = Matrix<T>::Random(kRows, n, 2);
    Matrix<T> sum(kRows, n), turned = Matrix<T>::Random(kRows, 2 * n, 3);
    EXPECT_TRUE(AddRows<T>(a.view(), b.view(), sum.view(), *stream).ok());
    const std::vector<int64_t> offsets = {0, 1, kRows};
    EXPECT_TRUE(ApplyRotary<T>({.sequence_offsets = offsets}, 100.0f, RotaryDirection::kForward,
                               turned.view(), workspace, *stream)
                    .ok());
    Append(sum.values(), all);
    Append(turned.values(), all);
  }
  return all;
}

Values UnfusedFloat() {
  Values all = Unfused<float>();
  TestStream stream;
  Workspace workspace;
  for (const int64_t n : kColumns) {
    const auto x = RandomFloats(n, 4, 3000);
    std::vector<float> weight(n, 1.0f), m(n, 0.1f), v(n, 0.2f), wide(n);
    std::vector<BFloat16> narrow(n);
    std::vector<Float16> half(n);
    std::vector<int64_t> sum(n);
    int64_t non_finite = 0;
    int64_t squares[kSquareSumSize] = {};
    const AdamWSlice slice = {0, n, weight.data(), m.data(), v.data(), 0.1f};
    EXPECT_TRUE(AdamW({}, {x, 1}, {&slice, 1}, workspace, *stream).ok());
    EXPECT_TRUE((Cast<float, BFloat16>(x, absl::MakeSpan(narrow), *stream).ok()));
    EXPECT_TRUE((Cast<float, Float16>(x, absl::MakeSpan(half), *stream).ok()));
    EXPECT_TRUE((Cast<Float16, float>(half, absl::MakeSpan(wide), *stream).ok()));
    Append(wide, all);
    EXPECT_TRUE((Cast<BFloat16, float>(narrow, absl::MakeSpan(wide), *stream).ok()));
    EXPECT_TRUE(
        ExactAccumulate({}, x, absl::MakeSpan(sum), Write::kAdd, &non_finite, *stream).ok());
    Append(weight, all);
    Append(m, all);
    Append(v, all);
    Append(wide, all);
    EXPECT_TRUE(ExactToFloat({}, sum, 1.0 / 3, absl::MakeSpan(wide), *stream).ok());
    const SquaresUnit unit = {.begin = 0, .rows = 1, .cols = n, .stride = n};
    EXPECT_TRUE(AddSquares({x, 1}, {&unit, 1}, squares, *stream).ok());
    Append(wide, all);
    Append(Values{SquareSumValue(squares), static_cast<double>(non_finite)}, all);
  }
  return all;
}

template <typename T>
Values Fused() {
  Values all;
  TestStream stream;
  for (const int64_t n : kColumns) {
    const auto a = Matrix<T>::Random(kRows, n, 1), b = Matrix<T>::Random(kRows, n, 2),
               d = Matrix<T>::Random(kRows, n, 3);
    Matrix<T> out(kRows, n), d_a(kRows, n), d_b(kRows, n);
    for (const Activation activation :
         {Activation::kSwiGlu, Activation::kGeGlu, Activation::kClampedSwiGlu}) {
      EXPECT_TRUE(ActivationForward<T>(activation, a.view(), b.view(), out.view(), *stream).ok());
      EXPECT_TRUE(ActivationBackward<T>(activation, a.view(), b.view(), d.view(), d_a.view(),
                                        d_b.view(), *stream)
                      .ok());
      for (const Matrix<T>* m : {&out, &d_a, &d_b}) Append(m->values(), all);
    }
    const auto weight = RandomFloats(n, 4);
    std::vector<float> rstd(kRows), d_weight(n), loss(kRows);
    EXPECT_TRUE(
        RmsNorm<T>(a.view(), weight, 1e-5f, out.view(), absl::MakeSpan(rstd), *stream).ok());
    EXPECT_TRUE(RmsNormBackward<T>(a.view(), weight, rstd, d.view(), d_a.view(), Write::kOverwrite,
                                   absl::MakeSpan(d_weight), Write::kOverwrite, *stream)
                    .ok());
    const auto logits = Matrix<float>::Random(kRows, n, 5);
    EXPECT_TRUE(
        CrossEntropy<T>(logits.view(), {0, 0, 0}, 0.5f, absl::MakeSpan(loss), d_b.view(), *stream)
            .ok());
    for (const Matrix<T>* m : {&out, &d_a, &d_b}) Append(m->values(), all);
    for (const auto* x : {&rstd, &d_weight, &loss}) Append(*x, all);
    const T* const row = a.view().row(0);
    Append(Values{FixedDot(row, row, n), FixedSum(row, n)}, all);
  }
  return all;
}

TEST(SimdTargetTest, OperationsWithoutFusedMultiplyAddHaveTheSameBitsEverywhere) {
  const Values best = UnfusedFloat(), best_bf16 = Unfused<BFloat16>(),
               best_f16 = Unfused<Float16>();
  for (const std::string& target : gemm::SimdTargets()) {
    const SimdTarget use(target);
    EXPECT_EQ(UnfusedFloat(), best) << target;
    EXPECT_EQ(Unfused<BFloat16>(), best_bf16) << target;
    EXPECT_EQ(Unfused<Float16>(), best_f16) << target;
  }
}

TEST(SimdTargetTest, OperationsHaveTheSameBitsOnTargetsWithFusedMultiplyAdd) {
  const Values best = Fused<float>(), best_bf16 = Fused<BFloat16>(), best_f16 = Fused<Float16>();
  const auto targets = gemm::SimdTargets();
  for (size_t i = 0; i + 1 < targets.size(); ++i) {  // the last one is the fallback
    const SimdTarget use(targets[i]);
    EXPECT_EQ(Fused<float>(), best) << targets[i];
    EXPECT_EQ(Fused<BFloat16>(), best_bf16) << targets[i];
    EXPECT_EQ(Fused<Float16>(), best_f16) << targets[i];
  }
}

// Without fused multiply-add a product is rounded once more: still under 64 roundings of values and
// terms that are below 32 here.
TEST(SimdTargetTest, TheFallbackStaysWithinRounding) {
  const Values best = Fused<float>();
  const SimdTarget use(gemm::SimdTargets().back());
  const Values plain = Fused<float>();
  ASSERT_EQ(plain.size(), best.size());
  for (size_t i = 0; i < best.size(); ++i) {
    EXPECT_NEAR(plain[i], best[i], 64 * testing::kFloatRounding * (32 + std::abs(best[i]))) << i;
  }
}

}  // namespace
}  // namespace moe
