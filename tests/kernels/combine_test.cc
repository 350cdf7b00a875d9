// kernels/combine: by hand, then bit for bit against the plain loops, on every device.
#include "kernels/combine/combine.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/combine/combine_op.h"
#include "tests/kernels/device_memory.h"

namespace moe::testing {
namespace {

// Tokens with 0, 1, 2 ... slots, some of them dropped, rows in random order.
struct Slots {
  Slots(int64_t tokens, int64_t rows) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t k = 0; k < t % 11; ++k) {
        const auto random = Random4({.seed = 9, .item = static_cast<uint64_t>(t * 11 + k)});
        row.push_back(static_cast<int32_t>(random[0] % (rows + 1)) - 1);
      }
      offset.push_back(static_cast<int64_t>(row.size()));
    }
    weight = RandomFloats(static_cast<int64_t>(row.size()), 10);
  }
  std::vector<int64_t> offset = {0};
  std::vector<int32_t> row;
  std::vector<float> weight;
};

template <typename T>
class CombineTest : public ::testing::Test {};
TYPED_TEST_SUITE(CombineTest, StorageTypes);

TYPED_TEST(CombineTest, SumsByHand) {
  using T = TypeParam;
  ForEachDevice([](const TestDevice& device) {
    // Token 0: slots 0 (row 1) and 1 (dropped); token 1: none; token 2: slot 2 (row 0), 3 (row 1).
    const auto rows = device.Copy(Matrix<T>::Of(2, 2, {1, 2, 10, 20}));
    const auto offset = device.Copy<int64_t>({0, 2, 2, 4});
    const auto row = device.Copy<int32_t>({1, -1, 0, 1});
    const auto weight = device.Copy<float>({0.5f, 9.0f, 2.0f, 0.25f});
    const auto out = device.Copy(Matrix<T>(3, 2, 100.0f));
    Stream& stream = device.stream();
    ASSERT_OK(CombineRows<T>(rows.view(), offset.span(), row.span(), weight.span(), out.view(),
                             Write::kAdd, stream));
    EXPECT_EQ(device.Read(out).values(), (std::vector<double>{105, 110, 100, 100, 104.5, 109}));
    ASSERT_OK(CombineRows<T>(rows.view(), offset.span(), row.span(), {}, out.view(),
                             Write::kOverwrite, stream));
    EXPECT_EQ(device.Read(out).values(), (std::vector<double>{10, 20, 0, 0, 11, 22}));

    const auto dy = device.Copy(Matrix<T>::Of(3, 2, {1, 2, 3, 4, 5, 6}));
    const auto d_weight = device.Copy(std::vector<float>(4, -1.0f));
    ASSERT_OK(CombineWeightGradient<T>(dy.view(), rows.view(), offset.span(), row.span(),
                                       d_weight.span(), stream));
    EXPECT_EQ(device.Read(d_weight), (std::vector<float>{50, 0, 17, 170}));
  });
}

template <typename T>
void ExpectThePlainLoops(const TestDevice& device, const Slots& slots, const Matrix<T>& rows,
                         const Matrix<T>& old) {
  SCOPED_TRACE(::testing::Message() << "T=" << old.rows() << " H=" << old.cols());
  const auto from = device.Copy(rows), dy = device.Copy(old);
  const auto offset = device.Copy(slots.offset);
  const auto row = device.Copy(slots.row);
  const auto weight = device.Copy(slots.weight);
  for (const bool weighted : {false, true}) {
    for (const Write write : {Write::kOverwrite, Write::kAdd}) {
      const size_t weights = weighted ? slots.weight.size() : 0;
      const auto got = device.Copy(old);
      Matrix<T> want = old;
      ASSERT_OK(CombineRows<T>(from.view(), offset.span(), row.span(), weight.span().first(weights),
                               got.view(), write, device.stream()));
      combine::Reference(combine::Combine<T>{rows.view(), slots.offset.data(), slots.row.data(),
                                             weighted ? slots.weight.data() : nullptr, want.view(),
                                             write});
      EXPECT_TRUE(SameBits(device.Read(got), want))
          << "weighted=" << weighted << " add=" << (write == Write::kAdd);
    }
  }
  const auto got = device.Copy(std::vector<float>(slots.row.size(), NAN));
  std::vector<float> want(slots.row.size(), NAN);
  ASSERT_OK(CombineWeightGradient<T>(dy.view(), from.view(), offset.span(), row.span(), got.span(),
                                     device.stream()));
  combine::Reference(combine::WeightGradient<T>{old.view(), rows.view(), slots.offset.data(),
                                                slots.row.data(), want.data()});
  EXPECT_EQ(device.Read(got), want);
}

TYPED_TEST(CombineTest, EqualsThePlainLoopsForAnyShapeAndLayout) {
  using T = TypeParam;
  const Slots few(13, 9), many(103, 60);
  ForEachDevice([&](const TestDevice& device) {
    for (const int64_t hidden : {1, 7, 16, 17, 63, 64, 65, 277}) {
      for (const auto& [in, out] : kLayoutPairs) {
        ExpectThePlainLoops<T>(device, few, Matrix<T>::Random(9, hidden, in, 1),
                               Matrix<T>::Random(13, hidden, out, 2));
      }
    }
    for (const int64_t hidden : {7, 200, 1031}) {
      ExpectThePlainLoops<T>(device, many, Matrix<T>::Random(60, hidden, 1),
                             Matrix<T>::Random(103, hidden, 2));
    }
  });
}

TYPED_TEST(CombineTest, AcceptsNoTokensAndNoColumnsGiveZeroGradients) {
  using T = TypeParam;
  ForEachDevice([](const TestDevice& device) {
    Stream& stream = device.stream();
    const auto none = device.Copy<int64_t>({0}), one = device.Copy<int64_t>({0, 1});
    const auto row = device.Copy<int32_t>({0});
    const auto d_weight = device.Copy<float>({-1});
    const MatrixView<T> no_tokens(nullptr, 0, 4), no_columns(nullptr, 1, 0);
    for (const absl::Span<const int64_t> offset : {none.span(), absl::Span<int64_t>()}) {
      EXPECT_OK(CombineRows<T>(no_tokens, offset, {}, {}, no_tokens, Write::kAdd, stream));
      EXPECT_OK(CombineWeightGradient<T>(no_tokens, no_tokens, offset, {}, {}, stream));
    }
    EXPECT_OK(CombineRows<T>(no_columns, one.span(), row.span(), {}, no_columns, Write::kOverwrite,
                             stream));
    EXPECT_OK(CombineWeightGradient<T>(no_columns, no_columns, one.span(), row.span(),
                                       d_weight.span(), stream));
    EXPECT_EQ(device.Read(d_weight), std::vector<float>{0});
  });
}

TYPED_TEST(CombineTest, RefusesShapesThatDisagree) {
  using T = TypeParam;
  const auto stream = MakeInlineStream();
  std::vector<T> data(12);
  std::vector<float> weight(3);
  const std::vector<int64_t> offset = {0, 1, 3};
  const std::vector<int32_t> row = {0, 1, 2};
  const MatrixView<const T> rows(data.data(), 3, 4), narrow(data.data(), 3, 3);
  const MatrixView<T> out(data.data(), 2, 4);
  const auto code = absl::StatusCode::kInvalidArgument;
  const auto combine = [&](MatrixView<const T> r, absl::Span<const int64_t> o,
                           absl::Span<const int32_t> of, absl::Span<const float> w) {
    return CombineRows<T>(r, o, of, w, out, Write::kOverwrite, *stream).code();
  };
  const auto gradient = [&](MatrixView<const T> r, absl::Span<float> d_weight) {
    return CombineWeightGradient<T>(out, r, offset, row, d_weight, *stream).code();
  };
  EXPECT_EQ(combine(narrow, offset, row, weight), code);
  EXPECT_EQ(combine(rows, {offset.data(), 2}, row, weight), code);
  EXPECT_EQ(combine(rows, offset, {row.data(), 2}, {}), code);
  EXPECT_EQ(combine(rows, offset, row, {weight.data(), 2}), code);
  EXPECT_EQ(combine(rows, {}, row, weight), code);
  EXPECT_EQ(gradient(rows, {weight.data(), 2}), code);
  EXPECT_EQ(gradient(narrow, absl::MakeSpan(weight)), code);
}

}  // namespace
}  // namespace moe::testing
