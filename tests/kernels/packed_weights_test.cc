// Packed weights: where each element goes, versions, and misuse. The bits of products with them are
// in grouped_gemm_bits_test.cc.
#include "kernels/grouped_gemm/packed_weights.h"

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/grouped_gemm/simd_targets.h"
#include "tests/kernels/gemm_matrix.h"

namespace moe {
namespace {

template <typename T>
class PackedWeightsTest : public ::testing::Test {
 protected:
  ~PackedWeightsTest() override { gemm::UseSimdTarget(""); }

  // Strip o / W, step k, column o % W, in both directions: every element once, and zeros beyond.
  // The two steps of a pair of bfloat16 lie side by side.
  void CheckPlaces(int64_t out, int64_t in, int64_t pad) {
    SCOPED_TRACE(::testing::Message() << "[" << out << ", " << in << "]");
    const auto weight = Mixed<T>(out, in, pad, 3);
    const auto stream = MakeInlineStream(&threads_);
    PackedWeights<T> packed = PackedWeights<T>::Create(out, in).value();
    // Twice: what an earlier packing left does not stay.
    const auto nan = Unwritten<T>(out, in);
    ASSERT_TRUE(packed.Pack(nan.view(), 0, *stream).ok());
    ASSERT_TRUE(packed.Pack(weight.view(), 1, *stream).ok());
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

using Storage = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(PackedWeightsTest, Storage);

TYPED_TEST(PackedWeightsTest, HoldEachElementOnceAndZerosBehindTheLast) {
  for (const std::string& target : gemm::SimdTargets()) {
    SCOPED_TRACE(target);
    gemm::UseSimdTarget(target);
    for (const int64_t out : {1, 7, 16, 63, 64, 65, 200}) {
      for (const int64_t in : {1, 8, 63, 64, 65, 131}) {
        this->CheckPlaces(out, in, (out + in) % 3);
      }
    }
  }
}

class PackedWeightsErrors : public ::testing::Test {
 protected:
  ~PackedWeightsErrors() override { gemm::UseSimdTarget(""); }

  absl::Status Forward(const PackedWeights<float>& w, int64_t version, int64_t out, int64_t in) {
    return Gemm<float>({data_.data(), 2, in}, w, version, MatrixView<float>{y_.data(), 2, out},
                       workspace_, *stream_);
  }
  static void Expect(const absl::Status& status, const std::string& text) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(text));
  }

  std::vector<float> data_ = std::vector<float>(64, 1.0f), y_ = data_;
  Workspace workspace_;
  std::unique_ptr<Stream> stream_ = MakeInlineStream();
};

TEST_F(PackedWeightsErrors, NameWhatIsWrong) {
  PackedWeights<float> w = PackedWeights<float>::Create(5, 3).value();
  Expect(PackedWeights<float>::Create(-1, 3).status(), "[-1, 3]");
  Expect(Forward(w, 0, 5, 3), "packed at version -1, expected 0 (call Pack first)");
  Expect(Forward(w, PackedWeights<float>::kNeverPacked, 5, 3), "call Pack first");
  Expect(w.Pack({data_.data(), 3, 5}, 0, *stream_),
         "PackedWeights::Pack: weight is [3, 5] with stride 5, expected [5, 3]");
  Expect(w.Pack({data_.data(), 5, 3}, -1, *stream_), "version -1");
  EXPECT_EQ(w.version(), PackedWeights<float>::kNeverPacked);
  ASSERT_TRUE(w.Pack({data_.data(), 5, 3}, 4, *stream_).ok());
  EXPECT_EQ(w.version(), 4);
  EXPECT_TRUE(Forward(w, 4, 5, 3).ok());
  EXPECT_EQ(y_[9], 3.0f);
  Expect(Forward(w, 5, 5, 3), "Gemm: a weight is packed at version 4, expected 5");
  Expect(Forward(w, 4, 3, 5), "a packed weight is [5, 3], expected [3, 5]");
  Expect(Forward({}, 4, 5, 3), "a packed weight is [0, 0]");
  Expect(GroupedGemm<float>({data_.data(), 2, 3}, {0, 1, 2}, {&w, 1}, 4, {y_.data(), 2, 5},
                            workspace_, *stream_),
         "3 offsets for 1 weights");
}

TEST_F(PackedWeightsErrors, AnotherWidthOfStripsIsRefused) {
  const std::vector<std::string> targets = gemm::SimdTargets();
  if (targets.size() < 2) GTEST_SKIP() << "one target";
  gemm::UseSimdTarget("");
  PackedWeights<float> w = PackedWeights<float>::Create(5, 3).value();
  ASSERT_TRUE(w.Pack({data_.data(), 5, 3}, 0, *stream_).ok());
  int refused = 0;
  for (const std::string& target : targets) {
    gemm::UseSimdTarget(target);
    const absl::Status status = Forward(w, 0, 5, 3);
    if (status.ok()) continue;
    Expect(status, "packed for other SIMD instructions");
    Expect(w.Pack({data_.data(), 5, 3}, 1, *stream_), "created for other SIMD instructions");
    ++refused;
  }
  EXPECT_GT(refused, 0);
}

TEST_F(PackedWeightsErrors, MovedFromHoldsNothing) {
  PackedWeights<float> w = PackedWeights<float>::Create(5, 3).value();
  ASSERT_TRUE(w.Pack({data_.data(), 5, 3}, 0, *stream_).ok());
  const PackedWeights<float> other = std::move(w);
  EXPECT_TRUE(Forward(other, 0, 5, 3).ok());
  // NOLINTNEXTLINE(bugprone-use-after-move)
  Expect(Forward(w, 0, 5, 3), "a packed weight is [0, 0]");
}

}  // namespace
}  // namespace moe
