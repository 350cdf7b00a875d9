// kernels/grouped_gemm on the simulated GPU: tensor cores on bfloat16, chains of fmaf on float32.
#include "kernels/grouped_gemm/grouped_gemm_cuda.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kernels/device_memory.h"

namespace moe {
namespace {

using testing::kLayoutPairs;
using testing::kLayouts;
using testing::Matrix;
using testing::MatrixLayout;
using testing::SameBits;
using Matrix32 = Matrix<float>;

// A path runs a problem with float32 output, and checks c, which held `old` before.

// 16-bit types on tensor cores, against sums in float64.
template <typename Type>
struct Mma {
  using T = Type;
  template <typename Problem>
  static cudaError_t Run(const Problem& problem) {
    return gemm::RunMma(problem, nullptr);
  }

  // Products of two 16-bit numbers are exact. Each addition errs by at most 2^-23 of a partial sum
  // (tensor cores may cut off where IEEE 754 would round), and no partial sum exceeds the sum of
  // magnitudes by more than what was added to it in error: one term more covers that.
  static void Expect(const gemm::Problem<T, float>& problem, MatrixView<float> old) {
    const auto& [a, b, c, a_layout, b_layout, write, tree, exact] = problem;
    for (int64_t i = 0; i < c.rows(); ++i) {
      for (int64_t j = 0; j < c.cols(); ++j) {
        double sum = write == Write::kAdd ? static_cast<double>(old(i, j)) : 0.0;
        double magnitudes = std::abs(sum);
        for (int64_t k = 0; k < problem.depth(); ++k) {
          const auto x = a_layout == gemm::Layout::kPlain ? a(i, k) : a(k, i);
          const auto y = b_layout == gemm::Layout::kPlain ? b(k, j) : b(j, k);
          const double term = double{static_cast<float>(x)} * double{static_cast<float>(y)};
          sum += term;
          magnitudes += std::abs(term);
        }
        const double additions = static_cast<double>(problem.depth() + 1);
        ASSERT_NEAR(c(i, j), sum, std::ldexp(additions, -23) * magnitudes) << i << " " << j;
      }
    }
  }
};

// Float32, against the specification bit by bit.
struct Fma {
  using T = float;
  template <typename Problem>
  static cudaError_t Run(const Problem& problem) {
    return gemm::RunFma(problem, nullptr);
  }

  static void Expect(const gemm::Problem<T, float>& problem, MatrixView<float> old) {
    const auto& [a, b, c, a_layout, b_layout, write, tree, exact] = problem;
    Matrix32 want(c.rows(), c.cols(), kLayouts[0]);
    for (int64_t i = 0; i < c.rows(); ++i) std::copy_n(old.row(i), c.cols(), want.view().row(i));
    gemm::Reference<float, float>({a, b, want.view(), a_layout, b_layout, write});
    for (int64_t i = 0; i < c.rows(); ++i) {
      for (int64_t j = 0; j < c.cols(); ++j) {
        ASSERT_EQ(std::bit_cast<uint32_t>(c(i, j)), std::bit_cast<uint32_t>(want.view()(i, j)))
            << i << " " << j;
      }
    }
  }
};

// Rows of groups, cut out of one buffer, and a matrix for each group.
struct Groups {
  // `spare`: rows after the last group.
  Groups(std::initializer_list<int64_t> rows, int64_t spare = 0) {
    for (const int64_t r : rows) offsets.push_back(offsets.back() + r);
    total = offsets.back() + spare;
  }
  int64_t count() const { return static_cast<int64_t>(offsets.size()) - 1; }
  template <typename U>
  MatrixView<U> Rows(MatrixView<U> all, int64_t g) const {
    return RowRange(all, offsets[g], offsets[g + 1]);
  }
  std::vector<int64_t> offsets = {0};
  int64_t total = 0;
};

template <typename T>
std::vector<Matrix<T>> RandomMatrices(int64_t count, int64_t rows, int64_t cols,
                                      MatrixLayout layout, uint64_t seed) {
  std::vector<Matrix<T>> matrices;
  for (int64_t g = 0; g < count; ++g) {
    matrices.push_back(Matrix<T>::Random(rows, cols, layout, seed + g));
  }
  return matrices;
}

template <typename View, typename T>
std::vector<View> ViewsOf(std::vector<Matrix<T>>& matrices) {
  std::vector<View> views;
  for (auto& matrix : matrices) views.push_back(matrix.view());
  return views;
}

// Layouts of the two inputs and of the output.
struct Layouts {
  MatrixLayout in, weight, out;
};
constexpr Layouts kAligned = {kLayouts[0], kLayouts[1], kLayouts[0]};

// y = x w^T and dx = dy w of all groups.
template <typename Path>
void CheckProducts(const Groups& groups, int64_t depth, int64_t cols, const Layouts& layouts) {
  using T = typename Path::T;
  SCOPED_TRACE(::testing::Message() << groups.total << " rows, depth " << depth << ", " << cols);
  for (const auto layout : {gemm::Layout::kTransposed, gemm::Layout::kPlain}) {
    const bool transposed = layout == gemm::Layout::kTransposed;
    const auto in = Matrix<T>::Random(groups.total, depth, layouts.in, 1);
    auto weights = RandomMatrices<T>(groups.count(), transposed ? cols : depth,
                                     transposed ? depth : cols, layouts.weight, 100);
    const auto views = ViewsOf<MatrixView<const T>>(weights);
    auto old = Matrix32::Random(groups.total, cols, layouts.out, 2);
    auto out = old;
    ASSERT_EQ(Path::Run(gemm::CudaGroupedGemm<T, float>{in.view(), groups.offsets.data(), views,
                                                        layout, out.view()}),
              cudaSuccess);
    for (int64_t g = 0; g < groups.count(); ++g) {
      SCOPED_TRACE(g);
      const auto result = groups.Rows(out.view(), g), before = groups.Rows(old.view(), g);
      Path::Expect({groups.Rows(in.view(), g), views[g], result, gemm::Layout::kPlain, layout,
                    Write::kOverwrite},
                   before);
      for (int64_t r = 0; r < result.rows(); ++r) {
        std::copy_n(result.row(r), cols, before.row(r));
      }
    }
    EXPECT_TRUE(SameBits(out, old)) << "something was written beside the rows of groups";
  }
}

// dw (+)= dy^T x of all groups.
template <typename Path>
void CheckWeightGradients(const Groups& groups, int64_t out, int64_t in, const Layouts& layouts) {
  using T = typename Path::T;
  SCOPED_TRACE(::testing::Message() << groups.total << " rows, dw " << out << " x " << in);
  const auto dy = Matrix<T>::Random(groups.total, out, layouts.in, 1);
  const auto x = Matrix<T>::Random(groups.total, in, layouts.weight, 2);
  for (const Write write : {Write::kOverwrite, Write::kAdd}) {
    auto old = RandomMatrices<float>(groups.count(), out, in, layouts.out, 200);
    auto dw = old;
    const auto views = ViewsOf<MatrixView<float>>(dw);
    ASSERT_EQ(Path::Run(gemm::CudaGroupedWeightGradient<T>{dy.view(), x.view(),
                                                           groups.offsets.data(), views, write}),
              cudaSuccess);
    for (int64_t g = 0; g < groups.count(); ++g) {
      SCOPED_TRACE(g);
      Path::Expect({groups.Rows(dy.view(), g), groups.Rows(x.view(), g), views[g],
                    gemm::Layout::kTransposed, gemm::Layout::kPlain, write},
                   old[g].view());
      for (int64_t r = 0; r < out; ++r) {
        std::copy_n(views[g].row(r), in, old[g].view().row(r));
      }
      EXPECT_TRUE(SameBits(dw[g], old[g])) << "something was written beside the matrix";
    }
  }
}

template <typename Path>
class GroupedGemmCudaTest : public ::testing::Test {};
using Paths = ::testing::Types<Mma<BFloat16>, Mma<Float16>, Fma>;
TYPED_TEST_SUITE(GroupedGemmCudaTest, Paths);

TYPED_TEST(GroupedGemmCudaTest, ProductsByHand) {
  using T = typename TypeParam::T;
  const auto values = [](std::initializer_list<float> list) {
    std::vector<T> result;
    for (const float v : list) result.push_back(T(v));
    return result;
  };
  const auto x = values({1, 2, 3, 4, 5, 6});  // [3, 2]: group 0 has row 0, group 1 none, 2 the rest
  const auto w0 = values({1, 0, 0, 1}), w2 = values({0, 10, 100, 1000});  // [2, 2]
  const std::vector<int64_t> offsets = {0, 1, 1, 3};
  const std::vector<MatrixView<const T>> weight = {
      {w0.data(), 2, 2}, {nullptr, 2, 2}, {w2.data(), 2, 2}};
  std::vector<float> out(6, -1.0f);
  gemm::CudaGroupedGemm<T, float> product = {
      {x.data(), 3, 2}, offsets.data(), weight, gemm::Layout::kTransposed, {out.data(), 3, 2}};
  ASSERT_EQ(TypeParam::Run(product), cudaSuccess);
  EXPECT_EQ(out, (std::vector<float>{1, 2, 40, 4300, 60, 6500}));
  product.weight_layout = gemm::Layout::kPlain;
  ASSERT_EQ(TypeParam::Run(product), cudaSuccess);
  EXPECT_EQ(out, (std::vector<float>{1, 2, 400, 4030, 600, 6050}));

  const auto dy = values({1, 2, 3});  // [3, 1]
  std::vector<float> dw(6, 7.0f);     // [1, 2] each
  const std::vector<MatrixView<float>> gradients = {{&dw[0], 1, 2}, {&dw[2], 1, 2}, {&dw[4], 1, 2}};
  gemm::CudaGroupedWeightGradient<T> gradient = {
      {dy.data(), 3, 1}, {x.data(), 3, 2}, offsets.data(), gradients, Write::kAdd};
  ASSERT_EQ(TypeParam::Run(gradient), cudaSuccess);
  EXPECT_EQ(dw, (std::vector<float>{8, 9, 7, 7, 28, 33}));
  gradient.write = Write::kOverwrite;
  ASSERT_EQ(TypeParam::Run(gradient), cudaSuccess);
  EXPECT_EQ(dw, (std::vector<float>{1, 2, 0, 0, 21, 26}));
}

// More depth than the pipeline has stages, a group of more than one tile, rows of whole 16 bytes so
// that copies are asynchronous.
TYPED_TEST(GroupedGemmCudaTest, EqualsTheOracleForAnySchedule) {
  testing::ForSchedules([] {
    CheckProducts<TypeParam>(Groups({2, 129}), 104, 16, kAligned);
    CheckWeightGradients<TypeParam>(Groups({2, 100}), 16, 24, kAligned);
  });
}

// Groups that end inside a tile, empty ones between and at either end, rows after the last one.
TYPED_TEST(GroupedGemmCudaTest, EqualsTheOracleForAnyGroups) {
  const Groups groups({0, 5, 130, 0, 1, 0}, 3);
  CheckProducts<TypeParam>(groups, 40, 131, kAligned);
  CheckWeightGradients<TypeParam>(groups, 131, 24, kAligned);
  CheckWeightGradients<TypeParam>(Groups({3, 0, 5}), 131, 136, kAligned);  // tiles both ways
  CheckProducts<TypeParam>(Groups({0, 0, 140}), 8, 16, kAligned);
  CheckWeightGradients<TypeParam>(Groups({0, 0}), 3, 5, kAligned);
}

TYPED_TEST(GroupedGemmCudaTest, EqualsTheOracleForAnyWidthAndDepth) {
  for (const int64_t depth : {0, 1, 7, 8, 16, 31, 32, 33, 64, 65, 96, 100}) {
    if (moe::testing::kSanitized && depth != 33) continue;
    CheckProducts<TypeParam>(Groups({3, 9}), depth, 1 + depth % 18, kAligned);
    CheckWeightGradients<TypeParam>(Groups({depth}), 1 + depth % 13, 1 + depth % 18, kAligned);
  }
}

TYPED_TEST(GroupedGemmCudaTest, EqualsTheOracleForAnyLayout) {
  for (const auto& [in, out] : kLayoutPairs) {
    CheckProducts<TypeParam>(Groups({3, 17}), 40, 24, {in, out, in});
    if (moe::testing::kSanitized) continue;
    CheckProducts<TypeParam>(Groups({18}), 33, 9, {out, in, out});
    CheckWeightGradients<TypeParam>(Groups({3, 37}), 24, 16, {in, out, in});
    CheckWeightGradients<TypeParam>(Groups({33}), 17, 9, {out, in, out});
  }
  // Rows at multiples of 16 bytes that end within 16 bytes, what follows them not to be read.
  const MatrixLayout padded = {0, 3, 0};
  CheckProducts<TypeParam>(Groups({3, 17}), 37, 21, {padded, padded, padded});
  CheckWeightGradients<TypeParam>(Groups({3, 37}), 21, 13, {padded, padded, padded});
}

// More groups than one launch takes, and a launch whose offsets begin behind others'.
TYPED_TEST(GroupedGemmCudaTest, TakesMoreGroupsThanALaunch) {
  Groups groups({});
  for (int64_t g = 0; g < 131; ++g) {
    groups.offsets.push_back(groups.offsets.back() + (g % 64 == 2 || g > 126 ? 1 + g % 3 : 0));
  }
  groups.total = groups.offsets.back();
  CheckProducts<TypeParam>(groups, 5, 3, kAligned);
  CheckWeightGradients<TypeParam>(groups, 2, 3, kAligned);
}

TYPED_TEST(GroupedGemmCudaTest, WithoutOffsetsAllRowsAreOneGroup) {
  using T = typename TypeParam::T;
  const auto in = Matrix<T>::Random(9, 5, kLayouts[0], 1);
  const auto weight = Matrix<T>::Random(4, 5, kLayouts[0], 2);
  const std::vector<MatrixView<const T>> weights = {weight.view()};
  Matrix32 out(9, 4, kLayouts[0]), dw(5, 5, kLayouts[0]);
  ASSERT_EQ(TypeParam::Run(gemm::CudaGroupedGemm<T, float>{in.view(), nullptr, weights,
                                                           gemm::Layout::kTransposed, out.view()}),
            cudaSuccess);
  TypeParam::Expect({in.view(), weight.view(), out.view(), gemm::Layout::kPlain,
                     gemm::Layout::kTransposed, Write::kOverwrite},
                    out.view());
  const std::vector<MatrixView<float>> gradients = {dw.view()};
  ASSERT_EQ(TypeParam::Run(gemm::CudaGroupedWeightGradient<T>{in.view(), in.view(), nullptr,
                                                              gradients, Write::kOverwrite}),
            cudaSuccess);
  TypeParam::Expect({in.view(), in.view(), dw.view(), gemm::Layout::kTransposed,
                     gemm::Layout::kPlain, Write::kOverwrite},
                    dw.view());
}

// The same rows of one group: alone, and between two others, one of which is all NaN.
TYPED_TEST(GroupedGemmCudaTest, BitsDependOnTheRowAndItsGroupAlone) {
  using T = typename TypeParam::T;
  const int64_t rows = 37, before = 11, after = 130, depth = 43, cols = 10;
  const int64_t total = before + rows + after;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  auto in = Matrix<T>::Random(total, depth, kLayouts[0], 1);
  auto dy = Matrix<T>::Random(total, cols, kLayouts[0], 2);
  auto weights = RandomMatrices<T>(3, cols, depth, kLayouts[0], 3);
  for (int64_t k = 0; k < depth; ++k) {
    weights[0].view()(k % cols, k) = T(nan);
    for (int64_t r = 0; r < before; ++r) in.view()(r, k) = T(nan);
  }
  for (int64_t r = 0; r < before * cols; ++r) dy.view()(r / cols, r % cols) = T(nan);
  const auto views = ViewsOf<MatrixView<const T>>(weights);
  const auto cut = [&](auto view, int64_t begin, int64_t end) {
    return RowRange(view, before + begin, before + end);
  };

  Matrix32 together(total, cols, kLayouts[0]), alone(rows, cols, kLayouts[0]);
  const std::vector<int64_t> offsets = {0, before, before + rows, total};
  ASSERT_EQ(TypeParam::Run(gemm::CudaGroupedGemm<T, float>{std::as_const(in).view(), offsets.data(),
                                                           views, gemm::Layout::kTransposed,
                                                           together.view()}),
            cudaSuccess);
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 1}, {1, 20}, {20, 37}}) {
    ASSERT_EQ(
        TypeParam::Run(gemm::CudaGroupedGemm<T, float>{
            cut(std::as_const(in).view(), begin, end), nullptr, std::span(views).subspan(1, 1),
            gemm::Layout::kTransposed, RowRange(alone.view(), begin, end)}),
        cudaSuccess);
  }
  for (int64_t i = 0; i < rows * cols; ++i) {
    ASSERT_EQ(together.view()(before + i / cols, i % cols), alone.view()(i / cols, i % cols)) << i;
  }
  EXPECT_TRUE(std::isnan(together.view()(0, 0)));

  Matrix32 gradients(3 * cols, depth, kLayouts[0]), gradient(cols, depth, kLayouts[0]);
  const std::vector<MatrixView<float>> dw = {RowRange(gradients.view(), 0, cols),
                                             RowRange(gradients.view(), cols, 2 * cols),
                                             RowRange(gradients.view(), 2 * cols, 3 * cols)};
  const std::vector<MatrixView<float>> dw_alone = {gradient.view()};
  ASSERT_EQ(TypeParam::Run(gemm::CudaGroupedWeightGradient<T>{
                std::as_const(dy).view(), std::as_const(in).view(), offsets.data(), dw,
                Write::kOverwrite}),
            cudaSuccess);
  ASSERT_EQ(TypeParam::Run(gemm::CudaGroupedWeightGradient<T>{
                cut(std::as_const(dy).view(), 0, rows), cut(std::as_const(in).view(), 0, rows),
                nullptr, dw_alone, Write::kOverwrite}),
            cudaSuccess);
  for (int64_t i = 0; i < cols * depth; ++i) {
    ASSERT_EQ(dw[1](i / depth, i % depth), gradient.view()(i / depth, i % depth)) << i;
  }
  EXPECT_TRUE(std::isnan(dw[0](0, 0)));
}

// AddressSanitizer has the say on what is read and written. No row is in two groups, which
// ThreadSanitizer would find.
TYPED_TEST(GroupedGemmCudaTest, WrongOffsetsStayInBounds) {
  using T = typename TypeParam::T;
  const auto in = Matrix<T>::Random(9, 8, kLayouts[0], 1);
  auto weights = RandomMatrices<T>(3, 8, 8, kLayouts[0], 2);
  const auto views = ViewsOf<MatrixView<const T>>(weights);
  Matrix32 out(9, 8, kLayouts[1]);
  auto dw = RandomMatrices<float>(3, 8, 8, kLayouts[1], 3);
  const auto gradients = ViewsOf<MatrixView<float>>(dw);
  for (const auto& offsets :
       {std::vector<int64_t>{5, 1000, -5, -7}, {-1, 7, 59, 1ll << 62}, {9, 5, 2, 0}}) {
    EXPECT_EQ(TypeParam::Run(gemm::CudaGroupedGemm<T, float>{in.view(), offsets.data(), views,
                                                             gemm::Layout::kPlain, out.view()}),
              cudaSuccess);
    EXPECT_EQ(TypeParam::Run(gemm::CudaGroupedWeightGradient<T>{
                  in.view(), in.view(), offsets.data(), gradients, Write::kAdd}),
              cudaSuccess);
  }
}

TYPED_TEST(GroupedGemmCudaTest, NothingIsLaunchedForOutputsOfSizeZero) {
  using T = typename TypeParam::T;
  const MatrixView<const T> none(nullptr, 0, 0);
  const std::vector<MatrixView<const T>> weights = {none};
  EXPECT_EQ(
      TypeParam::Run(gemm::CudaGroupedGemm<T, float>{.in = none, .weight = weights, .out = {}}),
      cudaSuccess);
  EXPECT_EQ(TypeParam::Run(gemm::CudaGroupedGemm<T, float>{
                .in = {nullptr, 2, 0}, .weight = {}, .out = {nullptr, 2, 3}}),
            cudaSuccess);
  const std::vector<MatrixView<float>> dw = {{nullptr, 0, 4}};
  EXPECT_EQ(TypeParam::Run(gemm::CudaGroupedWeightGradient<T>{
                .dy = {nullptr, 3, 0}, .x = {nullptr, 3, 4}, .dw = dw}),
            cudaSuccess);
}

// A product of 2^20 tiles a side is refused, not cut down to what a grid has.
TYPED_TEST(GroupedGemmCudaTest, MoreTilesThanAGridHasBlocksAreAnError) {
  using T = typename TypeParam::T;
  const int64_t huge = int64_t{1} << 27;
  const std::vector<MatrixView<const T>> weights = {{nullptr, huge, 1}};
  EXPECT_EQ(TypeParam::Run(gemm::CudaGroupedGemm<T, float>{
                .in = {nullptr, huge, 1}, .weight = weights, .out = {nullptr, huge, huge}}),
            cudaErrorInvalidConfiguration);
}

// A product too small for float32 rounds to -0, and one more term of zeros would turn that into +0.
TEST(GroupedGemmFmaTest, ASumOfMinusZeroKeepsItsSign) {
  const float tiny = 1e-30f, minus_tiny = -1e-30f;
  float out = 1;
  const std::vector<MatrixView<const float>> weights = {{&tiny, 1, 1}};
  ASSERT_EQ(Fma::Run(gemm::CudaGroupedGemm<float>{
                .in = {&minus_tiny, 1, 1}, .weight = weights, .out = {&out, 1, 1}}),
            cudaSuccess);
  EXPECT_EQ(std::bit_cast<uint32_t>(out), std::bit_cast<uint32_t>(-0.0f));
}

// 256 + 1 + 1: 258 in one rounding, 256 if every sum were rounded to bfloat16.
TEST(GroupedGemmMmaTest, RoundsToBFloat16OnceAfterTheWholeSum) {
  const auto in = Matrix<BFloat16>::Random(5, 70, kLayouts[0], 1);
  const std::vector<BFloat16> terms = {BFloat16(256.0f), BFloat16(1.0f), BFloat16(1.0f)};
  const std::vector<BFloat16> ones(3, BFloat16(1.0f));
  BFloat16 sum;
  std::vector<MatrixView<const BFloat16>> weights = {{terms.data(), 1, 3}};
  ASSERT_EQ(gemm::RunMma(
                gemm::CudaGroupedGemm<BFloat16>{
                    .in = {ones.data(), 1, 3}, .weight = weights, .out = {&sum, 1, 1}},
                nullptr),
            cudaSuccess);
  EXPECT_EQ(static_cast<float>(sum), 258.0f);

  for (const auto& layout : kLayouts) {
    const auto weight = Matrix<BFloat16>::Random(11, 70, kLayouts[0], 2);
    weights = {weight.view()};
    Matrix<BFloat16> narrow(5, 11, layout), want = narrow;
    Matrix32 wide(5, 11, layout);
    ASSERT_EQ(gemm::RunMma(
                  gemm::CudaGroupedGemm<BFloat16>{
                      .in = in.view(), .weight = weights, .out = narrow.view()},
                  nullptr),
              cudaSuccess);
    ASSERT_EQ(gemm::RunMma(
                  gemm::CudaGroupedGemm<BFloat16, float>{
                      .in = in.view(), .weight = weights, .out = wide.view()},
                  nullptr),
              cudaSuccess);
    for (int64_t i = 0; i < 55; ++i) {
      want.view()(i / 11, i % 11) = BFloat16(wide.view()(i / 11, i % 11));
    }
    EXPECT_TRUE(SameBits(narrow, want));
  }
}

}  // namespace
}  // namespace moe
