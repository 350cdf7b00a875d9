// StreamTimer: the time of the work between two points, on every device.
#include "kernels/base/stream_timer.h"

#include <chrono>
#include <thread>

#include <gtest/gtest.h>

#include "tests/device_memory.h"

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
    for (const int ms : {30, 1}) {  // and again
      ASSERT_TRUE(Sleep(stream, 200).ok());
      ASSERT_TRUE(timer->Start().ok());
      ASSERT_TRUE(Sleep(stream, ms).ok());
      ASSERT_TRUE(timer->Stop().ok());
      ASSERT_TRUE(Sleep(stream, 200).ok());
      const auto ns = timer->ElapsedNs();
      ASSERT_TRUE(ns.ok()) << ns.status();
      // CUDA's clock has a resolution of half a microsecond.
      EXPECT_GE(*ns, ms * 1e6 - 1e3);
      EXPECT_LT(*ns, ms * 1e6 + 150e6);  // a loaded machine; the work around takes more
    }
  }
}

TEST(StreamTimerTest, TellsTheStreamsError) {
  for (const auto& device : testing::TestDevices()) {
    SCOPED_TRACE(device->name());
    const auto timer = MakeStreamTimer(device->stream()).value();
    ASSERT_TRUE(timer->Start().ok());
    device->stream().Enqueue([] { return absl::DataLossError("planted"); }).IgnoreError();
    timer->Stop().IgnoreError();
    device->stream().Synchronize().IgnoreError();
    EXPECT_EQ(timer->Stop().code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(timer->ElapsedNs().status().code(), absl::StatusCode::kDataLoss);
  }
}

}  // namespace
}  // namespace moe
