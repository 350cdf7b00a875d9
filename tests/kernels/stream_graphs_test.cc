// Passes that become graphs, over the fake runtime: what is replayed, what is not, what is refused.
#include "kernels/base/stream_graphs.h"

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/buffer.h"
#include "kernels/base/log.h"
#include "kernels/base/stream.h"
#include "tests/cusim/cusim.h"
#include "tests/cusim/fake_streams.h"
#include "tests/kernels/device_memory.h"

namespace moe::testing {
namespace {

using ::testing::HasSubstr;

class StreamGraphsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (auto& stream : own_) stream = MakeStream({DeviceKind::kCuda, 0}).value();
    Make({own_[0].get(), own_[1].get()});
    buffer_ = Buffer::Allocate(2 * sizeof(int64_t), **CudaMemory(0)).value();
  }
  void TearDown() override {
    for (const auto& stream : own_) EXPECT_OK(stream->Synchronize());
    graphs_.reset();
    EXPECT_EQ(cusim::LiveGraphs(), 0u);
  }

  void Make(const std::vector<Stream*>& streams) { graphs_ = MakeStreamGraphs(streams).value(); }

  // A kernel that appends `letter` to order_.
  absl::Status Kernel(Stream& stream, char letter) {
    return LaunchOne(stream, [this, letter] { order_ += letter; });
  }
  static void Order(Stream& later, Stream& earlier) {
    ASSERT_OK(later.WaitFor(earlier.Record().value()));
  }
  absl::StatusOr<int64_t> Run(uint64_t key, absl::FunctionRef<absl::Status()> body) {
    return graphs_->Run({&key, 1}, body);
  }
  absl::Span<int64_t> memory() { return buffer_.span<int64_t>(); }
  Stream& compute() { return graphs_->stream(0); }
  Stream& exchange() { return graphs_->stream(1); }

  std::array<std::unique_ptr<Stream>, 2> own_;
  std::unique_ptr<StreamGraphs> graphs_;
  Buffer buffer_;
  std::string order_;
};

// seen = what was uploaded + argument. The body runs each time. An argument that the key does not
// tell keeps the value of the capture.
TEST_F(StreamGraphsTest, ReplaysWorkWithWhatIsUploadedNow) {
  int64_t seen = 0, bodies = 0;
  const auto call = [&](uint64_t key, int64_t upload, int64_t argument) {
    const auto number = Run(key, [&]() -> absl::Status {
      ++bodies;
      const auto data = memory();
      EXPECT_OK(compute().Zero(data.data(), 8));
      EXPECT_OK(compute().Upload(&upload, data.data(), 8));
      EXPECT_OK(compute().CopyBytes(data.data(), data.data() + 1, 8));
      return LaunchOne(compute(), [&seen, data, argument] { seen = data[1] + argument; });
    });
    EXPECT_OK(number);
    EXPECT_OK(compute().Synchronize());
    return seen;
  };
  const int64_t launches = cusim::Launches(), graphs = cusim::GraphLaunches();
  EXPECT_EQ(call(1, 10, 1), 11);
  EXPECT_EQ(cusim::GraphLaunches() - graphs, 0);
  EXPECT_EQ(call(1, 20, 1), 21);
  EXPECT_EQ(call(1, 20, 1), 21);
  EXPECT_EQ(call(1, 30, 1), 31);
  EXPECT_EQ(call(1, 40, 2), 41);  // its key says 1
  EXPECT_EQ(cusim::GraphLaunches() - graphs, 4);
  EXPECT_EQ(cusim::Launches() - launches, 2);
  EXPECT_EQ(call(2, 40, 2), 42);
  EXPECT_EQ(bodies, 6);
}

TEST_F(StreamGraphsTest, AnUploadThatHasChangedWaitsForTheLaunchBefore) {
  const auto call = [&](int64_t upload) {
    const cusim::HostWaits before = cusim::WaitsOfThisThread();
    EXPECT_OK(Run(1, [&] { return compute().Upload(&upload, memory().data(), 8); }));
    return (cusim::WaitsOfThisThread() - before).synchronizations;
  };
  EXPECT_EQ(call(1), 0);
  EXPECT_EQ(call(1), 0);
  EXPECT_EQ(call(1), 0);
  EXPECT_EQ(call(2), 1);
  EXPECT_EQ(call(2), 0);
}

// a, in the second stream, is before the pass "b, then c in the second", and d, there, after it.
TEST_F(StreamGraphsTest, APassComesAfterWhatIsInAllStreamsAndBeforeWhatFollows) {
  for (uint32_t seed = 1; seed <= 10; ++seed) {
    cusim::SeedStreams(seed);
    for (int call = 0; call < 4; ++call) {
      order_.clear();
      ASSERT_OK(Kernel(*own_[1], 'a'));
      if (call == 0) Order(*own_[0], *own_[1]);  // the first call runs as any other
      ASSERT_OK(Run(seed, [&] {
        EXPECT_OK(Kernel(compute(), 'b'));
        Order(exchange(), compute());
        return Kernel(exchange(), 'c');
      }));
      ASSERT_OK(Kernel(*own_[1], 'd'));
      for (const auto& stream : own_) ASSERT_OK(stream->Synchronize());
      EXPECT_EQ(order_, "abcd") << "seed " << seed << ", call " << call;
    }
  }
}

TEST_F(StreamGraphsTest, OneStreamMayBeGivenTwice) {
  Make({own_[0].get(), own_[0].get()});
  EXPECT_EQ(&compute(), &exchange());
  for (int call = 0; call < 3; ++call) {
    ASSERT_OK(Run(1, [&] { return Kernel(exchange(), 'a'); }));
  }
  ASSERT_OK(compute().Synchronize());
  EXPECT_EQ(order_, "aaa");
}

TEST_F(StreamGraphsTest, RefusesWhatAGraphCannotHold) {
  const auto second = [&](uint64_t key, absl::FunctionRef<absl::Status(int call)> body) {
    EXPECT_OK(Run(key, [&] { return body(0); }));
    return Run(key, [&] { return body(1); }).status();
  };
  const auto wait = second(1, [&](int) { return compute().Synchronize(); });
  EXPECT_TRUE(absl::IsFailedPrecondition(wait)) << wait;
  EXPECT_THAT(Message(wait), HasSubstr("waits for its stream"));
  const auto task =
      second(2, [&](int) { return compute().Enqueue([] { return absl::OkStatus(); }); });
  EXPECT_THAT(Message(task), HasSubstr("has a task of the host"));
  const auto upload = second(3, [&](int call) {
    const std::array<int64_t, 9> values = {};
    return compute().Upload(values.data(), memory().data(), call == 0 ? 8 : 72);
  });
  EXPECT_TRUE(absl::IsInternal(upload)) << upload;
  ASSERT_OK(Kernel(compute(), 'a'));  // the streams are as they were
  ASSERT_OK(compute().Synchronize());
  EXPECT_EQ(order_, "a");
}

TEST_F(StreamGraphsTest, OtherWorkUnderTheSameKeyIsNamed) {
  int kernels = 2;
  const auto call = [&] {
    return Run(1,
               [&]() -> absl::Status {
                 for (int k = 0; k < kernels; ++k)
                   EXPECT_TRUE(Kernel(compute(), 'a').ok() || k > 1);
                 return kernels == 3 ? compute().Zero(memory().data(), 8) : absl::OkStatus();
               })
        .status();
  };
  ASSERT_OK(call());
  ASSERT_OK(call());
  kernels = 1;
  EXPECT_THAT(Message(call()), HasSubstr("operation 1 of 2 of a pass is another"));
  kernels = 2;
  ASSERT_OK(call());
  ASSERT_OK(call());
  kernels = 3;
  EXPECT_TRUE(absl::IsInternal(call()));
}

TEST_F(StreamGraphsTest, ForgetsThePassWhoseLastCallIsLongestAgo) {
  const auto number = [&](uint64_t key) {
    return Run(key, [&] { return Kernel(compute(), 'a'); }).value();
  };
  const int64_t first = number(0), second = number(1);
  for (uint64_t key = 2; key < StreamGraphs::kMostPasses; ++key) number(key);
  EXPECT_EQ(number(0), first);
  number(StreamGraphs::kMostPasses);
  EXPECT_EQ(number(0), first);
  EXPECT_NE(number(1), second);
}

std::vector<std::string>& Warnings() {
  static std::vector<std::string> warnings;
  return warnings;
}

TEST_F(StreamGraphsTest, SaysThatNothingBecomesAGraph) {
  SetLogCallback([](LogLevel, absl::string_view text) { Warnings().emplace_back(text); });
  for (uint64_t key = 0; key < 2 * StreamGraphs::kMostPasses; ++key) {
    ASSERT_OK(Run(key, [&] { return Kernel(compute(), 'a'); }));
  }
  SetLogCallback(nullptr);
  EXPECT_THAT(Warnings(), ::testing::ElementsAre(HasSubstr("no pass comes again")));
}

}  // namespace
}  // namespace moe::testing
