// kernels/permute: every path equals the plain loops, bit for bit.
#include "kernels/permute/permute.h"

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/rng.h"
#include "kernels/permute/permute_cpu.h"

namespace moe {
namespace {

// A matrix whose rows lie `gap` elements apart; the gaps hold a sentinel that nobody may touch.
template <typename T>
struct Padded {
  Padded(int64_t rows, int64_t cols, int64_t gap)
      : data(static_cast<size_t>(rows * (cols + gap)), T(-77.0f)),
        view(data.data(), rows, cols, cols + gap) {}
  Padded(const Padded&) = delete;

  bool gaps_intact() const {
    for (int64_t r = 0; r < view.rows(); ++r) {
      for (int64_t c = view.cols(); c < view.stride(); ++c) {
        if (static_cast<float>(data[r * view.stride() + c]) != -77.0f) return false;
      }
    }
    return true;
  }

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
using Types = ::testing::Types<float, BFloat16>;
TYPED_TEST_SUITE(PermuteTest, Types);

TYPED_TEST(PermuteTest, GathersByHand) {
  using T = TypeParam;
  std::vector<T> in;
  for (const float v : {10.f, 11.f, 20.f, 21.f, 30.f, 31.f}) in.push_back(T(v));
  std::vector<T> out(8, T(-1.0f));
  const std::vector<int32_t> row = {2, -1, 0, 2};
  const std::vector<float> scale = {0.5f, 3.0f, 2.0f, -1.0f};
  const auto stream = MakeInlineStream();
  const MatrixView<const T> from(in.data(), 3, 2);
  const MatrixView<T> to(out.data(), 4, 2);

  ASSERT_TRUE(GatherRows<T>(from, row, to, *stream).ok());
  std::vector<float> got;
  for (const T v : out) got.push_back(static_cast<float>(v));
  EXPECT_EQ(got, (std::vector<float>{30, 31, 0, 0, 10, 11, 30, 31}));

  ASSERT_TRUE(GatherScaledRows<T>(from, row, scale, to, *stream).ok());
  got.clear();
  for (const T v : out) got.push_back(static_cast<float>(v));
  EXPECT_EQ(got, (std::vector<float>{15, 15.5f, 0, 0, 20, 22, -30, -31}));
}

// Widths around the vector lengths of every target, one and three threads, views with gaps.
TYPED_TEST(PermuteTest, EqualsThePlainLoopsForAnyWidthAndThreadCount) {
  using T = TypeParam;
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    const auto stream = MakeInlineStream(&pool);
    for (const int64_t hidden : {1, 3, 15, 16, 17, 64, 129, 1000}) {
      const int64_t rows_in = 23, rows_out = 301;
      Padded<T> in(rows_in, hidden, 3), other(rows_in, hidden, 0);
      FillRandom(in.view, 1);
      FillRandom(other.view, 2);
      std::vector<int32_t> row(rows_out), view(rows_out);
      std::vector<float> scale(rows_out);
      for (int64_t i = 0; i < rows_out; ++i) {
        const auto random = Random4({.seed = 3, .item = static_cast<uint64_t>(i)});
        row[i] = static_cast<int32_t>(random[0] % (rows_in + 1)) - 1;
        view[i] = static_cast<int32_t>(random[1] % 2);
        scale[i] = static_cast<float>(Normal({.seed = 4, .item = static_cast<uint64_t>(i)}));
      }
      const std::vector<MatrixView<const T>> both = {in.view, other.view};
      const absl::Span<const MatrixView<const T>> one(both.data(), 1);

      Padded<T> got(rows_out, hidden, 5), want(rows_out, hidden, 5);
      const auto expect_equal = [&](const char* what) {
        EXPECT_TRUE(got.data == want.data) << what << " H=" << hidden << " threads=" << threads;
        EXPECT_TRUE(got.gaps_intact()) << what << " H=" << hidden;
      };
      ASSERT_TRUE(GatherRows<T>(in.view, row, got.view, *stream).ok());
      permute::Reference<T>({one, {}, row, {}, want.view});
      expect_equal("GatherRows");
      ASSERT_TRUE(GatherScaledRows<T>(in.view, row, scale, got.view, *stream).ok());
      permute::Reference<T>({one, {}, row, scale, want.view});
      expect_equal("GatherScaledRows");
      ASSERT_TRUE(GatherRowsOfMany<T>(both, view, row, {}, got.view, *stream).ok());
      permute::Reference<T>({both, view, row, {}, want.view});
      expect_equal("GatherRowsOfMany");
      ASSERT_TRUE(GatherRowsOfMany<T>(both, view, row, scale, got.view, *stream).ok());
      permute::Reference<T>({both, view, row, scale, want.view});
      expect_equal("GatherRowsOfMany, scaled");
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
