// Which products use cuBLAS, what is refused, and what the fake library of tests/cusim finds.
// device_gemm_test.cc has the results.
#include "kernels/grouped_gemm/gemm_cublas.h"

#include <cstdint>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cublas_v2.h>

#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/grouped_gemm/weight_gradient.h"
#include "tests/cusim/fake_streams.h"
#include "tests/kernels/device_memory.h"

namespace moe::testing {
namespace {

using ::testing::HasSubstr;

constexpr Device kCublasDevice = {DeviceKind::kCuda, 0};
constexpr auto kAnyRows = RowBits::kMayDependOnCount;

class GemmCublasTest : public ::testing::Test {
 protected:
  // The products that used cuBLAS among one of each: four groups, one group, y = x w^T, and three
  // weights, dw = dy^T x, of which one has no rows.
  template <typename T>
  std::vector<int64_t> Taken(const GemmOptions& options) {
    const auto values = device_.Copy(std::vector<T>(64, T(1.0f)));
    const auto results = device_.Copy(std::vector<T>(64));
    const auto sums = device_.Copy(std::vector<float>(3 * 16));
    std::vector<GradAccumulator> grads;
    for (size_t g = 0; g < 3; ++g) grads.emplace_back(sums.span().subspan(g * 16, 16));
    const MatrixView<const T> in = values.view(6, 4, 4), weight = values.view(5, 4, 4);
    const MatrixView<T> out = results.view(6, 5, 5);
    const std::vector<MatrixView<const T>> weights(4, weight);
    Stream& stream = device_.stream();
    std::vector<int64_t> taken;
    int64_t before = cusim::CublasProducts();
    const auto count = [&](const absl::Status& status) {
      EXPECT_OK(status);
      taken.push_back(cusim::CublasProducts() - before);
      before = cusim::CublasProducts();
    };
    count(GroupedGemm<T>(in, {0, 2, 2, 5, 6}, weights, out, workspace_, stream, options));
    count(Gemm<T>(in, weight, out, workspace_, stream, options));
    count(AddWeightGradients<T>(in, in, {0, 2, 2, 6}, grads, workspace_, stream, options));
    EXPECT_OK(stream.Synchronize());
    return taken;
  }

  TestDevice device_{kCublasDevice};
  Workspace workspace_{device_.memory()};
};

TEST_F(GemmCublasTest, AutoTakesItForOneGroupOfBFloat16) {
  const auto cublas = MakeCublas(GroupedGemmKernel::kAuto, kAnyRows, kCublasDevice).value();
  const GemmOptions options = {GroupedGemmKernel::kAuto, cublas.get()};
  EXPECT_THAT(Taken<BFloat16>(options), ::testing::ElementsAre(0, 1, 2));
  EXPECT_THAT(Taken<float>(options), ::testing::ElementsAre(0, 0, 0));
  EXPECT_THAT(Taken<BFloat16>({}), ::testing::ElementsAre(0, 0, 0));
}

TEST_F(GemmCublasTest, OnDemandItTakesAllButEmptyGroups) {
  const auto cublas = MakeCublas(GroupedGemmKernel::kCublas, kAnyRows, kCublasDevice).value();
  const GemmOptions options = {GroupedGemmKernel::kCublas, cublas.get()};
  EXPECT_THAT(Taken<BFloat16>(options), ::testing::ElementsAre(3, 1, 2));
  EXPECT_THAT(Taken<float>(options), ::testing::ElementsAre(3, 1, 2));
  EXPECT_THAT(Taken<BFloat16>({GroupedGemmKernel::kMma, cublas.get()}),
              ::testing::ElementsAre(0, 0, 0));
}

TEST_F(GemmCublasTest, IsMadeWhereItIsOfUseAlone) {
  EXPECT_EQ(MakeCublas(GroupedGemmKernel::kMma, kAnyRows, kCublasDevice).value(), nullptr);
  EXPECT_EQ(MakeCublas(GroupedGemmKernel::kAuto, RowBits::kIndependent, kCublasDevice).value(),
            nullptr);
  EXPECT_EQ(MakeCublas(GroupedGemmKernel::kAuto, kAnyRows, Device()).value(), nullptr);
}

TEST_F(GemmCublasTest, RefusesGroupsThatTheHostDoesNotKnow) {
  const auto cublas = MakeCublas(GroupedGemmKernel::kCublas, kAnyRows, kCublasDevice).value();
  const auto offsets = device_.Copy(std::vector<int64_t>{0, 2});
  const auto values = device_.Copy(std::vector<float>(8, 1.0f));
  const MatrixView<const float> rows = values.view(2, 2, 2);
  ExpectRefused(GroupedGemm<float>(rows, GroupOffsets::OnDevice(offsets.span(), {}), {&rows, 1},
                                   values.view(2, 2, 2), workspace_, device_.stream(),
                                   {GroupedGemmKernel::kCublas, cublas.get()}),
                "GroupedGemm: cuBLAS multiplies, expected offsets that the host knows");
}

TEST_F(GemmCublasTest, RefusalsSayWhy) {
  const auto demand = [](RowBits rows, Device device) {
    return MakeCublas(GroupedGemmKernel::kCublas, rows, device).status();
  };
  ExpectRefused(demand(RowBits::kIndependent, kCublasDevice),
                HasSubstr("the bits of a row depend on the number of rows"));
  EXPECT_EQ(demand(kAnyRows, Device()).code(), absl::StatusCode::kInvalidArgument);
  {
    const cusim::ScopedMachine machine({.memory_bytes = 1 << 20});
    const absl::Status full = demand(kAnyRows, {DeviceKind::kCuda, 1});
    EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(Message(full), HasSubstr("workspace of cuBLAS"));
  }
  const cusim::ScopedMachine machine({.driver = cudaErrorInsufficientDriver});
  EXPECT_EQ(demand(kAnyRows, kCublasDevice).code(), absl::StatusCode::kUnimplemented);
}

TEST_F(GemmCublasTest, NeedsAHandleOfTheStreamsDevice) {
  const auto product = [&](const GemmOptions& options) {
    return Gemm<float>({nullptr, 1, 1}, {nullptr, 1, 1}, MatrixView<float>(nullptr, 1, 1),
                       workspace_, device_.stream(), options);
  };
  ExpectRefused(product({GroupedGemmKernel::kCublas, nullptr}),
                HasSubstr("Gemm: GroupedGemmKernel::kCublas without"));
  const auto other =
      MakeCublas(GroupedGemmKernel::kCublas, kAnyRows, {DeviceKind::kCuda, 1}).value();
  ExpectRefused(product({GroupedGemmKernel::kCublas, other.get()}),
                HasSubstr("cuBLAS of CUDA device 1"));
}

// Calls of the fake library, as of cuBLAS.
class FakeCublasDeathTest : public GemmCublasTest {
 protected:
  struct Call {
    cublasOperation_t a_operation = CUBLAS_OP_N;
    int64_t terms = 4, lda = 3;
    cudaDataType a_type = CUDA_R_32F;
    const void* a = nullptr;  // nullptr: 12 floats of the device
  };
  // A product of [3, terms] and [terms, 2], and execution of the device's work.
  void Multiply(const Call& call, bool with_workspace = true) {
    const auto memory = device_.Copy(std::vector<float>(1024));
    const auto a = device_.Copy(std::vector<float>(12));
    const float one = 1, zero = 0;
    ASSERT_OK(device_.stream().Launch([&](void* native) {
      cublasHandle_t handle = nullptr;
      cublasCreate(&handle);
      cublasSetStream(handle, static_cast<cudaStream_t>(native));
      if (with_workspace) cublasSetWorkspace(handle, memory.span().data(), 4096);
      cublasGemmEx_64(handle, call.a_operation, CUBLAS_OP_N, 3, 2, call.terms, &one,
                      call.a == nullptr ? a.span().data() : call.a, call.a_type, call.lda,
                      memory.span().data(), CUDA_R_32F, 8, &zero, memory.span().data() + 64,
                      CUDA_R_32F, 3, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
      cublasDestroy(handle);
      return absl::OkStatus();
    }));
    ASSERT_OK(device_.stream().Synchronize());
  }
};

TEST_F(FakeCublasDeathTest, FindsMisuse) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  Multiply({});
  const float host[12] = {};
  EXPECT_DEATH(Multiply({.lda = 2}), "lda is 2, below 3");
  EXPECT_DEATH(Multiply({.a_operation = CUBLAS_OP_T}), "lda is 3, below 4");
  EXPECT_DEATH(Multiply({.terms = 0}), "without terms");
  EXPECT_DEATH(Multiply({.a_type = CUDA_R_16BF}), "types 14, 0, 0");
  EXPECT_DEATH(Multiply({.a = host}), "a is no memory of the handle's device");
  EXPECT_DEATH(Multiply({.lda = 4}), "12 bytes past the end");
  EXPECT_DEATH(Multiply({}, false), "no workspace");
}

}  // namespace
}  // namespace moe::testing
