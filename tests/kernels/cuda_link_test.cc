// The CUDA kernels as nvcc compiled them: a program that has them starts and refuses without a
// driver. What they compute is tested on the simulator by the suites of the operations.
#include <cstdint>

#include <gtest/gtest.h>

#include <cuda_runtime_api.h>

#include "kernels/bias/bias_cuda.h"
#include "kernels/combine/combine_cuda.h"
#include "kernels/norm/rms_norm_cuda.h"
#include "kernels/permute/permute_cuda.h"
#include "kernels/swiglu/swiglu_cuda.h"

namespace moe {
namespace {

template <typename T>
class CudaLinkTest : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(CudaLinkTest, Types);

TYPED_TEST(CudaLinkTest, InputsOfSizeZeroLaunchNothingAndNeedNoDriver) {
  using T = TypeParam;
  const MatrixView<T> none(nullptr, 0, 0);
  EXPECT_EQ(permute::Run<T>({.in = none, .source_row = nullptr, .out = none}, nullptr),
            cudaSuccess);
  EXPECT_EQ(
      combine::Run<T>(combine::CudaCombine<T>{none, nullptr, nullptr, nullptr, none, {}}, nullptr),
      cudaSuccess);
  EXPECT_EQ(combine::Run<T>(combine::CudaWeightGradient<T>{none, none, nullptr, nullptr, nullptr},
                            nullptr),
            cudaSuccess);
  EXPECT_EQ(bias::CudaAddBias<T>(none, nullptr, nullptr), cudaSuccess);
  EXPECT_EQ(bias::CudaBiasGradient<T>(none, nullptr, Write::kAdd, nullptr), cudaSuccess);
  EXPECT_EQ(rms_norm::Run(rms_norm::CudaForward<T>{none, nullptr, 0, none, nullptr}, nullptr),
            cudaSuccess);
  EXPECT_EQ(rms_norm::Run(rms_norm::CudaBackward<T>{none, nullptr, nullptr, none, none, Write::kAdd,
                                                    nullptr, Write::kAdd},
                          nullptr),
            cudaSuccess);
  EXPECT_EQ(rms_norm::CudaAddRows<T>(none, none, none, nullptr), cudaSuccess);
  EXPECT_EQ(swiglu::Run(Activation::kSwiGlu, swiglu::CudaForward<T>{none, none, none}, nullptr),
            cudaSuccess);
  EXPECT_EQ(swiglu::Run(Activation::kSwiGlu, swiglu::CudaBackward<T>{none, none, none, none, none},
                        nullptr),
            cudaSuccess);
}

TYPED_TEST(CudaLinkTest, WithoutADriverALaunchReturnsAnError) {
  using T = TypeParam;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) GTEST_SKIP() << "there is a GPU";
  T row[4] = {};
  float bias[4] = {};
  EXPECT_NE(bias::CudaAddBias<T>({row, 1, 4}, bias, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace moe
