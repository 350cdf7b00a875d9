// Gradients of weights on every device of this build, and by cuBLAS if available: sums in float32,
// and exact ones with a partial for each segment.
#include <algorithm>
#include <cstdint>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/exact_sum/exact_sum.h"
#include "kernels/grouped_gemm/weight_gradient.h"
#include "tests/kernels/device_memory.h"
#include "tests/kernels/gemm_test.h"

namespace moe::testing {
namespace {

using gemm::Layout;
using ::testing::ElementsAre;

template <typename T>
class DeviceWeightGradientTest : public ::testing::Test {
 protected:
  // Weight g has segments of rows[g] rows; every other weight's sum is empty before. Rows before
  // the first segment and after the last are NaN. For sums in float32 only the device knows the
  // offsets, for exact ones the host.
  void CheckWeightGradients(const std::vector<std::vector<int64_t>>& rows, int64_t out, int64_t in,
                            const Layouts& layouts = kAligned) {
    std::vector<int64_t> segments = {2};
    for (const auto& each : rows) {
      for (const int64_t r : each) segments.push_back(segments.back() + r);
    }
    const int64_t end = segments.back();
    auto dy = Mixed<T>(end + 3, out, layouts.in, 1), x = Mixed<T>(end + 3, in, layouts.weight, 2);
    for (const int64_t r : {int64_t{0}, int64_t{1}, end, end + 2}) {
      std::fill_n(dy.view().row(r), out, T(kNaN));
      std::fill_n(x.view().row(r), in, T(kNaN));
    }
    const auto offset = static_cast<size_t>(layouts.out.offset);
    for (const Path& path : paths_) {
      SCOPED_TRACE(path.name() << ", " << end - 2 << " rows, dw " << out << " x " << in);
      CheckFloatSums(path, dy, x, segments, rows.size(), offset);
    }
    if (end > 2) {
      dy.at(2, out - 1) = T(kNaN);
      x.at(end - 1, 0) = T(kInfinity);
    }
    for (const Path& path : paths_) {
      SCOPED_TRACE(path.name() << ", " << end - 2 << " rows, exact dw " << out << " x " << in);
      CheckExactSums(path, dy, x, segments, rows.size(), offset);
    }
  }

  void CheckFloatSums(const Path& path, const Matrix<T>& dy, const Matrix<T>& x,
                      const std::vector<int64_t>& segments, size_t count, size_t offset) {
    const TestDevice& device = *path.device;
    Workspace workspace(device.memory());
    const auto old = Mixed<float>(dy.cols(), x.cols(), kLayouts[0], 3);
    const auto dy_there = device.Copy(dy), x_there = device.Copy(x);
    std::vector<Placed<float>> sums;
    std::vector<GradAccumulator> grads;
    bool empty[kMostWeights];
    for (size_t g = 0; g < count; ++g) {
      empty[g] = g % 2 == 0;
      sums.emplace_back(device, old.memory(), offset);
      grads.emplace_back(sums[g].span(), &empty[g]);
    }
    const auto offsets = device.Copy(segments);
    const bool by_kernels = !device.is_cpu() && path.options.cublas == nullptr;
    const GroupOffsets rows =
        by_kernels ? GroupOffsets::OnDevice(offsets.span(), {}) : GroupOffsets(segments);
    ASSERT_OK(AddWeightGradients<T>(dy_there.view(), x_there.view(), rows, grads, workspace,
                                    device.stream(), path.options));
    const size_t each = (segments.size() - 1) / count;
    for (size_t g = 0; g < count; ++g) {
      SCOPED_TRACE(g);
      const int64_t begin = segments[g * each], end = segments[(g + 1) * each];
      Matrix<float> got = old;
      got.memory() = sums[g].Read();
      if (begin == end) {
        EXPECT_EQ(empty[g], g % 2 == 0 && !by_kernels);
        const bool zeros = g % 2 == 0 && by_kernels;
        EXPECT_TRUE(
            SameBits(got, zeros ? Matrix<float>(old.rows(), old.cols(), kLayouts[0]) : old));
        continue;
      }
      EXPECT_FALSE(empty[g]);
      ExpectProduct<T, float>(path,
                              {.a = dy.view(begin, end),
                               .b = x.view(begin, end),
                               .c = {},
                               .a_layout = Layout::kTransposed,
                               .write = g % 2 == 0 ? Write::kOverwrite : Write::kAdd},
                              old, got);
    }
  }

  // The bits of sums of float32 partials, one for each segment. The grid cannot represent some of
  // them.
  void CheckExactSums(const Path& path, const Matrix<T>& dy, const Matrix<T>& x,
                      const std::vector<int64_t>& segments, size_t count, size_t offset) {
    constexpr ExactGrid kGrid = {.unit_log2 = -56, .max_terms = 3};
    const TestDevice& device = *path.device;
    Workspace workspace(device.memory());
    const auto size = static_cast<size_t>(dy.cols() * x.cols());
    const auto dy_there = device.Copy(dy), x_there = device.Copy(x);
    const auto partial_there = device.Copy(std::vector<float>(size));
    const auto tally = device.Copy(std::vector<GridTally>{{.non_finite = 5, .inexact = 7}});
    std::vector<Placed<int64_t>> sums;
    std::vector<GradAccumulator> grads;
    bool empty[kMostWeights];
    for (size_t g = 0; g < count; ++g) {
      empty[g] = g % 2 == 0;
      sums.emplace_back(device, std::vector<int64_t>(size, 7), offset);
      grads.emplace_back(sums[g].span(), kGrid, tally.span().data(), &empty[g]);
    }
    ASSERT_OK(AddWeightGradients<T>(dy_there.view(), x_there.view(), segments, grads, workspace,
                                    device.stream(), path.options));
    EXPECT_TRUE(device.is_cpu() || workspace.used_bytes() == 0);
    const auto host = MakeInlineStream();
    const size_t each = (segments.size() - 1) / count;
    GridTally want_tally = {.non_finite = 5, .inexact = 7};
    for (size_t g = 0; g < count; ++g) {
      SCOPED_TRACE(g);
      std::vector<int64_t> want(size, 7);
      Write write = g % 2 == 0 ? Write::kOverwrite : Write::kAdd;
      for (size_t s = g * each; s < (g + 1) * each; ++s) {
        if (segments[s] == segments[s + 1]) continue;
        bool first = true;
        ASSERT_OK(AddWeightGradient<T>(
            RowRange(MatrixView<const T>(dy_there.view()), segments[s], segments[s + 1]),
            RowRange(MatrixView<const T>(x_there.view()), segments[s], segments[s + 1]),
            GradAccumulator(partial_there.span(), &first), workspace, device.stream(),
            path.options));
        ASSERT_OK(ExactAccumulate(kGrid, device.Read(partial_there), absl::MakeSpan(want), write,
                                  &want_tally, *host));
        write = Write::kAdd;
      }
      if (write == Write::kOverwrite && !empty[g]) want.assign(size, 0);  // no rows: a zero partial
      EXPECT_EQ(sums[g].Read(), want);
    }
    EXPECT_EQ(device.Read(tally).front(), want_tally);
  }

  static constexpr size_t kMostWeights = 4;
  std::vector<Path> paths_ = Paths();
};
TYPED_TEST_SUITE(DeviceWeightGradientTest, StorageTypes);

TYPED_TEST(DeviceWeightGradientTest, ByHand) {
  using T = TypeParam;
  const auto x = Matrix<T>::Of(3, 2, {1, 2, 3, 4, 5, 6}), dy = Matrix<T>::Of(3, 1, {1, 2, 3});
  for (const Path& path : this->paths_) {
    SCOPED_TRACE(path.name());
    const auto& device = path.device;
    Workspace workspace(device->memory());
    const auto x_there = device->Copy(x), dy_there = device->Copy(dy);
    const auto dw = device->Copy(std::vector<float>{7, 7});
    for (bool empty : {false, true}) {
      const float old = empty ? 0 : 7;
      ASSERT_OK(AddWeightGradient<T>(dy_there.view(), x_there.view(),
                                     GradAccumulator(dw.span(), &empty), workspace,
                                     device->stream(), path.options));
      EXPECT_THAT(device->Read(dw), ElementsAre(22 + old, 28 + old));
    }
  }
}

// Empty segments, ends inside a tile, more depth than the pipeline has stages.
TYPED_TEST(DeviceWeightGradientTest, EqualsTheSpecificationForAnySchedule) {
  ForSchedules([this] {
    this->CheckWeightGradients({{0, 40, 0, 100}, {0, 0, 0, 0}, {1, 0, 65, 64}}, 16, 24);
  });
}

TYPED_TEST(DeviceWeightGradientTest, EqualsTheSpecificationForAnyShape) {
  this->CheckWeightGradients({{8, 3}, {0, 5}}, 131, 136);  // several tiles in both directions
  this->CheckWeightGradients({{0, 0}, {0, 0}}, 9, 8);
  // No terms: a sum stays unchanged.
  for (const int64_t depth : {0, 1, 7, 8, 16, 31, 32, 33, 64, 65, 96, 100, 300}) {
    if (kSanitized && depth != 33) continue;
    this->CheckWeightGradients({{depth}, {depth}}, 1 + depth % 13, 1 + depth % 18);
  }
}

// Chains of float32 are 128 steps, four under way: segments that end in one of the first four, with
// them, after them, and chains of two segments.
TYPED_TEST(DeviceWeightGradientTest, EqualsTheSpecificationForAnyDepth) {
  if (kSanitized) return;  // tails and schedules as above
  this->CheckWeightGradients({{128, 129}, {256, 0}, {512, 384}, {513, 1}}, 70, 68);
  this->CheckWeightGradients({{700, 1159}}, 3, 65);
}

TYPED_TEST(DeviceWeightGradientTest, EqualsTheSpecificationForAnyLayout) {
  for (const auto& [in, out] : kLayoutPairs) {
    if (kSanitized) break;
    this->CheckWeightGradients({{40, 3}, {2, 34}}, 24, 16, {in, out, in});
    this->CheckWeightGradients({{33, 3}, {2, 34}}, 17, 9, {out, in, out});
  }
  // Rows at multiples of 16 bytes that end within 16 bytes; the bytes after them must not be read.
  const MatrixLayout padded = {0, 3, 0};
  this->CheckWeightGradients({{40}, {8}}, 21, 13, {padded, padded, padded});
}

}  // namespace
}  // namespace moe::testing
