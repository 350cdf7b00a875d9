// StreamTimer: the time of the work between two points, on every device.
#include "kernels/base/stream_timer.h"

#include <chrono>
#include <thread>

#include <gtest/gtest.h>

#include "kernels/base/stream_stamps.h"
#include "kernels/base/trace.h"
#include "tests/kernels/device_memory.h"

namespace moe {
namespace {

absl::Status Sleep(Stream& stream, int ms) {
  return stream.Enqueue([ms] {
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
    return absl::OkStatus();
  });
}

TEST(StreamTimerTest, TimesTheWorkBetweenItsPointsAlone) {
  for (const auto& device : testing::TestDevices()) {
    SCOPED_TRACE(device->name());
    Stream& stream = device->stream();
    const auto timer = MakeStreamTimer(stream).value();
    for (const int ms : {30, 1}) {  // the second round reuses the timer
      ASSERT_OK(Sleep(stream, 200));
      ASSERT_OK(timer->Start());
      ASSERT_OK(Sleep(stream, ms));
      ASSERT_OK(timer->Stop());
      ASSERT_OK(Sleep(stream, 200));
      const auto ns = timer->ElapsedNs().value();
      // CUDA's clock has a resolution of half a microsecond.
      EXPECT_GE(ns, ms * 1e6 - 1e3);
      EXPECT_LT(ns, ms * 1e6 + 150e6);  // a loaded machine; the work around takes more
    }
  }
}

TEST(StreamTimerTest, TellsTheStreamsError) {
  for (const auto& device : testing::TestDevices()) {
    SCOPED_TRACE(device->name());
    const auto timer = MakeStreamTimer(device->stream()).value();
    ASSERT_OK(timer->Start());
    device->stream().Enqueue([] { return absl::DataLossError("planted"); }).IgnoreError();
    timer->Stop().IgnoreError();
    device->stream().Synchronize().IgnoreError();
    EXPECT_EQ(timer->Stop().code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(timer->ElapsedNs().status().code(), absl::StatusCode::kDataLoss);
  }
}

TEST(StreamStampsTest, TellsWhenTheStreamCameToItsPoints) {
  const auto device = std::move(testing::TestDevices().back());
  Stream& stream = device->stream();
  if (!IsCuda(stream)) GTEST_SKIP() << "no CUDA device";
  const auto stamps = MakeStreamStamps(stream).value();
  for (int round = 0; round < 2; ++round) {  // events are reused
    int64_t before = 0, between = 0, after = 0;
    const int64_t start = MonotonicNs();
    ASSERT_OK(stamps->Mark(&before));
    ASSERT_OK(Sleep(stream, 30));
    ASSERT_OK(stamps->Mark(&between));
    ASSERT_OK(stamps->Mark(&after));
    EXPECT_EQ(after, 0);  // not written yet
    ASSERT_OK(stamps->Collect());
    const int64_t end = MonotonicNs();
    // The clocks are aligned once a round: their difference is at most the time that this took on a
    // loaded machine.
    constexpr int64_t kClocks = 20'000'000;
    EXPECT_GE(before, start - kClocks);
    EXPECT_GE(between - before, 30'000'000 - 1000);
    EXPECT_GE(after, between);
    EXPECT_LE(after, end + kClocks);
  }
  EXPECT_OK(stamps->Collect());  // nothing to collect
}

}  // namespace
}  // namespace moe
