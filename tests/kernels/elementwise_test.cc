// kernels/elementwise: rounding, every length, layout and alignment, on every device.
#include "kernels/elementwise/elementwise.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "tests/kernels/device_memory.h"

namespace moe::testing {
namespace {

// Casts `in` to another type. The arrays begin `from` and `to` elements after an aligned address,
// and nothing around the result is written.
template <typename V, typename U>
std::vector<V> Converted(const TestDevice& device, const std::vector<U>& in, size_t from = 0,
                         size_t to = 0) {
  const Placed<U> source(device, in, from);
  const Placed<V> result(device, std::vector<V>(in.size()), to);
  EXPECT_OK(Cast<U, V>(source.span(), result.span(), device.stream()));
  return result.Read();
}

template <typename T>
class CastTest : public ::testing::Test {};
TYPED_TEST_SUITE(CastTest, HalfTypes);

// NaNs of all payloads are among the values, so bits are compared.
template <typename T>
void ExpectTheScalarConversion(const TestDevice& device, const std::vector<float>& in, size_t wide,
                               size_t narrow) {
  std::vector<T> rounded;
  std::vector<float> back;
  for (const float x : in) {
    rounded.push_back(T(x));
    back.push_back(static_cast<float>(rounded.back()));
  }
  EXPECT_TRUE(SameBits(Converted<T>(device, in, wide, narrow), rounded)) << in.size();
  EXPECT_TRUE(SameBits(Converted<float>(device, rounded, narrow, wide), back)) << in.size();
  EXPECT_TRUE(SameBits(Converted<float>(device, in, wide, narrow), in)) << in.size();
}

// The midpoint of every two neighbours of T, the floats next to it on either side, and all of T.
TYPED_TEST(CastTest, RoundsAsTheScalarConversionAroundEveryMiddle) {
  using T = TypeParam;
  std::vector<float> values;
  for (int bits = 0; bits < 0x10000; ++bits) {
    T low, high;
    low.bits = static_cast<uint16_t>(bits);
    high.bits = static_cast<uint16_t>(bits + 1);
    const auto value = static_cast<float>(low), next = static_cast<float>(high);
    const float middle = value + (next - value) / 2;
    for (const float v :
         {value, middle, std::nextafterf(middle, value), std::nextafterf(middle, next)}) {
      values.push_back(v);
    }
  }
  ForEachDevice(
      [&](const TestDevice& device) { ExpectTheScalarConversion<T>(device, values, 0, 0); });
}

// Bit patterns from all over the range, every third halfway between two of T; there and back.
TYPED_TEST(CastTest, EqualsTheScalarConversionForAnyLengthAndAlignment) {
  using T = TypeParam;
  std::vector<float> in;
  for (int64_t i = 0; i < 4101; ++i) {
    uint32_t bits = Random4({.seed = 1, .item = static_cast<uint64_t>(i)})[0];
    if (i % 3 == 0) {
      constexpr int kCut = std::is_same_v<T, BFloat16> ? 16 : 13;  // bits that rounding takes
      bits = (bits >> kCut << kCut) | 1u << (kCut - 1);
    }
    in.push_back(std::bit_cast<float>(bits));
  }
  std::vector<int64_t> lengths = {333, 4101};
  for (int64_t n = 0; n <= 67; ++n) lengths.push_back(n);
  ForEachDevice(Simd::kAll, [&](const TestDevice& device) {
    for (const int64_t n : lengths) {
      const std::vector<float> part(in.begin(), in.begin() + n);
      ExpectTheScalarConversion<T>(device, part, 0, 8);  // both aligned to 16 bytes
      ExpectTheScalarConversion<T>(device, part, 8, 1);
      ExpectTheScalarConversion<T>(device, part, 1, 0);
      ExpectTheScalarConversion<T>(device, part, 1, 3);
    }
  });
}

// Arrays of every length, numbered with and without gaps, some with several thread blocks.
TYPED_TEST(CastTest, ManyArraysHaveTheBitsOfOneAfterTheOther) {
  using T = TypeParam;
  ForEachDevice([](const TestDevice& device) {
    std::vector<Placed<float>> in;
    std::vector<Placed<T>> out;
    std::vector<CastSlice<T>> slices;
    std::vector<std::vector<T>> want;
    int64_t first = 0;
    for (const int64_t n : {5, 0, 16, 9001, 1, 8192, 0, 333}) {
      const auto values = RandomFloats(n, n);
      want.emplace_back();
      for (const float x : values) want.back().push_back(T(x));
      const ArrayOffsets at = kArrayOffsets[slices.size() % std::size(kArrayOffsets)];
      in.emplace_back(device, values, at.in);
      out.emplace_back(device, std::vector<T>(size_t(n)), at.out);
      slices.push_back({first, n, in.back().span().data(), out.back().span().data()});
      first += n + (n % 2 == 0 ? 16 : 0);
    }
    Workspace workspace(device.memory());
    ASSERT_OK(CastSlices<T>(slices, workspace, device.stream()));
    ASSERT_OK(CastSlices<T>({}, workspace, device.stream()));
    for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(SameBits(out[i].Read(), want[i])) << i;
  });
}

TEST(ScaleTest, MultipliesAndAddsForAnyLengthAndAlignment) {
  const auto check = [](const TestDevice& device, int64_t n, ArrayOffsets at) {
    const auto x = RandomFloats(n, 5);
    const Placed<float> in(device, x, at.in), out(device, RandomFloats(n, 6), at.out);
    std::vector<float> want = x;
    for (float& value : want) value *= 0.3f;
    const auto scale = [&](const Placed<float>& from, float factor, Write write) {
      ASSERT_OK(Scale(from.span(), factor, out.span(), write, device.stream()));
      EXPECT_TRUE(SameBits(out.Read(), want)) << n;
    };
    scale(in, 0.3f, Write::kOverwrite);
    for (float& value : want) value = -value;
    scale(out, -1, Write::kOverwrite);  // in place
    for (int64_t i = 0; i < n; ++i) {
      const float product = x[i] * 0.7f;
      want[i] += product;
    }
    scale(in, 0.7f, Write::kAdd);
  };
  ForEachDevice([&](const TestDevice& device) {
    for (const ArrayOffsets at : kArrayOffsets) {
      for (const int64_t n : {0, 1, 4, 333, 1029}) check(device, n, at);
    }
    check(device, 40009, {});  // several threads
  });
}

// [begin, begin + count) of the arrays of a device.
struct Range {
  size_t begin_of_partial, begin_of_acc, count;
};

template <typename T>
void ExpectRangesAdded(const TestDevice& device, const std::vector<T>& partial,
                       const std::vector<T>& acc, const std::vector<Range>& ranges) {
  const auto from = device.Copy(partial), to = device.Copy(acc);
  std::vector<T> sums = acc;
  for (const auto& [p, a, n] : ranges) {
    EXPECT_OK(AddPartial<T>(from.span().subspan(p, n), to.span().subspan(a, n), device.stream()));
    for (size_t i = 0; i < n; ++i) {
      if constexpr (std::is_integral_v<T>) {
        sums[a + i] = static_cast<T>(static_cast<uint64_t>(sums[a + i]) +
                                     static_cast<uint64_t>(partial[p + i]));
      } else {
        sums[a + i] += partial[p + i];
      }
    }
  }
  EXPECT_TRUE(SameBits(device.Read(to), sums));
}

// Every length from nothing to beyond two vectors, and some that several threads share; both arrays
// begin at a multiple of 16 bytes, or one of them, or none.
TEST(PartialSumTest, AddsAnyLengthAtAnyAlignment) {
  constexpr size_t kElements = 70'001;
  std::vector<Range> ranges;
  for (size_t n = 0; n <= 33; ++n) ranges.push_back({n * (n + 1) / 2, n * (n + 1) / 2, n});
  for (const size_t n : {3, 4, 333, 2051}) {
    for (const size_t p : {0, 1, 8}) {
      for (const size_t a : {0, 1, 8}) ranges.push_back({p, a, n});
    }
  }
  ranges.push_back({595, 595, kElements - 595});
  const auto partial = RandomFloats(kElements, 1);
  const auto acc = RandomFloats(kElements, 2);
  std::vector<int64_t> integers(kElements), more(kElements);
  for (size_t i = 0; i < kElements; ++i) {  // large numbers: half of the sums wrap around
    integers[i] = static_cast<int64_t>((i + 1) * 0x9E3779B97F4A7C15U);
    more[i] = static_cast<int64_t>((i + 1) * 0xBF58476D1CE4E5B9U);
  }
  ForEachDevice([&](const TestDevice& device) {
    ExpectRangesAdded(device, partial, acc, ranges);
    ExpectRangesAdded(device, integers, more, ranges);
  });
}

template <typename T>
class SumTest : public ::testing::Test {};
TYPED_TEST_SUITE(SumTest, StorageTypes);

// To another matrix, and in place.
template <typename T, typename U>
void ExpectSums(const TestDevice& device, const Matrix<T>& a, const Matrix<U>& b) {
  auto want = a;
  for (int64_t r = 0; r < a.rows(); ++r) {
    for (int64_t c = 0; c < a.cols(); ++c) {
      want.at(r, c) = T(static_cast<float>(a.at(r, c)) + static_cast<float>(b.at(r, c)));
    }
  }
  const auto on_a = device.Copy(a), out = device.Copy(Matrix<T>(a.rows(), a.cols(), a.layout()));
  const auto on_b = device.Copy(b);
  for (const auto* to : {&out, &on_a}) {
    ASSERT_OK(AddRows<T, U>(on_a.view(), on_b.view(), to->view(), device.stream()));
    EXPECT_TRUE(SameBits(device.Read(*to), want)) << a.rows() << " x " << a.cols();
  }
}

TYPED_TEST(SumTest, AddsInPlaceAndRoundsOnce) {
  using T = TypeParam;
  ForEachDevice(Simd::kAll, [](const TestDevice& device) {
    for (const int64_t cols : {0, 1, 16, 37, 277, 1049}) {
      for (const MatrixLayout layout : kLayouts) {
        const auto a = Matrix<T>::Random(5, cols, layout, 1);
        ExpectSums(device, a, Matrix<T>::Random(5, cols, kLayouts[0], 2));
        ExpectSums(device, a, Matrix<float>::Random(5, cols, kLayouts[0], 3));
      }
    }
    ExpectSums(device, Matrix<T>(0, 3), Matrix<T>(0, 3));
  });
}

template <typename Pair>
class ProductTest : public ::testing::Test {};
// Types of the result and of its first factor.
using Pairs = ::testing::Types<std::pair<float, float>, std::pair<BFloat16, BFloat16>,
                               std::pair<Float16, Float16>, std::pair<BFloat16, float>,
                               std::pair<Float16, float>>;
TYPED_TEST_SUITE(ProductTest, Pairs);

// a * b on the device, stored in `out` or added to it.
template <typename T, typename U>
Matrix<T> Product(const TestDevice& device, const Matrix<U>& a, const Matrix<float>& b,
                  const Matrix<T>& out, Write write) {
  const auto of_a = device.Copy(a);
  const auto of_b = device.Copy(b);
  const auto to = device.Copy(out);
  EXPECT_OK(MultiplyRows<T, U>(of_a.view(), of_b.view(), to.view(), write, device.stream()));
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
    ASSERT_OK(
        MultiplyRows<float>(a.view(), b.view(), a.view(), Write::kOverwrite, device.stream()));
    EXPECT_EQ(device.Read(a).values(), (std::vector<double>{2, 1, -3, -1}));
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
    for (const int64_t cols : {1, 7, 16, 37, 277, 1049}) {
      for (const auto& [most, one] : kLayoutPairs) {
        check(device, 13, cols, one, most, most);
        check(device, 13, cols, most, one, most);
        check(device, 13, cols, most, most, one);
      }
    }
    check(device, 500, 21, {}, {}, {});  // more rows than a task of the CPU has
  });
}

TYPED_TEST(ProductTest, TakesNoElements) {
  using T = typename TypeParam::first_type;
  using U = typename TypeParam::second_type;
  ForEachDevice([](const TestDevice& device) {
    Stream& stream = device.stream();
    const auto multiply = [&](int64_t rows, int64_t cols) {
      return MultiplyRows<T, U>({nullptr, rows, cols}, {nullptr, rows, cols}, {nullptr, rows, cols},
                                Write::kAdd, stream);
    };
    EXPECT_OK(multiply(0, 4));
    EXPECT_OK(multiply(4, 0));
    EXPECT_OK(stream.Synchronize());
  });
}

TEST(ElementwiseTest, RefusesDifferentLengthsAndShapes) {
  ForEachDevice([](const TestDevice& device) {
    Stream& stream = device.stream();
    const auto x = device.Random(3, 1), y = device.Random(2, 2);
    const auto narrow = device.Copy(std::vector<BFloat16>(4));
    ExpectRefused(Cast<float, BFloat16>(x.span(), narrow.span(), stream),
                  "Cast: out is [4], expected [3]");
    ExpectRefused(Scale(x.span(), 1, y.span(), Write::kAdd, stream),
                  "Scale: out is [2], expected [3]");
    ExpectRefused(AddPartial<float>(x.span(), y.span(), stream),
                  "AddPartial: partial is [3], expected [2]");
    ExpectRefused(AddRows<float>({nullptr, 2, 2}, {nullptr, 2, 3}, {nullptr, 2, 2}, stream),
                  "AddRows: b is [2, 3] with stride 3, expected [2, 2]");
    ExpectRefused(
        MultiplyRows<float>({nullptr, 2, 2}, {nullptr, 2, 3}, {nullptr, 2, 2}, Write::kAdd, stream),
        "MultiplyRows: b is [2, 3] with stride 3, expected [2, 2]");
    EXPECT_OK(stream.Synchronize());
  });
}

}  // namespace
}  // namespace moe::testing
