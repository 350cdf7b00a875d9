// kernels/product: products of rows, on every device.
#include "kernels/product/product.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "tests/kernels/device_memory.h"

namespace moe {
namespace {

using testing::ForEachDevice;
using testing::Matrix;
using testing::MatrixLayout;
using testing::SameBits;
using testing::TestDevice;

template <typename Pair>
class ProductTest : public ::testing::Test {};
// Of the result and of its first factor.
using Types = ::testing::Types<std::pair<float, float>, std::pair<BFloat16, BFloat16>,
                               std::pair<Float16, Float16>, std::pair<BFloat16, float>,
                               std::pair<Float16, float>>;
TYPED_TEST_SUITE(ProductTest, Types);

// a * b on the device, to `out` or added to it.
template <typename T, typename U>
Matrix<T> Product(const TestDevice& device, const Matrix<U>& a, const Matrix<float>& b,
                  const Matrix<T>& out, Write write) {
  const auto of_a = device.Copy(a);
  const auto of_b = device.Copy(b);
  const auto to = device.Copy(out);
  EXPECT_TRUE(
      (MultiplyRows<T, U>(of_a.view(), of_b.view(), to.view(), write, device.stream()).ok()));
  return device.Read(to);
}

TYPED_TEST(ProductTest, ProductsByHand) {
  using T = typename TypeParam::first_type;
  using U = typename TypeParam::second_type;
  const auto a = Matrix<U>::Of(2, 2, {1, 2, -3, 4});
  const auto b = Matrix<float>::Of(2, 2, {2, 0.5f, 1, -0.25f});
  const Matrix<T> out(2, 2, 10.0f);
  ForEachDevice([&](const TestDevice& device) {
    EXPECT_EQ(Product(device, a, b, out, Write::kAdd).values(),
              (std::vector<double>{12, 11, 7, 9}));
    EXPECT_EQ(Product(device, a, b, out, Write::kOverwrite).values(),
              (std::vector<double>{2, 1, -3, -1}));
  });
}

TEST(ProductInPlaceTest, TheResultMayBeTheFirstFactor) {
  ForEachDevice([&](const TestDevice& device) {
    const auto a = device.Copy(Matrix<float>::Of(2, 2, {1, 2, -3, 4}));
    const auto b = device.Copy(Matrix<float>::Of(2, 2, {2, 0.5f, 1, -0.25f}));
    ASSERT_TRUE(
        MultiplyRows<float>(a.view(), b.view(), a.view(), Write::kOverwrite, device.stream()).ok());
    EXPECT_EQ(device.Read(a).values(), (std::vector<double>{2, 1, -3, -1}));
  });
}

// (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24, of which a fused multiply-add would keep the last.
TEST(ProductRoundingTest, ProductsAreRoundedBeforeTheyAreAdded) {
  const Matrix<float> x(1, 1, 1 + 0x1p-12f), out(1, 1, -1 - 0x1p-11f);
  ForEachDevice([&](const TestDevice& device) {
    EXPECT_EQ(Product(device, x, x, out, Write::kAdd)(0, 0), 0);
    EXPECT_EQ(Product(device, x, x, out, Write::kOverwrite)(0, 0), 1 + 0x1p-11f);
  });
}

TYPED_TEST(ProductTest, EqualsThePlainLoopForAnyWidthAndLayout) {
  using T = typename TypeParam::first_type;
  using U = typename TypeParam::second_type;
  const auto check = [](const TestDevice& device, int64_t rows, int64_t cols, MatrixLayout of_a,
                        MatrixLayout of_b, MatrixLayout of_out) {
    const auto a = Matrix<U>::Random(rows, cols, of_a, 1);
    const auto b = Matrix<float>::Random(rows, cols, of_b, 2);
    const auto old = Matrix<T>::Random(rows, cols, of_out, 3);
    for (const Write write : {Write::kOverwrite, Write::kAdd}) {
      auto want = old;
      for (int64_t t = 0; t < rows; ++t) {
        for (int64_t h = 0; h < cols; ++h) {
          const float product = static_cast<float>(a.at(t, h)) * b.at(t, h);
          const auto before = static_cast<float>(old.at(t, h));
          want.at(t, h) = T(write == Write::kAdd ? before + product : product);
        }
      }
      EXPECT_TRUE(SameBits(Product(device, a, b, old, write), want)) << "H=" << cols;
    }
  };
  ForEachDevice([&](const TestDevice& device) {
    for (const int64_t cols : {1, 7, 16, 37, 277}) {
      for (const auto& [most, one] : testing::kLayoutPairs) {
        check(device, 13, cols, one, most, most);
        check(device, 13, cols, most, one, most);
        check(device, 13, cols, most, most, one);
      }
    }
    check(device, 70, 21, {}, {}, {});  // more rows than a task of the CPU has
  });
}

TYPED_TEST(ProductTest, TakesNoElementsAndRefusesWrongShapes) {
  using T = typename TypeParam::first_type;
  using U = typename TypeParam::second_type;
  ForEachDevice([](const TestDevice& device) {
    Stream& stream = device.stream();
    const auto multiply = [&](int64_t rows, int64_t cols, int64_t cols_of_b) {
      return MultiplyRows<T, U>({nullptr, rows, cols}, {nullptr, rows, cols_of_b},
                                {nullptr, rows, cols}, Write::kAdd, stream);
    };
    EXPECT_TRUE(multiply(0, 4, 4).ok());
    EXPECT_TRUE(multiply(4, 0, 0).ok());
    EXPECT_EQ(testing::Message(multiply(2, 2, 3)),
              "MultiplyRows: b is [2, 3] with stride 3, expected [2, 2]");
    EXPECT_TRUE(stream.Synchronize().ok());
  });
}

}  // namespace
}  // namespace moe
