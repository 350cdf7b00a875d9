#include "kernels/grouped_gemm/grouped_gemm.h"

#include <algorithm>
#include <cmath>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/grouped_gemm/simd_targets.h"
#include "tests/kernels/gemm_matrix.h"

namespace moe {
namespace {

using ::testing::HasSubstr;

// e is too small to change 1 alone: a chain stays at 1, pairs of leaves come to (1 + e) + (e + e).
// A leaf holds an item of each of two parts.
TEST(Gemm, AddsLeavesAsABalancedTree) {
  constexpr float e = 0x1p-24f;
  const std::vector<float> x = {1, e, e, e, 0, 0, 0, 0}, ones(8, 1.0f);
  float sum = 0;
  Workspace workspace;
  const auto stream = MakeInlineStream();
  const auto add = [&](int leaves, int parts) {
    EXPECT_TRUE(Gemm<float>({x.data(), 1, 8}, {ones.data(), 1, 8}, MatrixView<float>{&sum, 1, 1},
                            workspace, *stream, {}, {{leaves, 8 / parts, 1}, parts})
                    .ok());
    return sum;
  };
  EXPECT_EQ(add(1, 1), 1.0f);
  EXPECT_EQ(add(8, 1), 1 + 2 * e);
  EXPECT_EQ(add(4, 1), 1 + 2 * e);  // leaves 1 + e, e + e
  EXPECT_EQ(add(4, 2), 1 + 2 * e);
  EXPECT_EQ(add(2, 1), 1.0f);  // one leaf has all
  EXPECT_EQ(add(2, 2), 1 + 2 * e);
}

// The one item is in the last of two leaves: its -0 is not added to the other's 0.
TEST(Gemm, AnEmptyLeafIsNoZero) {
  const float x = -0x1p-100f, w = 0x1p-100f;
  float y = 1;
  Workspace workspace;
  const auto stream = MakeInlineStream();
  for (const std::string& target : gemm::SimdTargets()) {
    gemm::UseSimdTarget(target);
    ASSERT_TRUE(Gemm<float>({&x, 1, 1}, {&w, 1, 1}, MatrixView<float>{&y, 1, 1}, workspace, *stream,
                            {}, {{.leaves = 2, .extent = 1}})
                    .ok());
    EXPECT_TRUE(y == 0 && std::signbit(y)) << target;
  }
  gemm::UseSimdTarget("");
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
    ASSERT_TRUE(GroupedGemm<BFloat16>(x.view(), groups.offsets, groups.views(), y.view(), workspace,
                                      *stream)
                    .ok());
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
  ASSERT_TRUE(stream
                  ->Enqueue([opened = gate.get_future()]() mutable {
                    opened.wait();
                    return absl::OkStatus();
                  })
                  .ok());
  std::vector<MatrixView<const float>> views = groups.views();
  const absl::Status status =
      GroupedGemm<float>(x.view(), groups.offsets, views, y.view(), workspace, *stream);
  std::fill(views.begin(), views.end(), MatrixView<const float>());
  std::fill(groups.offsets.begin(), groups.offsets.end(), -1);
  EXPECT_GT(workspace.used_bytes(), 0) << "the queued task still needs it";
  gate.set_value();
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE(stream->Synchronize().ok());
  EXPECT_TRUE(SameBits(y, want));
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

class GroupedGemmErrors : public ::testing::Test {
 protected:
  absl::Status Forward(MatrixView<const float> x, std::vector<int64_t> offsets,
                       MatrixView<float> y) {
    const MatrixView<const float> weight[] = {{w_.data(), 2, 3}, {w_.data(), 2, 3}};
    return GroupedGemm<float>(x, offsets, weight, y, workspace_, *stream_);
  }
  static void Expect(const absl::Status& status, const std::string& text) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }

  std::vector<float> w_ = std::vector<float>(64, 1.0f), x_ = w_, y_ = w_;
  Workspace workspace_;
  std::unique_ptr<Stream> stream_ = MakeInlineStream();
};

TEST_F(GroupedGemmErrors, NameTheArgumentAndTheExpectedShape) {
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

TEST_F(GroupedGemmErrors, TreesThatDoNotFitTheProduct) {
  const auto tree = [&](const GemmTree& of) {
    return Gemm<float>({x_.data(), 4, 6}, {w_.data(), 2, 6}, MatrixView<float>{y_.data(), 4, 2},
                       workspace_, *stream_, {}, of);
  };
  EXPECT_TRUE(tree({{8, 2, 16}, 3}).ok());
  EXPECT_TRUE(tree({{8, 2, 16}, 2, 2}).ok());
  Expect(tree({{8, 2, 16}, 2, 3}),
         "a tree over 2 parts of 2, the first 3 times, in items of 16, expected 1 to 3 parts");
  for (const int leaves : {0, 3, 32}) Expect(tree({{leaves, 6, 16}}), "expected 1, 2, 4, 8 or 16");
  Expect(tree({{8, 5, 16}}),
         "Gemm: a tree over 1 parts of 5 in items of 16, expected 1 to 3 parts");
  Expect(tree({{8, 2, 16}, 2}), "6 in all");
  Expect(tree({{8, 6, 0}}), "in items of 1 or more");
  Expect(tree({{8, 6, 16}, 0}), "a tree over 0 parts");
}

TEST_F(GroupedGemmErrors, CudaStreamsAreUnimplemented) {
  stream_ = std::make_unique<FakeCudaStream>();
  const absl::Status tree =
      Gemm<float>({x_.data(), 4, 3}, {w_.data(), 2, 3}, MatrixView<float>{y_.data(), 4, 2},
                  workspace_, *stream_, {}, {{8, 3, 1}});
  EXPECT_EQ(tree.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(tree.message()), HasSubstr("expected one chain"));
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

TEST_F(GroupedGemmErrors, NoWorkspaceIsResourceExhausted) {
  NoMemory none;
  Workspace empty(none);
  EXPECT_EQ(Gemm<float>({x_.data(), 4, 3}, {w_.data(), 2, 3}, MatrixView<float>{y_.data(), 4, 2},
                        empty, *stream_)
                .code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace moe
