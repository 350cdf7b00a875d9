// kernels/grouped_gemm on CPUs: trees, memory, packed weights, and what is refused.
// grouped_gemm_bits_test.cc has the bits of products.
#include "kernels/grouped_gemm/grouped_gemm.h"

#include <algorithm>
#include <cmath>
#include <future>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <absl/algorithm/container.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/grouped_gemm/packed_weights.h"
#include "kernels/grouped_gemm/simd_targets.h"
#include "kernels/grouped_gemm/weight_gradient.h"
#include "tests/kernels/gemm_test.h"

namespace moe::testing {
namespace {

using ::testing::HasSubstr;

// Adding e to 1 has no effect: a chain stays at 1, but pairs of leaves sum to (1 + e) + (e + e). A
// leaf holds an item of each of two parts.
TEST(Gemm, AddsLeavesAsABalancedTree) {
  constexpr float e = 0x1p-24f;
  const std::vector<float> x = {1, e, e, e, 0, 0, 0, 0}, ones(8, 1.0f);
  float sum = 0;
  Workspace workspace;
  const auto stream = MakeInlineStream();
  const auto add = [&](int leaves, int parts) {
    EXPECT_OK(Gemm<float>({x.data(), 1, 8}, {ones.data(), 1, 8}, MatrixView<float>{&sum, 1, 1},
                          workspace, *stream, {}, {{leaves, 8 / parts, 1}, parts}));
    return sum;
  };
  EXPECT_EQ(add(1, 1), 1.0f);
  EXPECT_EQ(add(8, 1), 1 + 2 * e);
  EXPECT_EQ(add(4, 1), 1 + 2 * e);  // leaves 1 + e, e + e
  EXPECT_EQ(add(4, 2), 1 + 2 * e);
  EXPECT_EQ(add(2, 1), 1.0f);  // one leaf holds all
  EXPECT_EQ(add(2, 2), 1 + 2 * e);
}

// Even dot products of bfloat16 where multiply-adds are faster.
TEST(SimdTargets, TheOneInUseIsTheFirst) {
  for (const std::string& target : gemm::SimdTargets()) {
    const SimdTarget use(target);
    EXPECT_EQ(gemm::SimdTargets().front(), target);
  }
}

// The one item is in the last of two leaves: its -0 is not added to the other's 0.
TEST(Gemm, AnEmptyLeafIsNoZero) {
  const float x = -0x1p-100f, w = 0x1p-100f;
  float y = 1;
  Workspace workspace;
  const auto stream = MakeInlineStream();
  for (const std::string& target : gemm::SimdTargets()) {
    const SimdTarget use(target);
    ASSERT_OK(Gemm<float>({&x, 1, 1}, {&w, 1, 1}, MatrixView<float>{&y, 1, 1}, workspace, *stream,
                          {}, {{.leaves = 2, .extent = 1}}));
    EXPECT_TRUE(y == 0 && std::signbit(y)) << target;
  }
}

TEST(GroupedGemm, GivesTheWorkspaceBackAndStopsAllocating) {
  const Groups<BFloat16> groups({70, 80}, 65, 33);
  const auto x = Mixed<BFloat16>(150, 33, 0, 8);
  auto y = Unwritten<BFloat16>(150, 65);
  Workspace workspace;
  ThreadPool pool(2);
  const auto stream = MakeInlineStream(&pool);
  int64_t allocations = 0;
  for (int round = 0; round < 3; ++round) {
    ASSERT_OK(GroupedGemm<BFloat16>(x.view(), groups.offsets, groups.views(), y.view(), workspace,
                                    *stream));
    EXPECT_EQ(workspace.used_bytes(), 0);
    if (round == 1) allocations = workspace.allocations();
  }
  EXPECT_EQ(workspace.allocations(), allocations);
}

TEST(GroupedGemm, ReadsOffsetsAndWeightViewsBeforeItReturns) {
  Groups<float> groups({2, 3}, 4, 5);
  const auto x = Mixed<float>(5, 5, 0, 9);
  const Matrix<float> want = Expected<float, float>(x, groups, true, 0);
  auto y = Unwritten<float>(5, 4);
  Workspace workspace;
  auto stream = MakeStream({}).value();
  std::promise<void> gate;
  EnqueueWork(*stream, [opened = gate.get_future()]() mutable { opened.wait(); });
  std::vector<MatrixView<const float>> views = groups.views();
  const absl::Status status =
      GroupedGemm<float>(x.view(), groups.offsets, views, y.view(), workspace, *stream);
  std::fill(views.begin(), views.end(), MatrixView<const float>());
  std::fill(groups.offsets.begin(), groups.offsets.end(), -1);
  EXPECT_GT(workspace.used_bytes(), 0) << "the queued task still needs it";
  gate.set_value();
  ASSERT_OK(status);
  ASSERT_OK(stream->Synchronize());
  EXPECT_TRUE(SameBits(y, want));
}

template <typename T>
class PackedWeightsTest : public ::testing::Test {
 protected:
  // Strip o / W, step k, column o % W, in both directions: every element once, and zeros beyond.
  // The two steps of a pair of bfloat16 are adjacent.
  void CheckPlaces(int64_t out, int64_t in, int64_t pad) {
    SCOPED_TRACE(::testing::Message() << "[" << out << ", " << in << "]");
    const auto weight = Mixed<T>(out, in, pad, 3);
    const auto stream = MakeInlineStream(&threads_);
    PackedWeights<T> packed = PackedWeights<T>::Create(out, in).value();
    // Packed twice: nothing of an earlier packing remains.
    const auto nan = Unwritten<T>(out, in);
    ASSERT_OK(packed.Pack(nan.view(), 0, *stream));
    ASSERT_OK(packed.Pack(weight.view(), 1, *stream));
    const MatrixView<const T> strips = packed.strips();
    const int64_t width = strips.cols();
    constexpr int64_t kPair = std::is_same_v<T, BFloat16> ? 2 : 1;
    const int64_t steps = (in + kPair - 1) / kPair * kPair;
    ASSERT_EQ(strips.rows(), (out + width - 1) / width * steps);
    for (int64_t i = 0; i < strips.rows() * width; ++i) {
      const int64_t line = i / (width * kPair), in_line = i % (width * kPair);
      const int64_t o = line / (steps / kPair) * width + in_line / kPair;
      const int64_t k = line % (steps / kPair) * kPair + in_line % kPair;
      const float want = o < out && k < in ? static_cast<float>(weight.at(o, k)) : 0.0f;
      ASSERT_EQ(static_cast<float>(strips.data()[i]), want) << "o " << o << ", k " << k;
    }
  }

  ThreadPool threads_{3};
};

TYPED_TEST_SUITE(PackedWeightsTest, StorageTypes);

TYPED_TEST(PackedWeightsTest, HoldEachElementOnceAndZerosBehindTheLast) {
  for (const std::string& target : gemm::SimdTargets()) {
    SCOPED_TRACE(target);
    const SimdTarget use(target);
    for (const int64_t out : {1, 7, 16, 63, 64, 65, 200}) {
      for (const int64_t in : {1, 8, 63, 64, 65, 131}) {
        this->CheckPlaces(out, in, (out + in) % 3);
      }
    }
  }
}

class FakeCudaStream final : public Stream {
 public:
  Device device() const override { return {DeviceKind::kCuda, 0}; }
  absl::StatusOr<Event> Record() override { return Event(); }
  absl::Status WaitFor(const Event&) override { return absl::OkStatus(); }
  absl::Status Synchronize() override { return absl::OkStatus(); }

 private:
  absl::Status DoEnqueue(const TaskOffer&) override { return absl::OkStatus(); }
};

// So large that whole lines of float32 sums bypass the cache, and not where memory is unaligned.
TEST(WeightGradients, InTilesHaveTheBitsOfAddingToZerosWhereverTheyAreWritten) {
  constexpr int64_t kRows = 3, kOut = 1450, kIn = 1472, kSize = kOut * kIn;
  const auto dy = Mixed<BFloat16>(kRows, kOut, 0, 1), x = Mixed<BFloat16>(kRows, kIn, 0, 2);
  Workspace workspace;
  const auto stream = MakeInlineStream();
  const auto memory = workspace.Array<float>(kSize + 16).value();
  const auto add = [&](absl::Span<float> sum, bool empty) {
    ASSERT_OK(AddWeightGradient<BFloat16>(dy.view(), x.view(), GradAccumulator(sum, &empty),
                                          workspace, *stream,
                                          {.bfloat16_order = BFloat16Order::kTile}));
  };
  std::vector<float> want(kSize);
  add(absl::MakeSpan(want), false);
  for (const std::string& target : gemm::SimdTargets()) {
    if (target == "EMU128") continue;  // the loops of the specification
    const SimdTarget use(target);
    for (const size_t offset : {0, 1, 8}) {
      const absl::Span<float> sum = memory.subspan(offset, kSize);
      std::fill(memory.begin(), memory.end(), NAN);
      add(sum, true);
      EXPECT_TRUE(absl::c_equal(sum, want)) << target << ' ' << offset;
    }
  }
}

class GemmErrors : public ::testing::Test {
 protected:
  absl::Status Forward(MatrixView<const float> x, std::vector<int64_t> offsets,
                       MatrixView<float> y) {
    const MatrixView<const float> weight[] = {{w_.data(), 2, 3}, {w_.data(), 2, 3}};
    return GroupedGemm<float>(x, offsets, weight, y, workspace_, *stream_);
  }
  absl::Status Forward(const PackedWeights<float>& w, int64_t version, int64_t out, int64_t in) {
    return Gemm<float>({x_.data(), 2, in}, w, version, MatrixView<float>{y_.data(), 2, out},
                       workspace_, *stream_);
  }
  static void Expect(const absl::Status& status, const std::string& text) {
    ExpectRefused(status, HasSubstr(text));
  }

  std::vector<float> w_ = std::vector<float>(64, 1.0f), x_ = w_, y_ = w_;
  Workspace workspace_;
  std::unique_ptr<Stream> stream_ = MakeInlineStream();
};

TEST_F(GemmErrors, NameTheArgumentAndTheExpectedShape) {
  Expect(Forward({x_.data(), 4, 3}, {0, 1, 4}, {y_.data(), 5, 2}),
         "GroupedGemm: x is [4, 3] with stride 3, expected [5, 3]");
  Expect(Forward({x_.data(), 4, 2}, {0, 1, 4}, {y_.data(), 4, 2}),
         "weight is [2, 3] with stride 3, expected [2, 2]");
  Expect(Forward({x_.data(), 4, 3, 2}, {0, 1, 4}, {y_.data(), 4, 2}), "with stride 2");
  Expect(Forward({x_.data(), 4, 3}, {0, 4}, {y_.data(), 4, 2}), "2 offsets for 2 weights");
  Expect(Forward({x_.data(), 4, 3}, {0, 1, 3}, {y_.data(), 4, 2}),
         "offsets run from 0 to 3, expected 0 to 4 rows");
  Expect(Forward({x_.data(), 4, 3}, {0, 5, 4}, {y_.data(), 4, 2}), "offsets[1] = 5 is above");
  Expect(GemmInputGradient<float>({x_.data(), 5, 2}, {w_.data(), 3, 2},
                                  MatrixView<float>{y_.data(), 5, 2}, workspace_, *stream_),
         "GemmInputGradient: weight is [3, 2] with stride 2, expected [2, 2]");
  EXPECT_EQ(workspace_.allocations(), 0);
}

TEST_F(GemmErrors, NameWhatIsWrongWithWeightGradients) {
  std::vector<float> sum(6), few(5);
  const auto add = [&](int64_t rows, const std::vector<int64_t>& segments, std::vector<float>& to) {
    const GradAccumulator grad(absl::MakeSpan(to));
    return AddWeightGradients<float>({x_.data(), 3, 2}, {w_.data(), rows, 3}, segments, {&grad, 1},
                                     workspace_, *stream_);
  };
  EXPECT_OK(add(3, {0, 3}, sum));
  Expect(add(2, {0, 3}, sum), "x is [2, 3] with stride 3, expected [3, 3]");
  Expect(add(3, {0, 3}, few), "grad is [5], expected [6]");
  for (const std::vector<int64_t>& bad :
       {std::vector<int64_t>{}, {0}, {0, 4}, {-1, 3}, {0, 2, 1}}) {
    Expect(add(3, bad, sum), "segment offsets for 1 weights");
  }
}

TEST_F(GemmErrors, TreesThatDoNotFitTheProduct) {
  const auto tree = [&](const GemmTree& of) {
    return Gemm<float>({x_.data(), 4, 6}, {w_.data(), 2, 6}, MatrixView<float>{y_.data(), 4, 2},
                       workspace_, *stream_, {}, of);
  };
  EXPECT_OK(tree({{8, 2, 16}, 3}));
  EXPECT_OK(tree({{8, 2, 16}, 2, 2}));
  Expect(tree({{8, 2, 16}, 2, 3}),
         "a tree over 2 parts of 2, the first 3 times, in items of 16, expected 1 to 3 parts");
  for (const int leaves : {0, 3, 32}) Expect(tree({{leaves, 6, 16}}), "expected 1, 2, 4, 8 or 16");
  Expect(tree({{8, 5, 16}}),
         "Gemm: a tree over 1 parts of 5 in items of 16, expected 1 to 3 parts");
  Expect(tree({{8, 2, 16}, 2}), "6 in all");
  Expect(tree({{8, 6, 0}}), "in items of 1 or more");
  Expect(tree({{8, 6, 16}, 0}), "a tree over 0 parts");
}

TEST_F(GemmErrors, CudaStreamsAreUnimplemented) {
  stream_ = std::make_unique<FakeCudaStream>();
  EXPECT_EQ(Forward({x_.data(), 4, 3}, {0, 1, 4}, {y_.data(), 4, 2}).code(),
            absl::StatusCode::kUnimplemented);
}

class NoMemory final : public MemoryResource {
 public:
  Device device() const override { return {}; }
  absl::StatusOr<std::byte*> Allocate(int64_t) override {
    return absl::ResourceExhaustedError("NoMemory: none");
  }
  void Free(std::byte*, int64_t) override {}
};

TEST_F(GemmErrors, NoWorkspaceIsResourceExhausted) {
  NoMemory none;
  Workspace empty(none);
  EXPECT_EQ(Gemm<float>({x_.data(), 4, 3}, {w_.data(), 2, 3}, MatrixView<float>{y_.data(), 4, 2},
                        empty, *stream_)
                .code(),
            absl::StatusCode::kResourceExhausted);
}

TEST_F(GemmErrors, NameWhatIsWrongWithPackedWeights) {
  PackedWeights<float> w = PackedWeights<float>::Create(5, 3).value();
  Expect(PackedWeights<float>::Create(-1, 3).status(), "[-1, 3]");
  Expect(Forward(w, 0, 5, 3), "packed at version -1, expected 0 (call Pack first)");
  Expect(Forward(w, PackedWeights<float>::kNeverPacked, 5, 3), "call Pack first");
  Expect(w.Pack({x_.data(), 3, 5}, 0, *stream_),
         "PackedWeights::Pack: weight is [3, 5] with stride 5, expected [5, 3]");
  Expect(w.Pack({x_.data(), 5, 3}, -1, *stream_), "version -1");
  EXPECT_EQ(w.version(), PackedWeights<float>::kNeverPacked);
  ASSERT_OK(w.Pack({x_.data(), 5, 3}, 4, *stream_));
  EXPECT_EQ(w.version(), 4);
  EXPECT_OK(Forward(w, 4, 5, 3));
  EXPECT_EQ(y_[9], 3.0f);
  Expect(Forward(w, 5, 5, 3), "Gemm: a weight is packed at version 4, expected 5");
  Expect(Forward(w, 4, 3, 5), "a packed weight is [5, 3], expected [3, 5]");
  Expect(Forward({}, 4, 5, 3), "a packed weight is [0, 0]");
  Expect(GroupedGemm<float>({x_.data(), 2, 3}, {0, 1, 2}, {&w, 1}, 4, {y_.data(), 2, 5}, workspace_,
                            *stream_),
         "3 offsets for 1 weights");
}

TEST_F(GemmErrors, WeightsPackedForTwoOrdersOrAnotherTreeAreRefused) {
  const std::vector<BFloat16> x(64, BFloat16(1.0f));
  std::vector<BFloat16> y(64);
  const GemmTree tree = {{4, 8, 2}};
  std::vector<PackedWeights<BFloat16>> w;
  for (const auto& [word, order] : kBFloat16OrderWords) {
    w.push_back(PackedWeights<BFloat16>::Create(5, 8, order, tree).value());
    ASSERT_OK(w.back().Pack({x.data(), 5, 8}, 0, *stream_));
  }
  Expect(GroupedGemm<BFloat16>({x.data(), 2, 8}, {0, 1, 2}, w, 0, {y.data(), 2, 5}, workspace_,
                               *stream_, tree),
         "GroupedGemm: weights packed for two orders of bfloat16");
  const auto product = [&](const GemmTree& of) {
    return Gemm<BFloat16>({x.data(), 2, 8}, w[1], 0, MatrixView<BFloat16>(y.data(), 2, 5),
                          workspace_, *stream_, of);
  };
  EXPECT_OK(product(tree));
  EXPECT_EQ(static_cast<float>(y[9]), 8.0f);
  Expect(product({{2, 8, 2}}),
         "Gemm: a weight is packed for a tree of 4 leaves over 8, expected that of the product, 2 "
         "over 8");
  Expect(PackedWeights<BFloat16>::Create(5, 8, BFloat16Order::kTile, {{4, 9, 2}}).status(),
         "PackedWeights: a tree over 1 parts of 9");
}

TEST_F(GemmErrors, AnotherWidthOfPackedStripsIsRefused) {
  const std::vector<std::string> targets = gemm::SimdTargets();
  if (targets.size() < 2) GTEST_SKIP() << "one target";
  PackedWeights<float> w = PackedWeights<float>::Create(5, 3).value();
  ASSERT_OK(w.Pack({x_.data(), 5, 3}, 0, *stream_));
  int refused = 0;
  for (const std::string& target : targets) {
    const SimdTarget use(target);
    const absl::Status status = Forward(w, 0, 5, 3);
    if (status.ok()) continue;
    Expect(status, "packed for other SIMD instructions");
    Expect(w.Pack({x_.data(), 5, 3}, 1, *stream_), "created for other SIMD instructions");
    ++refused;
  }
  EXPECT_GT(refused, 0);
}

TEST_F(GemmErrors, PackedWeightsMovedFromHoldNothing) {
  PackedWeights<float> w = PackedWeights<float>::Create(5, 3).value();
  ASSERT_OK(w.Pack({x_.data(), 5, 3}, 0, *stream_));
  const PackedWeights<float> other = std::move(w);
  EXPECT_OK(Forward(other, 0, 5, 3));
  // NOLINTNEXTLINE(bugprone-use-after-move)
  Expect(Forward(w, 0, 5, 3), "a packed weight is [0, 0]");
}

}  // namespace
}  // namespace moe::testing
