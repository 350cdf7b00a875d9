// Cases of moe bench on ranks: exact results, planted faults, the same row everywhere.
#include <fstream>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/measure/collectives.h"
#include "tests/comm/comm_env.h"
#include "tests/comm/forwarding_communicator.h"
#include "tests/sanitizers.h"

namespace moe::measure {
namespace {

using ::moe::testing::Env;
using ::moe::testing::ForwardingCommunicator;

// Short: these runs test results, not speed.
constexpr MeasureOptions kShort = {.iterations = 3, .warmup = 1, .budget = absl::ZeroDuration()};

// Types that all operations can sum.
AllReduceAlgorithm OwnAllReduce() {
  return Env().name() == std::string("local") ? AllReduceAlgorithm::kDirect
                                              : AllReduceAlgorithm::kLibrary;
}

class BenchCollectivesTest : public ::moe::testing::CommTest {
 protected:
  // The row that all ranks agreed on; empty in a process without ranks.
  static std::optional<BenchRow> Measure(const CaseSpec& spec,
                                         const MeasureOptions& options = kShort) {
    std::mutex mu;
    std::optional<BenchRow> agreed;
    OnEachRank([&](Communicator& comm, Stream& stream) {
      const auto row = MeasureCollective(spec, options, {}, comm, stream).value();
      double times[2] = {row.time_us, -row.time_us};
      ASSERT_TRUE(comm.AllReduce<double>(absl::MakeSpan(times), ReduceOp::kMax, stream).ok());
      ASSERT_TRUE(stream.Synchronize().ok());
      EXPECT_EQ(times[0], -times[1]) << "ranks disagree";
      const std::lock_guard<std::mutex> lock(mu);
      agreed = row;
    });
    return agreed;
  }
};

TEST_P(BenchCollectivesTest, EveryOperationAndTypeIsRight) {
  for (const Op op : {Op::kAllToAll, Op::kAllToAllV, Op::kAllReduce, Op::kAllGather,
                      Op::kReduceScatter, Op::kMemcpy}) {
    for (const DType type :
         {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kInt32, DType::kInt64}) {
      const bool ring = type == DType::kFloat32 || type == DType::kInt64;
      const CaseSpec spec = {.op = op,
                             .dtype = type,
                             .size_bytes = 4000,
                             .routing = ParseRouting("zipf:1").value(),
                             .all_reduce = ring ? AllReduceAlgorithm::kRing : OwnAllReduce()};
      const auto row = Measure(spec);
      if (!row.has_value()) continue;
      EXPECT_EQ(row->wrong, 0) << NameOf(op) << " " << moe::NameOf(type);
      EXPECT_EQ(row->iterations, 3);
      EXPECT_EQ(row->op, op);
      EXPECT_GT(row->time_us, 0);
      EXPECT_GE(row->samples_us.max, row->time_us);
      EXPECT_GE(row->wait_pct, 0);
      EXPECT_LE(row->wait_pct, 100);
    }
  }
}

// Both forms of nccl-tests: correct results pass, and results that were not written are wrong.
TEST_P(BenchCollectivesTest, BothFormsAreRightAndChecked) {
  std::vector<CaseSpec> specs = {{.op = Op::kMemcpy},
                                 {.op = Op::kAllReduce},
                                 {.op = Op::kAllReduce, .all_reduce = OwnAllReduce()},
                                 {.op = Op::kAllGather},
                                 {.op = Op::kReduceScatter},
                                 {.op = Op::kPointToPoint, .destination = ranks() - 1}};
  for (const Op op : {Op::kAllToAll, Op::kAllToAllV}) {
    for (const auto dispatch : {DispatchAlgorithm::kStaged, DispatchAlgorithm::kDirect,
                                DispatchAlgorithm::kHierarchical}) {
      specs.push_back({.op = op,
                       .routing = ParseRouting("hot_rank:0.7").value(),
                       .dispatch = dispatch,
                       .node_size = 1});
    }
  }
  OnEachRank([&](Communicator& comm, Stream& stream) {
    for (CaseSpec& spec : std::vector<CaseSpec>(specs)) {
      spec.size_bytes = 400 * comm.size();
      for (const Form form : {Form::kOwn, Form::kOther}) {
        spec.form = form;
        const auto timed = CollectiveCase::Create(spec, comm, stream).value();
        for (int i = 0; i < 2; ++i) {
          ASSERT_TRUE(timed->Prepare().ok());
          if (comm.size() > 1 && spec.op != Op::kPointToPoint) {
            EXPECT_GT(timed->CountWrong().value(), 0) << NameOf(spec.op);
          }
          ASSERT_TRUE(comm.Barrier().ok());
          ASSERT_TRUE(timed->Call().ok());
          EXPECT_EQ(timed->CountWrong().value(), 0) << NameOf(spec.op);
        }
      }
    }
  });
}

TEST_P(BenchCollectivesTest, EveryRoutingAndDispatchIsRight) {
  for (const char* routing :
       {"uniform", "zipf:1.2", "hot_expert:0.3", "hot_rank:1", "ragged", "zero_rank"}) {
    for (const DispatchAlgorithm dispatch : {DispatchAlgorithm::kStaged, DispatchAlgorithm::kDirect,
                                             DispatchAlgorithm::kHierarchical}) {
      const CaseSpec spec = {.op = Op::kAllToAllV,
                             .dtype = DType::kBFloat16,
                             .size_bytes = 999,
                             .routing = ParseRouting(routing).value(),
                             .seed = 3,
                             .dispatch = dispatch,
                             .node_size = ranks() % 2 == 0 ? 2 : 1};
      const auto row = Measure(spec);
      if (!row.has_value()) continue;
      EXPECT_EQ(row->wrong, 0) << routing << " " << row->algorithm;
      EXPECT_EQ(row->routing, routing);
      EXPECT_EQ(row->hosts, ranks() % 2 == 0 ? ranks() / 2 : ranks());
    }
  }
}

TEST_P(BenchCollectivesTest, SizesAndBytesFollowTheirDefinitions) {
  const int64_t n = ranks();
  const auto even = Measure({.op = Op::kAllToAll, .size_bytes = 4 * n * 10});
  const auto tiny = Measure({.op = Op::kAllGather, .size_bytes = 1});
  const auto hot = Measure(
      {.op = Op::kAllToAllV, .size_bytes = 4000, .routing = ParseRouting("hot_rank:1").value()});
  const auto ring = Measure({.op = Op::kAllReduce, .size_bytes = 400 * n});
  if (!even.has_value()) return;
  EXPECT_EQ(even->size_bytes, 4 * n * 10);
  EXPECT_EQ(even->count, 10);
  EXPECT_EQ(even->bytes_self, n * 40);
  EXPECT_EQ(even->bytes_same_host, n * (n - 1) * 40);
  EXPECT_EQ(even->bytes_cross_host, 0);
  EXPECT_EQ(even->imbalance_sent, 1);
  EXPECT_EQ(tiny->size_bytes, 4 * n);    // one element of each
  EXPECT_EQ(hot->size_bytes, 4000 * n);  // what the hot rank receives
  EXPECT_EQ(hot->imbalance_received, static_cast<double>(n));
  EXPECT_EQ(ring->bytes_self + ring->bytes_same_host, 2 * (n - 1) * 400 * n);
  EXPECT_TRUE(ring->in_place);
}

// The memcpy limit of a call copies on each rank the bytes of that rank.
TEST_P(BenchCollectivesTest, TheLimitCopiesWhatTheRankMoves) {
  OnEachRank([&](Communicator& comm, Stream& stream) {
    const int64_t size = 400 * comm.size();
    const auto copied = [&](const CaseSpec& spec) {
      return CollectiveCase::Create(spec, comm, stream).value()->CopiedBytes();
    };
    EXPECT_EQ(copied({.op = Op::kAllToAll, .size_bytes = size}), size);
    EXPECT_EQ(copied({.op = Op::kAllToAllV,
                      .size_bytes = size,
                      .routing = ParseRouting("hot_rank:1").value()}),
              comm.rank() == 0 ? size * comm.size() : 0);
    EXPECT_EQ(copied({.op = Op::kAllGather, .size_bytes = size}), size);
    EXPECT_EQ(copied({.op = Op::kReduceScatter, .size_bytes = size}), (size + 400) / 8 * 4);
    EXPECT_EQ(copied({.op = Op::kAllReduce, .size_bytes = size}), size);
  });
}

// KiB of this process: "VmRSS:", or "VmHWM:", the maximum since clear_refs was written.
int64_t Kibibytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  int64_t kib = 0;
  for (std::string word; status >> word;) {
    if (word == key) status >> kib;
  }
  return kib;
}

// Memory for sent, received and expected data. With threads: a process of MPI also has its
// library's buffers.
TEST_P(BenchCollectivesTest, MemoryIsAtMostThreeTimesTheSize) {
  if (::moe::testing::kSanitized || ranks() != 2 || Env().name() != std::string("local")) return;
  // malloc returns what is larger than 32 MiB to the system
  constexpr int64_t kSize = int64_t{34} << 20;
  constexpr int64_t kRest = int64_t{8} << 10;  // stacks, pages of code, the ring's chunks
  for (const Form form : {Form::kOwn, Form::kOther}) {
    for (CaseSpec spec : {CaseSpec{.op = Op::kAllToAll}, CaseSpec{.op = Op::kAllReduce},
                          CaseSpec{.op = Op::kAllToAll, .dispatch = DispatchAlgorithm::kDirect},
                          CaseSpec{.op = Op::kAllGather}, CaseSpec{.op = Op::kReduceScatter}}) {
      spec.form = form;
      spec.size_bytes = kSize;
      std::ofstream("/proc/self/clear_refs") << "5";
      const int64_t before = Kibibytes("VmRSS:");
      if (Kibibytes("VmHWM:") > before + kRest) GTEST_SKIP() << "the peak cannot be set back";
      const auto row =
          Measure(spec, {.iterations = 1, .warmup = 0, .budget = absl::ZeroDuration()});
      EXPECT_EQ(row->wrong, 0);
      EXPECT_LE(Kibibytes("VmHWM:") - before,
                static_cast<int64_t>(MemoryOf(spec, ranks())) / 1024 + kRest)
          << NameOf(spec.op) << " " << row->algorithm;
    }
  }
}

TEST_P(BenchCollectivesTest, PairsAreAllMeasured) {
  OnEachRank([&](Communicator& comm, Stream& stream) {
    const auto rows =
        MeasureRows({.op = Op::kPointToPoint, .size_bytes = 400}, kShort, {}, comm, stream).value();
    ASSERT_EQ(rows.size(), static_cast<size_t>(ranks()) * ranks());
    for (int i = 0; i < ranks() * ranks(); ++i) {
      const BenchRow& row = rows[i];
      EXPECT_EQ(row.source, i / ranks());
      EXPECT_EQ(row.destination, i % ranks());
      EXPECT_EQ(row.wrong, 0);
      EXPECT_GT(row.busbw(), 0);
      EXPECT_TRUE(row.slow_rank == -1 || row.slow_rank == row.source ||
                  row.slow_rank == row.destination);
      EXPECT_GT(row.memcpy_pct(), 0);
    }
  });
}

// Once armed, flips the lowest bit of the first byte that `victim` receives in every collective of
// that kind.
class FaultCommunicator final : public ForwardingCommunicator {
 public:
  FaultCommunicator(Communicator& inner, int victim)
      : ForwardingCommunicator(inner), victim_(victim) {}
  void Arm(CollectiveKind kind) { armed_ = kind; }

 private:
  absl::Status DoCollective(CollectiveCall call, Stream& stream) override {
    const absl::Span<std::byte> received = call.recv;
    const bool flips = call.kind == armed_ && rank() == victim_ && !received.empty() &&
                       (!call.reduces() || call.type == DType::kFloat32);
    MOE_RETURN_IF_ERROR(ForwardingCommunicator::DoCollective(std::move(call), stream));
    if (!flips) return absl::OkStatus();
    return stream.Enqueue([received] {
      received[0] ^= std::byte{1};
      return absl::OkStatus();
    });
  }

  const int victim_;
  std::optional<CollectiveKind> armed_;
};

TEST_P(BenchCollectivesTest, APlantedWrongElementIsCountedInEveryCall) {
  using Kind = CollectiveKind;
  const std::pair<Op, Kind> kPlanted[] = {{Op::kAllToAll, Kind::kAllToAllV},
                                          {Op::kAllToAllV, Kind::kAllToAllV},
                                          {Op::kAllGather, Kind::kAllGather},
                                          {Op::kReduceScatter, Kind::kReduceScatter},
                                          {Op::kAllReduce, Kind::kAllReduce}};
  for (const auto& [op, kind] : kPlanted) {
    OnEachRank([&, op = op, kind = kind](Communicator& comm, Stream& stream) {
      FaultCommunicator faulty(comm, comm.size() - 1);
      const CaseSpec spec = {
          .op = op, .size_bytes = 64 * comm.size(), .all_reduce = OwnAllReduce()};
      int64_t wrong = 0;
      const auto timed = CollectiveCase::Create(spec, faulty, stream).value();
      faulty.Arm(kind);
      for (int i = 0; i < 3; ++i) {
        ASSERT_TRUE(timed->Prepare().ok());
        ASSERT_TRUE(timed->Call().ok());
        wrong += timed->CountWrong().value();
      }
      EXPECT_EQ(wrong, comm.rank() == comm.size() - 1 ? 3 : 0) << NameOf(op);
    });
  }
}

TEST_P(BenchCollectivesTest, WrongElementsOfOneRankReachTheRowOfAll) {
  OnEachRank([&](Communicator& comm, Stream& stream) {
    FaultCommunicator faulty(comm, comm.size() - 1);
    faulty.Arm(CollectiveKind::kAllToAllV);
    const auto row =
        MeasureCollective({.op = Op::kAllToAllV, .size_bytes = 4096}, kShort, {}, faulty, stream)
            .value();
    EXPECT_EQ(row.wrong, 3);  // one for each timed call
    EXPECT_STREQ(row.status(), "wrong");
  });
}

TEST_P(BenchCollectivesTest, RefusesWhatACollectiveDoesNotHave) {
  OnEachRank([&](Communicator& comm, Stream& stream) {
    for (const CaseSpec& spec : {CaseSpec{.op = Op::kAllToAll, .dtype = DType::kUInt8},
                                 CaseSpec{.op = Op::kAllReduce, .dtype = DType::kBFloat16},
                                 CaseSpec{.op = Op::kAllToAll,
                                 .dispatch = DispatchAlgorithm::kHierarchical,
                                 .node_size = comm.size() + 1}}) {
      EXPECT_TRUE(absl::IsInvalidArgument(CollectiveCase::Create(spec, comm, stream).status()));
    }
  });
}

TEST_P(BenchCollectivesTest, IterationsGrowUntilTheTimeIsUp) {
  // No noise is low enough (two calls may take the same nanoseconds: no noise at all), so time
  // decides: the budget is far above the first batch.
  const MeasureOptions options = {
      .iterations = 2, .warmup = 0, .max_noise_pct = -1, .budget = absl::Milliseconds(200)};
  const CaseSpec spec = {.op = Op::kMemcpy, .size_bytes = 1 << 10};
  const auto long_one = Measure(spec, options);
  // Any noise is low enough here.
  const auto short_one = Measure(spec, {.iterations = 2, .warmup = 0, .max_noise_pct = 1e9});
  if (!long_one.has_value()) return;
  EXPECT_GT(long_one->iterations, 2);
  EXPECT_EQ(short_one->iterations, 2);
}

INSTANTIATE_TEST_SUITE_P(Ranks, BenchCollectivesTest, ::moe::testing::EveryCommTestParam(),
                         ::moe::testing::CommTestName);

}  // namespace
}  // namespace moe::measure
