// moe bench gate, permute, combine and gemm on a CUDA device: right results, and planted faults
// that are counted. Without a device: why.
#include <cstring>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/local/local_world.h"
#include "kernels/base/cuda_devices.h"
#include "moe/cli/bench/collective_case.h"
#include "moe/cli/bench/kernel_bench.h"

namespace moe::bench {
namespace {

constexpr Device kCuda = {DeviceKind::kCuda, 0};
constexpr MeasureOptions kShort = {.iterations = 2, .warmup = 1, .budget = absl::ZeroDuration()};

class BenchDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto devices = CudaDevices();
    if (devices.ok() && devices->front().usable.ok()) {
      device_ = KernelDevice::Create(kCuda, threads_).value();
      return;
    }
    EXPECT_EQ(KernelDevice::Create(kCuda, threads_).status().code(),
              absl::StatusCode::kUnimplemented);
    GTEST_SKIP() << "no CUDA device";
  }

  // Runs it, makes the whole result wrong, then one element; returns what each is counted as.
  std::vector<int64_t> CountedFaults(const KernelCase& one, size_t place) {
    std::vector<int64_t> counted;
    const auto count = [&] {
      counted.push_back(one.timed.wrong().value());
    };
    EXPECT_TRUE(one.timed.prepare(0).ok());
    EXPECT_TRUE(one.timed.run().ok());
    count();
    EXPECT_TRUE(one.timed.spoil().ok());
    count();
    EXPECT_TRUE(one.timed.run().ok());
    EXPECT_TRUE(device_->Spoil(one.result.subspan(place, 4)).ok());
    count();
    return counted;
  }

  ThreadPool threads_{2};
  std::unique_ptr<KernelDevice> device_;
};

KernelSpec SmallSpec(KernelOp op, DType type = DType::kFloat32) {
  return {.op = op,
          .dtype = type,
          .tokens = 13,
          .hidden = 10,
          .router = {.num_experts = 4, .top_k = 2},
          .routing = ParseRouting("zipf:1.2").value()};
}

TEST_F(BenchDeviceTest, RowKernelsAreRight) {
  for (const KernelOp op : {KernelOp::kPermute, KernelOp::kCombine}) {
    for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
      const auto rows = MeasureKernels(SmallSpec(op, type), kShort, *device_).value();
      EXPECT_EQ(rows.size(), op == KernelOp::kPermute ? 2u : 3u);
      for (const KernelRow& row : rows) {
        EXPECT_EQ(row.times.wrong, 0) << row.kernel << " " << moe::NameOf(type);
        EXPECT_GT(row.times.time_us.min, 0);
        EXPECT_GT(row.times.limit_per_ns, 0);
        EXPECT_EQ(Find(KernelFields(row), "device")->text(), "cuda");
        EXPECT_EQ(Find(KernelFields(row), "threads")->text(), "");
      }
    }
  }
}

TEST_F(BenchDeviceTest, PlantedFaultsOfRowsAreCounted) {
  for (const KernelOp op : {KernelOp::kPermute, KernelOp::kCombine}) {
    const auto cases = MakeRowCases(SmallSpec(op), *device_).value();
    for (const KernelCase& one : cases->cases()) {
      const bool tokens = one.kernel == "sum" || one.kernel == "combine";
      const int64_t all = one.kernel == "weight_grad" ? 26 : tokens ? 13 * 10 : 26 * 10;
      EXPECT_THAT(CountedFaults(one, 16), ::testing::ElementsAre(0, all, 1)) << one.kernel;
    }
  }
}

KernelSpec SmallGate(const char* gate, DType type) {
  KernelSpec spec = SmallSpec(KernelOp::kGate, type);
  spec.tokens = 150;
  spec.router = {.gate = gate, .num_experts = 24, .top_k = 3};
  return spec;
}

TEST_F(BenchDeviceTest, GatesAreRight) {
  for (const char* gate : {"mixtral", "qwen2"}) {
    for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
      const auto rows = MeasureKernels(SmallGate(gate, type), kShort, *device_).value();
      std::vector<std::string> kernels;
      for (const KernelRow& row : rows) {
        EXPECT_EQ(row.times.wrong, 0) << gate << " " << row.kernel << " " << row.pass;
        kernels.push_back(row.kernel);
      }
      if (type == DType::kFloat32) {
        EXPECT_THAT(kernels, ::testing::ElementsAre("gate", "gate", "select", "plan"));
      } else {
        EXPECT_THAT(kernels, ::testing::ElementsAre("select", "plan"));
      }
    }
  }
  // Selects by the sum of a score and a bias: timed, and not checked.
  const auto rows =
      MeasureKernels(SmallGate("deepseek-v3", DType::kFloat32), kShort, *device_).value();
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].times.wrong, -1);
}

TEST_F(BenchDeviceTest, BytesOfSelectionAndSort) {
  const auto rows =
      MeasureKernels(SmallGate("mixtral", DType::kBFloat16), kShort, *device_).value();
  EXPECT_EQ(rows[0].bytes, 150 * 24 * 2 + 450 * 8 + 24 * 8);
  EXPECT_EQ(rows[1].bytes, 450 * 12 + 25 * 16 + 24 * 4);
}

// What a run did not write again is wrong.
TEST_F(BenchDeviceTest, SpoiledSelectionsAndSortsAreCounted) {
  const auto cases = MakeSelectCases(SmallGate("mixtral", DType::kBFloat16), *device_).value();
  const int64_t elements[] = {2 * 450 + 24, 2 * 450 + 25 + 24};
  for (int i = 0; i < 2; ++i) {
    const TimedKernel& timed = cases->cases()[i].timed;
    ASSERT_TRUE(timed.prepare(0).ok());
    ASSERT_TRUE(timed.spoil().ok());
    EXPECT_EQ(timed.wrong().value(), elements[i]);
    ASSERT_TRUE(timed.run().ok());
    EXPECT_EQ(timed.wrong().value(), 0);
  }
}

TEST_F(BenchDeviceTest, GatesThatTheDeviceDoesNotRunAreRefused) {
  const auto refused = [&](const KernelSpec& spec) {
    return MeasureKernels(spec, kShort, *device_).status().code();
  };
  EXPECT_EQ(refused(SmallGate("sinkhorn", DType::kFloat32)), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(refused(SmallGate("deepseek-v3", DType::kBFloat16)),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused(SmallGate("mixtral", DType::kInt64)), absl::StatusCode::kInvalidArgument);
  KernelSpec many = SmallGate("mixtral", DType::kBFloat16);
  many.router.num_experts = 1025;
  EXPECT_EQ(refused(many), absl::StatusCode::kInvalidArgument);
}

KernelSpec SmallGemm(DType type) {
  return {.op = KernelOp::kGemm,
          .dtype = type,
          .tokens = 37,
          .hidden = 33,
          .ffn = 17,
          .router = {.num_experts = 5, .top_k = 3},
          .routing = ParseRouting("zipf:1.2").value()};
}

TEST_F(BenchDeviceTest, ProductsAreRightAndPlantedFaultsAreCounted) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
    const auto rows = MeasureKernels(SmallGemm(type), kShort, *device_).value();
    for (const KernelRow& row : rows) {
      EXPECT_EQ(row.times.wrong, 0) << row.kernel;
      EXPECT_FALSE(row.times.limit_per_ns <= 0);  // NaN where cuBLAS is missing
    }
    const auto cases = MakeGemmCases(SmallGemm(type), *device_).value();
    for (const KernelCase& one : cases->cases()) {
      EXPECT_THAT(CountedFaults(one, 0), ::testing::ElementsAre(0, 97, 1)) << one.kernel;
    }
  }
}

// The first element of bf16 products, off by more than the order of sums can make it.
TEST_F(BenchDeviceTest, ASmallErrorOfTensorCoresIsCounted) {
  const auto cases = MakeGemmCases(SmallGemm(DType::kBFloat16), *device_).value();
  const KernelCase& forward = cases->cases()[0];
  ASSERT_TRUE(forward.timed.prepare(0).ok());
  ASSERT_TRUE(forward.timed.run().ok());
  uint16_t bits = 0;
  Stream& stream = device_->stream();
  ASSERT_TRUE(stream.CopyBytes(forward.result.data(), &bits, sizeof(bits)).ok());
  ASSERT_TRUE(stream.Synchronize().ok());
  bits = static_cast<uint16_t>(
      bits + 2);  // two units in the last place of bf16, of which the rounding may be half a one
  ASSERT_TRUE(stream.Upload(&bits, forward.result.data(), sizeof(bits)).ok());
  EXPECT_EQ(forward.timed.wrong().value(), 1);
}

TEST_F(BenchDeviceTest, ChecksOfLargeResultsFollowOneAnother) {
  const auto range = [&](int64_t call, int64_t rows, int64_t row_bytes) {
    const RowStretch stretch = CheckedRows(*device_, call, rows, row_bytes);
    return std::pair(stretch.begin, stretch.end);
  };
  constexpr int64_t kMiB = 1 << 20;
  EXPECT_EQ(range(5, 32, kMiB), std::pair(int64_t{0}, int64_t{32}));  // all
  EXPECT_EQ(range(0, 70, kMiB), std::pair(int64_t{0}, int64_t{32}));
  EXPECT_EQ(range(1, 70, kMiB), std::pair(int64_t{32}, int64_t{64}));
  EXPECT_EQ(range(2, 70, kMiB), std::pair(int64_t{64}, int64_t{70}));
  EXPECT_EQ(range(3, 70, kMiB), std::pair(int64_t{0}, int64_t{32}));
  EXPECT_EQ(range(1, 3, 100 * kMiB), std::pair(int64_t{1}, int64_t{2}));
  EXPECT_EQ(range(0, 0, kMiB), std::pair(int64_t{0}, int64_t{0}));
  const auto cpu = KernelDevice::Create({}, threads_).value();
  EXPECT_EQ(CheckedRows(*cpu, 1, 70, kMiB).end, 70);
}

TEST_F(BenchDeviceTest, ACollectiveCountsWhatItDidNotWrite) {
  const auto world = MakeLocalWorld({.ranks = 1});
  for (const Op op : {Op::kMemcpy, Op::kAllToAll, Op::kAllReduce}) {
    const auto timed = CollectiveCase::Create(
                           {.op = op, .size_bytes = 400, .all_reduce = AllReduceAlgorithm::kDirect},
                           *world[0], device_->stream())
                           .value();
    ASSERT_TRUE(timed->Prepare().ok());
    // A sum starts from its input, which is the result on one rank.
    EXPECT_EQ(timed->CountWrong().value(), op == Op::kAllReduce ? 0 : 100) << NameOf(op);
    ASSERT_TRUE(timed->Call().ok());
    EXPECT_EQ(timed->CountWrong().value(), 0) << NameOf(op);
  }
}

}  // namespace
}  // namespace moe::bench
