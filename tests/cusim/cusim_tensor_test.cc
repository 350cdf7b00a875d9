// The simulator's matrix fragments and asynchronous copies.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/cuda_kernel.h"
#include "kernels/base/dtype.h"
#include "tests/cusim/cusim.h"
#include "tests/cusim/tensor.h"

namespace cusim {
namespace {

template <typename T>
class CusimMmaTest : public ::testing::Test {};
using Types = ::testing::Types<moe::BFloat16, moe::Float16>;
TYPED_TEST_SUITE(CusimMmaTest, Types);

// Small integers: every product and sum is exact, so that the order of terms cannot matter.
TYPED_TEST(CusimMmaTest, MatrixFragmentsLieWherePtxSays) {
  using T = TypeParam;
  const auto a = [](int row, int k) {
    return static_cast<float>((row * 5 + k * 3) % 17 - 8);
  };
  const auto b = [](int k, int column) {
    return static_cast<float>((k * 7 + column * 2) % 13 - 6);
  };
  const auto pair = [](float low, float high) {
    return static_cast<uint32_t>(T(low).bits) | static_cast<uint32_t>(T(high).bits) << 16;
  };
  std::vector<float> d(16 * 8);
  const auto kernel = [&] {
    const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
    const auto a_pair = [&](int row, int k) {
      return pair(a(row, k), a(row, k + 1));
    };
    const uint32_t fa[4] = {a_pair(g, 2 * t), a_pair(g + 8, 2 * t), a_pair(g, 2 * t + 8),
                            a_pair(g + 8, 2 * t + 8)};
    const uint32_t fb[2] = {pair(b(2 * t, g), b(2 * t + 1, g)),
                            pair(b(2 * t + 8, g), b(2 * t + 9, g))};
    float sum[4] = {1, 1, 1, 1};
    MmaM16N8K16<T>(sum, fa, fb);
    for (int i = 0; i < 4; ++i) d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = sum[i];
  };
  RunGrid({1, 32, 0, kernel}, {});
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      float sum = 1;
      for (int k = 0; k < 16; ++k) sum += a(row, k) * b(k, column);
      EXPECT_EQ(d[row * 8 + column], sum) << row << " " << column;
    }
  }
}

// Element (row, column) of matrix j is j * 100 + row * 10 + column.
TEST(CusimTensorTest, LoadedMatricesLieWherePtxSays) {
  std::vector<uint32_t> plain(32 * 4), transposed(32 * 4);
  const auto kernel = [&] {
    MOE_SHARED_ARRAY(MatrixRow, rows, 32);
    const unsigned lane = threadIdx.x;
    for (unsigned c = 0; c < 8; ++c) {
      rows[lane][c] = static_cast<uint16_t>(lane / 8 * 100 + lane % 8 * 10 + c);
    }
    __syncthreads();
    uint32_t out[4];
    LoadMatrices(&rows[lane], out);
    std::copy(out, out + 4, &plain[lane * 4]);
    LoadMatricesTransposed(&rows[lane], out);
    std::copy(out, out + 4, &transposed[lane * 4]);
  };
  RunGrid({1, 32, 0, kernel}, {});
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const uint32_t g = lane / 4, t = lane % 4;
    for (uint32_t j = 0; j < 4; ++j) {
      const uint32_t row = j * 100 + g * 10 + 2 * t, column = j * 100 + 2 * t * 10 + g;
      EXPECT_EQ(plain[lane * 4 + j], row | (row + 1) << 16) << lane << " " << j;
      EXPECT_EQ(transposed[lane * 4 + j], column | (column + 10) << 16) << lane << " " << j;
    }
  }
}

// The source has six bytes, and AddressSanitizer sees a seventh.
TEST(CusimTensorTest, AsynchronousCopiesFillUpWithZeros) {
  alignas(16) const uint16_t source[3] = {1, 2, 3};
  std::vector<uint16_t> out(8);
  const auto kernel = [&] {
    MOE_SHARED_ARRAY(MatrixRow, row, 1);
    AsyncCopies copies;
    copies.Copy16(row, source, sizeof(source));
    copies.Commit();
    copies.Wait(0);
    std::copy(row[0].begin(), row[0].end(), out.begin());
  };
  RunGrid({1, 1, 0, kernel}, {});
  EXPECT_EQ(out, (std::vector<uint16_t>{1, 2, 3, 0, 0, 0, 0, 0}));
}

// Two tiles in flight; `pending` = 1 is right, 2 waits for one group too few.
std::vector<float> SumTiles(const std::vector<float>& in, size_t pending, uint32_t seed) {
  std::vector<float> out(32);
  const auto kernel = [&] {
    MOE_SHARED_ARRAY(float, tiles, 2 * 128);
    const unsigned lane = threadIdx.x, tiles_in = static_cast<unsigned>(in.size() / 128);
    AsyncCopies copies;
    const auto fetch = [&](unsigned tile) {
      if (tile < tiles_in) {
        copies.Copy16(tiles + tile % 2 * 128 + lane * 4, &in[tile * 128 + lane * 4]);
      }
      copies.Commit();
    };
    fetch(0);
    fetch(1);
    float sum = 0;
    for (unsigned tile = 0; tile < tiles_in; ++tile) {
      copies.Wait(pending);
      __syncthreads();
      for (unsigned i = 0; i < 4; ++i) sum += tiles[tile % 2 * 128 + (127 - lane * 4 - i)];
      __syncthreads();
      fetch(tile + 2);
    }
    out[lane] = sum;
  };
  RunGrid({1, 32, 0, kernel}, {.seed = seed});
  return out;
}

TEST(CusimTensorTest, AsynchronousCopiesArriveWhenTheyAreWaitedForAndNotBefore) {
  alignas(16) float values[5 * 128];
  for (int i = 0; i < 5 * 128; ++i) values[i] = static_cast<float>(i);
  const std::vector<float> in(values, values + 5 * 128);
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    const auto sums = SumTiles(in, 1, seed);
    for (int lane = 0; lane < 32; ++lane) {
      float want = 0;
      for (int tile = 0; tile < 5; ++tile) {
        for (int i = 0; i < 4; ++i) want += static_cast<float>(tile * 128 + 127 - lane * 4 - i);
      }
      EXPECT_EQ(sums[lane], want);
    }
    EXPECT_NE(SumTiles(in, 2, seed), sums);
  }
}

}  // namespace
}  // namespace cusim
