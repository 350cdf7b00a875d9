// kernels/attention: rotary positions, on every device.
#include <cmath>
#include <thread>
#include <tuple>
#include <type_traits>

#include "kernels/attention/attention.h"
#include "kernels/attention/rotary_table.h"
#include "kernels/base/status_macros.h"
#include "tests/kernels/device_memory.h"

namespace moe::testing {
namespace {

using Offsets = std::vector<int64_t>;

// x, rotated; waits for the stream.
template <typename T>
absl::StatusOr<Matrix<T>> Rotate(const TestDevice& device, int heads, const Offsets& offsets,
                                 RotaryDirection direction, const Matrix<T>& x,
                                 float base = 10000.0f) {
  const auto rows = device.Copy(x);
  Workspace workspace(device.memory());
  MOE_RETURN_IF_ERROR(ApplyRotary<T>({.heads = heads, .sequence_offsets = offsets}, base, direction,
                                     rows.view(), workspace, device.stream()));
  return device.Read(rows);
}

template <typename T>
class ApplyRotaryTest : public ::testing::Test {};
TYPED_TEST_SUITE(ApplyRotaryTest, StorageTypes);

TEST(ApplyRotaryByHandTest, TurnsThePairByThePositionInItsSequence) {
  ForEachDevice([](const TestDevice& device) {
    const auto x = Rotate(device, 1, {0, 3, 4}, RotaryDirection::kForward,
                          Matrix<float>::Of(4, 2, {1, 0, 1, 0, 1, 0, 1, 0}))
                       .value();
    EXPECT_EQ(x(0, 0), 1);
    EXPECT_EQ(x(0, 1), 0);
    EXPECT_FLOAT_EQ(x.at(2, 0), std::cos(2.0f));
    EXPECT_FLOAT_EQ(x.at(2, 1), std::sin(2.0f));
    EXPECT_EQ(x(3, 0), 1);  // the next sequence starts at position 0
  });
}

// cos, sin, two products and a sum: 4 roundings of |a| + |b|.
TEST(ApplyRotaryFloat64Test, MatchesFloat64AndItsInverse) {
  const Offsets offsets = {0, 1, 1, 300, 350};
  const TestDevice device{Device()};
  for (const int64_t depth : {2, 6, 32, 64}) {
    for (const float base : {10000.0f, 500.0f}) {
      const auto x = Matrix<float>::Random(350, 3 * depth, 1);
      const auto y = Rotate(device, 3, offsets, RotaryDirection::kForward, x, base).value();
      EXPECT_TRUE(y.edges_intact());
      for (int64_t t = 0; t < 350; ++t) {
        const int64_t position = t < 1 ? 0 : t < 300 ? t - 1 : t - 300;
        for (int64_t head = 0; head < 3; ++head) {
          for (int64_t d = 0; d < depth / 2; ++d) {
            const int64_t first = head * depth + d, second = first + depth / 2;
            const double angle = static_cast<double>(position) *
                                 std::pow(base, -2.0 * static_cast<double>(d) / double(depth));
            const double a = x(t, first), b = x(t, second);
            const double tolerance = 4 * kFloatRounding * (std::abs(a) + std::abs(b));
            ASSERT_NEAR(y(t, first), a * std::cos(angle) - b * std::sin(angle), tolerance);
            ASSERT_NEAR(y(t, second), b * std::cos(angle) + a * std::sin(angle), tolerance);
          }
        }
      }
      const auto back = Rotate(device, 3, offsets, RotaryDirection::kBackward, y, base).value();
      for (int64_t t = 0; t < 350; ++t) {
        for (int64_t c = 0; c < 3 * depth; ++c) {
          ASSERT_NEAR(back(t, c), x(t, c), 8 * kFloatRounding * 10);  // |a| + |b| < 10
        }
      }
    }
  }
}

// The float32 result of the CPU's first target, rounded once: every device has these bits, in any
// layout.
TYPED_TEST(ApplyRotaryTest, HasTheBitsOfTheFloat32ResultForAnyHeadSizeAndLayout) {
  using T = TypeParam;
  const TestDevice one{Device()};
  const auto check = [&](const TestDevice& device, int heads, int64_t depth, const Offsets& offsets,
                         MatrixLayout layout) {
    const auto x = Matrix<T>::Random(offsets.back(), heads * depth, layout, 1);
    for (const auto direction : {RotaryDirection::kForward, RotaryDirection::kBackward}) {
      const auto got = Rotate(device, heads, offsets, direction, x).value();
      const auto want = Rotate(one, heads, offsets, direction, x.template As<float>());
      EXPECT_TRUE(SameBits(got, want->template As<T>())) << heads << " heads of " << depth;
    }
  };
  ForEachDevice(Simd::kAll, [&](const TestDevice& device) {
    for (const int64_t depth : {2, 6, 16, 24, 128}) {
      for (const MatrixLayout layout : kLayouts)
        check(device, 3, depth, {0, 1, 1, 9, 22, 22}, layout);
    }
    check(device, 4, 18, {0, 120, 400}, {});
  });
}

TEST(ApplyRotaryFloat64Test, ARowHasTheSameBitsInAnyBatch) {
  const auto x = Matrix<float>::Random(400, 72, 2);
  const TestDevice device{Device()};
  EXPECT_TRUE(SameBits(*Rotate(device, 4, {0, 280}, RotaryDirection::kForward, x.Rows(120, 400)),
                       *Rotate(device, 4, {0, 120, 400}, RotaryDirection::kForward, x), 120));
}

TEST(ApplyRotaryArgumentsTest, RefusesOddHeadsAndOffsetsThatMissRows) {
  ForEachDevice([](const TestDevice& device) {
    const Matrix<float> x(3, 6);
    const auto rotate = [&](int heads, const Offsets& offsets, float base = 10000.0f) {
      return Rotate(device, heads, offsets, RotaryDirection::kForward, x, base).status();
    };
    EXPECT_EQ(Message(rotate(2, {0, 3})),
              "ApplyRotary: head size 3, base 10000, expected an even one and base > 0");
    EXPECT_EQ(rotate(1, {0, 3}, 0.0f).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(rotate(1, {0, 2}).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(rotate(4, {0, 3}).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_OK(rotate(1, {0, 3}));
    EXPECT_OK(Rotate(device, 1, {0, 0}, RotaryDirection::kForward, Matrix<float>(0, 6)).status());
    EXPECT_OK(device.stream().Synchronize());
  });
}

// A longer table is made while work with the shorter one is still in the stream, and offsets change
// as soon as a call has returned.
TYPED_TEST(ApplyRotaryTest, HasTheSameBitsOnEveryDeviceWhileItsTableGrows) {
  using T = TypeParam;
  const int64_t cols = 18, rows = 302;
  // No other test has made its table.
  const float base = std::is_same_v<T, float> ? 71 : std::is_same_v<T, BFloat16> ? 73 : 74;
  ExpectSameBitsOnEveryDevice([&](const TestDevice& device) {
    Workspace workspace(device.memory());
    const auto few = device.Copy(Matrix<T>::Random(3, cols, 1));
    const auto many = device.Copy(Matrix<T>::Random(rows, cols, 2));
    Offsets offsets = {0, 1, 3};
    EXPECT_OK(ApplyRotary<T>({.heads = 3, .sequence_offsets = offsets}, base,
                             RotaryDirection::kForward, few.view(), workspace, device.stream()));
    offsets = {0, 1, 1, rows};
    EXPECT_OK(ApplyRotary<T>({.heads = 3, .sequence_offsets = offsets}, base,
                             RotaryDirection::kBackward, many.view(), workspace, device.stream()));
    offsets = {-1, -1, -1, -1};
    return std::tuple(device.Read(few).memory(), device.Read(many).memory());
  });
}

TEST(RotaryTableTest, IsMadeOnceForManyThreadsAndLivesOn) {
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const auto table = [&](int64_t positions) {
      return RotaryTable::For(79, 4, positions, device->stream().device()).value();
    };
    const RotaryTable* made[3] = {};
    std::vector<std::thread> threads;
    for (auto& mine : made) threads.emplace_back([&mine, &table] { mine = table(200); });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(made[0], made[1]);
    EXPECT_EQ(made[0], made[2]);
    EXPECT_GE(made[0]->positions(), 200);
    const RotaryTable* const longer = table(made[0]->positions() + 1);
    EXPECT_GE(longer->positions(), 2 * made[0]->positions());
    EXPECT_EQ(table(1), longer);
    // The shorter table is still a prefix of the longer one.
    const auto row = [&](const float* values) {
      std::vector<float> host(4);
      EXPECT_OK(device->stream().CopyBytes(values + 99 * 4, host.data(), 16));
      EXPECT_OK(device->stream().Synchronize());
      return host;
    };
    EXPECT_EQ(row(made[0]->cosine()), row(longer->cosine()));
    EXPECT_EQ(row(made[0]->sine()), row(longer->sine()));
    EXPECT_EQ(row(longer->sine())[0], std::sin(99.0f));
  }
}

}  // namespace
}  // namespace moe::testing
