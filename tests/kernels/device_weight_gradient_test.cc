// Gradients of weights on every device of this build, and by cuBLAS if available: sums in float32,
// and exact ones with a partial for each segment.
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/exact_sum/exact_sum.h"
#include "kernels/grouped_gemm/grouped_gemm_cuda.h"
#include "kernels/grouped_gemm/weight_gradient.h"
#include "tests/kernels/device_memory.h"
#include "tests/kernels/gemm_test.h"
#if defined(MOE_TEST_SCHEDULES)
#include "tests/cusim/fake_streams.h"
#endif

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

  // The sum of float32 or exact partials of `segments`, which are of one weight. `grid` and `tally`
  // are for exact ones.
  template <typename TSum>
  std::vector<TSum> SumOf(const Path& path, const Matrix<T>& dy, const Matrix<T>& x,
                          const std::vector<int64_t>& segments, const ExactGrid& grid,
                          GridTally& tally) {
    const TestDevice& device = *path.device;
    Workspace workspace(device.memory());
    const auto dy_there = device.Copy(dy), x_there = device.Copy(x);
    const auto sum = device.Copy(std::vector<TSum>(static_cast<size_t>(dy.cols() * x.cols())));
    const auto tally_there = device.Copy(std::vector<GridTally>{tally});
    bool empty = true;
    const GradAccumulator grad = [&] {
      if constexpr (std::is_same_v<TSum, float>) {
        return GradAccumulator(sum.span(), &empty);
      } else {
        return GradAccumulator(sum.span(), grid, tally_there.span().data(), &empty);
      }
    }();
    EXPECT_OK(AddWeightGradients<T>(dy_there.view(), x_there.view(), segments, {grad}, workspace,
                                    device.stream(), path.options));
    tally = device.Read(tally_there).front();
    return device.Read(sum);
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
  // As Hopper GPUs multiply them: tiles in both directions, and weights without rows.
  if (!kSanitized) this->CheckWeightGradients({{8, 3}, {0, 5}}, 136, 264);
  this->CheckWeightGradients({{70}, {5}, {0}, {0}}, 72, 200);  // an exact sum of one segment
  this->CheckWeightGradients({{0, 0}, {0, 0}, {0, 2}}, 16, 8);
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

// Segments of lengths around the depths that kernels copy and multiply at once, alone and between
// rows of NaN. Those are beside the weight's rows for sums in float32, segments of it for exact
// ones, to which their partials add nothing. Of the grids one is too fine for float64 to round most
// partials, one represents them all, and one is too coarse for some.
TYPED_TEST(DeviceWeightGradientTest, BitsDependOnTheSegmentAlone) {
  using T = TypeParam;
  constexpr int64_t kOut = 24, kIn = 136, kBefore = 5, kAfter = 70;
  constexpr ExactGrid kGrids[] = {{-50, 4}, {-8, 4}, {-8, int64_t{1} << 50}};
  const auto host = MakeInlineStream();
  for (const int64_t rows : {1, 8, 15, 16, 17, 33, 48, 63, 64, 65, 129}) {
    if (kSanitized && rows != 33) continue;
    const ExactGrid grid = kGrids[rows % 3];
    const auto dy = Mixed<T>(rows, kOut, kLayouts[0], 1), x = Mixed<T>(rows, kIn, kLayouts[0], 2);
    Matrix<T> all_dy(kBefore + rows + kAfter, kOut, kLayouts[0], kNaN);
    Matrix<T> all_x(kBefore + rows + kAfter, kIn, kLayouts[0], kNaN);
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(dy.view().row(r), kOut, all_dy.view().row(kBefore + r));
      std::copy_n(x.view().row(r), kIn, all_x.view().row(kBefore + r));
    }
    for (const Path& path : this->paths_) {
      if (path.cublas != nullptr) continue;
      SCOPED_TRACE(path.name() << ", " << rows << " rows");
      GridTally alone, together, want_tally;
      const auto partial = this->template SumOf<float>(path, dy, x, {0, rows}, grid, alone);
      EXPECT_EQ(this->template SumOf<float>(path, all_dy, all_x, {kBefore, kBefore + rows}, grid,
                                            together),
                partial);
      std::vector<int64_t> want(partial.size());
      ASSERT_OK(ExactAccumulate(grid, partial, absl::MakeSpan(want), Write::kOverwrite, &want_tally,
                                *host));
      EXPECT_EQ(this->template SumOf<int64_t>(path, dy, x, {0, rows}, grid, alone), want);
      EXPECT_EQ(alone, want_tally);
      EXPECT_EQ(
          this->template SumOf<int64_t>(path, all_dy, all_x,
                                        {0, kBefore, kBefore + rows, all_x.rows()}, grid, together),
          want);
      EXPECT_EQ(together.non_finite, alone.non_finite + 2 * kOut * kIn);
      EXPECT_EQ(together.inexact, alone.inexact);
    }
  }
}

#if defined(MOE_TEST_SCHEDULES)
// Uses mma.sync for what a Hopper GPU multiplies by wgmma.
TYPED_TEST(DeviceWeightGradientTest, EqualsTheSpecificationOnGpusBeforeHopper) {
  const cusim::ScopedMachine machine({.major = 8});
  ForSchedules([this] {
    this->CheckWeightGradients({{0, 40, 0, 100}, {0, 0, 0, 0}, {1, 0, 65, 64}}, 16, 24);
  });
}

template <typename T>
class WgmmaGradientTest : public ::testing::Test {};
TYPED_TEST_SUITE(WgmmaGradientTest, HalfTypes);

// The choice does not depend on segments, on which a weight's bits would then depend.
TYPED_TEST(WgmmaGradientTest, IsChosenByDeviceAndAlignment) {
  using T = TypeParam;
  alignas(16) T memory[16] = {};
  const auto takes = [](MatrixView<const T> dy, MatrixView<const T> x) {
    const bool takes_float = gemm::TakesWgmma<T, float>({.dy = dy, .x = x});
    EXPECT_EQ((gemm::TakesWgmma<T, int64_t>({.dy = dy, .x = x})), takes_float);
    return takes_float;
  };
  const MatrixView<const T> aligned(memory, 3, 7, 8);
  EXPECT_TRUE(takes(aligned, aligned));
  EXPECT_TRUE(takes({memory + 8, 3, 1, 16}, aligned));
  EXPECT_FALSE(takes({memory, 0, 7, 8}, {memory, 0, 7, 8}));
  for (const MatrixView<const T>& odd :
       {MatrixView<const T>(memory + 1, 3, 7, 8), MatrixView<const T>(memory, 3, 7, 9)}) {
    EXPECT_FALSE(takes(odd, aligned));
    EXPECT_FALSE(takes(aligned, odd));
  }
  const cusim::ScopedMachine machine({.major = 8});
  EXPECT_FALSE(takes(aligned, aligned));
}

// Its copies have 32-bit coordinates, and tiles of a weight 32-bit numbers.
TYPED_TEST(WgmmaGradientTest, RefusesTwoToThe31RowsColumnsOrTiles) {
  using T = TypeParam;
  const auto run = [](int64_t rows, int64_t out, int64_t in) {
    alignas(16) static T memory[1];
    return gemm::RunWgmma<T, float>({.dy = {memory, rows, out, out},
                                     .x = {memory, rows, in, in},
                                     .segments = nullptr,
                                     .each = 1,
                                     .sums = nullptr,
                                     .count = 1},
                                    nullptr);
  };
  constexpr int64_t kMany = int64_t{1} << 31;
  EXPECT_EQ(run(kMany, 8, 8), cudaErrorInvalidValue);
  EXPECT_EQ(run(8, kMany, 8), cudaErrorInvalidValue);
  EXPECT_EQ(run(8, 8, kMany), cudaErrorInvalidValue);
  EXPECT_EQ(run(8, kMany / 2, kMany / 2), cudaErrorInvalidConfiguration);
}
#endif

}  // namespace
}  // namespace moe::testing
