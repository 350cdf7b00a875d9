// The time line of a rank, and how the ranks' time lines become one trace.
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "comm/clock_offset.h"
#include "comm/hosts.h"
#include "moe/run/phase_clock.h"
#include "moe/run/trace_export.h"
#include "tests/comm/local_ranks.h"
#include "tests/counting_new.h"
#include "tests/kernels/device_memory.h"

namespace moe {
namespace {

using Json = nlohmann::json;

class TextSink final : public TraceSink {
 public:
  absl::Status Append(absl::string_view text) override {
    text_.append(text.data(), text.size());
    return absl::OkStatus();
  }
  absl::Status Commit() override {
    ++commits_;
    return absl::OkStatus();
  }
  const std::string& text() const { return text_; }
  int commits() const { return commits_; }

 private:
  std::string text_;
  int commits_ = 0;
};

TEST(TraceRecorderTest, TakesNothingWhenSwitchedOffAndCountsWhatDoesNotFit) {
  TraceRecorder recorder(2);
  EXPECT_EQ(recorder.Open(), nullptr);
  recorder.Switch(true);
  TraceEvent* const first = recorder.Open();
  ASSERT_NE(first, nullptr);
  ASSERT_NE(recorder.Open(), nullptr);
  EXPECT_EQ(recorder.Open(), nullptr);
  EXPECT_EQ(recorder.Open(), nullptr);
  recorder.Switch(false);
  EXPECT_EQ(recorder.Open(), nullptr);
  EXPECT_EQ(recorder.left_out(), 2);
  ASSERT_EQ(recorder.events().size(), 2);
  EXPECT_EQ(&recorder.events()[0], first);  // an event stays where it is
}

TEST(PhaseClockTest, CountsTheSameSecondsAsTheTimeLineAndTakesNoMemory) {
  TraceRecorder recorder(100);
  const auto stream = MakeInlineStream();
  recorder.AddLane("other", nullptr);
  recorder.AddLane("mine", stream.get());
  recorder.Switch(true);
  PhaseClock clock;
  clock.set_recorder(&recorder);
  const Work work = {.phase = Phase::kExpert, .name = "experts", .chunk = 3, .bytes = 11};
  const Work around = {.name = "step"};
  const auto record = [&](const Work& what) {
    TraceEvent* const event = clock.Open(what, {.layer = 2, .round = 7, .step = 5}, *stream);
    EXPECT_TRUE(clock.Start(what.phase, event, *stream).ok());
    EXPECT_TRUE(clock.Stop(what.phase, event, *stream).ok());
  };
  EXPECT_EQ(PeakBytesOf([&] {
              for (int i = 0; i < 49; ++i) {
                record(work);
                record(around);
              }
            }),
            0);
  int64_t total_ns = 0;
  for (const TraceEvent& event : recorder.events()) {
    EXPECT_EQ(event.lane, 1);
    EXPECT_EQ(event.layer, 2);
    EXPECT_EQ(event.call, 7);
    EXPECT_EQ(event.step, 5);
    EXPECT_GT(event.begin_ns, 0);
    EXPECT_GE(event.end_ns, event.begin_ns);
    if (event.chunk == 3) total_ns += event.end_ns - event.begin_ns;
  }
  ASSERT_EQ(recorder.events().size(), 98);
  // 49 sums of doubles, each rounded to 2^-53 of at most the total.
  const double total = static_cast<double>(total_ns) * 1e-9;
  EXPECT_NEAR(clock.seconds(Phase::kExpert), total, 50 * 0x1p-52 * total);
  // What does not fit is timed all the same.
  record(work);
  record(work);
  const double before = clock.seconds(Phase::kExpert);
  while (clock.seconds(Phase::kExpert) == before) record(work);
  EXPECT_GT(recorder.left_out(), 0);
}

// Phases inside each other, with and without an event, on a stream that only tells times later.
TEST(PhaseClockTest, TakesTheTimesOfACudaStreamWhenTheyAreCollected) {
  const auto device = std::move(testing::TestDevices().back());
  Stream& stream = device->stream();
  if (!IsCuda(stream)) GTEST_SKIP() << "no CUDA device";
  TraceRecorder recorder(10);
  recorder.Switch(true);
  PhaseClock clock;
  clock.set_recorder(&recorder);
  TraceEvent* const step = clock.Open({.name = "step"}, {}, stream);
  ASSERT_TRUE(clock.Start(Phase::kNone, step, stream).ok());
  for (const Phase phase : {Phase::kExpert, Phase::kGate, Phase::kExpert}) {
    ASSERT_TRUE(clock.Start(phase, nullptr, stream).ok());
    ASSERT_TRUE(stream
                    .Enqueue([] {
                      std::this_thread::sleep_for(std::chrono::milliseconds(5));
                      return absl::OkStatus();
                    })
                    .ok());
    ASSERT_TRUE(clock.Stop(phase, nullptr, stream).ok());
  }
  ASSERT_TRUE(clock.Stop(Phase::kNone, step, stream).ok());
  ASSERT_TRUE(clock.Collect().ok());
  EXPECT_GE(clock.seconds(Phase::kGate), 0.005 - 2e-6);
  EXPECT_GE(clock.seconds(Phase::kExpert), 0.010 - 4e-6);
  EXPECT_EQ(clock.seconds(Phase::kPlan), 0);
  const double all = static_cast<double>(step->end_ns - step->begin_ns) * 1e-9;
  EXPECT_GE(all, clock.seconds(Phase::kGate) + clock.seconds(Phase::kExpert) - 8e-6);
  ASSERT_TRUE(clock.Reset().ok());
  EXPECT_EQ(clock.seconds(Phase::kGate), 0);
}

// A program that never asks for the times: they are taken in by themselves, around what is open.
TEST(PhaseClockTest, KeepsABoundedNumberOfTimesOfACudaStream) {
  const auto device = std::move(testing::TestDevices().back());
  Stream& stream = device->stream();
  if (!IsCuda(stream)) GTEST_SKIP() << "no CUDA device";
  TraceRecorder recorder(1);
  recorder.Switch(true);
  PhaseClock clock;
  clock.set_recorder(&recorder);
  TraceEvent* const step = clock.Open({.name = "step"}, {}, stream);
  ASSERT_TRUE(clock.Start(Phase::kNone, step, stream).ok());
  for (size_t i = 0; i < PhaseClock::kMostIntervals; ++i) {
    ASSERT_TRUE(clock.Start(Phase::kGate, nullptr, stream).ok());
    ASSERT_TRUE(clock.Stop(Phase::kGate, nullptr, stream).ok());
  }
  const double collected = clock.seconds(Phase::kGate);
  EXPECT_GT(collected, 0);
  ASSERT_TRUE(clock.Stop(Phase::kNone, step, stream).ok());
  ASSERT_TRUE(clock.Collect().ok());
  EXPECT_GE(clock.seconds(Phase::kGate), collected);
  EXPECT_GE(static_cast<double>(step->end_ns - step->begin_ns) * 1e-9, collected - 1e-3);
}

TEST(ClockOffsetTest, RanksOfOneHostShareAClock) {
  testing::RunLocalRanks(3, [](std::unique_ptr<Communicator> world) -> absl::Status {
    const auto stream = MakeInlineStream();
    const auto offset = EstimateClockOffset(HostId(), MonotonicNs, *world, *stream);
    EXPECT_EQ(offset->offset_ns, 0);
    EXPECT_EQ(offset->error_ns, 0);
    return offset.status();
  });
}

TEST(ClockOffsetTest, APingFindsTheSkewOfAnotherHostWithinItsBound) {
  testing::RunLocalRanks(4, [](std::unique_ptr<Communicator> world) -> absl::Status {
    const auto stream = MakeInlineStream();
    const int rank = world->rank();
    const bool far = rank == 1 || rank == 3;
    const int64_t skew_ns = far ? rank * int64_t{1'000'000'000'000} : 0;
    const auto now = [&] {
      return MonotonicNs() + skew_ns;
    };
    const auto offset = EstimateClockOffset(far ? 100 + rank : 7, now, *world, *stream);
    MOE_RETURN_IF_ERROR(offset.status());
    // Rank 0 read its clock between the two stamps of rank r: a bound whatever the machine does,
    // but for the halves that integers lose.
    EXPECT_NEAR(static_cast<double>(offset->offset_ns + skew_ns), 0,
                static_cast<double>(offset->error_ns) + 1);
    EXPECT_EQ(offset->error_ns > 0, far);
    return absl::OkStatus();
  });
}

// Rank r records r + 1 events of 10 (r + 1) ns from 1000 (r + 1) ns on.
absl::StatusOr<int64_t> ExportByHand(TextSink& sink, Communicator& world) {
  const auto stream = MakeInlineStream();
  const int rank = world.rank();
  TraceRecorder recorder(rank + 1);
  recorder.AddLane("compute", stream.get());
  recorder.Switch(true);
  for (int i = 0; i <= rank; ++i) {
    TraceEvent* const event = recorder.Open();
    event->name = "work";
    event->category = "expert";
    event->begin_ns = 1000 * (rank + 1);
    event->end_ns = event->begin_ns + 10 * (rank + 1);
    event->step = i;
    event->bytes = 0;
  }
  if (rank == 1) {
    EXPECT_EQ(recorder.Open(), nullptr);
  }
  return ExportTrace(recorder, rank == 0 ? &sink : nullptr, world, *stream);
}

TEST(ExportTraceTest, EveryRankIsAProcessOfOneDocument) {
  for (const int ranks : {1, 3}) {
    TextSink sink;
    testing::RunLocalRanks(ranks, [&](std::unique_ptr<Communicator> world) -> absl::Status {
      const auto left_out = ExportByHand(sink, *world);
      EXPECT_EQ(*left_out, ranks == 1 ? 0 : 1);
      return left_out.status();
    });
    EXPECT_EQ(sink.commits(), 1);
    const Json trace = Json::parse(sink.text());
    std::vector<int> count(ranks, 0);
    for (const Json& event : trace["traceEvents"]) {
      if (event["ph"] != "X") continue;
      const int rank = event["pid"].get<int>() / 100 - 1;
      EXPECT_EQ(event["tid"], event["pid"]);  // the first lane is the main thread
      EXPECT_EQ(event["ts"], 1.0 * rank);     // from the first event, in us
      EXPECT_EQ(event["dur"], 0.01 * (rank + 1));
      EXPECT_EQ(event["cat"], "expert");
      EXPECT_EQ(event["args"], Json({{"step", count[rank]}, {"bytes", 0}}));
      ++count[rank];
    }
    for (int r = 0; r < ranks; ++r) EXPECT_EQ(count[r], r + 1);
    const Json& other = trace["otherData"];
    EXPECT_EQ(other["schema"], "moe.trace/1");
    EXPECT_EQ(other["left_out"], ranks == 1 ? 0 : 1);
    ASSERT_EQ(other["ranks"].size(), ranks);
    if (ranks == 3) {
      EXPECT_EQ(other["ranks"][1]["left_out"], 1);
    }
  }
}

// A full disk: rank 0 has the sink's own error.
TEST(ExportTraceTest, TheErrorOfTheSinkComesBack) {
  class FullSink final : public TraceSink {
    absl::Status Append(absl::string_view) override { return absl::UnavailableError("full"); }
    absl::Status Commit() override { return absl::OkStatus(); }
  };
  testing::RunLocalRanks(1, [&](std::unique_ptr<Communicator> world) {
    FullSink sink;
    TraceRecorder recorder(1);
    const auto result = ExportTrace(recorder, &sink, *world, *MakeInlineStream());
    EXPECT_EQ(result.status(), absl::UnavailableError("full"));
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace moe
