// kernels/base on CUDA devices, over the fake runtime: streams, events between devices, memory, and
// the texts of errors.
#include <cstdint>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/buffer.h"
#include "kernels/base/cuda_devices.h"
#include "kernels/base/stream.h"
#include "tests/cusim/cusim.h"
#include "tests/cusim/fake_memory.h"
#include "tests/cusim/fake_streams.h"
#include "tests/kernels/device_memory.h"

namespace moe::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr Device kCuda = {DeviceKind::kCuda, 0};

TEST(CudaStreamTest, RunsKernelsCopiesAndHostTasksInOrder) {
  const auto stream = MakeStream(kCuda).value();
  EXPECT_EQ(stream->device().kind, DeviceKind::kCuda);
  std::vector<int> from = {1, 2, 3}, to(3);
  Buffer buffer = Buffer::Allocate(12, **CudaMemory(0)).value();
  const auto data = buffer.span<int>();
  ASSERT_OK(stream->CopyBytes(from.data(), data.data(), 12));
  ASSERT_OK(LaunchOne(*stream, [=] { data[1] += 10; }));
  ASSERT_OK(stream->CopyBytes(data.data(), to.data(), 12));
  EnqueueWork(*stream, [&] { to[2] *= 7; });
  EXPECT_EQ(to, std::vector<int>(3));  // nothing has run
  ASSERT_OK(stream->Synchronize());
  EXPECT_EQ(to, (std::vector<int>{1, 12, 21}));
}

TEST(CudaStreamTest, UploadedArraysMayChangeAtOnce) {
  const auto stream = MakeStream(kCuda).value();
  constexpr int64_t kInts = 1 << 16;  // a quarter of a staging block, so that blocks are left
  constexpr int kUploads = 13;
  constexpr auto kBytes = kInts * static_cast<int64_t>(sizeof(int));
  Buffer buffer = Buffer::Allocate(kUploads * kBytes, **CudaMemory(0)).value();
  std::vector<int> from(kInts);
  for (int i = 0; i < kUploads; ++i) {
    from.assign(kInts, i);
    ASSERT_OK(stream->Upload(from.data(), buffer.data() + i * kBytes, kBytes));
  }
  from.assign(kInts, -1);
  std::vector<int> to(kUploads * kInts, -2);
  ASSERT_OK(stream->CopyBytes(buffer.data(), to.data(), kUploads * kBytes));
  ASSERT_OK(stream->Zero(buffer.data(), kBytes));
  std::vector<int> zeros(kInts, -2);
  ASSERT_OK(stream->CopyBytes(buffer.data(), zeros.data(), kBytes));
  ASSERT_OK(stream->Synchronize());
  for (int i = 0; i < kUploads * kInts; ++i) ASSERT_EQ(to[i], i / kInts) << i;
  EXPECT_EQ(zeros, std::vector<int>(kInts, 0));
}

TEST(CudaStreamTest, FirstErrorSticksAndStopsWhatComesLater) {
  const auto stream = MakeStream(kCuda).value();
  bool ran = false;
  const auto run = [&ran] {
    ran = true;
    return absl::OkStatus();
  };
  ASSERT_OK(stream->Enqueue([] { return absl::InternalError("boom"); }));
  ASSERT_OK(stream->Enqueue(run));
  EXPECT_EQ(stream->Synchronize().message(), "boom");
  EXPECT_EQ(stream->Enqueue(run).message(), "boom");
  EXPECT_EQ(stream->Launch([&](void*) { return run(); }).message(), "boom");
  EXPECT_EQ(stream->Synchronize().message(), "boom");
  EXPECT_FALSE(ran);
}

TEST(CudaStreamTest, ALaunchThatFailsSticks) {
  const auto stream = MakeStream(kCuda).value();
  EXPECT_FALSE(stream->Launch([](void*) { return absl::InternalError("launch"); }).ok());
  EXPECT_EQ(stream->Synchronize().message(), "launch");
}

// The producer's value reaches the consumer, whatever kinds of streams they are. Without the event
// the fake runtime produces another order (fake_cudart_test).
TEST(CudaStreamTest, EventsOrderStreamsOfBothKinds) {
  const Device cpu = {};
  for (const auto& [from, to] : {std::pair(kCuda, kCuda), {kCuda, cpu}, {cpu, kCuda}}) {
    for (uint32_t seed = 1; seed <= 10; ++seed) {
      cusim::SeedStreams(seed);
      const auto a = MakeStream(from).value(), b = MakeStream(to).value();
      int x = 0, y = 0;
      EnqueueWork(*a, [&] { x = 1; });
      ASSERT_OK(b->WaitFor(a->Record().value()));
      EnqueueWork(*b, [&] { y = x; });
      ASSERT_OK(b->Synchronize());
      EXPECT_EQ(y, 1);
    }
  }
}

TEST(CudaStreamTest, OverTheProgramsOwnStreamItsWorkAndTheProgramsTakeTurns) {
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  cudaStream_t own = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking), cudaSuccess);
  int x = 1;
  const auto times_10_plus = [&](int digit) {
    return [&x, digit] {
      x = 10 * x + digit;
    };
  };
  {
    const auto stream = MakeStream(kCuda, nullptr, own).value();
    for (const int digit : {2, 3}) {
      EXPECT_EQ(cusim::LaunchOne(times_10_plus(digit), own), cudaSuccess);
      EXPECT_OK(LaunchOne(*stream, times_10_plus(digit + 5)));
    }
    EnqueueWork(*stream, [&] { x = 10 * x; });
    EXPECT_EQ(x, 1);
  }
  EXPECT_EQ(x, 127380);  // it waited for the work in the stream, and left the stream intact
  EXPECT_EQ(cusim::LaunchOne(times_10_plus(1), own), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(own), cudaSuccess);
  EXPECT_EQ(x, 1273801);

  for (const auto& [device, stream, expected] :
       {std::tuple(Device{DeviceKind::kCuda, 1}, own, "the stream given is of CUDA device 0"),
        {kCuda, cudaStreamLegacy, "one of CUDA's default streams"},
        {kCuda, cudaStreamPerThread, "one of CUDA's default streams"},
        {Device{}, own, "on the CPU"}}) {
    ExpectRefused(MakeStream(device, nullptr, stream).status(), HasSubstr(expected));
  }
  EXPECT_EQ(cudaStreamDestroy(own), cudaSuccess);
}

TEST(CudaStreamTest, AnInlineStreamWaitsForACudaStream) {
  const auto cuda = MakeStream(kCuda).value();
  const auto inline_stream = MakeInlineStream();
  int x = 0;
  ASSERT_OK(LaunchOne(*cuda, [&] { x = 1; }));
  ASSERT_OK(inline_stream->WaitFor(cuda->Record().value()));
  EXPECT_EQ(x, 1);
}

TEST(CudaStreamTest, AKernelThatFailedIsTheStreamsErrorWhereverItIsSeen) {
  const auto cuda = MakeStream(kCuda).value(), cpu = MakeStream({}).value();
  const Event event = cuda->Record().value();
  const cusim::ScopedMachine machine({.work = cudaErrorIllegalAddress});
  ASSERT_OK(cpu->WaitFor(event));
  EXPECT_THAT(Message(cpu->Synchronize()), HasSubstr("cudaErrorIllegalAddress"));
  EXPECT_THAT(Message(cuda->Synchronize()),
              AllOf(HasSubstr("stream of CUDA device 0"), HasSubstr("compute-sanitizer")));
}

TEST(CudaStreamTest, SaysWhatTheMachineLacks) {
  const auto why = [](const cusim::Machine& m, int index = 0) {
    const cusim::ScopedMachine machine(m);
    const auto stream = MakeStream({DeviceKind::kCuda, index});
    EXPECT_EQ(stream.status().code(), absl::StatusCode::kUnimplemented);  // exit code 10
    return Message(stream.status());
  };
  EXPECT_THAT(why({.driver = cudaErrorInsufficientDriver}), HasSubstr("no NVIDIA driver"));
  EXPECT_THAT(why({.devices = 0}), HasSubstr("CUDA_VISIBLE_DEVICES"));
  EXPECT_THAT(why({}, 2), AllOf(HasSubstr("device 2"), HasSubstr("moe doctor")));
  EXPECT_THAT(why({.kernel_image = cudaErrorNoKernelImageForDevice}),
              HasSubstr("CMAKE_CUDA_ARCHITECTURES"));
  EXPECT_OK(MakeStream(kCuda));  // none of them is left over
}

TEST(CudaMemoryTest, IsZeroedAndSaysWhatIsMissing) {
  MemoryResource& memory = **CudaMemory(0);
  const Buffer buffer = Buffer::Allocate(1000, memory).value();
  std::vector<std::byte> host(1000, std::byte{1});
  const auto stream = MakeStream(kCuda).value();
  ASSERT_OK(stream->CopyBytes(buffer.data(), host.data(), 1000));
  ASSERT_OK(stream->Synchronize());
  EXPECT_EQ(host, std::vector<std::byte>(1000));

  const cusim::ScopedMachine machine({.memory_bytes = cusim::UsedDeviceBytes(0) + 64});
  const absl::Status status = Buffer::Allocate(65, memory, "expert weights").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(status),
              HasSubstr("expert weights: CudaMemory(0): 65 bytes wanted, 64 free of"));
  EXPECT_EQ(CudaMemory(0).value(), &memory);
  EXPECT_EQ(CudaMemory(7).status().code(), absl::StatusCode::kUnimplemented);
}

// Memory that was allocated before, and after.
TEST(PeerAccessTest, OpensAllMemoryOfADeviceHoweverOftenItIsAskedFor) {
  const Buffer before = Buffer::Allocate(4, **CudaMemory(0)).value();
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([] {
      for (int times = 0; times < 2; ++times) {
        EXPECT_OK(EnablePeerAccess(1, 0));
        EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);  // else the next launch would report it
        int current = -1;
        EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
        EXPECT_EQ(current, 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_OK(EnablePeerAccess(0, 0));
  const Buffer after = Buffer::Allocate(4, **CudaMemory(0)).value();
  const auto stream = MakeStream({DeviceKind::kCuda, 1}).value();
  for (const Buffer* buffer : {&before, &after}) {
    int value = -1;
    ASSERT_OK(stream->CopyBytes(buffer->data(), &value, 4));
    ASSERT_OK(stream->Synchronize());
    EXPECT_EQ(value, 0);
  }
}

TEST(PeerAccessTest, APairThatTheHardwareDoesNotHaveIsNamed) {
  const cusim::ScopedMachine machine({.no_peers = {{0, 1}}});
  EXPECT_OK(EnablePeerAccess(1, 0));
  const absl::Status status = EnablePeerAccess(0, 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(Message(status), "CUDA device 0 cannot read the memory of CUDA device 1");
  EXPECT_EQ(EnablePeerAccess(0, 7).code(), absl::StatusCode::kUnimplemented);
}

TEST(CudaDevicesTest, DescribesThemAll) {
  const auto devices = CudaDevices();
  ASSERT_OK(devices);
  ASSERT_EQ(devices->size(), 2u);
  EXPECT_EQ((*devices)[1].name, "simulated GPU");
  EXPECT_GT((*devices)[1].memory_bytes, 0);
  EXPECT_OK((*devices)[1].usable);
  const cusim::ScopedMachine machine({.kernel_image = cudaErrorNoKernelImageForDevice});
  EXPECT_FALSE(CudaDevices().value()[0].usable.ok());
}

}  // namespace
}  // namespace moe::testing
