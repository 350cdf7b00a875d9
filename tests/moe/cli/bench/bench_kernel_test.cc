// moe bench gate, permute, combine and gemm on the CPU and on a CUDA device: bytes by hand, right
// results, and planted faults that are counted.
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/local/local_world.h"
#include "kernels/base/cuda_devices.h"
#include "moe/cli/bench/collective_case.h"
#include "moe/cli/bench/kernel_bench.h"

namespace moe::bench {
namespace {

using ::testing::ElementsAre;

constexpr MeasureOptions kShort = {.iterations = 3, .warmup = 1, .budget = absl::ZeroDuration()};

KernelSpec SmallSpec(KernelOp op, DType type = DType::kFloat32) {
  return {
      .op = op, .dtype = type, .tokens = 10, .hidden = 6, .router = {.num_experts = 4, .top_k = 2}};
}

KernelSpec SmallGate(const char* gate, DType type = DType::kFloat32) {
  KernelSpec spec = SmallSpec(KernelOp::kGate, type);
  spec.tokens = 150;
  spec.router = {.gate = gate, .num_experts = 24, .top_k = std::string(gate) == "switch" ? 1 : 3};
  return spec;
}

KernelSpec SmallGemm(DType type = DType::kFloat32) {
  return {.op = KernelOp::kGemm,
          .dtype = type,
          .tokens = 37,
          .hidden = 33,
          .ffn = 17,
          .router = {.num_experts = 5, .top_k = 3}};
}

class KernelBenchTest : public ::testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override {
    auto device = KernelDevice::Create({GetParam(), 0}, threads_);
    const auto cuda = CudaDevices();
    if (on_cpu() || (cuda.ok() && cuda->front().usable.ok())) {
      ASSERT_TRUE(device.ok()) << device.status();
      device_ = *std::move(device);
      return;
    }
    EXPECT_EQ(device.status().code(), absl::StatusCode::kUnimplemented);
    GTEST_SKIP() << "no CUDA device";
  }

  static bool on_cpu() { return GetParam() == DeviceKind::kCpu; }

  std::vector<KernelRow> Measure(const KernelSpec& spec) const {
    auto rows = MeasureKernels(spec, kShort, *device_);
    EXPECT_TRUE(rows.ok()) << rows.status();
    if (!rows.ok()) return {};
    for (const KernelRow& row : *rows) EXPECT_LE(row.times.wrong, 0) << row.kernel << row.pass;
    return *std::move(rows);
  }
  std::vector<int64_t> Bytes(const KernelSpec& spec) const {
    std::vector<int64_t> found;
    for (const KernelRow& row : Measure(spec)) found.push_back(row.bytes);
    return found;
  }
  absl::StatusCode Refusal(const KernelSpec& spec) const {
    return MeasureKernels(spec, kShort, *device_).status().code();
  }

  // Changes what is `place` bytes behind the begin of the result.
  template <typename T>
  void Change(const KernelCase& one, size_t place, const std::function<T(T)>& change) const {
    T value = {};
    std::byte* const at = one.result.data() + place;
    Stream& stream = device_->stream();
    ASSERT_TRUE(stream.CopyBytes(at, &value, sizeof(T)).ok());
    ASSERT_TRUE(stream.Synchronize().ok());
    value = change(value);
    ASSERT_TRUE(stream.Upload(&value, at, sizeof(T)).ok());
    ASSERT_TRUE(stream.Synchronize().ok());
  }
  // Wrong elements of a run, of a result that is wrong everywhere, and of another run.
  static void ExpectSpoiledElements(const KernelCase& one, int64_t elements) {
    SCOPED_TRACE(one.kernel + " " + one.pass);
    ASSERT_TRUE(one.timed.prepare(0).ok());
    ASSERT_TRUE(one.timed.run().ok());
    EXPECT_EQ(one.timed.wrong().value(), 0);
    ASSERT_TRUE(one.timed.spoil().ok());
    EXPECT_EQ(one.timed.wrong().value(), elements);
    ASSERT_TRUE(one.timed.run().ok());
    EXPECT_EQ(one.timed.wrong().value(), 0);
  }

  ThreadPool threads_{2};
  std::unique_ptr<KernelDevice> device_;
};

INSTANTIATE_TEST_SUITE_P(Devices, KernelBenchTest,
                         ::testing::Values(DeviceKind::kCpu, DeviceKind::kCuda),
                         [](const auto& test) {
                           return test.param == DeviceKind::kCpu ? "Cpu" : "Cuda";
                         });

TEST_P(KernelBenchTest, CountsTheBytesThatMustMove) {
  // T = 10, N = S = 20, H = 6.
  EXPECT_THAT(Bytes(SmallSpec(KernelOp::kPermute)), ElementsAre(30 * 24 + 80, 30 * 24 + 80 + 88));
  EXPECT_THAT(Bytes(SmallSpec(KernelOp::kCombine)),
              ElementsAre(30 * 24 + 160 + 88, 30 * 24 + 160, 30 * 24 + 160 + 88));
  EXPECT_THAT(Bytes(SmallSpec(KernelOp::kCombine, DType::kBFloat16)),
              ElementsAre(30 * 12 + 160 + 88, 30 * 12 + 160, 30 * 12 + 160 + 88));
  // Logits and scores [10, 4], ids and weights [20], 11 offsets, 10 log-sum-exps, 4 counts. On a
  // GPU selection and sort alone, too, which 16 bits have there.
  std::vector<int64_t> gate = {160 + 160 + 160 + 88 + 40 + 32, 160 + 160 + 180 + 88};
  if (!on_cpu()) {
    gate.insert(gate.end(), {160 + 160 + 32, 240 + 5 * 16 + 16});
    EXPECT_THAT(Bytes(SmallSpec(KernelOp::kGate, DType::kBFloat16)),
                ElementsAre(80 + 160 + 32, 240 + 5 * 16 + 16));
  }
  EXPECT_EQ(Bytes(SmallSpec(KernelOp::kGate)), gate);
}

TEST_P(KernelBenchTest, EveryKernelOfRowsIsRight) {
  for (const KernelOp op : {KernelOp::kPermute, KernelOp::kCombine}) {
    for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
      for (const char* routing : {"zipf:1.2", "uniform", "hot_expert:1"}) {
        for (const int k : {3, 1}) {
          if (!on_cpu() && (std::string(routing) != "zipf:1.2" || k == 1)) continue;
          KernelSpec spec = SmallSpec(op, type);
          spec.tokens = 133;
          spec.hidden = 37;
          spec.router.top_k = k;
          spec.routing = ParseRouting(routing).value();
          const auto rows = Measure(spec);
          EXPECT_EQ(rows.size(), op == KernelOp::kPermute ? 2u : 3u);
          for (const KernelRow& row : rows) {
            EXPECT_EQ(row.times.wrong, 0) << row.kernel << moe::NameOf(type) << routing << k;
            EXPECT_EQ(row.times.iterations, 3);
            EXPECT_EQ(row.slots, 133 * k);
            EXPECT_GT(row.times.limit_per_ns, 0);
            // Bytes over the median time, in GB/s.
            EXPECT_DOUBLE_EQ(row.times.work_per_ns,
                             static_cast<double>(row.bytes) / row.times.time_us.p50 * 1e-3);
            EXPECT_EQ(Find(KernelFields(row), "device")->text(), on_cpu() ? "cpu" : "cuda");
            EXPECT_EQ(Find(KernelFields(row), "threads")->text(), on_cpu() ? "2" : "");
          }
        }
      }
    }
  }
}

TEST_P(KernelBenchTest, GatesAreRight) {
  std::vector<const char*> gates = {"mixtral", "qwen2", "qwen3", "olmoe", "gpt-oss", "switch"};
  if (!on_cpu()) gates.resize(2);  // both ways to weigh
  for (const char* gate : gates) {
    for (const char* routing : {"zipf:1.2", "uniform", "hot_expert:1"}) {
      KernelSpec spec = SmallGate(gate);
      spec.routing = ParseRouting(routing).value();
      const auto rows = Measure(spec);
      ASSERT_EQ(rows.size(), on_cpu() ? 2u : 4u);
      for (const KernelRow& row : rows) {
        EXPECT_EQ(row.times.wrong, 0) << gate << " " << row.kernel << " " << row.pass;
      }
      if (!on_cpu()) break;  // one routing: the kernel is the same
    }
  }
}

TEST_P(KernelBenchTest, GatesWithARuleOfTheirOwnAreTimedAndNotChecked) {
  for (const char* gate :
       {"deepseek-v3", "sinkhorn", "noisy-topk", "expert-choice", "gshard", "sparsemixer"}) {
    if (!on_cpu() && std::string(gate) != "deepseek-v3") continue;
    KernelSpec spec = SmallSpec(KernelOp::kGate);
    spec.router.gate = gate;
    if (std::string(gate) == "expert-choice") spec.router.capacity_factor = 1;
    const auto rows = Measure(spec);
    EXPECT_EQ(rows.size(), 2u);
    for (const KernelRow& row : rows) {
      EXPECT_EQ(row.times.wrong, -1) << gate;
      EXPECT_GT(row.times.work_per_ns, 0) << gate;
      EXPECT_EQ(Find(KernelFields(row), "nwrong")->text(), "");
    }
  }
}

TEST_P(KernelBenchTest, ProductsAreRight) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
    for (const char* routing : {"uniform", "hot_expert:1"}) {  // the last: four empty experts
      const bool uniform = std::string(routing) == "uniform";
      KernelSpec spec = SmallGemm(type);
      spec.router.top_k = uniform ? 3 : 1;
      spec.routing = ParseRouting(routing).value();
      const int n = 37 * spec.router.top_k;
      const auto rows = Measure(spec);
      ASSERT_EQ(rows.size(), 3u);
      for (const KernelRow& row : rows) {
        EXPECT_EQ(row.times.wrong, 0) << row.kernel << " " << moe::NameOf(type) << " " << routing;
        EXPECT_EQ(row.slots, n);
        EXPECT_EQ(row.times.iterations, 3);
        EXPECT_EQ(row.place.threads, on_cpu() ? 2 : 0);
        EXPECT_FALSE(row.times.limit_per_ns <= 0);  // NaN where cuBLAS is missing
        // 2 N H F operations in the median time, by hand.
        EXPECT_DOUBLE_EQ(row.times.work_per_ns, 2.0 * n * 33 * 17 / row.times.time_us.p50 * 1e-3);
      }
      EXPECT_EQ(rows[0].largest_rows, uniform ? 23 : 37);
    }
  }
}

// What SmallSpec's results have: 10 tokens and 20 slots on 4 experts, H 6.
int64_t ElementsOf(const std::string& kernel) {
  if (kernel == "gather forward" || kernel == "scale backward") return 20 * 6;
  if (kernel == "sum backward" || kernel == "combine forward") return 10 * 6;
  if (kernel == "weight_grad backward") return 20;
  if (kernel == "gate backward") return 10 * 4;
  if (kernel == "select forward") return 2 * 20 + 4;
  if (kernel == "plan forward") return 2 * 20 + 5 + 4;
  EXPECT_EQ(kernel, "gate forward");
  return 10 + 2 * 20 + 4;  // offsets, experts and weights, counts
}

TEST_P(KernelBenchTest, APlantedWrongElementIsCounted) {
  for (const KernelOp op : {KernelOp::kPermute, KernelOp::kCombine, KernelOp::kGate}) {
    auto made = op == KernelOp::kGate ? MakeGateCases(SmallSpec(op), *device_)
                                      : MakeRowCases(SmallSpec(op), *device_);
    ASSERT_TRUE(made.ok()) << made.status();
    int planted = 0;
    for (const KernelCase& one : (*made)->cases()) {
      ExpectSpoiledElements(one, ElementsOf(one.kernel + " " + one.pass));
      if (one.result.empty()) continue;  // a gate's selection is const
      Change<float>(one, 12, [](float value) { return value + 0.125f; });
      EXPECT_EQ(one.timed.wrong().value(), 1) << one.kernel;
      Change<float>(one, 12, [](float) { return std::numeric_limits<float>::quiet_NaN(); });
      EXPECT_EQ(one.timed.wrong().value(), 1) << one.kernel;
      ++planted;
    }
    EXPECT_EQ(planted, op == KernelOp::kPermute ? 2 : op == KernelOp::kCombine ? 3 : 1);
  }
}

// The first element of each product is among those that are looked at. The CPU's have the bits of
// one order; of tensor cores two units in the last place of bf16 are more than the order of their
// sums can make, of which the rounding may be half a one. Weight gradients are float32 there.
TEST_P(KernelBenchTest, APlantedWrongElementOfProductsIsCounted) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
    const auto made = MakeGemmCases(SmallGemm(type), *device_).value();
    ASSERT_EQ(made->cases().size(), 3u);
    for (const KernelCase& one : made->cases()) {
      ExpectSpoiledElements(one, 97);  // every sample
      const size_t upper_half = !on_cpu() && one.kernel == "weight_grad" ? 2 : 0;
      Change<uint16_t>(one, upper_half, [](uint16_t bits) {
        return static_cast<uint16_t>(on_cpu() ? bits ^ 1 : bits + 2);
      });
      EXPECT_EQ(one.timed.wrong().value(), 1) << one.kernel << " " << moe::NameOf(type);
    }
  }
}

TEST_P(KernelBenchTest, ReplaysATrace) {
  RoutingTrace trace{.header = {.ranks = 2, .num_experts = 3, .top_k = 2}, .records = {}};
  trace.records.push_back({.tokens = {4, 2}, .slots = {4, 3, 1, 2, 0, 2}});
  trace.records.push_back({.step = 1, .tokens = {0, 5}, .slots = {0, 0, 0, 2, 0, 0}});
  for (const KernelOp op : {KernelOp::kPermute, KernelOp::kCombine}) {
    KernelSpec spec = SmallSpec(op);
    spec.tokens = 6;
    spec.router.num_experts = 3;
    spec.routing = ParseRouting("trace:file").value();
    spec.routing.replay = std::make_shared<const Replay>(Replay::Create(trace, 1).value());
    const auto rows = Measure(spec);
    for (const KernelRow& row : rows) {
      EXPECT_EQ(row.times.wrong, 0) << row.kernel;
      EXPECT_EQ(row.slots, 12);
      EXPECT_EQ(row.largest_rows, 6);
    }
    if (op == KernelOp::kCombine) continue;
    // Calls 1, 0, 1 after the warm-up's 0: (6 + 12) and twice (2 + 2) rows, 12 and 2 indices.
    EXPECT_EQ(rows[0].bytes, ((18 + 2 * 4) * 24 + (12 + 2 * 2) * 4) / 3);
  }
}

TEST_P(KernelBenchTest, RoutingsOfRanksAndOtherTypesAreRefused) {
  for (const KernelOp op : {KernelOp::kPermute, KernelOp::kGate, KernelOp::kGemm}) {
    EXPECT_EQ(Refusal(SmallSpec(op, DType::kInt64)), absl::StatusCode::kInvalidArgument);
    for (const char* text : {"hot_rank:0.5", "ragged", "zero_rank"}) {
      KernelSpec spec = SmallSpec(op);
      spec.routing = ParseRouting(text).value();
      EXPECT_EQ(Refusal(spec), absl::StatusCode::kInvalidArgument) << text;
    }
  }
  KernelSpec twice = SmallGemm();
  twice.router.top_k = 6;
  EXPECT_EQ(Refusal(twice), absl::StatusCode::kInvalidArgument);
  if (on_cpu()) return;
  EXPECT_EQ(Refusal(SmallGate("sinkhorn")), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(Refusal(SmallGate("deepseek-v3", DType::kBFloat16)),
            absl::StatusCode::kInvalidArgument);
  KernelSpec many = SmallGate("mixtral", DType::kBFloat16);
  many.router.num_experts = 1025;
  EXPECT_EQ(Refusal(many), absl::StatusCode::kInvalidArgument);
}

TEST_P(KernelBenchTest, ChecksOfLargeResultsFollowOneAnother) {
  const auto range = [&](int64_t call, int64_t rows, int64_t row_bytes) {
    const RowStretch stretch = CheckedRows(*device_, call, rows, row_bytes);
    return std::pair(stretch.begin, stretch.end);
  };
  using Range = std::pair<int64_t, int64_t>;
  constexpr int64_t kMiB = 1 << 20;
  EXPECT_EQ(range(5, 32, kMiB), Range(0, 32));  // all
  EXPECT_EQ(range(0, 0, kMiB), Range(0, 0));
  EXPECT_EQ(range(1, 70, kMiB), on_cpu() ? Range(0, 70) : Range(32, 64));
  if (on_cpu()) return;
  EXPECT_EQ(range(0, 70, kMiB), Range(0, 32));
  EXPECT_EQ(range(2, 70, kMiB), Range(64, 70));
  EXPECT_EQ(range(3, 70, kMiB), Range(0, 32));
  EXPECT_EQ(range(1, 3, 100 * kMiB), Range(1, 2));
}

TEST_P(KernelBenchTest, ACollectiveCountsWhatItDidNotWrite) {
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

// Gradients of experts that were not chosen are small where there are many.
TEST(GateKernelsTest, AWrongGradientOfAnExpertThatWasNotChosenIsCounted) {
  KernelSpec spec = SmallSpec(KernelOp::kGate);
  spec.tokens = 3;
  spec.router = {.gate = "qwen2", .num_experts = 4096, .top_k = 2};
  const auto device = KernelDevice::Create({}, ThreadPool::Serial()).value();
  const auto made = MakeGateCases(spec, *device).value();
  const KernelCase& backward = made->cases()[1];
  ASSERT_TRUE(backward.timed.prepare(0).ok());
  ASSERT_TRUE(backward.timed.run().ok());
  ASSERT_EQ(backward.timed.wrong().value(), 0);
  auto* const gradient = reinterpret_cast<float*>(backward.result.data());
  for (const int e : {0, 1, 2, 4095}) {
    const float right = gradient[e];
    ASSERT_LT(std::abs(right), 1e-2f);
    for (const float wrong : {0.0f, -right, right * 1.01f}) {
      gradient[e] = wrong;
      EXPECT_EQ(backward.timed.wrong().value(), 1) << e << ": " << wrong << " for " << right;
    }
    gradient[e] = right;
  }
}

// Right the first time alone.
TEST(TimeKernelTest, AKernelThatStopsWritingIsSeen) {
  float result = 0;
  int64_t runs = 0;
  const auto run = [&] {
    if (++runs == 1) result = 1;
    return absl::OkStatus();
  };
  const auto spoil = [&] {
    result = std::numeric_limits<float>::quiet_NaN();
    return absl::OkStatus();
  };
  const TimedKernel kernel{.prepare = [](int64_t) { return 1.0; },
                           .run = run,
                           .wrong = [&] { return int64_t{result == 1 ? 0 : 1}; },
                           .spoil = spoil};
  const auto limit = [](double) {
    return 1.0;
  };
  const auto device = KernelDevice::Create({}, ThreadPool::Serial()).value();
  const auto times = TimeKernel(kernel, limit, kShort, *device).value();
  EXPECT_EQ(times.wrong, 3);  // the call before them was right
}

TEST(TimeKernelTest, WrongResultsOfTimedCallsAddUp) {
  int64_t runs = 0;
  const auto run = [&] {
    ++runs;
    return absl::OkStatus();
  };
  const auto wrong = [] {
    return int64_t{2};
  };
  const TimedKernel kernel{.prepare = [](int64_t) { return 100.0; }, .run = run, .wrong = wrong};
  // The second of three is of a machine that others keep busy.
  const auto limit = [measured = 0](double) mutable {
    return ++measured % 3 == 2 ? 0.5 : 5.0;
  };
  const auto device = KernelDevice::Create({}, ThreadPool::Serial()).value();
  const auto times = TimeKernel(kernel, limit, kShort, *device).value();
  EXPECT_EQ(runs, 4);  // one call before the three
  EXPECT_EQ(times.wrong, 6);
  EXPECT_EQ(times.limit_per_ns, 5);
  EXPECT_DOUBLE_EQ(times.limit_pct, 100 * times.work_per_ns / 5);
  EXPECT_EQ(times.mean_work, 100);
  MeasureOptions unchecked = kShort;
  unchecked.check = Check::kNo;
  EXPECT_EQ(TimeKernel(kernel, limit, unchecked, *device)->wrong, -1);
  const auto unlimited = TimeKernel(kernel, nullptr, kShort, *device);
  EXPECT_TRUE(std::isnan(unlimited->limit_per_ns) && std::isnan(unlimited->limit_pct));
}

TEST(ExpertRowsTest, UniformIsEvenAndNoExpertHasATokenTwice) {
  // Token t goes to t, t + 1 and t + 2 mod 5; of 37 tokens 8, 8, 7, 7, 7 have t mod 5 = 0 .. 4.
  EXPECT_THAT(ExpertRows(SmallGemm(), 0).value(), ElementsAre(22, 23, 23, 22, 21));
  KernelSpec hot = SmallGemm();
  hot.routing = ParseRouting("hot_expert:1").value();
  EXPECT_EQ(ExpertRows(hot, 0).value()[0], 37);  // every token, once
}

}  // namespace
}  // namespace moe::bench
