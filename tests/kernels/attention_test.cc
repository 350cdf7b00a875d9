// kernels/attention: causal attention over packed sequences, and its gradients, on every device.
#include "kernels/attention/attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "tests/kernels/attention_oracle.h"
#include "tests/kernels/device_memory.h"
#include "tests/kernels/gradcheck.h"
#if defined(MOE_TEST_SCHEDULES)
#include "tests/cusim/fake_streams.h"
#endif

namespace moe::testing {
namespace {

using Offsets = std::vector<int64_t>;

// Arrays in host memory; a call copies them to the device and back.
template <typename T>
struct Problem {
  int heads;
  Offsets offsets;
  Matrix<T> q, k, v, d_out, out, d_q, d_k, d_v;
  Matrix<float> log_sum_exp;

  // `group` query heads share a key-value head.
  Problem(int num_heads, int64_t depth, Offsets sequence_offsets, LayoutPair layout = {},
          int group = 1)
      : heads(num_heads),
        offsets(std::move(sequence_offsets)),
        q(Random(heads * depth, layout.in, 1)),
        k(Random(heads / group * depth, layout.in, 2)),
        v(Random(heads / group * depth, layout.in, 3)),
        d_out(Random(heads * depth, layout.out, 4)),
        out(q.rows(), q.cols(), layout.out),
        d_q(q.rows(), q.cols(), layout.out),
        d_k(q.rows(), k.cols(), layout.out),
        d_v(q.rows(), k.cols(), layout.in),
        log_sum_exp(q.rows(), num_heads) {}

  absl::Status Forward(const TestDevice& device) {
    Workspace workspace(device.memory());
    const auto on_q = device.Copy(q), on_k = device.Copy(k), on_v = device.Copy(v);
    const auto to = device.Copy(out);
    const auto sums = device.Copy(log_sum_exp);
    Offsets given = offsets;
    absl::Status status =
        CausalAttention<T>({.heads = heads, .sequence_offsets = given}, on_q.view(), on_k.view(),
                           on_v.view(), to.view(), sums.view(), workspace, device.stream());
    given.assign(given.size(), -1);  // the call has read them
    out = device.Read(to);
    log_sum_exp = device.Read(sums);
    return status;
  }
  absl::Status Backward(const TestDevice& device) {
    Workspace workspace(device.memory());
    const auto on_q = device.Copy(q), on_k = device.Copy(k), on_v = device.Copy(v);
    const auto on_out = device.Copy(out), by_out = device.Copy(d_out);
    const auto sums = device.Copy(log_sum_exp);
    const auto by_q = device.Copy(d_q), by_k = device.Copy(d_k), by_v = device.Copy(d_v);
    Offsets given = offsets;
    absl::Status status = CausalAttentionBackward<T>(
        {.heads = heads, .sequence_offsets = given}, on_q.view(), on_k.view(), on_v.view(),
        on_out.view(), sums.view(), by_out.view(), by_q.view(), by_k.view(), by_v.view(), workspace,
        device.stream());
    given.assign(given.size(), -1);
    d_q = device.Read(by_q);
    d_k = device.Read(by_k);
    d_v = device.Read(by_v);
    return status;
  }
  void Compute(const TestDevice& device) {
    ASSERT_OK(Forward(device));
    ASSERT_OK(Backward(device));
    for (const Matrix<T>* m : {&out, &d_q, &d_k, &d_v}) ASSERT_TRUE(m->edges_intact());
    ASSERT_TRUE(log_sum_exp.edges_intact());
  }

 private:
  Matrix<T> Random(int64_t cols, MatrixLayout layout, uint64_t seed) const {
    return Matrix<T>::Random(offsets.back(), cols, layout, seed);
  }
};

// The results of `a` are rows [first, ...) of those of `b`.
template <typename T>
void ExpectSameBits(const Problem<T>& a, const Problem<T>& b, int64_t first = 0) {
  EXPECT_TRUE(SameBits(a.out, b.out, first));
  EXPECT_TRUE(SameBits(a.log_sum_exp, b.log_sum_exp, first));
  EXPECT_TRUE(SameBits(a.d_q, b.d_q, first));
  EXPECT_TRUE(SameBits(a.d_k, b.d_k, first));
  EXPECT_TRUE(SameBits(a.d_v, b.d_v, first));
}

// Sets rows [begin, end).
template <typename T>
void Fill(Matrix<T>& m, int64_t begin, int64_t end, float value) {
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t c = 0; c < m.cols(); ++c) m.at(r, c) = T(value);
  }
}

TEST(CausalAttentionTest, EqualScoresAverageTheValuesSoFar) {
  ForEachDevice([](const TestDevice& device) {
    Problem<float> p(2, 1, {0, 2, 2, 3});
    p.q = Matrix<float>(3, 2);  // all scores 0
    p.v = Matrix<float>::Of(3, 2, {1, 10, 2, 20, 3, 30});
    ASSERT_OK(p.Forward(device));
    EXPECT_EQ(p.out.values(), (std::vector<double>{1, 10, 1.5, 15, 3, 30}));
    EXPECT_FLOAT_EQ(p.log_sum_exp.at(1, 0), std::log(2.0f));
    EXPECT_EQ(p.log_sum_exp(2, 1), 0);
  });
}

// Forward and d_q have the bits of attention with each key-value head repeated for its queries.
TEST(CausalAttentionTest, GroupedQueriesShareTheirKeysAndValues) {
  ForEachDevice([](const TestDevice& device) {
    Problem<float> grouped(4, 3, {0, 5, 40}, {}, 2), repeated(4, 3, {0, 5, 40});
    for (int64_t t = 0; t < 40; ++t) {
      for (int64_t c = 0; c < 12; ++c) {
        repeated.k.at(t, c) = grouped.k.at(t, c / 6 * 3 + c % 3);
        repeated.v.at(t, c) = grouped.v.at(t, c / 6 * 3 + c % 3);
      }
    }
    grouped.Compute(device);
    repeated.Compute(device);
    EXPECT_TRUE(SameBits(grouped.out, repeated.out));
    EXPECT_TRUE(SameBits(grouped.log_sum_exp, repeated.log_sum_exp));
    EXPECT_TRUE(SameBits(grouped.d_q, repeated.d_q));
  });
}

struct Case {
  int heads;
  int64_t depth;
  Offsets offsets;
  int group = 1;
};

// Lengths around the CPU's blocks of queries (2, 4, 8), panels of keys (16, 32) and 16 partials,
// and around one, two and three tiles of CUDA; head sizes with and without whole vectors and tails,
// around the 32 columns that CUDA stages at a time, with one and two blocks of columns, and around
// tensor cores' 64, 128 and 256. Some with grouped queries.
const Case kCases[] = {
    {1, 1, {0, 1}},         {1, 3, {0, 7, 7, 8, 17}},    {3, 16, {0, 9, 25}},
    {2, 20, {0, 31, 64}},   {2, 32, {0, 33, 33}},        {1, 33, {0, 2, 50}},
    {4, 8, {0, 40}},        {1, 64, {0, 65, 130}},       {1, 48, {0, 15, 31, 47}},
    {3, 33, {0, 9, 25}},    {2, 20, {0, 7, 7, 71, 136}}, {1, 64, {0, 130}},
    {2, 72, {0, 63, 64}},   {1, 130, {0, 66, 66}},       {1, 8, {0, 128, 193}},
    {4, 20, {0, 9, 40}, 2}, {6, 16, {0, 70}, 3},         {2, 72, {0, 63, 64}, 2},
    {2, 128, {0, 5, 150}},  {1, 256, {0, 90}},           {2, 264, {0, 20}},
};

// Calls check(i, case) for the cases of a device: all, or a third under each schedule of a
// simulated one. `turn` counts the schedules.
template <typename Check>
void ForCases(const TestDevice& device, size_t& turn, Check check) {
  const bool all = device.is_cpu() || !kSimulatedCuda;
  for (size_t i = all ? 0 : turn++ % 3; i < std::size(kCases); i += all ? 1 : 3) {
    check(i, kCases[i]);
  }
}

template <typename T>
void ExpectNear(const Matrix<T>& actual, const AttentionOracle::Value& expected, double roundings,
                const char* name) {
  const auto values = actual.values();
  ASSERT_EQ(values.size(), expected.value.size()) << name;
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(values[i], expected.value[i],
                roundings * kFloatRounding * expected.bound[i] + 1.01 * expected.stored[i])
        << name << " [" << i << "]";
  }
}

// Computes a case and compares it with float64; roundings(n): float32 roundings in sums of n rows.
template <typename T, typename Roundings>
void ExpectMatchesFloat64(const TestDevice& device, size_t i, const Case& c,
                          StorageRounding storage, Roundings roundings) {
  SCOPED_TRACE("case " + std::to_string(i));
  Problem<T> p(c.heads, c.depth, c.offsets, kLayoutPairs[i % std::size(kLayoutPairs)], c.group);
  p.Compute(device);
  static auto& oracles = *new std::map<size_t, AttentionOracle>;  // shared by all devices, for T
  if (!oracles.contains(i)) {
    oracles.try_emplace(i, c.heads, c.offsets, p.q.values(), p.k.values(), p.v.values(),
                        p.d_out.values(), storage);
  }
  const AttentionOracle& expected = oracles.at(i);
  int64_t longest = 0;
  for (size_t s = 1; s < c.offsets.size(); ++s) {
    longest = std::max(longest, c.offsets[s] - c.offsets[s - 1]);
  }
  const double allowed = roundings(c.group * longest);  // d_k and d_v: queries of a group's heads
  ExpectNear(p.out, expected.out, allowed, "out");
  ExpectNear(p.log_sum_exp, expected.log_sum_exp, allowed, "log_sum_exp");
  ExpectNear(p.d_q, expected.d_q, allowed, "d_q");
  ExpectNear(p.d_k, expected.d_k, allowed, "d_k");
  ExpectNear(p.d_v, expected.d_v, allowed, "d_v");
}

TEST(CausalAttentionTest, ForwardAndBackwardMatchFloat64) {
  size_t turn = 0;
  ForEachDevice(Simd::kAll, [&](const TestDevice& device) {
    ForCases(device, turn, [&](size_t i, const Case& c) {
      ExpectMatchesFloat64<float>(device, i, c, {}, [&](int64_t n) {
        return AttentionRoundings(c.depth, n, device.is_cpu());
      });
    });
  });
}

TEST(CausalAttentionTest, CpusWithFusedMultiplyAddGiveTheSameBitsOnAnyNumberOfThreads) {
  std::map<size_t, Problem<float>> first;
  ForEachDevice([&](const TestDevice& device) {
    if (!device.is_cpu()) return;
    for (size_t i = 0; i < std::size(kCases); ++i) {
      Problem<float> p(kCases[i].heads, kCases[i].depth, kCases[i].offsets, {}, kCases[i].group);
      p.Compute(device);
      ExpectSameBits(p, first.try_emplace(i, p).first->second);
    }
  });
}

// Checks the oracle's own gradients, and so the operation's, against differences of its output.
TEST(CausalAttentionTest, BackwardMatchesFiniteDifferences) {
  Problem<float> p(4, 4, {0, 3, 8}, {}, 2);
  p.Compute(TestDevice(Device()));
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
  const double tolerance = 2 * (4 + 2 * 8 + 20) * kFloatRounding * bound;
  ExpectGradient([&](const auto& x) { return loss(x, k, v); }, q, p.d_q.values(), tolerance, "d_q");
  ExpectGradient([&](const auto& x) { return loss(q, x, v); }, k, p.d_k.values(), tolerance, "d_k");
  ExpectGradient([&](const auto& x) { return loss(q, k, x); }, v, p.d_v.values(), tolerance, "d_v");
}

template <typename T>
class CausalAttentionTypesTest : public ::testing::Test {};
TYPED_TEST_SUITE(CausalAttentionTypesTest, StorageTypes);

// On CUDA 16-bit types use tensor cores, which take weights rounded to the type.
TYPED_TEST(CausalAttentionTypesTest, OnCudaMatchesFloat64WithinTheTypesRoundings) {
  using T = TypeParam;
  if constexpr (!std::is_same_v<T, float>) {
    size_t turn = 0;
    ForEachDevice([&](const TestDevice& device) {
      if (device.is_cpu()) return;
      ForCases(device, turn, [&](size_t i, const Case& c) {
        ExpectMatchesFloat64<T>(device, i, c, kStorageRounding<T>,
                                [&](int64_t n) { return MmaAttentionRoundings(c.depth, n); });
      });
    });
  }
}

#if defined(MOE_TEST_SCHEDULES)
// There the tensor-core tiles of heads above 64 have no room in backward: attention_fit_test.cc.
TYPED_TEST(CausalAttentionTypesTest, BackwardFitsGpusOfLittleSharedMemory) {
  using T = TypeParam;
  const cusim::ScopedMachine machine({.major = 8, .minor = 6});
  size_t turn = 0;
  ForEachDevice([&](const TestDevice& device) {
    if (device.is_cpu()) return;
    const size_t i = std::array<size_t, 3>{12, 18, 19}[turn++ % 3];  // heads of 72, 128 and 256
    ExpectMatchesFloat64<T>(device, i, kCases[i], kStorageRounding<T>,
                            [&](int64_t n) { return MmaAttentionRoundings(kCases[i].depth, n); });
  });
}
#endif

// Nor is any element beside the results written. Two layouts a device, of which there are several.
TYPED_TEST(CausalAttentionTypesTest, HasTheSameBitsForAnyLayoutAndSchedule) {
  using T = TypeParam;
  for (const int64_t depth : {16, 20}) {
    std::map<bool, Problem<T>> first;  // by kind of device
    size_t next = 0;
    ForEachDevice([&](const TestDevice& device) {
      for (int i = 0; i < 2; ++i) {
        const LayoutPair layout = kLayoutPairs[next++ % std::size(kLayoutPairs)];
        Problem<T> p(4, depth, {0, 5, 71}, layout, 2);
        p.Compute(device);
        ExpectSameBits(p, first.try_emplace(device.is_cpu(), p).first->second);
      }
    });
  }
}

// Alone and between others: with other tiles and slots.
TYPED_TEST(CausalAttentionTypesTest, ASequenceHasTheSameBitsInAnyBatch) {
  if (kSanitized) GTEST_SKIP() << "a matter of bits";
  using T = TypeParam;
  const Offsets offsets = {0, 37, 38, 38, 108, 111};
  ForEachDevice([&](const TestDevice& device) {
    Problem<T> all(4, 20, offsets, {}, 2);
    all.Compute(device);
    for (size_t s = 1; s < offsets.size(); ++s) {
      const int64_t begin = offsets[s - 1], end = offsets[s];
      Problem<T> p(4, 20, {0, end - begin}, {}, 2);
      p.q = all.q.Rows(begin, end);
      p.k = all.k.Rows(begin, end);
      p.v = all.v.Rows(begin, end);
      p.d_out = all.d_out.Rows(begin, end);
      p.Compute(device);
      ExpectSameBits(p, all, begin);
    }
  });
}

// No NaN of later tokens or of another sequence changes a result.
TYPED_TEST(CausalAttentionTypesTest, LaterTokensAndOtherSequencesDoNotChangeABit) {
  if (kSanitized) GTEST_SKIP() << "a matter of bits";
  using T = TypeParam;
  constexpr int64_t kEnd = 80, kRows = 100, kCols = 2 * 16;
  ForEachDevice([](const TestDevice& device) {
    Problem<T> p(2, 16, {0, kEnd, kRows});
    p.Compute(device);
    const std::vector<int64_t> cuts =
        device.is_cpu() ? std::vector<int64_t>{1, 7, 8, 33, 79} : std::vector<int64_t>{7, 70};
    for (const int64_t from : cuts) {
      SCOPED_TRACE(from);
      Problem<T> changed(2, 16, {0, kEnd, kRows});
      for (auto* m : {&changed.q, &changed.k, &changed.v, &changed.d_out}) {
        Fill(*m, from, kEnd, kNaN);
      }
      for (int64_t t = from; t < kEnd; ++t) {
        if (t % 2 == 1) Fill(changed.k, t, t + 1, 5);
      }
      changed.Compute(device);
      for (int64_t t = 0; t < kRows; ++t) {
        const bool seen = t >= from && t < kEnd;
        for (int64_t c = 0; c < kCols; ++c) {
          ASSERT_EQ(std::isnan(changed.out(t, c)), seen) << t << " " << c;
          if (seen) continue;
          ASSERT_TRUE(SameBits(changed.out.at(t, c), p.out.at(t, c))) << t;
          ASSERT_TRUE(SameBits(changed.d_q.at(t, c), p.d_q.at(t, c))) << t;
          ASSERT_TRUE(SameBits(changed.log_sum_exp.at(t, c / 16), p.log_sum_exp.at(t, c / 16)));
          if (t < kEnd) continue;
          ASSERT_TRUE(SameBits(changed.d_k.at(t, c), p.d_k.at(t, c)));
          ASSERT_TRUE(SameBits(changed.d_v.at(t, c), p.d_v.at(t, c)));
        }
      }
    }
  });
}

// On CUDA queries of earlier tokens do not change the gradients of later keys and values either.
TYPED_TEST(CausalAttentionTypesTest, EarlierQueriesDoNotChangeLaterKeysGradientsOnCuda) {
  using T = TypeParam;
  constexpr int64_t kCut = 70, kRows = 80;
  ForEachDevice([](const TestDevice& device) {
    if (device.is_cpu()) return;
    Problem<T> p(1, 24, {0, kRows}), changed = Problem<T>(1, 24, {0, kRows});
    p.Compute(device);
    Fill(changed.q, 0, kCut, kNaN);
    Fill(changed.d_out, 0, kCut, kNaN);
    changed.Compute(device);
    for (int64_t t = kCut; t < kRows; ++t) {
      for (int64_t c = 0; c < 24; ++c) {
        ASSERT_TRUE(SameBits(changed.d_k.at(t, c), p.d_k.at(t, c)));
        ASSERT_TRUE(SameBits(changed.d_v.at(t, c), p.d_v.at(t, c)));
      }
    }
    EXPECT_TRUE(std::isnan(changed.d_k(0, 0)));
  });
}

// Scores near 20000 from key 66 on, on CUDA in the second tile: the maximum grows by as much.
TEST(CausalAttentionTest, LargeScoresDoNotOverflow) {
  ForEachDevice([](const TestDevice& device) {
    Problem<float> p(1, 4, {0, 70});
    Fill(p.q, 0, 70, 100);
    Fill(p.k, 66, 67, 100);  // score 20000; the others are below 400
    p.Compute(device);
    for (int64_t t = 66; t < 70; ++t) {
      EXPECT_NEAR(p.log_sum_exp(t, 0), 20000, 1e-2);
      for (int64_t c = 0; c < 4; ++c) {
        EXPECT_EQ(p.out(t, c), p.v(66, c));
        EXPECT_TRUE(std::isfinite(p.d_k(t, c)));
      }
    }
  });
}

TEST(CausalAttentionTest, OnCpusBFloat16IsTheFloat32ResultRoundedOnce) {
  ForEachDevice([](const TestDevice& device) {
    if (!device.is_cpu()) return;
    Problem<BFloat16> p(2, 72, {0, 21, 88});
    Problem<float> p32(2, 72, {0, 21, 88});
    p32.q = p.q.As<float>();
    p32.k = p.k.As<float>();
    p32.v = p.v.As<float>();
    p32.d_out = p.d_out.As<float>();
    p.Compute(device);
    ASSERT_OK(p32.Forward(device));
    EXPECT_TRUE(SameBits(p.out, p32.out.As<BFloat16>()));
    EXPECT_TRUE(SameBits(p.log_sum_exp, p32.log_sum_exp));
    p32.out = p.out.As<float>();  // as backward reads it
    ASSERT_OK(p32.Backward(device));
    EXPECT_TRUE(SameBits(p.d_q, p32.d_q.As<BFloat16>()));
    EXPECT_TRUE(SameBits(p.d_k, p32.d_k.As<BFloat16>()));
    EXPECT_TRUE(SameBits(p.d_v, p32.d_v.As<BFloat16>()));
  });
}

TEST(CausalAttentionTest, AllocatesNothingTheSecondTime) {
  const TestDevice device(Device(), 2);
  Problem<float> p(4, 32, {0, 100, 200});
  Workspace workspace;
  const auto step = [&] {
    WorkspaceScope scope(workspace);
    ASSERT_OK(CausalAttention<float>({p.heads, p.offsets}, p.q.view(), p.k.view(), p.v.view(),
                                     p.out.view(), p.log_sum_exp.view(), workspace,
                                     device.stream()));
    EXPECT_GT(workspace.used_bytes(), 0);
  };
  step();
  const int64_t first = workspace.allocations();
  step();
  EXPECT_EQ(workspace.allocations(), first);
}

TYPED_TEST(CausalAttentionTypesTest, TakesNoRows) {
  ForEachDevice([](const TestDevice& device) {
    for (const Offsets& offsets : {Offsets{0}, Offsets{0, 0, 0}}) {
      Problem<TypeParam>(2, 4, offsets).Compute(device);
    }
  });
}

// Refused before anything is launched: the stream stays usable.
TEST(CausalAttentionTest, RefusesBadArgumentsByName) {
  ForEachDevice([](const TestDevice& device) {
    const auto message = [&](Problem<float> p) {
      return Message(p.Forward(device));
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
    EXPECT_EQ(
        message(p),
        "CausalAttention: k has 7 columns, expected heads of 4, as many as divide the 2 of q");
    p.k = Matrix<float>(3, 12);
    EXPECT_EQ(message(p),
              "CausalAttention: k has 12 columns, expected heads of 4, as many as divide the 2 of "
              "q");
    p.k = Matrix<float>(3, 4);
    EXPECT_EQ(message(p), "CausalAttention: v is [3, 8] with stride 11, expected [3, 4]");
    p = good;
    p.log_sum_exp = Matrix<float>(3, 1);
    EXPECT_EQ(message(p), "CausalAttention: log_sum_exp is [3, 1] with stride 4, expected [3, 2]");
    p = good;
    p.d_v = Matrix<float>(2, 8);
    EXPECT_EQ(Message(p.Backward(device)),
              "CausalAttentionBackward: d_v is [2, 8] with stride 11, expected [3, 8]");
    const Problem<float> many(65536, 1, {0, 1});
    if (!device.is_cpu()) {  // the limit of a grid's y dimension
      p = many;
      EXPECT_EQ(message(p), "CausalAttention: 65536 heads, at most 65535 on CUDA");
      EXPECT_EQ(Message(p.Backward(device)),
                "CausalAttentionBackward: 65536 heads, at most 65535 on CUDA");
    }
    p = good;
    EXPECT_OK(p.Forward(device));  // the stream stays usable
  });
}

}  // namespace
}  // namespace moe::testing
