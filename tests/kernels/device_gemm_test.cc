// Matrix products on every device of this build, and by cuBLAS if available. This project's kernels
// have the specification's bits in float32; the others are within a bound.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/grouped_gemm/gemm_problem.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/grouped_gemm/grouped_gemm_cuda.h"
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
class DeviceGemmTest : public ::testing::Test {
 protected:
  // Both directions of all groups.
  void CheckGroups(absl::Span<const int64_t> rows, int64_t out, int64_t in,
                   const Layouts& layouts = kAligned) {
    const Groups<T> groups(rows, out, in, layouts.weight);
    const int64_t count = static_cast<int64_t>(groups.weight.size()), total = groups.total();
    const auto x = Mixed<T>(total, in, layouts.in, 1), dy = Mixed<T>(total, out, layouts.in, 2);
    const auto old_y = Mixed<T>(total, out, layouts.out, 3);
    const auto old_dx = Mixed<T>(total, in, layouts.out, 4);
    for (const Path& path : paths_) {
      const auto& device = path.device;
      SCOPED_TRACE(path.name() << ", " << total << " rows, " << in << " to " << out);
      Workspace workspace(device->memory());
      auto [weight, views] = WeightsOn(*device, groups);
      const auto x_there = device->Copy(x), dy_there = device->Copy(dy);
      const auto y = device->Copy(old_y), dx = device->Copy(old_dx);
      std::vector<int64_t> offsets = groups.offsets;
      ASSERT_OK(GroupedGemm<T>(x_there.view(), offsets, views, y.view(), workspace,
                               device->stream(), path.options));
      ASSERT_OK(GroupedGemmInputGradient<T>(dy_there.view(), offsets, views, dx.view(), workspace,
                                            device->stream(), path.options));
      // Host memory that the calls have read.
      std::fill(offsets.begin(), offsets.end(), -1);
      std::fill(views.begin(), views.end(), MatrixView<const T>());
      const Matrix<T> got_y = device->Read(y), got_dx = device->Read(dx);
      EXPECT_TRUE(got_y.edges_intact() && got_dx.edges_intact());
      for (int64_t g = 0; g < count; ++g) {
        SCOPED_TRACE(g);
        const int64_t begin = groups.offsets[g], end = groups.offsets[g + 1];
        const auto w = groups.weight[g].view();
        ExpectProduct<T, T>(
            path,
            {.a = RowRange(x.view(), begin, end), .b = w, .c = {}, .b_layout = Layout::kTransposed},
            old_y.Rows(begin, end), got_y.Rows(begin, end));
        ExpectProduct<T, T>(path, {.a = RowRange(dy.view(), begin, end), .b = w, .c = {}},
                            old_dx.Rows(begin, end), got_dx.Rows(begin, end));
      }
    }
  }

  // One group, and its outputs in float32.
  template <typename TOut>
  void CheckDense(int64_t rows, int64_t out, int64_t in, const Layouts& layouts = kAligned) {
    const auto x = Mixed<T>(rows, in, layouts.in, 1), dy = Mixed<T>(rows, out, layouts.in, 2);
    const auto weight = Mixed<T>(out, in, layouts.weight, 3);
    const auto old_y = Mixed<TOut>(rows, out, layouts.out, 4);
    const auto old_dx = Mixed<TOut>(rows, in, layouts.out, 5);
    for (const Path& path : paths_) {
      const auto& device = path.device;
      SCOPED_TRACE(path.name() << ", " << rows << " rows, " << in << " to " << out);
      Workspace workspace(device->memory());
      const auto x_there = device->Copy(x), dy_there = device->Copy(dy), w = device->Copy(weight);
      const auto y = device->Copy(old_y), dx = device->Copy(old_dx);
      ASSERT_OK(Gemm<T, TOut>(x_there.view(), w.view(), y.view(), workspace, device->stream(),
                              path.options));
      ASSERT_OK(GemmInputGradient<T, TOut>(dy_there.view(), w.view(), dx.view(), workspace,
                                           device->stream(), path.options));
      ExpectProduct<T, TOut>(
          path, {.a = x.view(), .b = weight.view(), .c = {}, .b_layout = Layout::kTransposed},
          old_y, device->Read(y));
      ExpectProduct<T, TOut>(path, {.a = dy.view(), .b = weight.view(), .c = {}}, old_dx,
                             device->Read(dx));
    }
  }

  std::vector<Path> paths_ = Paths();
};
TYPED_TEST_SUITE(DeviceGemmTest, StorageTypes);

// Group 0 has row 0, group 1 none, group 2 the rest.
TYPED_TEST(DeviceGemmTest, ProductsByHand) {
  using T = TypeParam;
  const auto x = Matrix<T>::Of(3, 2, {1, 2, 3, 4, 5, 6});
  const auto slab = Matrix<T>::Of(6, 2, {1, 0, 0, 1, 9, 9, 9, 9, 0, 10, 20, 30});
  for (const Path& path : this->paths_) {
    SCOPED_TRACE(path.name());
    const auto& device = path.device;
    Stream& stream = device->stream();
    Workspace workspace(device->memory());
    const auto x_there = device->Copy(x), slab_there = device->Copy(slab);
    const auto y = device->Copy(Matrix<T>(3, 2, -1));
    std::vector<MatrixView<const T>> weight;
    for (const int64_t row : {0, 2, 4}) {
      weight.push_back(RowRange(MatrixView<const T>(slab_there.view()), row, row + 2));
    }
    const auto run = [&](auto function) {
      EXPECT_OK(function(x_there.view(), {0, 1, 1, 3}, weight, y.view(), workspace, stream,
                         path.options, {}));
      return device->Read(y).values();
    };
    EXPECT_THAT(run(GroupedGemm<T>), ElementsAre(1, 2, 40, 180, 60, 280));
    EXPECT_THAT(run(GroupedGemmInputGradient<T>), ElementsAre(1, 2, 80, 150, 120, 230));
  }
}

// More depth than the pipeline has stages, groups with more than one tile and without rows, tails
// of rows, columns and depth for every kind of tensor cores.
TYPED_TEST(DeviceGemmTest, EqualsTheSpecificationForAnySchedule) {
  ForSchedules([this] {
    this->CheckGroups({2, 129}, 16, 104);
    this->CheckGroups({0, 1, 17, 0, 40}, 200, 136);
  });
  this->CheckGroups({5}, 33, 64 * 9 + 8);  // an odd width: pairs do not fit
  if (kSanitized) return;                  // tails and tiles as above
  this->CheckGroups({0, 1, 17, 0, 40}, 136, 200);
  this->CheckGroups({16, 100, 150}, 72, 72);
  this->CheckGroups({150}, 301, 141);      // more than one chain of float32 and tile, not aligned
  this->CheckGroups({17, 300}, 16, 1032);  // pairs of tiles, the last one of one tile
  this->CheckGroups({17, 300}, 1032, 16);
}

// Groups that end inside a tile, with empty ones between them and at either end.
TYPED_TEST(DeviceGemmTest, EqualsTheSpecificationForAnyGroups) {
  this->CheckGroups({0, 5, 130, 0, 1, 0}, 131, 40);
  this->CheckGroups({0, 0, 140}, 16, 8);
  std::vector<int64_t> many;  // more than one launch takes
  for (int64_t g = 0; g < 131; ++g) many.push_back(g % 64 == 2 || g > 126 ? 1 + g % 3 : 0);
  this->CheckGroups(many, 5, 3);
}

// No terms: y is zero.
TYPED_TEST(DeviceGemmTest, EqualsTheSpecificationForAnyWidthAndDepth) {
  using T = TypeParam;
  for (const int64_t depth : {0, 1, 7, 8, 16, 31, 32, 33, 64, 65, 96, 100, 300}) {
    if (kSanitized && depth != 33) continue;
    const int64_t width = 1 + depth % 18;
    this->CheckGroups({3, 9}, width, depth);
    this->template CheckDense<T>(12, width, depth);
    this->template CheckDense<float>(12, width, depth);
  }
  this->template CheckDense<float>(0, 21, 40);
  this->template CheckDense<float>(3, 0, 5);
}

TYPED_TEST(DeviceGemmTest, EqualsTheSpecificationForAnyLayout) {
  using T = TypeParam;
  for (const auto& [in, out] : kLayoutPairs) {
    this->CheckGroups({3, 17}, 24, 40, {in, out, in});
    this->template CheckDense<float>(20, 24, 40, {in, out, in});
    if (kSanitized) continue;
    this->CheckGroups({18}, 9, 33, {out, in, out});
  }
  // Rows at multiples of 16 bytes that end within 16 bytes; the bytes after them must not be read.
  const MatrixLayout padded = {0, 3, 0};
  this->CheckGroups({3, 17}, 21, 37, {padded, padded, padded});
  this->template CheckDense<T>(20, 21, 37, {padded, padded, padded});
}

// The same rows of one group: alone, and between two others, one of which is all NaN, with offsets
// that only the device knows and that end before the rows. For any depth, and for one that Hopper
// GPUs multiply by wgmma.
TYPED_TEST(DeviceGemmTest, BitsDependOnTheRowAndItsGroupAlone) {
  if (kSanitized) GTEST_SKIP() << "a matter of bits";
  using T = TypeParam;
  const int64_t before = 11, rows = 37, total = before + rows + 130;
  for (const auto& [cols, depth] : {std::pair<int64_t, int64_t>{10, 43}, {24, 200}}) {
    auto x = Mixed<T>(total + 7, depth, kLayouts[0], 1);
    for (int64_t r = 0; r < before; ++r) {
      for (int64_t k = 0; k < depth; ++k) x.at(r, k) = T(kNaN);
    }
    const Groups<T> groups({before, rows, 130}, cols, depth, kLayouts[0]);
    for (const Path& path : this->paths_) {
      if (path.cublas != nullptr) continue;
      SCOPED_TRACE(path.name());
      const auto& device = path.device;
      Workspace workspace(device->memory());
      const auto [weight, views] = WeightsOn(*device, groups);
      const auto x_there = device->Copy(x);
      const Matrix<T> zeros(x.rows(), cols, kLayouts[0]);
      const auto together = device->Copy(zeros), alone = device->Copy(zeros);
      const auto there = device->Copy(groups.offsets);
      const bool cpu = device->is_cpu();
      const int64_t most = cpu ? total : x.rows();
      ASSERT_OK(GroupedGemm<T>(RowRange(MatrixView<const T>(x_there.view()), 0, most),
                               cpu ? groups.offsets : GroupOffsets::OnDevice(there.span(), {}),
                               views, RowRange(together.view(), 0, most), workspace,
                               device->stream()));
      for (const auto& [begin, end] :
           {std::pair<int64_t, int64_t>{0, before}, {11, 12}, {12, 31}, {31, 48}, {48, total}}) {
        const size_t group = begin < before ? 0 : end <= before + rows ? 1 : 2;
        ASSERT_OK(Gemm<T>(RowRange(MatrixView<const T>(x_there.view()), begin, end), views[group],
                          RowRange(alone.view(), begin, end), workspace, device->stream()));
      }
      const Matrix<T> got = device->Read(together);
      EXPECT_TRUE(std::isnan(got(0, 0)) && !std::isnan(got(before, 0)));
      EXPECT_TRUE(SameBits(got, device->Read(alone)));
    }
  }
}

// Each height of a tile is another instruction on a Hopper GPU.
TYPED_TEST(DeviceGemmTest, ARowHasTheSameBitsInATileOfAnyHeight) {
  using T = TypeParam;
  constexpr int64_t kMost = 256, kCols = 72;
  const int64_t depth = kSimulatedCuda ? 72 : 4096;
  const auto x = Mixed<T>(kMost, depth, kAligned.in, 1);
  const auto weight = Mixed<T>(kCols, depth, kAligned.weight, 2);
  const Matrix<T> zeros(kMost, kCols, kAligned.out);
  for (const Path& path : this->paths_) {
    if (path.cublas != nullptr) continue;
    SCOPED_TRACE(path.name());
    const auto& device = path.device;
    Workspace workspace(device->memory());
    const auto x_there = device->Copy(x), w = device->Copy(weight);
    const auto product = [&](int64_t rows) {
      const auto y = device->Copy(zeros);
      EXPECT_OK(Gemm<T>(RowRange(MatrixView<const T>(x_there.view()), 0, rows), w.view(),
                        RowRange(y.view(), 0, rows), workspace, device->stream()));
      return device->Read(y);
    };
    const Matrix<T> whole = product(kMost);
    for (const int64_t rows : {1, 16, 17, 33, 65, 129, 193}) {
      EXPECT_TRUE(SameBits(product(rows).Rows(0, rows), whole.Rows(0, rows))) << rows;
    }
  }
}

// On a Hopper GPU blocks that share rows of a tile compute neighbouring columns. Tiles of each
// height, in both directions.
TYPED_TEST(DeviceGemmTest, AColumnHasTheSameBitsBesideAnyOthers) {
  if (kSanitized) GTEST_SKIP() << "a matter of bits";
  using T = TypeParam;
  constexpr int64_t kMost = 200, kFew = 72;
  const int64_t depth = kSimulatedCuda ? 328 : 4096;
  const std::vector<int64_t> rows = {16, 0, 17, 60, 100, 150, 250, 257};
  const auto check = [&](const Groups<T>& groups, auto function, bool transposed) {
    const auto x = Mixed<T>(groups.total(), depth, kAligned.in, 1);
    for (const Path& path : this->paths_) {
      if (path.device->is_cpu() || path.cublas != nullptr) continue;
      SCOPED_TRACE(path.name());
      const auto& device = path.device;
      Workspace workspace(device->memory());
      const auto x_there = device->Copy(x);
      const auto weights = WeightsOn(*device, groups);
      const auto product = [&](int64_t cols) {
        auto views = weights.views;
        for (auto& w : views) {
          w = transposed ? RowRange(w, 0, cols)
                         : MatrixView<const T>(w.data(), w.rows(), cols, w.stride());
        }
        const auto y = device->Copy(Matrix<T>(x.rows(), cols, kAligned.out));
        EXPECT_OK(function(x_there.view(), groups.offsets, views, y.view(), workspace,
                           device->stream(), path.options, {}));
        return device->Read(y);
      };
      const Matrix<T> most = product(kMost), few = product(kFew);
      for (int64_t r = 0; r < x.rows(); ++r) {
        for (int64_t c = 0; c < kFew; ++c) ASSERT_EQ(most(r, c), few(r, c)) << r << ", " << c;
      }
    }
  };
  check(Groups<T>(rows, kMost, depth, kAligned.weight), GroupedGemm<T>, true);
  check(Groups<T>(rows, depth, kMost, kAligned.weight), GroupedGemmInputGradient<T>, false);
}

// What kernels cannot detect is refused.
TYPED_TEST(DeviceGemmTest, WeightsAtUnequalDistancesAreRefusedOnADevice) {
  using T = TypeParam;
  for (const Path& path : this->paths_) {
    if (path.cublas != nullptr) continue;
    const auto& device = path.device;
    Workspace workspace(device->memory());
    const auto memory = device->Copy(std::vector<T>(64));
    const auto at = [&](size_t first, int64_t stride) {
      return MatrixView<const T>(memory.span().data() + first, 2, 4, stride);
    };
    const MatrixView<T> y = memory.view(3, 2, 2);
    for (const auto& last : {at(18, 4), at(16, 5)}) {
      const absl::Status status =
          GroupedGemm<T>(memory.view(3, 4, 4), {0, 1, 2, 3}, {at(0, 4), at(8, 4), last}, y,
                         workspace, device->stream(), path.options);
      EXPECT_EQ(absl::IsInvalidArgument(status), !device->is_cpu()) << path.name() << status;
    }
    EXPECT_OK(device->stream().Synchronize());
  }
}

// 256 + 1 + 1: 258 in one rounding, 256 if every sum were rounded to bfloat16. A product too small
// for float32 rounds to -0, and one more term of zeros would turn that into +0.
TYPED_TEST(DeviceGemmTest, RoundsOnceAfterTheWholeSum) {
  using T = TypeParam;
  const auto x = Mixed<T>(5, 70, kLayouts[0], 1), weight = Mixed<T>(11, 70, kLayouts[0], 2);
  for (const Path& path : this->paths_) {
    if (path.cublas != nullptr) continue;
    SCOPED_TRACE(path.name());
    const auto& device = path.device;
    Workspace workspace(device->memory());
    const auto product = [&]<typename TOut>(const Matrix<T>& a, const Matrix<T>& b, TOut) {
      const auto a_there = device->Copy(a), b_there = device->Copy(b);
      const auto c = device->Copy(Matrix<TOut>(a.rows(), b.rows(), kLayouts[0]));
      EXPECT_OK(
          Gemm<T, TOut>(a_there.view(), b_there.view(), c.view(), workspace, device->stream()));
      return device->Read(c);
    };
    EXPECT_EQ(product(Matrix<T>::Of(1, 3, {1, 1, 1}), Matrix<T>::Of(1, 3, {256, 1, 1}), T())(0, 0),
              258.0);
    EXPECT_TRUE(SameBits(product(x, weight, T()), product(x, weight, float()).template As<T>()));
    if (!std::is_same_v<T, float>) continue;
    const Matrix<float> zero =
        product(Matrix<T>::Of(1, 1, {-1e-30f}), Matrix<T>::Of(1, 1, {1e-30f}), float());
    EXPECT_TRUE(zero(0, 0) == 0 && std::signbit(zero(0, 0)));
  }
}

TYPED_TEST(DeviceGemmTest, NoGroupsAndNoRows) {
  using T = TypeParam;
  for (const Path& path : this->paths_) {
    const auto& device = path.device;
    Workspace workspace(device->memory());
    const MatrixView<const T> none(nullptr, 0, 40);
    EXPECT_OK(
        GroupedGemm<T>(none, {0}, {}, {nullptr, 0, 21}, workspace, device->stream(), path.options));
    const auto w = device->Copy(Mixed<T>(21, 40, 0, 1));
    const std::vector<MatrixView<const T>> views = {w.view(), w.view()};
    EXPECT_OK(GroupedGemm<T>(none, {0, 0, 0}, views, {nullptr, 0, 21}, workspace, device->stream(),
                             path.options));
    EXPECT_OK(device->stream().Synchronize());
  }
}

// A product of 2^20 tiles a side is refused, not truncated to the size of a grid.
TYPED_TEST(DeviceGemmTest, MoreTilesThanAGridHasBlocksAreAnError) {
  const int64_t huge = int64_t{1} << 27;
  for (const Path& path : this->paths_) {
    if (path.device->is_cpu() || path.cublas != nullptr) continue;
    Workspace workspace(path.device->memory());
    EXPECT_FALSE(Gemm<TypeParam>({nullptr, huge, 1}, {nullptr, huge, 1},
                                 MatrixView<TypeParam>(nullptr, huge, huge), workspace,
                                 path.device->stream())
                     .ok());
  }
}

#if defined(MOE_TEST_SCHEDULES)
// Offsets that no host has checked. AddressSanitizer checks all reads and writes, and
// ThreadSanitizer would find a row in two groups. Rows after the last group stay unchanged.
TYPED_TEST(DeviceGemmTest, WrongOffsetsStayInBounds) {
  using T = TypeParam;
  const auto in = Mixed<T>(9, 8, kLayouts[0], 1), weight = Mixed<T>(24, 8, kLayouts[0], 2);
  const auto first = RowRange(MatrixView<const T>(weight.view()), 0, 8);
  Matrix<T> out(9, 8, kLayouts[1], -1);
  for (const auto& offsets : {std::vector<int64_t>{0, 1, 3, 5},
                              {5, 1000, -5, -7},
                              {9, 5, 2, 0},
                              {-1, 7, 59, 1ll << 62}}) {
    unsigned taken[gemm::kTakenWords] = {7, 7};
    const gemm::CudaGroupedGemm<T> product = {in.view(),      offsets.data(), {first, 3, 64},
                                              Layout::kPlain, out.view(),     taken};
    if constexpr (std::is_same_v<T, float>) {
      EXPECT_EQ(gemm::RunFma(product, nullptr), cudaSuccess);
    } else {
      EXPECT_EQ(gemm::RunMma(product, nullptr), cudaSuccess);
      ASSERT_TRUE(gemm::TakesWgmma(product));
      EXPECT_EQ(gemm::RunWgmma(product, nullptr), cudaSuccess);
    }
    EXPECT_TRUE(out.edges_intact());
    ASSERT_TRUE(offsets.back() != 5 || (out(5, 0) == -1 && out(8, 7) == -1));
  }
}

// Uses mma.sync for what a Hopper GPU multiplies by wgmma.
TYPED_TEST(DeviceGemmTest, EqualsTheSpecificationOnGpusBeforeHopper) {
  const cusim::ScopedMachine machine({.major = 8});
  ForSchedules([this] { this->CheckGroups({2, 129}, 16, 104); });
}

template <typename T>
class WgmmaTest : public ::testing::Test {};
TYPED_TEST_SUITE(WgmmaTest, HalfTypes);

// The choice depends on what does not change from step to step: a row's bits must not depend on the
// number of rows.
TYPED_TEST(WgmmaTest, IsChosenByDeviceAlignmentAndDepth) {
  using T = TypeParam;
  alignas(16) T memory[16] = {};
  const auto takes = [&](MatrixView<const T> in, MatrixView<const T> weight, int64_t distance) {
    return gemm::TakesWgmma<T>({.in = in, .weight = {weight, 2, distance}});
  };
  const MatrixView<const T> aligned(memory, 3, 7, 8);
  EXPECT_TRUE(takes(aligned, aligned, 64));
  EXPECT_TRUE(takes({memory + 8, 1000, 7, 16}, {memory + 8, 5, 7, 8}, 8));
  EXPECT_TRUE(takes({memory, 0, 7, 8}, aligned, 64));
  EXPECT_FALSE(takes({memory, 3, 0, 8}, {memory, 3, 0, 8}, 64));
  EXPECT_FALSE(takes({memory + 1, 3, 7, 8}, aligned, 64));
  EXPECT_FALSE(takes({memory, 3, 7, 9}, aligned, 64));
  EXPECT_FALSE(takes(aligned, {memory + 1, 3, 7, 8}, 64));
  EXPECT_FALSE(takes(aligned, {memory, 3, 7, 9}, 64));
  for (const int64_t distance : {63, 0, -64}) EXPECT_FALSE(takes(aligned, aligned, distance));
  EXPECT_FALSE(takes(aligned, {memory, 3, 7, 16}, 8));  // rows interleaved
  EXPECT_TRUE(gemm::TakesWgmma<T>({.in = aligned, .weight = {aligned, 1}}));
  const cusim::ScopedMachine machine({.major = 8});
  EXPECT_FALSE(takes(aligned, aligned, 64));
}

// Its copies have 32-bit coordinates.
TYPED_TEST(WgmmaTest, RefusesTwoToThe31RowsColumnsOrTerms) {
  using T = TypeParam;
  const auto refuses = [](int64_t rows, int64_t cols, int64_t depth) {
    alignas(16) static T memory[1];
    return gemm::RunWgmma<T>({.in = {memory, rows, depth, depth},
                              .weight = {{memory, cols, depth, depth}, 1},
                              .out = {memory, rows, cols, cols}},
                             nullptr) == cudaErrorInvalidValue;
  };
  constexpr int64_t kMany = int64_t{1} << 31;
  EXPECT_TRUE(refuses(kMany, 8, 8));
  EXPECT_TRUE(refuses(8, kMany, 8));
  EXPECT_TRUE(refuses(8, 8, kMany));
}
#endif

}  // namespace
}  // namespace moe::testing
