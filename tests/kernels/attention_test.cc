// kernels/attention: causal attention over packed sequences, and its gradients.
#include "kernels/attention/attention.h"

#include <cmath>
#include <string>

#include "tests/kernels/attention_oracle.h"
#include "tests/kernels/gradcheck.h"
#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using testing::AttentionOracle;
using testing::kFloatRounding;
using testing::kNaN;
using testing::Matrix;
using testing::SameBits;
using testing::TestStream;

using Offsets = std::vector<int64_t>;

template <typename T>
struct Problem {
  int heads;
  Offsets offsets;
  Matrix<T> q, k, v, out, d_out, d_q, d_k, d_v;
  Matrix<float> log_sum_exp;

  Problem(int num_heads, int64_t depth, Offsets sequence_offsets, uint64_t seed = 0)
      : heads(num_heads),
        offsets(std::move(sequence_offsets)),
        q(Random(depth, seed + 1)),
        k(Random(depth, seed + 2)),
        v(Random(depth, seed + 3)),
        out(q.rows(), q.cols()),
        d_out(Random(depth, seed + 4)),
        d_q(q.rows(), q.cols()),
        d_k(q.rows(), q.cols()),
        d_v(q.rows(), q.cols()),
        log_sum_exp(q.rows(), num_heads) {}

  AttentionShape shape() const { return {.heads = heads, .sequence_offsets = offsets}; }
  int64_t depth() const { return q.cols() / heads; }

  absl::Status Forward(TestStream& stream) {
    Workspace workspace;
    return CausalAttention<T>(shape(), q.view(), k.view(), v.view(), out.view(), log_sum_exp.view(),
                              workspace, *stream);
  }
  absl::Status Backward(TestStream& stream) {
    Workspace workspace;
    const auto& p = *this;
    return CausalAttentionBackward<T>(shape(), p.q.view(), p.k.view(), p.v.view(), p.out.view(),
                                      p.log_sum_exp.view(), p.d_out.view(), d_q.view(), d_k.view(),
                                      d_v.view(), workspace, *stream);
  }
  void Compute(TestStream& stream) {
    ASSERT_TRUE(Forward(stream).ok());
    ASSERT_TRUE(Backward(stream).ok());
    for (const Matrix<T>* m : {&out, &d_q, &d_k, &d_v}) ASSERT_TRUE(m->edges_intact());
    ASSERT_TRUE(log_sum_exp.edges_intact());
  }

 private:
  Matrix<T> Random(int64_t depth, uint64_t seed) const {
    return Matrix<T>::Random(offsets.back(), heads * depth, seed);
  }
};

void ExpectNear(const Matrix<float>& actual, const AttentionOracle::Value& expected,
                double roundings, const char* name) {
  const auto values = actual.values();
  ASSERT_EQ(values.size(), expected.value.size()) << name;
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(values[i], expected.value[i], roundings * kFloatRounding * expected.bound[i])
        << name << " [" << i << "]";
  }
}

TEST(CausalAttentionTest, EqualScoresAverageTheValuesSoFar) {
  TestStream stream;
  Problem<float> p(2, 1, {0, 2, 3});
  p.q = Matrix<float>(3, 2);  // all scores 0
  for (int64_t t = 0; t < 3; ++t) {
    p.v.at(t, 0) = static_cast<float>(t + 1);
    p.v.at(t, 1) = static_cast<float>(10 * (t + 1));
  }
  ASSERT_TRUE(p.Forward(stream).ok());
  EXPECT_EQ(p.out.values(), (std::vector<double>{1, 10, 1.5, 15, 3, 30}));
  EXPECT_FLOAT_EQ(p.log_sum_exp.at(1, 0), std::log(2.0f));
  EXPECT_EQ(p.log_sum_exp(2, 1), 0);
}

struct Case {
  int heads;
  int64_t depth;
  Offsets offsets;
};

// Lengths around the blocks of queries (2, 4, 8), the panels of keys (16, 32) and the 16 partials;
// head sizes with and without tails.
const Case kCases[] = {
    {1, 1, {0, 1}},       {1, 3, {0, 7, 7, 8, 17}}, {3, 16, {0, 9, 25}},
    {2, 20, {0, 31, 64}}, {2, 32, {0, 33, 33}},     {1, 33, {0, 2, 50}},
    {4, 8, {0, 40}},      {1, 64, {0, 65, 130}},    {1, 48, {0, 15, 31, 47}},
};

TEST(CausalAttentionTest, ForwardAndBackwardMatchFloat64OnEverySimdTarget) {
  TestStream stream;
  for (const std::string& target : gemm::SimdTargets()) {
    const testing::SimdTarget use(target);
    for (const Case& c : kCases) {
      Problem<float> p(c.heads, c.depth, c.offsets);
      p.Compute(stream);
      const AttentionOracle expected(c.heads, c.offsets, p.q.values(), p.k.values(), p.v.values(),
                                     p.d_out.values());
      const double roundings = 2 * static_cast<double>(c.depth + p.q.rows() + 20);
      ExpectNear(p.out, expected.out, roundings, "out");
      ExpectNear(p.log_sum_exp, expected.log_sum_exp, roundings, "log_sum_exp");
      ExpectNear(p.d_q, expected.d_q, roundings, "d_q");
      ExpectNear(p.d_k, expected.d_k, roundings, "d_k");
      ExpectNear(p.d_v, expected.d_v, roundings, "d_v");
    }
  }
}

// The oracle's gradients themselves, and so the operation's: against differences of its output.
TEST(CausalAttentionTest, BackwardMatchesFiniteDifferences) {
  TestStream stream;
  Problem<float> p(2, 4, {0, 3, 8});
  p.Compute(stream);
  const auto q = p.q.values(), k = p.k.values(), v = p.v.values(), d_out = p.d_out.values();
  const auto loss = [&](const auto& queries, const auto& keys, const auto& values) {
    const AttentionOracle oracle(p.heads, p.offsets, queries, keys, values, d_out);
    double sum = 0;
    for (size_t i = 0; i < d_out.size(); ++i) sum += d_out[i] * oracle.out.value[i];
    return sum;
  };
  const AttentionOracle oracle(p.heads, p.offsets, q, k, v, d_out);
  double bound = 0;
  for (const auto* x : {&oracle.d_q, &oracle.d_k, &oracle.d_v}) {
    for (const double b : x->bound) bound = std::max(bound, b);
  }
  const double tolerance = 2 * (4 + 8 + 20) * kFloatRounding * bound;
  testing::ExpectGradient([&](const auto& x) { return loss(x, k, v); }, q, p.d_q.values(),
                          tolerance, "d_q");
  testing::ExpectGradient([&](const auto& x) { return loss(q, x, v); }, k, p.d_k.values(),
                          tolerance, "d_k");
  testing::ExpectGradient([&](const auto& x) { return loss(q, k, x); }, v, p.d_v.values(),
                          tolerance, "d_v");
}

TEST(CausalAttentionTest, ASequenceHasTheSameBitsInAnyBatchAndOnAnyNumberOfThreads) {
  const Offsets offsets = {0, 40, 41, 41, 97, 130};
  Problem<float> all(3, 20, offsets);
  TestStream one;
  all.Compute(one);
  for (const int threads : {2, 3}) {
    TestStream stream(threads);
    Problem<float> p(3, 20, offsets);
    p.Compute(stream);
    EXPECT_TRUE(SameBits(p.out, all.out));
    EXPECT_TRUE(SameBits(p.log_sum_exp, all.log_sum_exp));
    EXPECT_TRUE(SameBits(p.d_q, all.d_q));
    EXPECT_TRUE(SameBits(p.d_k, all.d_k));
    EXPECT_TRUE(SameBits(p.d_v, all.d_v));
  }
  for (size_t s = 1; s < offsets.size(); ++s) {
    const int64_t begin = offsets[s - 1], end = offsets[s];
    Problem<float> p(3, 20, {0, end - begin});
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < all.q.cols(); ++c) {
        p.q.at(t - begin, c) = all.q.at(t, c);
        p.k.at(t - begin, c) = all.k.at(t, c);
        p.v.at(t - begin, c) = all.v.at(t, c);
        p.d_out.at(t - begin, c) = all.d_out.at(t, c);
      }
    }
    p.Compute(one);
    EXPECT_TRUE(SameBits(p.out, all.out, begin));
    EXPECT_TRUE(SameBits(p.d_q, all.d_q, begin));
    EXPECT_TRUE(SameBits(p.d_k, all.d_k, begin));
    EXPECT_TRUE(SameBits(p.d_v, all.d_v, begin));
  }
}

TEST(CausalAttentionTest, SimdTargetsWithFusedMultiplyAddGiveTheSameBits) {
  TestStream stream;
  for (const Case& c : kCases) {
    Problem<float> best(c.heads, c.depth, c.offsets);
    best.Compute(stream);
    const auto targets = gemm::SimdTargets();
    for (size_t i = 0; i + 1 < targets.size(); ++i) {  // the last one is the fallback
      const testing::SimdTarget use(targets[i]);
      Problem<float> p(c.heads, c.depth, c.offsets);
      p.Compute(stream);
      EXPECT_TRUE(SameBits(p.out, best.out)) << targets[i];
      EXPECT_TRUE(SameBits(p.d_q, best.d_q)) << targets[i];
      EXPECT_TRUE(SameBits(p.d_k, best.d_k)) << targets[i];
      EXPECT_TRUE(SameBits(p.d_v, best.d_v)) << targets[i];
    }
  }
}

// Not even a NaN leaks backwards, or a sequence's into another.
TEST(CausalAttentionTest, LaterTokensAndOtherSequencesDoNotChangeABit) {
  TestStream stream;
  const Offsets offsets = {0, 50, 70};
  Problem<float> p(2, 16, offsets);
  p.Compute(stream);
  for (const int64_t from : {1, 7, 8, 33, 49}) {
    Problem<float> changed(2, 16, offsets);
    for (int64_t t = from; t < 50; ++t) {
      for (int64_t c = 0; c < 32; ++c) {
        changed.q.at(t, c) = kNaN;
        changed.k.at(t, c) = t % 2 == 0 ? kNaN : 5.0f;
        changed.v.at(t, c) = kNaN;
      }
    }
    changed.Compute(stream);
    for (int64_t t = 0; t < 70; ++t) {
      for (int64_t c = 0; c < 32; ++c) {
        const bool seen = t >= from && t < 50;
        ASSERT_EQ(std::isnan(changed.out(t, c)), seen) << from << " " << t << " " << c;
        if (seen) continue;
        ASSERT_TRUE(SameBits(changed.out.at(t, c), p.out.at(t, c))) << from << " " << t;
        ASSERT_TRUE(SameBits(changed.d_q.at(t, c), p.d_q.at(t, c))) << from << " " << t;
      }
    }
    for (int64_t t = 50; t < 70; ++t) {
      for (int64_t c = 0; c < 32; ++c) {
        ASSERT_TRUE(SameBits(changed.d_k.at(t, c), p.d_k.at(t, c)));
        ASSERT_TRUE(SameBits(changed.d_v.at(t, c), p.d_v.at(t, c)));
      }
    }
  }
}

TEST(CausalAttentionTest, LargeScoresDoNotOverflow) {
  TestStream stream;
  Problem<float> p(1, 4, {0, 20});
  for (int64_t c = 0; c < 4; ++c) {
    for (int64_t t = 0; t < 20; ++t) p.q.at(t, c) = 100;
    p.k.at(3, c) = 100;  // score 20000; the others are near 0
  }
  p.Compute(stream);
  for (int64_t t = 3; t < 20; ++t) {
    EXPECT_NEAR(p.log_sum_exp(t, 0), 20000, 1e-2);
    for (int64_t c = 0; c < 4; ++c) {
      EXPECT_EQ(p.out(t, c), p.v(3, c));
      EXPECT_TRUE(std::isfinite(p.d_k(t, c)));
    }
  }
}

TEST(CausalAttentionTest, BFloat16IsTheFloat32ResultRoundedOnce) {
  TestStream stream;
  Problem<BFloat16> p(2, 20, {0, 21, 40});
  Problem<float> p32(2, 20, {0, 21, 40});
  p32.q = p.q.As<float>();
  p32.k = p.k.As<float>();
  p32.v = p.v.As<float>();
  p32.d_out = p.d_out.As<float>();
  p.Compute(stream);
  ASSERT_TRUE(p32.Forward(stream).ok());
  EXPECT_TRUE(SameBits(p.out, p32.out.As<BFloat16>()));
  EXPECT_TRUE(SameBits(p.log_sum_exp, p32.log_sum_exp));
  p32.out = p.out.As<float>();  // what backward sees
  ASSERT_TRUE(p32.Backward(stream).ok());
  EXPECT_TRUE(SameBits(p.d_q, p32.d_q.As<BFloat16>()));
  EXPECT_TRUE(SameBits(p.d_k, p32.d_k.As<BFloat16>()));
  EXPECT_TRUE(SameBits(p.d_v, p32.d_v.As<BFloat16>()));
}

TEST(CausalAttentionTest, AllocatesNothingTheSecondTime) {
  TestStream stream(2);
  Problem<float> p(4, 32, {0, 100, 200});
  Workspace workspace;
  const auto step = [&] {
    WorkspaceScope scope(workspace);
    ASSERT_TRUE(CausalAttention<float>(p.shape(), p.q.view(), p.k.view(), p.v.view(), p.out.view(),
                                       p.log_sum_exp.view(), workspace, *stream)
                    .ok());
    EXPECT_GT(workspace.used_bytes(), 0);
  };
  step();
  const int64_t first = workspace.allocations();
  step();
  EXPECT_EQ(workspace.allocations(), first);
}

TEST(CausalAttentionTest, NoTokensAreFineAndBadArgumentsAreNamed) {
  TestStream stream;
  Problem<float> none(2, 4, {0});
  none.Compute(stream);
  Problem<float> empty(2, 4, {0, 0, 0});
  empty.Compute(stream);
  const auto message = [&](Problem<float> p) {
    return testing::Message(p.Forward(stream));
  };
  const Problem<float> good(2, 4, {0, 3});
  Problem<float> p = good;
  p.heads = 3;
  EXPECT_EQ(message(p), "CausalAttention: 8 columns for 3 heads, expected a multiple");
  p.heads = 0;
  EXPECT_EQ(message(p), "CausalAttention: 8 columns for 0 heads, expected a multiple");
  p = good;
  p.offsets = {0, 2};
  EXPECT_EQ(
      message(p),
      "CausalAttention: sequence_offsets [2] from 0 to 2, expected them from 0 to 3, the rows");
  p.offsets = {};
  EXPECT_EQ(message(p),
            "CausalAttention: sequence_offsets [0], expected them from 0 to 3, the rows");
  p.offsets = {0, 4, 3};
  EXPECT_EQ(message(p), "CausalAttention: sequence_offsets[2] is 3, expected at least 4");
  p = good;
  p.k = Matrix<float>(3, 7);
  EXPECT_EQ(message(p), "CausalAttention: k is [3, 7] with stride 10, expected [3, 8]");
  p = good;
  p.log_sum_exp = Matrix<float>(3, 1);
  EXPECT_EQ(message(p), "CausalAttention: log_sum_exp is [3, 1] with stride 4, expected [3, 2]");
  p = good;
  p.d_v = Matrix<float>(2, 8);
  EXPECT_EQ(testing::Message(p.Backward(stream)),
            "CausalAttentionBackward: d_v is [2, 8] with stride 11, expected [3, 8]");
  p = good;
  EXPECT_TRUE(p.Forward(stream).ok());  // the stream stays usable
}

}  // namespace
}  // namespace moe
