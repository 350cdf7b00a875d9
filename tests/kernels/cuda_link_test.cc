// The CUDA kernels as compiled by nvcc: a program that contains them starts without a driver, and
// refuses devices. The operations' suites test their results on the simulator.

#include <gtest/gtest.h>

#include <cuda_runtime_api.h>

#include "kernels/activation/activation_op.h"
#include "kernels/bias/bias_op.h"
#include "kernels/combine/combine_op.h"
#include "kernels/elementwise/elementwise_op.h"
#include "kernels/norm/rms_norm_op.h"
#include "kernels/permute/permute_op.h"

namespace moe {
namespace {

template <typename T>
class CudaLinkTest : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(CudaLinkTest, Types);

TYPED_TEST(CudaLinkTest, InputsOfSizeZeroLaunchNothingAndNeedNoDriver) {
  using T = TypeParam;
  const MatrixView<T> none(nullptr, 0, 0);
  const auto nothing = [](const auto& op) {
    EXPECT_EQ(Run(op, cudaStream_t()), cudaSuccess);
  };
  nothing(permute::Gather<T>{.in = none, .source_row = nullptr, .out = none});
  nothing(combine::Combine<T>{none, nullptr, nullptr, nullptr, none, {}});
  nothing(combine::WeightGradient<T>{none, none, nullptr, nullptr, nullptr});
  nothing(bias::Add<T>{none, nullptr});
  nothing(bias::Gradient<T>{none, nullptr, Write::kAdd});
  nothing(rms_norm::Forward<T>{{}, none, nullptr, 0, none, nullptr});
  nothing(rms_norm::Backward<T>{
      {}, none, nullptr, nullptr, none, none, Write::kAdd, nullptr, Write::kAdd});
  nothing(elementwise::Sum<T, T>{none, none, none});
  nothing(activation::Forward<T>{Activation::kSwiGlu, none, none, none});
  nothing(activation::Backward<T>{Activation::kSwiGlu, none, none, none, none, none});
}

TYPED_TEST(CudaLinkTest, WithoutADriverALaunchReturnsAnError) {
  using T = TypeParam;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) GTEST_SKIP() << "there is a GPU";
  T row[4] = {};
  float bias[4] = {};
  EXPECT_NE(Run(bias::Add<T>{{row, 1, 4}, bias}, cudaStream_t()), cudaSuccess);
}

}  // namespace
}  // namespace moe
