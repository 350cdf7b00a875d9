// Gradients that are added in the order of arrival or exactly, on every device.
#include "kernels/exact_sum/grad_accumulator.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include "kernels/bias/bias.h"
#include "tests/kernels/device_memory.h"

namespace moe::testing {
namespace {

// Two partials of a bias, in both kinds of numerics, added to a sum and to an empty one. The second
// uses the scratch of the first.
TEST(GradAccumulatorTest, HasTheSameBitsOnEveryDevice) {
  const int64_t rows = 5, cols = 21;
  const ExactGrid grid = {.unit_log2 = -34, .max_terms = 4};
  ExpectSameBitsOnEveryDevice([&](const TestDevice& device) {
    Workspace workspace(device.memory());
    const auto floats = device.Random(cols, 1);
    const auto exact = device.Copy(std::vector<int64_t>(cols, 3));
    const auto first_float = device.Random(cols, 4);
    const auto first_exact = device.Copy(std::vector<int64_t>(cols, 3));
    bool empty[] = {true, true};
    const auto tally = device.Copy<GridTally>({{}});
    const GradAccumulator accumulators[] = {
        GradAccumulator(floats.span()), GradAccumulator(exact.span(), grid, tally.span().data()),
        GradAccumulator(first_float.span(), &empty[0]),
        GradAccumulator(first_exact.span(), grid, tally.span().data(), &empty[1])};
    for (const uint64_t seed : {2, 3}) {
      const auto dy = device.Random(rows * cols, seed);
      for (const GradAccumulator& accumulator : accumulators) {
        const auto add = [&](absl::Span<float> out, Write write) {
          return BiasGradient<float>(dy.view(rows, cols, cols), out, write, device.stream());
        };
        EXPECT_OK(accumulator.Add(add, workspace, device.stream()));
      }
      EXPECT_OK(device.stream().Synchronize());  // dy goes
    }
    EXPECT_EQ(workspace.used_bytes(), 0);
    const GridTally met = device.Read(tally).front();
    return std::tuple(device.Read(floats), device.Read(exact), device.Read(first_float),
                      device.Read(first_exact),
                      std::vector<int64_t>{met.non_finite, met.inexact, met.largest});
  });
}

// A partial that consists of `value`.
auto Fill(float value) {
  return [value](absl::Span<float> out, Write write) {
    for (float& x : out) x = write == Write::kAdd ? x + value : value;
    return absl::OkStatus();
  };
}

TEST(GradAccumulatorTest, AddsInTheOrderOfArrivalOrExactly) {
  const auto stream = MakeInlineStream();
  Workspace workspace;
  std::vector<float> floats(5, 1.0f);
  const GradAccumulator plain(absl::MakeSpan(floats));
  EXPECT_FALSE(plain.exact());
  EXPECT_EQ(plain.size(), 5);
  ASSERT_OK(plain.Add(Fill(0.5f), workspace, *stream));
  EXPECT_EQ(floats, std::vector<float>(5, 1.5f));

  std::vector<int64_t> sum(5, 0);
  GridTally tally;
  const GradAccumulator exact(absl::MakeSpan(sum), {.unit_log2 = -2, .max_terms = 4}, &tally);
  EXPECT_TRUE(exact.exact());
  EXPECT_EQ(exact.size(), 5);
  for (const float value : {0.5f, 1.0f, kNaN}) {
    ASSERT_OK(exact.Add(Fill(value), workspace, *stream));
  }
  EXPECT_EQ(sum, std::vector<int64_t>(5, 6));
  EXPECT_EQ(tally.non_finite, 5);
  EXPECT_EQ(workspace.used_bytes(), 0);
  const auto fail = [](absl::Span<float>, Write) {
    return absl::InternalError("boom");
  };
  EXPECT_EQ(exact.Add(fail, workspace, *stream).message(), "boom");
  EXPECT_EQ(sum, std::vector<int64_t>(5, 6));
}

TEST(GradAccumulatorTest, TheFirstPartialOfAnEmptySumOverwritesIt) {
  const auto stream = MakeInlineStream();
  Workspace workspace;
  std::vector<float> floats(3);
  std::vector<int64_t> sum(3);
  GridTally tally;
  bool empty = true;
  const GradAccumulator plain(absl::MakeSpan(floats), &empty);
  const GradAccumulator exact(absl::MakeSpan(sum), {.unit_log2 = -2, .max_terms = 4}, &tally,
                              &empty);
  for (const GradAccumulator& grad : {plain, exact}) {
    // Holds for any copy.
    for (int adds = 1; adds < 3; ++adds) {
      std::fill(floats.begin(), floats.end(), kNaN);
      std::fill(sum.begin(), sum.end(), 99);
      empty = true;
      for (int i = 0; i < adds; ++i) {
        ASSERT_OK(GradAccumulator(grad).Add(Fill(0.5f), workspace, *stream));
        EXPECT_FALSE(empty);
      }
      if (grad.exact()) {
        EXPECT_EQ(sum, std::vector<int64_t>(3, 2 * adds));
      } else {
        EXPECT_EQ(floats, std::vector<float>(3, 0.5f * static_cast<float>(adds)));
      }
    }
  }
  EXPECT_EQ(tally.non_finite, 0);
}

}  // namespace
}  // namespace moe::testing
