// Graphs of the fake CUDA runtime: what a capture takes, what a launch runs, what spoils a capture.
#include <array>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include <cuda_runtime_api.h>

#include "tests/cusim/cusim.h"
#include "tests/cusim/fake_memory.h"
#include "tests/cusim/fake_streams.h"

namespace {

constexpr int kSeeds = 20;

class FakeGraphs : public ::testing::Test {
 protected:
  void SetUp() override {
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
    EXPECT_EQ(cusim::LiveGraphs(), 0u);
  }

  static void Kernel(cudaStream_t stream, std::function<void()> body) {
    ASSERT_EQ(
        cusim::LaunchGrid({.grid = dim3(1), .block = dim3(1), .body = std::move(body)}, stream),
        cudaSuccess);
  }
  // One that appends `letter` to order_.
  void Kernel(int stream, char letter) {
    Kernel(stream_[stream], [this, letter] { order_ += letter; });
  }
  // What comes next in stream `later` follows what is in stream `earlier`.
  void Join(int later, int earlier) {
    ASSERT_EQ(cudaEventRecord(event_[earlier], stream_[earlier]), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(stream_[later], event_[earlier], 0), cudaSuccess);
  }
  cudaError_t Begin() {
    return cudaStreamBeginCapture(stream_[0], cudaStreamCaptureModeThreadLocal);
  }
  cudaError_t End(cudaGraphExec_t* executable) {
    cudaGraph_t graph = nullptr;
    const cudaError_t error = cudaStreamEndCapture(stream_[0], &graph);
    if (error != cudaSuccess) return error;
    EXPECT_EQ(cudaGraphInstantiate(executable, graph, 0), cudaSuccess);
    return cudaGraphDestroy(graph);
  }
  // Of a capture that `body` has spoilt.
  void ExpectSpoilt(cudaError_t expected, const std::function<cudaError_t()>& body) {
    ASSERT_EQ(Begin(), cudaSuccess);
    EXPECT_EQ(body(), expected);
    cudaGraphExec_t executable = nullptr;
    EXPECT_EQ(End(&executable), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(cudaStreamSynchronize(stream_[0]), cudaSuccess);  // it is a stream again
  }

  std::array<cudaStream_t, 2> stream_ = {};
  std::array<cudaEvent_t, 2> event_ = {};
  std::string order_;
};

// Stream 0: a, d; stream 1, between them: b; beside b in stream 0: c.
TEST_F(FakeGraphs, ALaunchRunsTheNodesInAnyOrderThatTheEdgesAllow) {
  ASSERT_EQ(Begin(), cudaSuccess);
  Kernel(0, 'a');
  Join(1, 0);
  Kernel(1, 'b');
  Kernel(0, 'c');
  Join(0, 1);
  Kernel(0, 'd');
  cudaGraphExec_t graph = nullptr;
  ASSERT_EQ(End(&graph), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(order_, "");

  std::set<std::string> orders;
  for (uint32_t seed = 1; seed <= kSeeds; ++seed) {
    cusim::SeedStreams(seed);
    order_.clear();
    ASSERT_EQ(cudaGraphLaunch(graph, stream_[0]), cudaSuccess);
    Kernel(0, 'e');
    ASSERT_EQ(cudaStreamSynchronize(stream_[0]), cudaSuccess);
    orders.insert(order_);
  }
  EXPECT_EQ(orders, std::set<std::string>({"abcde", "acbde"}));
  ASSERT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
}

// As a launch takes copies of a kernel's arguments, a graph keeps those of its capture; what they
// point to is read anew.
TEST_F(FakeGraphs, ReplaysTheArgumentsOfItsCapture) {
  int seen = 0, argument = 1, memory = 10;
  ASSERT_EQ(Begin(), cudaSuccess);
  Kernel(stream_[0], [&seen, argument, at = &memory] { seen = argument + *at; });
  cudaGraphExec_t graph = nullptr;
  ASSERT_EQ(End(&graph), cudaSuccess);
  argument = 2;
  memory = 20;
  const int64_t before = cusim::GraphLaunches();
  ASSERT_EQ(cudaGraphLaunch(graph, stream_[0]), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_[0]), cudaSuccess);
  EXPECT_EQ(seen, 21);
  EXPECT_EQ(cusim::GraphLaunches() - before, 1);
  ASSERT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
}

TEST_F(FakeGraphs, WhatACaptureCannotHoldSpoilsIt) {
  ExpectSpoilt(cudaErrorStreamCaptureUnsupported,
               [&] { return cudaStreamSynchronize(stream_[0]); });
  ExpectSpoilt(cudaErrorStreamCaptureUnsupported, [] { return cudaDeviceSynchronize(); });
  void* pinned = nullptr;
  ExpectSpoilt(cudaErrorStreamCaptureUnsupported,
               [&] { return cudaHostAlloc(&pinned, 8, cudaHostAllocDefault); });
  char host[8] = {};
  void* const device = cusim::AllocateDevice(0, sizeof(host));
  ExpectSpoilt(cudaErrorStreamCaptureUnsupported, [&] {
    return cudaMemcpyAsync(device, host, sizeof(host), cudaMemcpyDefault, stream_[0]);
  });
  cusim::FreeDevice("test", device);
  ASSERT_EQ(cudaEventRecord(event_[1], stream_[1]), cudaSuccess);
  ExpectSpoilt(cudaErrorStreamCaptureIsolation,
               [&] { return cudaStreamWaitEvent(stream_[0], event_[1], 0); });
}

TEST_F(FakeGraphs, AStreamThatDoesNotJoinAgainAndCapturedEventsAreNamed) {
  ASSERT_EQ(Begin(), cudaSuccess);
  EXPECT_EQ(Begin(), cudaErrorIllegalState);
  Join(1, 0);
  Kernel(1, 'b');
  EXPECT_EQ(cudaEventSynchronize(event_[0]), cudaErrorCapturedEvent);
  EXPECT_EQ(cudaEventQuery(event_[0]), cudaErrorCapturedEvent);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream_[1], &graph), cudaErrorStreamCaptureUnmatched);
  cudaGraphExec_t executable = nullptr;
  EXPECT_EQ(End(&executable), cudaErrorStreamCaptureUnjoined);
  EXPECT_EQ(cudaStreamWaitEvent(stream_[1], event_[0], 0), cudaErrorCapturedEvent);
  EXPECT_STREQ(cudaGetErrorName(cudaErrorCapturedEvent), "cudaErrorCapturedEvent");
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(order_, "");
}

TEST_F(FakeGraphs, MisuseIsNamed) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH((void)cudaGraphLaunch(nullptr, stream_[0]), "cudaGraphLaunch: unknown graph");
  EXPECT_DEATH(
      {
        (void)Begin();
        (void)cudaLaunchHostFunc(
            stream_[0], [](void*) {}, nullptr);
      },
      "cudaLaunchHostFunc: in a stream that is being captured, which is not simulated");
}

}  // namespace
