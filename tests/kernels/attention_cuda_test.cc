// kernels/attention on the simulated GPU: within float32's roundings of float64.
#include "kernels/attention/attention_cuda.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "tests/cusim/schedules.h"
#include "tests/kernels/attention_oracle.h"

namespace moe {
namespace {

using cusim::DeviceMatrix;
using cusim::Layout;
using testing::AttentionOracle;

using Offsets = std::vector<int64_t>;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr double kFloatRounding = 0x1p-24;  // largest relative error of one rounding

struct Shape {
  int heads;
  int64_t depth;
  Offsets offsets;

  int64_t rows() const { return offsets.back(); }
  int64_t longest() const {
    int64_t longest = 0;
    for (size_t s = 1; s < offsets.size(); ++s) {
      longest = std::max(longest, offsets[s] - offsets[s - 1]);
    }
    return longest;
  }
};

template <typename T>
struct Problem {
  Shape shape;
  DeviceMatrix<T> q, k, v, d_out, out, d_q, d_k, d_v;
  DeviceMatrix<float> log_sum_exp, row_dot;

  explicit Problem(const Shape& s, Layout in = {0, 0}, Layout result = {0, 0})
      : shape(s),
        q(Random(in, 1)),
        k(Random(in, 2)),
        v(Random(in, 3)),
        d_out(Random(result, 4)),
        out(Empty(result)),
        d_q(Empty(result)),
        d_k(Empty(result)),
        d_v(Empty(in)),
        log_sum_exp(s.rows(), s.heads, {0, 1}),
        row_dot(s.rows(), s.heads, {0, 0}) {}

  void Forward() {
    ASSERT_EQ(
        attention::Run(attention::CudaForward<T>{.q = q.view(),
                                                 .k = k.view(),
                                                 .v = v.view(),
                                                 .heads = shape.heads,
                                                 .sequence_offsets = shape.offsets.data(),
                                                 .sequences = int64_t(shape.offsets.size()) - 1,
                                                 .out = out.view(),
                                                 .log_sum_exp = log_sum_exp.view()},
                       nullptr),
        cudaSuccess);
  }
  void Backward() {
    ASSERT_EQ(
        attention::Run(attention::CudaBackward<T>{.q = q.view(),
                                                  .k = k.view(),
                                                  .v = v.view(),
                                                  .out = out.view(),
                                                  .log_sum_exp = log_sum_exp.view(),
                                                  .d_out = d_out.view(),
                                                  .heads = shape.heads,
                                                  .sequence_offsets = shape.offsets.data(),
                                                  .sequences = int64_t(shape.offsets.size()) - 1,
                                                  .d_q = d_q.view(),
                                                  .d_k = d_k.view(),
                                                  .d_v = d_v.view(),
                                                  .row_dot = row_dot.view()},
                       nullptr),
        cudaSuccess);
  }
  void Compute() {
    Forward();
    Backward();
  }

 private:
  DeviceMatrix<T> Random(Layout layout, uint64_t seed) const {
    return DeviceMatrix<T>::Random(shape.rows(), shape.heads * shape.depth, layout, seed);
  }
  DeviceMatrix<T> Empty(Layout layout) const {
    return {shape.rows(), shape.heads * shape.depth, layout};
  }
};

// The rows [begin, end) as numbers.
template <typename T>
std::vector<double> Values(const DeviceMatrix<T>& m, int64_t begin, int64_t end) {
  std::vector<double> values;
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t c = 0; c < m.view().cols(); ++c) {
      values.push_back(static_cast<float>(m.view()(r, c)));
    }
  }
  return values;
}
template <typename T>
std::vector<double> Values(const DeviceMatrix<T>& m) {
  return Values(m, 0, m.view().rows());
}

// The values of `from`, each rounded to the other type.
template <typename To, typename From>
void Convert(const DeviceMatrix<From>& from, DeviceMatrix<To>& to) {
  for (int64_t r = 0; r < from.view().rows(); ++r) {
    for (int64_t c = 0; c < from.view().cols(); ++c) {
      to.view()(r, c) = To(static_cast<float>(from.view()(r, c)));
    }
  }
}

// Five results in the order of their names, rows [begin, end).
constexpr const char* kNames[] = {"out", "log_sum_exp", "d_q", "d_k", "d_v"};
template <typename T>
std::vector<std::vector<double>> Results(const Problem<T>& p, int64_t begin, int64_t end) {
  return {Values(p.out, begin, end), Values(p.log_sum_exp, begin, end), Values(p.d_q, begin, end),
          Values(p.d_k, begin, end), Values(p.d_v, begin, end)};
}
template <typename T>
std::vector<std::vector<double>> Results(const Problem<T>& p) {
  return Results(p, 0, p.shape.rows());
}

void ExpectNearOracle(const Problem<float>& p) {
  const AttentionOracle oracle(p.shape.heads, p.shape.offsets, Values(p.q), Values(p.k),
                               Values(p.v), Values(p.d_out));
  const AttentionOracle::Value* const expected[] = {&oracle.out, &oracle.log_sum_exp, &oracle.d_q,
                                                    &oracle.d_k, &oracle.d_v};
  const double roundings = testing::CudaAttentionRoundings(p.shape.depth, p.shape.longest());
  const auto results = Results(p);
  for (size_t m = 0; m < results.size(); ++m) {
    ASSERT_EQ(results[m].size(), expected[m]->value.size()) << kNames[m];
    for (size_t i = 0; i < results[m].size(); ++i) {
      ASSERT_NEAR(results[m][i], expected[m]->value[i],
                  roundings * kFloatRounding * expected[m]->bound[i])
          << kNames[m] << " [" << i << "] " << p.shape.heads << " heads of " << p.shape.depth;
    }
  }
}

// All scores are 0: token t averages the values so far.
TEST(AttentionCudaTest, EqualScoresAverageTheValuesSoFar) {
  Problem<float> p({.heads = 2, .depth = 1, .offsets = {0, 2, 2, 3}});
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t c = 0; c < 2; ++c) {
      p.q.view()(t, c) = 0;
      p.v.view()(t, c) = static_cast<float>((t + 1) * (c == 0 ? 1 : 10));
    }
  }
  p.Forward();
  EXPECT_EQ(Values(p.out), (std::vector<double>{1, 10, 1.5, 15, 3, 30}));
  EXPECT_FLOAT_EQ(p.log_sum_exp.view()(1, 0), std::log(2.0f));
  EXPECT_EQ(p.log_sum_exp.view()(2, 1), 0);
}

// Lengths around a tile, two and three of them; head sizes with and without whole vectors, around
// the 32 that are staged at a time, and of one and two blocks of columns.
const Shape kShapes[] = {{1, 1, {0, 1}},       {2, 20, {0, 7, 7, 71, 136}}, {1, 64, {0, 130}},
                         {3, 33, {0, 9, 25}},  {2, 72, {0, 63, 64}},        {1, 130, {0, 66, 66}},
                         {1, 8, {0, 128, 193}}};

// Seeds and layouts take turns: the test below has several of them for one shape.
TEST(AttentionCudaTest, MatchesFloat64ForAnyLengthAndHeadSize) {
  size_t first = 0;
  cusim::ForSeeds([&] {
    for (size_t i = first++; i < std::size(kShapes); i += 3) {
      const auto [in, result] = cusim::kLayoutPairs[i % std::size(cusim::kLayoutPairs)];
      Problem<float> p(kShapes[i], in, result);
      p.Compute();
      ExpectNearOracle(p);
    }
  });
}

template <typename T>
class AttentionCudaTypesTest : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(AttentionCudaTypesTest, Types);

// And no element beside the results is touched. Two layouts a schedule.
TYPED_TEST(AttentionCudaTypesTest, HasTheSameBitsForAnyLayoutAndSchedule) {
  for (const int64_t depth : {16, 20}) {
    const Shape shape = {2, depth, {0, 5, 71}};
    Problem<TypeParam> expected(shape);
    expected.Compute();
    size_t next = 0;
    cusim::ForSeeds([&] {
      for (int i = 0; i < 2; ++i) {
        const auto [in, result] = cusim::kLayoutPairs[next++ % std::size(cusim::kLayoutPairs)];
        Problem<TypeParam> p(shape, in, result);
        p.Compute();
        EXPECT_EQ(Results(p), Results(expected)) << depth;
        const auto expect_gaps = [&p](const DeviceMatrix<TypeParam>& m, const Layout& layout) {
          DeviceMatrix<TypeParam> rewritten(p.shape.rows(), m.view().cols(), layout);
          Convert(m, rewritten);
          EXPECT_TRUE(rewritten == m) << p.shape.depth;
        };
        expect_gaps(p.out, result);
        expect_gaps(p.d_q, result);
        expect_gaps(p.d_k, result);
        expect_gaps(p.d_v, in);
      }
    });
  }
}

TEST(AttentionCudaTest, BFloat16IsTheFloat32ResultRoundedOnce) {
  const Shape shape = {2, 72, {0, 21, 88}};
  Problem<BFloat16> p(shape, {0, 8}, {0, 0});
  Problem<float> p32(shape);
  Convert(p.q, p32.q);
  Convert(p.k, p32.k);
  Convert(p.v, p32.v);
  Convert(p.d_out, p32.d_out);
  p.Compute();
  p32.Forward();
  const auto rounded = [&](const DeviceMatrix<float>& m) {
    DeviceMatrix<BFloat16> result(m.view().rows(), m.view().cols(), {0, 0});
    Convert(m, result);
    return Values(result);
  };
  EXPECT_EQ(Values(p.out), rounded(p32.out));
  EXPECT_EQ(Values(p.log_sum_exp), Values(p32.log_sum_exp));
  Convert(p.out, p32.out);  // what backward sees
  p32.Backward();
  EXPECT_EQ(Values(p.d_q), rounded(p32.d_q));
  EXPECT_EQ(Values(p.d_k), rounded(p32.d_k));
  EXPECT_EQ(Values(p.d_v), rounded(p32.d_v));
}

// A sequence alone and behind another one: other tiles, other slots.
TYPED_TEST(AttentionCudaTypesTest, ASequenceHasTheSameBitsInAnyBatch) {
  const int64_t before = 37, rows = 70;
  const Shape shape = {2, 24, {0, before, before + rows, before + rows + 3}};
  Problem<TypeParam> batch(shape), alone({shape.heads, shape.depth, {0, rows}});
  const auto copy = [&](const DeviceMatrix<TypeParam>& from, DeviceMatrix<TypeParam>& to) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < to.view().cols(); ++c) {
        to.view()(r, c) = from.view()(before + r, c);
      }
    }
  };
  copy(batch.q, alone.q);
  copy(batch.k, alone.k);
  copy(batch.v, alone.v);
  copy(batch.d_out, alone.d_out);
  batch.Compute();
  alone.Compute();
  EXPECT_EQ(Results(batch, before, before + rows), Results(alone));
}

// NaNs in everything that later tokens hold: forward results and d_q up to there keep their bits.
// NaNs in the queries' side of earlier tokens: d_k and d_v from there on keep theirs.
TYPED_TEST(AttentionCudaTypesTest, TokensOutsideOfTheSumsDoNotChangeABit) {
  const int64_t rows = 80, cut = 70;  // within the last tile
  const Shape shape = {1, 24, {0, rows}};
  const auto poison = [&](DeviceMatrix<TypeParam>& m, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < m.view().cols(); ++c) m.view()(r, c) = TypeParam(kNaN);
    }
  };
  Problem<TypeParam> clean(shape), later(shape), earlier(shape);
  clean.Compute();
  for (auto* m : {&later.q, &later.k, &later.v, &later.d_out}) poison(*m, cut, rows);
  later.Compute();
  EXPECT_EQ(Values(later.out, 0, cut), Values(clean.out, 0, cut));
  EXPECT_EQ(Values(later.log_sum_exp, 0, cut), Values(clean.log_sum_exp, 0, cut));
  EXPECT_EQ(Values(later.d_q, 0, cut), Values(clean.d_q, 0, cut));
  EXPECT_TRUE(std::isnan(Values(later.out, rows - 1, rows)[0]));

  poison(earlier.q, 0, cut);
  poison(earlier.d_out, 0, cut);
  earlier.Compute();
  EXPECT_EQ(Values(earlier.d_k, cut, rows), Values(clean.d_k, cut, rows));
  EXPECT_EQ(Values(earlier.d_v, cut, rows), Values(clean.d_v, cut, rows));
  EXPECT_TRUE(std::isnan(Values(earlier.d_k, 0, 1)[0]));
}

// Scores near 20000 from key 66 on, in the second tile: the maximum grows by as much.
TEST(AttentionCudaTest, LargeScoresDoNotOverflow) {
  Problem<float> p({.heads = 1, .depth = 4, .offsets = {0, 70}});
  for (int64_t c = 0; c < 4; ++c) {
    for (int64_t t = 0; t < 70; ++t) p.q.view()(t, c) = 100;
    p.k.view()(66, c) = 100;  // score 20000; the others are below 400
  }
  p.Compute();
  for (int64_t t = 66; t < 70; ++t) {
    EXPECT_NEAR(p.log_sum_exp.view()(t, 0), 20000, 1e-2);
    for (int64_t c = 0; c < 4; ++c) {
      EXPECT_EQ(p.out.view()(t, c), p.v.view()(66, c));
      EXPECT_TRUE(std::isfinite(p.d_k.view()(t, c)));
    }
  }
}

TYPED_TEST(AttentionCudaTypesTest, NothingIsLaunchedForNoTokens) {
  Problem<TypeParam> none({.heads = 2, .depth = 4, .offsets = {0}});
  none.Compute();
  Problem<TypeParam> empty_sequences({.heads = 2, .depth = 4, .offsets = {0, 0, 0}});
  empty_sequences.Compute();
}

}  // namespace
}  // namespace moe
