// kernels/permute: hand-made cases, then bit for bit against the plain loops, on every device.
#include "kernels/permute/permute.h"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/permute/permute_op.h"
#include "tests/kernels/device_memory.h"

namespace moe::testing {
namespace {

template <typename T>
class PermuteTest : public ::testing::Test {};
TYPED_TEST_SUITE(PermuteTest, StorageTypes);

TYPED_TEST(PermuteTest, GathersByHand) {
  using T = TypeParam;
  ForEachDevice([](const TestDevice& device) {
    const auto from = device.Copy(Matrix<T>::Of(3, 2, {10, 11, 20, 21, 30, 31}));
    const auto row = device.Copy<int32_t>({2, -1, 0, 2});
    const auto scale = device.Copy<float>({0.5f, 3.0f, 2.0f, -1.0f});
    const auto out = device.Copy(Matrix<T>(4, 2, -1.0f));
    ASSERT_OK(GatherRows<T>(from.view(), row.span(), out.view(), device.stream()));
    EXPECT_EQ(device.Read(out).values(), (std::vector<double>{30, 31, 0, 0, 10, 11, 30, 31}));
    ASSERT_OK(
        GatherScaledRows<T>(from.view(), row.span(), scale.span(), out.view(), device.stream()));
    EXPECT_EQ(device.Read(out).values(), (std::vector<double>{15, 15.5, 0, 0, 20, 22, -30, -31}));
  });
}

// Random rows to gather from two sources; some are -1.
struct Sources {
  Sources(int64_t rows_in, int64_t rows_out) : row(rows_out), view(rows_out) {
    for (int64_t i = 0; i < rows_out; ++i) {
      const auto random = Random4({.seed = 3, .item = static_cast<uint64_t>(i)});
      row[i] = static_cast<int32_t>(random[0] % (rows_in + 1)) - 1;
      view[i] = static_cast<int32_t>(random[1] % 2);
    }
    scale = RandomFloats(rows_out, 4);
  }
  std::vector<int32_t> row, view;
  std::vector<float> scale;
};

// From the first matrix alone, then from both.
template <typename T>
void ExpectThePlainLoops(const TestDevice& device, const Sources& sources, const Matrix<T>& first,
                         const Matrix<T>& second, const Matrix<T>& untouched) {
  SCOPED_TRACE(::testing::Message() << "H=" << first.cols());
  const auto from = device.Copy(first), from_second = device.Copy(second);
  const auto row = device.Copy(sources.row), view = device.Copy(sources.view);
  const auto factor = device.Copy(sources.scale);
  const std::vector<MatrixView<const T>> host = {first.view(), second.view()};
  const std::vector<MatrixView<const T>> views = {from.view(), from_second.view()};
  for (const bool many : {false, true}) {
    for (const bool scaled : {false, true}) {
      const size_t scales = scaled ? sources.scale.size() : 0;
      Matrix<T> want = untouched;
      const std::vector<int32_t> first_view(sources.row.size(), 0);
      permute::Reference(
          permute::GatherOfMany<T>{.views = host.data(),
                                   .view_count = 2,
                                   .source_view = many ? sources.view.data() : first_view.data(),
                                   .source_row = sources.row.data(),
                                   .scale = scaled ? sources.scale.data() : nullptr,
                                   .out = want.view()});
      const auto got = device.Copy(untouched);
      const auto gather = [&] {
        if (many) {
          return GatherRowsOfMany<T>(views, view.span(), row.span(), factor.span().first(scales),
                                     got.view(), device.stream());
        }
        if (!scaled) return GatherRows<T>(from.view(), row.span(), got.view(), device.stream());
        return GatherScaledRows<T>(from.view(), row.span(), factor.span(), got.view(),
                                   device.stream());
      };
      ASSERT_OK(gather());
      EXPECT_TRUE(SameBits(device.Read(got), want)) << "many=" << many << " scaled=" << scaled;
    }
  }
}

// Widths around 16 bytes, around what a warp copies at a time, and around the vector lengths of
// every target.
TYPED_TEST(PermuteTest, EqualsThePlainLoopsForAnyShapeAndLayout) {
  using T = TypeParam;
  const Sources few(7, 19), many(23, 101);
  ForEachDevice([&](const TestDevice& device) {
    for (const int64_t hidden : {1, 3, 8, 15, 16, 17, 64, 277}) {
      for (const auto& [in, out] : kLayoutPairs) {
        ExpectThePlainLoops<T>(device, few, Matrix<T>::Random(7, hidden, in, 1),
                               Matrix<T>::Random(7, hidden, out, 2), Matrix<T>(19, hidden, out));
      }
    }
    for (const int64_t hidden : {3, 129, 1000}) {
      ExpectThePlainLoops<T>(device, many, Matrix<T>::Random(23, hidden, 1),
                             Matrix<T>::Random(23, hidden, kLayouts[0], 2), Matrix<T>(101, hidden));
    }
  });
}

// Tokens with 0 to 4 slots, out of order on the even rows; odd rows have none, nor has every third
// slot a row. 17 must not divide the number of even rows.
struct Tokens {
  Tokens(int64_t tokens, int64_t rows) : token(rows, -1), weight_of_row(rows, 0.0f) {
    int64_t next = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t k = 0; k < t % 5; ++k) {
        const bool has_row = row.size() % 3 != 2 && 2 * next < rows;
        row.push_back(has_row ? static_cast<int32_t>((next * 34) % (rows / 2 * 2)) : -1);
        next += has_row ? 1 : 0;
      }
      offset.push_back(static_cast<int64_t>(row.size()));
    }
    weight = RandomFloats(static_cast<int64_t>(row.size()), 5);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t s = offset[t]; s < offset[t + 1]; ++s) {
        if (row[s] < 0) continue;
        token[row[s]] = static_cast<int32_t>(t);
        weight_of_row[row[s]] = weight[s];
      }
    }
  }
  std::vector<int64_t> offset = {0};
  std::vector<int32_t> row, token;
  std::vector<float> weight, weight_of_row;
};

// Rows [begin, end) of all that the tokens have, copied and scaled.
template <typename T>
void ExpectTokensInTheirRows(const TestDevice& device, const Tokens& tokens, int64_t hidden,
                             const LayoutPair& layouts, int64_t begin, int64_t end) {
  const auto count = static_cast<int64_t>(tokens.offset.size()) - 1;
  const auto rows = static_cast<int64_t>(tokens.token.size());
  const auto x = Matrix<T>::Random(count, hidden, layouts.in, 1);
  const std::vector<MatrixView<const T>> host = {x.view()};
  const std::vector<int32_t> first_view(rows, 0);
  const auto from = device.Copy(x);
  const auto offset = device.Copy(tokens.offset);
  const auto row = device.Copy(tokens.row), token = device.Copy(tokens.token);
  const auto weight = device.Copy(tokens.weight);
  for (const bool scaled : {false, true}) {
    const Matrix<T> untouched(rows, hidden, layouts.out, -1.0f);
    Matrix<T> want = untouched;
    permute::Reference(
        permute::GatherOfMany<T>{.views = host.data(),
                                 .view_count = 1,
                                 .source_view = first_view.data(),
                                 .source_row = tokens.token.data() + begin,
                                 .scale = scaled ? tokens.weight_of_row.data() + begin : nullptr,
                                 .out = want.view(begin, end)});
    const auto got = device.Copy(untouched);
    ASSERT_OK(GatherTokens<T>(from.view(),
                              {.slot_offset = offset.span(),
                               .row_of_slot = row.span(),
                               .token_of_row = token.span().subspan(begin, end - begin),
                               .first_row = begin},
                              weight.span().first(scaled ? tokens.weight.size() : 0),
                              RowRange(got.view(), begin, end), device.stream()));
    EXPECT_TRUE(SameBits(device.Read(got), want))
        << "T=" << count << " H=" << hidden << " from row " << begin << " scaled=" << scaled;
  }
}

// All rows, and a range of them; few tokens and many.
TYPED_TEST(PermuteTest, GathersTokensAsRowsOfTheirSlots) {
  using T = TypeParam;
  const Tokens few(41, 70), many(4099, 1070);  // 17 divides neither 35 nor 535
  ForEachDevice([&](const TestDevice& device) {
    for (const auto& [hidden, layouts] :
         {std::pair(1, 0), std::pair(24, 0), std::pair(64, 1), std::pair(65, 2), std::pair(277, 3),
          std::pair(1040, 0)}) {
      ExpectTokensInTheirRows<T>(device, few, hidden, kLayoutPairs[layouts], 0, 70);
      ExpectTokensInTheirRows<T>(device, few, hidden, kLayoutPairs[layouts], 13, 50);
    }
    ExpectTokensInTheirRows<T>(device, many, 17, kLayoutPairs[0], 0, 1070);
  });
}

// One, two and three launches; a row's only column identifies its view, and zero rows have views
// out of range.
TYPED_TEST(PermuteTest, GathersFromAnyNumberOfViews) {
  using T = TypeParam;
  ForEachDevice([](const TestDevice& device) {
    for (const int views : {1, 64, 65, 128, 131}) {
      std::vector<float> in, want;
      std::vector<int32_t> view, row;
      for (int i = 0; i < 2 * views; ++i) {
        const bool zero = i % 5 == 4;
        const int v = i * 37 % views;
        row.push_back(zero ? -1 : 0);
        view.push_back(zero ? 1 << 20 : v);
        want.push_back(zero ? 0 : static_cast<float>(v));
        in.push_back(static_cast<float>(i));
      }
      const auto from = device.Copy(std::vector<T>(in.begin(), in.end()));
      std::vector<MatrixView<const T>> of;
      for (int v = 0; v < views; ++v) of.emplace_back(&from.span()[v], 1, 1);
      const auto view_of = device.Copy(view), row_of = device.Copy(row);
      const auto out = device.Copy(Matrix<T>(2 * views, 1, -1.0f));
      ASSERT_OK(
          GatherRowsOfMany<T>(of, view_of.span(), row_of.span(), {}, out.view(), device.stream()));
      EXPECT_EQ(device.Read(out).values(), std::vector<double>(want.begin(), want.end())) << views;
    }
  });
}

// Columns of rows to rows of their own and back: what ranks that have columns exchange.
TYPED_TEST(PermuteTest, CopiesRowsOfAnyLayout) {
  using T = TypeParam;
  ForEachDevice([](const TestDevice& device) {
    for (const auto& [in, out] : kLayoutPairs) {
      for (const int64_t cols : {1, 7, 24, 300}) {
        const auto from = Matrix<T>::Random(9, cols + 5, in, 1);
        const auto there = device.Copy(from), to = device.Copy(Matrix<T>(9, cols, out, -1.0f));
        ASSERT_OK(CopyRows<T>(ColumnRange(there.view(), 2, 2 + cols), to.view(), device.stream()));
        EXPECT_EQ(device.Read(to).values(), from.Cols(2, 2 + cols).values());
        EXPECT_TRUE(device.Read(to).edges_intact());
      }
    }
    EXPECT_OK(CopyRows<T>({nullptr, 0, 4}, {nullptr, 0, 4}, device.stream()));
    EXPECT_OK(CopyRows<T>({nullptr, 3, 0}, {nullptr, 3, 0}, device.stream()));
    EXPECT_TRUE(
        absl::IsInvalidArgument(CopyRows<T>({nullptr, 0, 4}, {nullptr, 0, 3}, device.stream())));
  });
}

// A launch without blocks would be an error.
TYPED_TEST(PermuteTest, AcceptsNoRowsAndNoColumns) {
  using T = TypeParam;
  ForEachDevice([](const TestDevice& device) {
    Stream& stream = device.stream();
    const MatrixView<T> none(nullptr, 0, 4);
    const std::vector<MatrixView<const T>> views = {none};
    const auto row = device.Copy<int32_t>({0, -1});
    EXPECT_OK(GatherRows<T>(none, {}, none, stream));
    EXPECT_OK(GatherRows<T>({nullptr, 1, 0}, row.span(), {nullptr, 2, 0}, stream));
    EXPECT_OK(GatherRowsOfMany<T>(views, {}, {}, {}, none, stream));
    EXPECT_OK(GatherTokens<T>(none, {}, {}, none, stream));
    const auto empty = device.Copy<int32_t>({-1, -1});
    const auto zeros = device.Copy(Matrix<T>(2, 4, -1.0f));
    EXPECT_OK(GatherTokens<T>(none, {.token_of_row = empty.span()}, {}, zeros.view(), stream));
    EXPECT_EQ(device.Read(zeros).values(), std::vector<double>(8, 0.0));
    EXPECT_OK(stream.Synchronize());
  });
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
  EXPECT_EQ(GatherScaledRows<T>(from, row, {scale.data(), 2}, {out.data(), 3, 4}, *stream).code(),
            code);
  EXPECT_EQ(GatherRowsOfMany<T>({}, row, row, {}, {out.data(), 3, 4}, *stream).code(), code);
  const std::vector<MatrixView<const T>> one = {from};
  EXPECT_EQ(GatherRowsOfMany<T>(one, two, row, {}, {out.data(), 3, 4}, *stream).code(), code);
  const std::vector<int64_t> offset = {0, 1, 2, 3};
  const auto gather = [&](const TokenRows& rows, absl::Span<const float> weight) {
    return GatherTokens<T>(from, rows, weight, {out.data(), 3, 4}, *stream).code();
  };
  EXPECT_EQ(gather({offset, row, two}, scale), code);
  EXPECT_EQ(gather({offset, two, row}, {}), code);
  EXPECT_EQ(gather({{offset.data(), 3}, row, row}, scale), code);
  EXPECT_EQ(gather({offset, row, row}, {scale.data(), 2}), code);
  ExpectRefused(GatherRows<T>(from, two, {out.data(), 3, 4}, *stream),
                "GatherRows: source_row is [2], expected [3]");
  EXPECT_EQ(out, std::vector<T>(12, T(5.0f)));
  EXPECT_OK(stream->Synchronize());  // refused before anything was enqueued
}

}  // namespace
}  // namespace moe::testing
