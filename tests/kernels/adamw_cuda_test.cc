// kernels/adamw on the simulated GPU: the bits of the CPU's step.
#include "kernels/adamw/adamw_cuda.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "tests/cusim/schedules.h"

namespace moe {
namespace {

using cusim::DeviceMatrix;
using cusim::Layout;
using Floats = DeviceMatrix<float>;

AdamWStep StepOf(float gradient_scale, int step) {
  return {.gradient_scale = gradient_scale,
          .beta1 = 0.9f,
          .one_minus_beta1 = 1.0f - 0.9f,
          .beta2 = 0.95f,
          .one_minus_beta2 = 1.0f - 0.95f,
          .correction1 = 1.0f - std::pow(0.9f, static_cast<float>(step)),
          .correction2 = 1.0f - std::pow(0.95f, static_cast<float>(step)),
          .epsilon = 1e-8f,
          .learning_rate = 1e-3f,
          .weight_decay = 0.1f};
}

// Gradients from 1e-37, whose squares are subnormal or 0, to 1e18.
struct State {
  State(int64_t n, Layout in, Layout out)
      : gradient(Floats::Random(1, n, in, 1)),
        weight(Floats::Random(1, n, out, 2)),
        m(Floats::Random(1, n, in, 3, 0.1f)),
        v(Floats::Random(1, n, out, 4, 0.1f)),
        rounded(1, n, out) {
    for (int64_t i = 0; i < n; ++i) {
      if (i % 3 == 0) gradient.view()(0, i) *= std::ldexp(1.0f, static_cast<int>(i % 183) - 122);
      v.view()(0, i) *= v.view()(0, i);
    }
  }
  adamw::CudaAdamW Problem(const AdamWStep& step, BFloat16* rounded_weight) {
    return {.step = step,
            .gradient = gradient.view().data(),
            .weight = weight.view().data(),
            .m = m.view().data(),
            .v = v.view().data(),
            .rounded_weight = rounded_weight,
            .n = weight.view().cols()};
  }
  void StepOnCpu(const AdamWStep& step) {
    AdamWRange(step, gradient.view().data(), weight.view().data(), m.view().data(), v.view().data(),
               weight.view().cols());
    for (int64_t i = 0; i < weight.view().cols(); ++i) {
      rounded.view()(0, i) = BFloat16(weight.view()(0, i));
    }
  }

  Floats gradient, weight, m, v;
  DeviceMatrix<BFloat16> rounded;
};

// The first step from zero moments moves a weight by the learning rate against its gradient; decay
// alone takes 0.125 * 0.5 of it.
TEST(AdamWCudaTest, FirstStepMovesByTheLearningRateAndDecays) {
  AdamWStep step = StepOf(1, 1);
  step.learning_rate = 0.125f;
  step.weight_decay = 0;
  const std::vector<float> gradient = {3.0f, -0.5f, 0.0f};
  std::vector<float> weight(3, 1.0f), m(3), v(3);
  adamw::CudaAdamW adamw = {.step = step,
                            .gradient = gradient.data(),
                            .weight = weight.data(),
                            .m = m.data(),
                            .v = v.data(),
                            .n = 3};
  ASSERT_EQ(adamw::Run(adamw, nullptr), cudaSuccess);
  EXPECT_NEAR(weight[0], 0.875, 1e-6);
  EXPECT_NEAR(weight[1], 1.125, 1e-6);
  EXPECT_EQ(weight[2], 1.0f);
  EXPECT_NEAR(m[0], 0.3, 1e-6);
  EXPECT_NEAR(v[0], 0.45, 1e-6);
  adamw.step.weight_decay = 0.5f;
  adamw.n = 1;
  adamw.gradient += 2;
  adamw.weight += 2;
  adamw.m += 2;
  adamw.v += 2;
  ASSERT_EQ(adamw::Run(adamw, nullptr), cudaSuccess);
  EXPECT_EQ(weight[2], 0.9375f);
}

TEST(AdamWCudaTest, EqualsTheCpuForAnyLengthLayoutAndSchedule) {
  cusim::ForSeeds([] {
    for (const auto& [in, out] : cusim::kLayoutPairs) {
      for (const int64_t n : {1, 4, 7, 333, 2051}) {
        State got(n, in, out), want(n, in, out);
        for (const int step : {1, 2, 1000}) {
          const AdamWStep constants = StepOf(0.7f, step);
          ASSERT_EQ(adamw::Run(got.Problem(constants, got.rounded.view().data()), nullptr),
                    cudaSuccess);
          want.StepOnCpu(constants);
          EXPECT_TRUE(got.weight == want.weight) << n << " " << step;
          EXPECT_TRUE(got.m == want.m) << n << " " << step;
          EXPECT_TRUE(got.v == want.v) << n << " " << step;
          EXPECT_TRUE(got.rounded == want.rounded) << n << " " << step;
        }
      }
    }
  });
}

TEST(AdamWCudaTest, RoundedWeightsAreOptionalAndMayLieAnywhere) {
  for (const Layout layout : cusim::kLayouts) {
    State got(37, {}, {}), want(37, {}, {});
    ASSERT_EQ(adamw::Run(got.Problem(StepOf(1, 1), nullptr), nullptr), cudaSuccess);
    want.StepOnCpu(StepOf(1, 1));
    EXPECT_TRUE(got.weight == want.weight);
    EXPECT_TRUE(got.rounded == DeviceMatrix<BFloat16>(1, 37, {}));  // untouched
    DeviceMatrix<BFloat16> rounded(1, 37, layout);
    ASSERT_EQ(adamw::Run(got.Problem(StepOf(1, 2), rounded.view().data()), nullptr), cudaSuccess);
    want.StepOnCpu(StepOf(1, 2));
    EXPECT_TRUE(got.weight == want.weight);
    for (int64_t i = 0; i < 37; ++i) {
      EXPECT_EQ(rounded.view()(0, i), want.rounded.view()(0, i));
    }
  }
}

TEST(AdamWCudaTest, ANaNShowsInItsOwnElementAlone) {
  State got(9, {}, {}), want(9, {}, {});
  got.gradient.view()(0, 5) = std::numeric_limits<float>::quiet_NaN();
  ASSERT_EQ(adamw::Run(got.Problem(StepOf(1, 1), nullptr), nullptr), cudaSuccess);
  want.StepOnCpu(StepOf(1, 1));
  for (Floats State::*member : {&State::weight, &State::m, &State::v}) {
    for (int64_t i = 0; i < 9; ++i) {
      const float value = (got.*member).view()(0, i);
      if (i == 5) {
        EXPECT_TRUE(std::isnan(value));
      } else {
        EXPECT_EQ(value, (want.*member).view()(0, i));
      }
    }
  }
}

TEST(AdamWCudaTest, NothingIsLaunchedForNoElements) {
  EXPECT_EQ(adamw::Run(adamw::CudaAdamW{}, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace moe
