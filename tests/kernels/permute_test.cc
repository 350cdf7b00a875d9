// kernels/permute: every path equals the plain loops, bit for bit.
#include "kernels/permute/permute.h"

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/rng.h"
#include "kernels/permute/permute_cpu.h"
#include "tests/kernels/device_memory.h"

namespace moe {
namespace {

using testing::TestDevices;

// A matrix whose rows lie `gap` elements apart; the gaps hold a sentinel that nobody may touch.
template <typename T>
struct Padded {
  Padded(int64_t rows, int64_t cols, int64_t gap)
      : data(static_cast<size_t>(rows * (cols + gap)), T(-77.0f)),
        view(data.data(), rows, cols, cols + gap) {}
  Padded(const Padded&) = delete;

  std::vector<T> data;
  MatrixView<T> view;
};

template <typename T>
void FillRandom(MatrixView<T> m, uint64_t seed) {
  for (int64_t r = 0; r < m.rows(); ++r) {
    for (int64_t c = 0; c < m.cols(); ++c) {
      m(r, c) = T(static_cast<float>(
          Normal({.seed = seed, .item = static_cast<uint64_t>(r * m.cols() + c)})));
    }
  }
}

template <typename T>
class PermuteTest : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(PermuteTest, Types);

TYPED_TEST(PermuteTest, GathersByHand) {
  using T = TypeParam;
  const std::vector<T> in = {T(10.0f), T(11.0f), T(20.0f), T(21.0f), T(30.0f), T(31.0f)};
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const auto from = device->Copy(in);
    const auto row = device->Copy<int32_t>({2, -1, 0, 2});
    const auto scale = device->Copy<float>({0.5f, 3.0f, 2.0f, -1.0f});
    const auto out = device->Copy(std::vector<T>(8, T(-1.0f)));
    const auto got = [&] {
      const std::vector<T> values = device->Read(out);
      return std::vector<float>(values.begin(), values.end());
    };
    ASSERT_TRUE(
        GatherRows<T>(from.view(3, 2, 2), row.span(), out.view(4, 2, 2), device->stream()).ok());
    EXPECT_EQ(got(), (std::vector<float>{30, 31, 0, 0, 10, 11, 30, 31}));
    ASSERT_TRUE(GatherScaledRows<T>(from.view(3, 2, 2), row.span(), scale.span(), out.view(4, 2, 2),
                                    device->stream())
                    .ok());
    EXPECT_EQ(got(), (std::vector<float>{15, 15.5f, 0, 0, 20, 22, -30, -31}));
  }
}

// Rows to gather from two sources, at random; some are none.
struct Sources {
  Sources(int64_t rows_in, int64_t rows_out) : row(rows_out), view(rows_out), scale(rows_out) {
    for (int64_t i = 0; i < rows_out; ++i) {
      const auto random = Random4({.seed = 3, .item = static_cast<uint64_t>(i)});
      row[i] = static_cast<int32_t>(random[0] % (rows_in + 1)) - 1;
      view[i] = static_cast<int32_t>(random[1] % 2);
      scale[i] = static_cast<float>(Normal({.seed = 4, .item = static_cast<uint64_t>(i)}));
    }
  }
  std::vector<int32_t> row, view;
  std::vector<float> scale;
};

// Widths around the vector lengths of every target, views with gaps.
TYPED_TEST(PermuteTest, EqualsThePlainLoopsForAnyWidthOnAnyDevice) {
  using T = TypeParam;
  const int64_t rows_in = 23, rows_out = 101;
  const Sources sources(rows_in, rows_out);
  for (const int64_t hidden : {1, 3, 15, 16, 17, 64, 129, 1000}) {
    for (const int64_t gap : {3, 8}) {
      Padded<T> in(rows_in, hidden, gap);
      FillRandom(in.view, 1);
      const MatrixView<const T> source = in.view;
      Padded<T> copied(rows_out, hidden, gap), scaled(rows_out, hidden, gap);
      const std::vector<T> untouched = copied.data;
      permute::Reference<T>({{&source, 1}, {}, sources.row, {}, copied.view});
      permute::Reference<T>({{&source, 1}, {}, sources.row, sources.scale, scaled.view});
      for (const auto& device : TestDevices()) {
        SCOPED_TRACE(::testing::Message() << device->name() << " H=" << hidden << " gap=" << gap);
        const auto from = device->Copy(in.data), to = device->Copy(untouched);
        const auto row = device->Copy(sources.row);
        const auto scale = device->Copy(sources.scale);
        const auto in_view = from.view(rows_in, hidden, hidden + gap);
        const auto out_view = to.view(rows_out, hidden, hidden + gap);
        ASSERT_TRUE(GatherRows<T>(in_view, row.span(), out_view, device->stream()).ok());
        EXPECT_TRUE(device->Read(to) == copied.data) << "GatherRows";
        ASSERT_TRUE(
            GatherScaledRows<T>(in_view, row.span(), scale.span(), out_view, device->stream())
                .ok());
        EXPECT_TRUE(device->Read(to) == scaled.data) << "GatherScaledRows";
      }
    }
  }
}

TYPED_TEST(PermuteTest, GathersFromManyAsThePlainLoopsDo) {
  using T = TypeParam;
  const int64_t rows_in = 23, rows_out = 101, hidden = 129;
  const Sources sources(rows_in, rows_out);
  Padded<T> in(rows_in, hidden, 3), other(rows_in, hidden, 0);
  FillRandom(in.view, 1);
  FillRandom(other.view, 2);
  const std::vector<MatrixView<const T>> both = {in.view, other.view};
  for (const bool scaled : {false, true}) {
    Padded<T> want(rows_out, hidden, 5);
    const std::vector<T> untouched = want.data;
    const auto scale = absl::MakeConstSpan(sources.scale).first(scaled ? rows_out : 0);
    permute::Reference<T>({both, sources.view, sources.row, scale, want.view});
    for (const auto& device : TestDevices()) {
      SCOPED_TRACE(::testing::Message() << device->name() << " scaled=" << scaled);
      const auto from = device->Copy(in.data), from_other = device->Copy(other.data);
      const auto to = device->Copy(untouched);
      const auto view = device->Copy(sources.view), row = device->Copy(sources.row);
      const auto factor = device->Copy(sources.scale);
      const std::vector<MatrixView<const T>> views = {from.view(rows_in, hidden, hidden + 3),
                                                      from_other.view(rows_in, hidden, hidden)};
      ASSERT_TRUE(GatherRowsOfMany<T>(views, view.span(), row.span(),
                                      factor.span().first(scaled ? rows_out : 0),
                                      to.view(rows_out, hidden, hidden + 5), device->stream())
                      .ok());
      EXPECT_TRUE(device->Read(to) == want.data);
    }
  }
}

TYPED_TEST(PermuteTest, AcceptsNoRowsAndNoColumns) {
  using T = TypeParam;
  const auto stream = MakeInlineStream();
  EXPECT_TRUE(GatherRows<T>({nullptr, 0, 4}, {}, {nullptr, 0, 4}, *stream).ok());
  const std::vector<int32_t> row = {0, -1};
  EXPECT_TRUE(GatherRows<T>({nullptr, 1, 0}, row, {nullptr, 2, 0}, *stream).ok());
}

TYPED_TEST(PermuteTest, RefusesShapesThatDisagreeAndLeavesTheOutputAlone) {
  using T = TypeParam;
  const auto stream = MakeInlineStream();
  std::vector<T> in(12, T(1.0f)), out(12, T(5.0f));
  const std::vector<int32_t> row = {0, 1, 2};
  const std::vector<float> scale = {1, 1, 1};
  const MatrixView<const T> from(in.data(), 3, 4);
  const auto code = absl::StatusCode::kInvalidArgument;
  const absl::Span<const int32_t> two(row.data(), 2);
  EXPECT_EQ(GatherRows<T>(from, row, {out.data(), 3, 3}, *stream).code(), code);
  EXPECT_EQ(GatherRows<T>(from, two, {out.data(), 3, 4}, *stream).code(), code);
  EXPECT_EQ(GatherScaledRows<T>(from, row, {scale.data(), 2}, {out.data(), 3, 4}, *stream).code(),
            code);
  EXPECT_EQ(GatherRowsOfMany<T>({}, row, row, {}, {out.data(), 3, 4}, *stream).code(), code);
  const std::vector<MatrixView<const T>> one = {from};
  EXPECT_EQ(GatherRowsOfMany<T>(one, two, row, {}, {out.data(), 3, 4}, *stream).code(), code);
  const absl::Status status = GatherRows<T>(from, two, {out.data(), 3, 4}, *stream);
  EXPECT_EQ(status.message(), "GatherRows: source_row is [2], expected [3]");
  EXPECT_EQ(out, std::vector<T>(12, T(5.0f)));
  EXPECT_TRUE(stream->Synchronize().ok());  // refused before anything was enqueued
}

}  // namespace
}  // namespace moe
