// moe bench gate, permute, combine: bytes by hand, right results, and planted faults that are
// counted.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/cli/bench/kernel_bench.h"

namespace moe::bench {
namespace {

constexpr MeasureOptions kShort = {.iterations = 3, .warmup = 1, .budget = absl::ZeroDuration()};

KernelSpec SmallSpec(KernelOp op) {
  return {.op = op, .tokens = 10, .hidden = 6, .router = {.num_experts = 4, .top_k = 2}};
}

std::vector<KernelRow> Measure(const KernelSpec& spec, int threads = 2) {
  ThreadPool pool(threads);
  const auto device = KernelDevice::Create({}, pool).value();
  auto rows = MeasureKernels(spec, kShort, *device);
  EXPECT_TRUE(rows.ok()) << rows.status();
  return rows.ok() ? *std::move(rows) : std::vector<KernelRow>();
}

TEST(KernelBenchTest, CountsTheBytesThatMustMove) {
  // T = 10, N = S = 20, H = 6.
  const auto bytes = [](const KernelSpec& spec) {
    std::vector<int64_t> found;
    for (const KernelRow& row : Measure(spec)) found.push_back(row.bytes);
    return found;
  };
  KernelSpec permute = SmallSpec(KernelOp::kPermute);
  EXPECT_THAT(bytes(permute), testing::ElementsAre(30 * 24 + 80, 30 * 24 + 80 + 88));
  KernelSpec combine = SmallSpec(KernelOp::kCombine);
  EXPECT_THAT(bytes(combine),
              testing::ElementsAre(30 * 24 + 160 + 88, 30 * 24 + 160, 30 * 24 + 160 + 88));
  combine.dtype = DType::kBFloat16;
  EXPECT_THAT(bytes(combine),
              testing::ElementsAre(30 * 12 + 160 + 88, 30 * 12 + 160, 30 * 12 + 160 + 88));
  // Logits and scores [10, 4], ids and weights [20], 11 offsets, 10 log-sum-exps, 4 counts.
  EXPECT_THAT(bytes(SmallSpec(KernelOp::kGate)),
              testing::ElementsAre(160 + 160 + 160 + 88 + 40 + 32, 160 + 160 + 180 + 88));
}

TEST(KernelBenchTest, EveryKernelIsRight) {
  for (const KernelOp op : {KernelOp::kPermute, KernelOp::kCombine}) {
    for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
      for (const char* routing : {"uniform", "zipf:1.2", "hot_expert:1"}) {
        for (const int k : {1, 3}) {
          KernelSpec spec = SmallSpec(op);
          spec.dtype = type;
          spec.tokens = 133;
          spec.hidden = 37;
          spec.router.top_k = k;
          spec.routing = ParseRouting(routing).value();
          for (const KernelRow& row : Measure(spec)) {
            EXPECT_EQ(row.times.wrong, 0) << row.kernel << moe::NameOf(type) << routing << k;
            EXPECT_EQ(row.times.iterations, 3);
            EXPECT_EQ(row.slots, 133 * k);
            EXPECT_GT(row.times.limit_per_ns, 0);
            // Bytes over the median time, in GB/s.
            EXPECT_DOUBLE_EQ(row.times.work_per_ns,
                             static_cast<double>(row.bytes) / row.times.time_us.p50 * 1e-3);
          }
        }
      }
    }
  }
}

TEST(KernelBenchTest, GatesAreRight) {
  for (const char* gate : {"mixtral", "qwen2", "qwen3", "olmoe", "gpt-oss", "switch"}) {
    for (const char* routing : {"uniform", "zipf:1.2", "hot_expert:1"}) {
      KernelSpec spec = SmallSpec(KernelOp::kGate);
      spec.tokens = 400;
      spec.router = {
          .gate = gate, .num_experts = 24, .top_k = std::string(gate) == "switch" ? 1 : 3};
      spec.routing = ParseRouting(routing).value();
      const auto rows = Measure(spec);
      ASSERT_EQ(rows.size(), 2u);
      for (const KernelRow& row : rows) EXPECT_EQ(row.times.wrong, 0) << gate << " " << row.pass;
    }
  }
}

TEST(KernelBenchTest, GatesWithARuleOfTheirOwnAreTimedAndNotChecked) {
  for (const char* gate :
       {"deepseek-v3", "sinkhorn", "noisy-topk", "expert-choice", "gshard", "sparsemixer"}) {
    KernelSpec spec = SmallSpec(KernelOp::kGate);
    spec.router.gate = gate;
    if (std::string(gate) == "expert-choice") spec.router.capacity_factor = 1;
    for (const KernelRow& row : Measure(spec)) {
      EXPECT_EQ(row.times.wrong, -1) << gate;
      EXPECT_GT(row.times.work_per_ns, 0) << gate;
      EXPECT_EQ(Find(KernelFields(row), "nwrong")->text(), "");
    }
  }
}

// What SmallSpec's results have: 10 tokens and 20 slots on 4 experts, H 6.
int64_t ElementsOf(const std::string& kernel) {
  if (kernel == "gather forward" || kernel == "scale backward") return 20 * 6;
  if (kernel == "sum backward" || kernel == "combine forward") return 10 * 6;
  if (kernel == "weight_grad backward") return 20;
  if (kernel == "gate backward") return 10 * 4;
  EXPECT_EQ(kernel, "gate forward");
  return 10 + 2 * 20 + 4;  // offsets, experts and weights, counts
}

// Runs each kernel, makes all of its result wrong, then changes one element.
TEST(KernelBenchTest, APlantedWrongElementIsCounted) {
  for (const KernelOp op : {KernelOp::kPermute, KernelOp::kCombine, KernelOp::kGate}) {
    const KernelSpec spec = SmallSpec(op);
    const auto device = KernelDevice::Create({}, ThreadPool::Serial()).value();
    auto made = op == KernelOp::kGate ? MakeGateCases(spec, *device) : MakeRowCases(spec, *device);
    ASSERT_TRUE(made.ok()) << made.status();
    int planted = 0;
    for (const KernelCase& one : (*made)->cases()) {
      ASSERT_TRUE(one.timed.prepare(0).ok());
      ASSERT_TRUE(one.timed.run().ok());
      EXPECT_EQ(one.timed.wrong().value(), 0) << one.kernel;
      ASSERT_TRUE(one.timed.spoil().ok());
      EXPECT_EQ(one.timed.wrong().value(), ElementsOf(one.kernel + " " + one.pass));
      ASSERT_TRUE(one.timed.run().ok());
      EXPECT_EQ(one.timed.wrong().value(), 0) << one.kernel;
      if (one.result.empty()) continue;  // a gate's selection is const
      float value = 0;
      std::memcpy(&value, one.result.data() + 12, sizeof(value));
      value += 0.125f;
      std::memcpy(one.result.data() + 12, &value, sizeof(value));
      EXPECT_EQ(one.timed.wrong().value(), 1) << one.kernel;
      value = std::numeric_limits<float>::quiet_NaN();
      std::memcpy(one.result.data() + 12, &value, sizeof(value));
      EXPECT_EQ(one.timed.wrong().value(), 1) << one.kernel;
      ++planted;
      ASSERT_TRUE(one.timed.run().ok());
      EXPECT_EQ(one.timed.wrong().value(), 0) << one.kernel;
    }
    EXPECT_EQ(planted, op == KernelOp::kPermute ? 2 : op == KernelOp::kCombine ? 3 : 1);
  }
}

// Gradients of experts that were not chosen are small where there are many.
TEST(KernelBenchTest, AWrongGradientOfAnExpertThatWasNotChosenIsCounted) {
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
TEST(KernelBenchTest, AKernelThatStopsWritingIsSeen) {
  float result = 0;
  int64_t runs = 0;
  const TimedKernel kernel{.prepare = [](int64_t) { return 1.0; },
                           .run =
                               [&] {
                                 if (++runs == 1) result = 1;
                                 return absl::OkStatus();
                               },
                           .wrong = [&] { return int64_t{result == 1 ? 0 : 1}; },
                           .spoil =
                               [&] {
                                 result = std::numeric_limits<float>::quiet_NaN();
                                 return absl::OkStatus();
                               }};
  const auto limit = [](double) {
    return 1.0;
  };
  const auto device = KernelDevice::Create({}, ThreadPool::Serial()).value();
  const auto times = TimeKernel(kernel, limit, kShort, *device).value();
  EXPECT_EQ(times.wrong, 3);  // the call before them was right
}

TEST(KernelBenchTest, WrongResultsOfTimedCallsAddUp) {
  int64_t runs = 0;
  const TimedKernel kernel{.prepare = [](int64_t) { return 100.0; },
                           .run =
                               [&] {
                                 ++runs;
                                 return absl::OkStatus();
                               },
                           .wrong =
                               [] {
                                 return int64_t{2};
                               }};
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

TEST(KernelBenchTest, ReplaysATrace) {
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

TEST(KernelBenchTest, RoutingsOfRanksAndOtherTypesAreRefused) {
  const auto device = KernelDevice::Create({}, ThreadPool::Serial()).value();
  for (const KernelOp op : {KernelOp::kPermute, KernelOp::kGate}) {
    KernelSpec ragged = SmallSpec(op);
    ragged.routing = ParseRouting("ragged").value();
    KernelSpec whole = SmallSpec(op);
    whole.dtype = DType::kInt64;
    for (const KernelSpec& spec : {ragged, whole}) {
      EXPECT_EQ(MeasureKernels(spec, kShort, *device).status().code(),
                absl::StatusCode::kInvalidArgument);
    }
  }
}

}  // namespace
}  // namespace moe::bench
