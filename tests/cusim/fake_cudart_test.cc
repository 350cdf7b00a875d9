// The fake CUDA runtime of tests/cusim: the orders in which it runs streams, and the misuse that it
// finds.
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <cuda_runtime_api.h>

#include "tests/cusim/cub.h"
#include "tests/cusim/cusim.h"
#include "tests/cusim/fake_memory.h"
#include "tests/cusim/fake_streams.h"

namespace {

constexpr int kSeeds = 20;

class FakeCudart : public ::testing::Test {
 protected:
  void SetUp() override {
    ::testing::FLAGS_gtest_death_test_style = "threadsafe";
    for (cudaStream_t& stream : stream_) {
      ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    }
    for (cudaEvent_t& event : event_) {
      ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
    }
  }
  void TearDown() override {
    for (cudaStream_t stream : stream_) EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    for (cudaEvent_t event : event_) EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  }

  // A kernel that appends `letter` to order_.
  void Launch(int stream, char letter) {
    ASSERT_EQ(cusim::LaunchOne([this, letter] { order_ += letter; }, stream_[stream]), cudaSuccess);
  }
  // Orders later work of stream `later` after the work in stream `earlier`.
  void Join(int later, int earlier) {
    ASSERT_EQ(cudaEventRecord(event_[earlier], stream_[earlier]), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(stream_[later], event_[earlier], 0), cudaSuccess);
  }
  // Calls body() under `kSeeds` orders of the streams.
  void ForSeeds(const std::function<void()>& body) {
    for (uint32_t seed = 1; seed <= kSeeds; ++seed) {
      cusim::SeedStreams(seed);
      order_.clear();
      body();
    }
  }

  std::array<cudaStream_t, 2> stream_ = {};
  std::array<cudaEvent_t, 2> event_ = {};
  std::string order_;
};

TEST_F(FakeCudart, NothingRunsBeforeTheHostWaits) {
  Launch(0, 'a');
  EXPECT_EQ(order_, "");
  EXPECT_EQ(cudaEventRecord(event_[0], stream_[0]), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event_[0]), cudaErrorNotReady);
  EXPECT_EQ(cudaStreamSynchronize(stream_[0]), cudaSuccess);
  EXPECT_EQ(order_, "a");
  EXPECT_EQ(cudaEventQuery(event_[0]), cudaSuccess);
}

TEST_F(FakeCudart, CountsWhatHoldsTheHost) {
  const cusim::HostWaits before = cusim::WaitsOfThisThread();
  const auto waited = [&] {
    return cusim::WaitsOfThisThread() - before;
  };
  const size_t bytes = 8;
  void *pinned = nullptr, *device = cusim::AllocateDevice(0, bytes);
  char pageable[bytes];
  ASSERT_EQ(cudaHostAlloc(&pinned, bytes, cudaHostAllocDefault), cudaSuccess);
  const auto copy = [&](void* to, const void* from) {
    EXPECT_EQ(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_[0]), cudaSuccess);
  };
  copy(device, pageable);
  copy(pinned, device);
  EXPECT_TRUE(waited() == cusim::HostWaits());
  copy(pageable, device);
  EXPECT_TRUE(waited() == (cusim::HostWaits{.copies = 1}));
  ASSERT_EQ(cudaEventRecord(event_[0], stream_[0]), cudaSuccess);
  ASSERT_EQ(cudaEventSynchronize(event_[0]), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_[0]), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_TRUE(waited() == (cusim::HostWaits{.synchronizations = 3, .copies = 1}));
  ASSERT_EQ(cudaFreeHost(pinned), cudaSuccess);
  cusim::FreeDevice("test", device);
}

TEST_F(FakeCudart, TheNullStreamRunsAtOnce) {
  ASSERT_EQ(cusim::LaunchOne([this] { order_ += 'a'; }, nullptr), cudaSuccess);
  EXPECT_EQ(order_, "a");
}

TEST_F(FakeCudart, KernelsAndHostFunctionsKeepTheOrderOfTheirStream) {
  ForSeeds([&] {
    Launch(0, 'a');
    const auto append = [](void* order) {
      *static_cast<std::string*>(order) += 'b';
    };
    ASSERT_EQ(cudaLaunchHostFunc(stream_[0], append, &order_), cudaSuccess);
    Launch(1, '.');
    Launch(0, 'c');
    ASSERT_EQ(cudaStreamSynchronize(stream_[0]), cudaSuccess);
    std::erase(order_, '.');
    EXPECT_EQ(order_, "abc");
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  });
}

// x = 1 in one stream, y = x in the other.
TEST_F(FakeCudart, AnEventOrdersTwoStreamsAndWithoutItSomeSeedShowsAnother) {
  for (const bool edge : {true, false}) {
    std::set<std::string> orders;
    ForSeeds([&] {
      Launch(0, 'x');
      if (edge) Join(1, 0);
      Launch(1, 'y');
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      orders.insert(order_);
    });
    EXPECT_EQ(orders, edge ? std::set<std::string>({"xy"}) : std::set<std::string>({"xy", "yx"}));
  }
}

TEST_F(FakeCudart, AWaitIsForWhatWasRecordedWhenItBegan) {
  ForSeeds([&] {
    ASSERT_EQ(cudaStreamWaitEvent(stream_[1], event_[0], 0), cudaSuccess);  // nothing recorded yet
    Launch(0, 'a');
    Join(1, 0);
    Launch(1, 'b');
    Launch(0, 'c');
    ASSERT_EQ(cudaEventRecord(event_[0], stream_[0]), cudaSuccess);  // does not affect the wait
    ASSERT_EQ(cudaStreamSynchronize(stream_[1]), cudaSuccess);
    EXPECT_LT(order_.find('a'), order_.find('b')) << order_;
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  });
}

TEST_F(FakeCudart, ARecordInAnotherStreamEndsNoWait) {
  ForSeeds([&] {
    Launch(0, 'a');
    Join(1, 0);
    Launch(1, 'b');
    cudaStream_t idle = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&idle, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(event_[0], idle), cudaSuccess);  // passes at once
    ASSERT_EQ(cudaStreamSynchronize(idle), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(order_, "ab");
    ASSERT_EQ(cudaStreamDestroy(idle), cudaSuccess);
  });
}

// Two host threads with a stream each: CUDA may use one thread for all host functions.
TEST_F(FakeCudart, HostFunctionsRunOneAfterTheOther) {
  struct Seen {
    std::atomic<int> inside = 0, ended = 0, together = 0;
  } seen;
  const auto enter = [](void* data) {
    auto& s = *static_cast<Seen*>(data);
    if (++s.inside > 1) ++s.together;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    --s.inside;
    ++s.ended;
  };
  std::vector<std::thread> threads;
  for (cudaStream_t stream : stream_) {
    threads.emplace_back([&, stream] {
      EXPECT_EQ(cudaLaunchHostFunc(stream, enter, &seen), cudaSuccess);
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(seen.ended, 2);
  EXPECT_EQ(seen.together, 0);
}

TEST_F(FakeCudart, ADriverThatIsNotThereIsAnError) {
  const cusim::ScopedMachine machine({.driver = cudaErrorInsufficientDriver});
  int count = -1;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaErrorInsufficientDriver);
  EXPECT_EQ(count, -1);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInsufficientDriver);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

class FakeCudartMemory : public FakeCudart {
 protected:
  void SetUp() override {
    FakeCudart::SetUp();
    const cudaMemPoolProps properties = {.allocType = cudaMemAllocationTypePinned,
                                         .handleTypes = cudaMemHandleTypeNone,
                                         .location = {.type = cudaMemLocationTypeDevice, .id = 0}};
    ASSERT_EQ(cudaMemPoolCreate(&pool_, &properties), cudaSuccess);
    ASSERT_EQ(Allocate(kBytes, &data_), cudaSuccess);
  }
  cudaError_t Allocate(size_t bytes, void** data) {
    return cudaMallocFromPoolAsync(data, bytes, pool_, stream_[0]);
  }
  void Free() {
    ASSERT_EQ(cudaFreeAsync(data_, stream_[0]), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream_[0]), cudaSuccess);
  }

  static constexpr size_t kBytes = 100;
  cudaMemPool_t pool_ = nullptr;
  void* data_ = nullptr;
};

TEST_F(FakeCudartMemory, BeginsAsNaNAndKeepsWhatWasCopied) {
  std::vector<unsigned char> in(kBytes, 7), out(kBytes, 0);
  const auto copy = [&](void* to, const void* from) {
    ASSERT_EQ(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDefault, stream_[0]), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream_[0]), cudaSuccess);
  };
  copy(out.data(), data_);
  EXPECT_EQ(out, std::vector<unsigned char>(kBytes, 0xff));
  copy(data_, in.data());
  copy(out.data(), data_);
  EXPECT_EQ(out, in);
  Free();
}

TEST_F(FakeCudartMemory, IsAsLargeAsTheMachineSays) {
  const size_t used = cusim::UsedDeviceBytes(0);
  const cusim::ScopedMachine machine({.memory_bytes = used + 50});
  void* more = nullptr;
  EXPECT_EQ(Allocate(51, &more), cudaErrorMemoryAllocation);
  ASSERT_EQ(Allocate(50, &more), cudaSuccess);
  size_t free = 1, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  EXPECT_EQ(free, 0u);
  EXPECT_EQ(total, used + 50);
  ASSERT_EQ(cudaFreeAsync(more, stream_[0]), cudaSuccess);
  Free();
  EXPECT_EQ(cusim::UsedDeviceBytes(0), used - kBytes);
}

using FakeCudartDeathTest = FakeCudartMemory;

TEST_F(FakeCudartDeathTest, MisuseIsNamed) {
  char host[kBytes] = {};
  const auto synchronize = [&] {
    (void)cudaStreamSynchronize(stream_[0]);
  };
  const auto clear = [&](size_t bytes) {
    (void)cudaMemsetAsync(data_, 0, bytes, stream_[0]);
    synchronize();
  };
  EXPECT_DEATH(clear(kBytes + 1), "cudaMemsetAsync: 1 bytes past the end");
  EXPECT_DEATH(
      {
        (void)cudaFreeAsync(host, stream_[0]);
        synchronize();
      },
      "cudaFreeAsync: no memory of a device");
  EXPECT_DEATH(
      {
        Free();
        Free();
      },
      "cudaFreeAsync: memory that was freed before");
  EXPECT_DEATH(
      {
        Free();
        clear(kBytes);
      },
      "cudaMemsetAsync: memory that was freed");
  EXPECT_DEATH(
      {
        (void)cudaStreamDestroy(stream_[0]);
        synchronize();
      },
      "cudaStreamSynchronize: unknown stream");
  EXPECT_DEATH(
      {
        (void)cudaLaunchHostFunc(
            stream_[0], [](void*) { (void)cudaDeviceSynchronize(); }, nullptr);
        synchronize();
      },
      "the host function calls CUDA");
#if defined(__SANITIZE_ADDRESS__)
  EXPECT_DEATH(host[0] = *static_cast<volatile char*>(data_), "use-after-poison");
#endif
  Free();
}

TEST_F(FakeCudartDeathTest, OtherDevicesMayTouchMemoryOnceItsPoolIsOpenToThem) {
  cudaStream_t other = nullptr;
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  unsigned char host[kBytes] = {};
  const auto copy = [&](void* to, const void* from) {
    (void)cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDefault, other);
    return cudaStreamSynchronize(other);
  };
  const auto clear = [&] {
    (void)cudaMemsetAsync(data_, 0, kBytes, other);
    return cudaStreamSynchronize(other);
  };
  const auto launch = [&] {
    (void)cusim::LaunchOne([&] { static_cast<volatile unsigned char*>(data_)[0] = 7; }, other);
    return cudaStreamSynchronize(other);
  };
  const std::string fault = ": memory of device 0 in a stream of device 1";
  EXPECT_DEATH((void)copy(host, data_), "cudaMemcpyAsync, from" + fault);
  EXPECT_DEATH((void)copy(data_, host), "cudaMemcpyAsync, to" + fault);
  EXPECT_DEATH((void)clear(), "cudaMemsetAsync" + fault);
#if defined(__SANITIZE_ADDRESS__)
  EXPECT_DEATH((void)launch(), "use-after-poison");
#endif
  const cudaMemAccessDesc access = {.location = {.type = cudaMemLocationTypeDevice, .id = 1},
                                    .flags = cudaMemAccessFlagsProtReadWrite};
  ASSERT_EQ(cudaMemPoolSetAccess(pool_, &access, 1), cudaSuccess);
  ASSERT_EQ(clear(), cudaSuccess);
  ASSERT_EQ(launch(), cudaSuccess);
  ASSERT_EQ(copy(host, data_), cudaSuccess);
  EXPECT_EQ(host[0], 7);
  EXPECT_EQ(host[1], 0);
  EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  Free();
}

TEST_F(FakeCudartMemory, PeersAreThoseOfTheMachine) {
  const cusim::ScopedMachine machine({.devices = 3, .no_peers = {{0, 2}}});
  const auto can = [](int device, int owner) {
    int answer = -1;
    EXPECT_EQ(cudaDeviceCanAccessPeer(&answer, device, owner), cudaSuccess);
    return answer;
  };
  EXPECT_EQ(can(0, 2), 0);
  EXPECT_EQ(can(2, 0), 1);
  EXPECT_EQ(can(0, 0), 0);
  EXPECT_EQ(cudaDeviceEnablePeerAccess(2, 0), cudaErrorPeerAccessUnsupported);
  EXPECT_EQ(cudaDeviceEnablePeerAccess(0, 0), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaDeviceEnablePeerAccess(1, 0), cudaSuccess);
  EXPECT_EQ(cudaDeviceEnablePeerAccess(1, 0), cudaErrorPeerAccessAlreadyEnabled);
  EXPECT_EQ(cudaGetLastError(), cudaErrorPeerAccessAlreadyEnabled);

  cudaMemAccessDesc access = {.location = {.type = cudaMemLocationTypeDevice, .id = 3},
                              .flags = cudaMemAccessFlagsProtReadWrite};
  EXPECT_EQ(cudaMemPoolSetAccess(pool_, &access, 1), cudaErrorInvalidDevice);
  access.location.id = 2;
  access.flags = cudaMemAccessFlagsProtRead;
  EXPECT_EQ(cudaMemPoolSetAccess(pool_, &access, 1), cudaErrorNotSupported);
  Free();
}

TEST(FakeCub, SortsAndSumsWithScratchOfTheSizeThatItAsksFor) {
  const std::vector<uint32_t> keys = {2, 0xf0000000, 2, 1};
  const std::vector<int> values = {10, 11, 12, 13};
  std::vector<uint32_t> sorted_keys(4);
  std::vector<int> sorted(4), sums = {3, 0, 4, 1};
  std::vector<unsigned char> scratch;
  const auto in_scratch = [&](auto call) {
    size_t bytes = 0;
    EXPECT_EQ(call(nullptr, bytes), cudaSuccess);
    scratch.assign(bytes, 0);
    EXPECT_EQ(call(scratch.data(), bytes), cudaSuccess);
    EXPECT_EQ(scratch, std::vector<unsigned char>(bytes, 0xff));
    EXPECT_EQ(call(scratch.data(), --bytes), cudaErrorInvalidValue);
  };
  in_scratch([&](void* at, size_t& bytes) {
    return cub::DeviceRadixSort::SortPairs(at, bytes, keys.data(), sorted_keys.data(),
                                           values.data(), sorted.data(), 4, 0, 2, nullptr);
  });
  EXPECT_EQ(sorted, (std::vector<int>{11, 13, 10, 12}));  // by the two lowest bits, stable
  EXPECT_EQ(sorted_keys, (std::vector<uint32_t>{0xf0000000, 1, 2, 2}));
  in_scratch([&](void* at, size_t& bytes) {
    return cub::DeviceScan::ExclusiveSum(at, bytes, sums.data(), sums.data(), 4, nullptr);
  });
  EXPECT_EQ(sums, (std::vector<int>{0, 3, 3, 7}));
}

TEST_F(FakeCudart, AStreamTakesKernelsOfItsOwnDeviceAlone) {
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(cusim::LaunchOne([] {}, stream_[0]), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

}  // namespace
