// kernels/combine: by hand, then bit for bit against the plain loops.
#include "kernels/combine/combine.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/rng.h"
#include "kernels/combine/combine_cpu.h"
#include "tests/kernels/device_memory.h"

namespace moe {
namespace {

using testing::TestDevices;

template <typename T>
std::vector<T> RandomValues(int64_t n, uint64_t seed) {
  std::vector<T> values(n);
  for (int64_t i = 0; i < n; ++i) {
    values[i] = T(static_cast<float>(Normal({.seed = seed, .item = static_cast<uint64_t>(i)})));
  }
  return values;
}

// Tokens with 0, 1, 2 ... slots, some of them dropped, rows in any order.
struct Slots {
  explicit Slots(int64_t tokens, int64_t rows) {
    offset.push_back(0);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t k = 0; k < t % 5; ++k) {
        const auto random = Random4({.seed = 9, .item = static_cast<uint64_t>(t * 5 + k)});
        row.push_back(static_cast<int32_t>(random[0] % (rows + 1)) - 1);
      }
      offset.push_back(static_cast<int64_t>(row.size()));
    }
    weight = RandomValues<float>(static_cast<int64_t>(row.size()), 10);
  }
  std::vector<int64_t> offset;
  std::vector<int32_t> row;
  std::vector<float> weight;
};

template <typename T>
class CombineTest : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(CombineTest, Types);

TYPED_TEST(CombineTest, SumsByHand) {
  using T = TypeParam;
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    // Token 0: slots 0 (row 1) and 1 (dropped); token 1: none; token 2: slot 2 (row 0), 3 (row 1).
    const auto rows = device->Copy<T>({T(1.0f), T(2.0f), T(10.0f), T(20.0f)});
    const auto offset = device->Copy<int64_t>({0, 2, 2, 4});
    const auto row = device->Copy<int32_t>({1, -1, 0, 1});
    const auto weight = device->Copy<float>({0.5f, 9.0f, 2.0f, 0.25f});
    const auto out = device->Copy(std::vector<T>(6, T(100.0f)));
    const MatrixView<const T> from = rows.view(2, 2, 2);
    const MatrixView<T> to = out.view(3, 2, 2);
    Stream& stream = device->stream();
    const auto got = [&] {
      const std::vector<T> values = device->Read(out);
      return std::vector<float>(values.begin(), values.end());
    };
    ASSERT_TRUE(
        CombineRows<T>(from, offset.span(), row.span(), weight.span(), to, Write::kAdd, stream)
            .ok());
    EXPECT_EQ(got(), (std::vector<float>{105, 110, 100, 100, 104.5f, 109}));
    ASSERT_TRUE(
        CombineRows<T>(from, offset.span(), row.span(), {}, to, Write::kOverwrite, stream).ok());
    EXPECT_EQ(got(), (std::vector<float>{10, 20, 0, 0, 11, 22}));

    const auto dy = device->Copy<T>({T(1.0f), T(2.0f), T(3.0f), T(4.0f), T(5.0f), T(6.0f)});
    const auto d_weight = device->Copy(std::vector<float>(4, -1.0f));
    ASSERT_TRUE(CombineWeightGradient<T>(dy.view(3, 2, 2), from, offset.span(), row.span(),
                                         d_weight.span(), stream)
                    .ok());
    EXPECT_EQ(device->Read(d_weight), (std::vector<float>{50, 0, 17, 170}));
  }
}

TYPED_TEST(CombineTest, EqualsThePlainLoopsForAnyWidthOnAnyDevice) {
  using T = TypeParam;
  const int64_t tokens = 103, num_rows = 60;
  const Slots slots(tokens, num_rows);
  for (const auto& device : TestDevices()) {
    Stream& stream = device->stream();
    const auto offset = device->Copy(slots.offset);
    const auto row = device->Copy(slots.row);
    const auto weight = device->Copy(slots.weight);
    for (const int64_t hidden : {1, 7, 16, 17, 63, 64, 65, 200, 1031}) {
      SCOPED_TRACE(::testing::Message() << device->name() << " H=" << hidden);
      const int64_t stride = hidden + 3;
      const auto rows = RandomValues<T>(num_rows * stride, 1);
      const auto old = RandomValues<T>(tokens * stride, 2);
      const MatrixView<const T> from(rows.data(), num_rows, hidden, stride);
      const auto device_rows = device->Copy(rows), device_old = device->Copy(old);
      const MatrixView<const T> device_from = device_rows.view(num_rows, hidden, stride);
      for (const bool weighted : {false, true}) {
        for (const Write write : {Write::kOverwrite, Write::kAdd}) {
          absl::Span<const float> host_weight, device_weight;
          if (weighted) {
            host_weight = slots.weight;
            device_weight = weight.span();
          }
          const auto got = device->Copy(old);
          std::vector<T> want = old;
          ASSERT_TRUE(CombineRows<T>(device_from, offset.span(), row.span(), device_weight,
                                     got.view(tokens, hidden, stride), write, stream)
                          .ok());
          combine::Reference<T>(combine::Combine<T>{from,
                                                    slots.offset,
                                                    slots.row,
                                                    host_weight,
                                                    {want.data(), tokens, hidden, stride},
                                                    write});
          EXPECT_TRUE(device->Read(got) == want)
              << "weighted=" << weighted << " add=" << (write == Write::kAdd);
        }
      }
      const auto got = device->Copy(std::vector<float>(slots.row.size(), NAN));
      std::vector<float> want(slots.row.size(), NAN);
      ASSERT_TRUE(CombineWeightGradient<T>(device_old.view(tokens, hidden, stride), device_from,
                                           offset.span(), row.span(), got.span(), stream)
                      .ok());
      combine::Reference<T>(combine::WeightGradient<T>{{old.data(), tokens, hidden, stride},
                                                       from,
                                                       slots.offset,
                                                       slots.row,
                                                       absl::MakeSpan(want)});
      EXPECT_EQ(device->Read(got), want);
    }
  }
}

// Against the dot product in double, in another order: products are exact in both, H additions are
// off by at most H * 2^-53 of the sum of magnitudes in each, and the result is rounded to float32.
TYPED_TEST(CombineTest, WeightGradientIsTheDotProduct) {
  using T = TypeParam;
  const int64_t tokens = 11, num_rows = 8, hidden = 37;
  const Slots slots(tokens, num_rows);
  const auto rows = RandomValues<T>(num_rows * hidden, 5);
  const auto dy = RandomValues<T>(tokens * hidden, 6);
  std::vector<float> d_weight(slots.row.size());
  const auto stream = MakeInlineStream();
  ASSERT_TRUE(CombineWeightGradient<T>({dy.data(), tokens, hidden}, {rows.data(), num_rows, hidden},
                                       slots.offset, slots.row, absl::MakeSpan(d_weight), *stream)
                  .ok());
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t s = slots.offset[t]; s < slots.offset[t + 1]; ++s) {
      double want = 0, magnitude = 0;
      for (int64_t h = 0; slots.row[s] >= 0 && h < hidden; ++h) {
        const double term = static_cast<double>(static_cast<float>(dy[t * hidden + h])) *
                            static_cast<float>(rows[slots.row[s] * hidden + h]);
        want += term;
        magnitude += std::abs(term);
      }
      EXPECT_NEAR(d_weight[s], want, 0x1p-24 * std::abs(want) + hidden * 0x1p-52 * magnitude);
    }
  }
}

// 2^24 + 2^-6 - 2^24, in one partial sum of the dot product: float32 has no room for 2^-6.
TYPED_TEST(CombineTest, WeightGradientSurvivesCancellation) {
  using T = TypeParam;
  std::vector<T> rows(48, T(0.0f)), dy(48, T(1.0f));
  rows[5] = dy[5] = dy[37] = T(4096.0f);
  rows[21] = T(0.015625f);
  rows[37] = T(-4096.0f);
  const std::vector<int64_t> offset = {0, 1};
  const std::vector<int32_t> row = {0};
  std::vector<float> d_weight(1);
  const auto stream = MakeInlineStream();
  ASSERT_TRUE(CombineWeightGradient<T>({dy.data(), 1, 48}, {rows.data(), 1, 48}, offset, row,
                                       absl::MakeSpan(d_weight), *stream)
                  .ok());
  EXPECT_EQ(d_weight[0], 0.015625f);
}

TYPED_TEST(CombineTest, AcceptsNoTokens) {
  using T = TypeParam;
  const auto stream = MakeInlineStream();
  const std::vector<int64_t> offset = {0};
  EXPECT_TRUE(
      CombineRows<T>({nullptr, 0, 4}, offset, {}, {}, {nullptr, 0, 4}, Write::kAdd, *stream).ok());
  EXPECT_TRUE(
      CombineRows<T>({nullptr, 0, 4}, {}, {}, {}, {nullptr, 0, 4}, Write::kAdd, *stream).ok());
  EXPECT_TRUE(
      CombineWeightGradient<T>({nullptr, 0, 4}, {nullptr, 0, 4}, offset, {}, {}, *stream).ok());
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
  EXPECT_EQ(combine(narrow, offset, row, weight), code);
  EXPECT_EQ(combine(rows, {offset.data(), 2}, row, weight), code);
  EXPECT_EQ(combine(rows, offset, {row.data(), 2}, {}), code);
  EXPECT_EQ(combine(rows, offset, row, {weight.data(), 2}), code);
  EXPECT_EQ(combine(rows, {}, row, weight), code);
  EXPECT_EQ(CombineWeightGradient<T>(out, rows, offset, row, {weight.data(), 2}, *stream).code(),
            code);
  EXPECT_EQ(
      CombineWeightGradient<T>(out, narrow, offset, row, absl::MakeSpan(weight), *stream).code(),
      code);
}

}  // namespace
}  // namespace moe
