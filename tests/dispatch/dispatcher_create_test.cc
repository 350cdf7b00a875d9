// dispatch/dispatcher: what Create accepts, and which algorithm it gives.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dispatch/dispatcher.h"
#include "kernels/base/log.h"
#include "tests/comm/comm_env.h"

namespace moe::testing {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kTimeout = absl::Seconds(20);

TEST(DispatcherCreateTest, RefusesANodeSizeThatDoesNotDivideTheGroup) {
  const int ranks = std::min(4, Env().max_ranks());
  Env().Run(ranks, kTimeout, EnvStream::kInline, [&](Communicator& comm, Stream&) {
    const auto create = [&](int node_size) {
      return Dispatcher<float>::Create(
                 {.algorithm = DispatchAlgorithm::kHierarchical, .node_size = node_size}, comm)
          .status();
    };
    EXPECT_EQ(create(-1).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(create(ranks + 1).code(), absl::StatusCode::kInvalidArgument);
    if (ranks == 4) {
      EXPECT_EQ(create(3).message(),
                "Dispatcher: node size 3 for 4 ranks, expected a divisor of them: 2 or 4");
    }
  });
}

// A group that cannot share memory: everything else is the group given to it.
class WithoutPeerMemory final : public Communicator {
 public:
  explicit WithoutPeerMemory(Communicator& comm) : comm_(comm) {}
  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  absl::string_view backend() const override { return "test"; }
  absl::Duration timeout() const override { return comm_.timeout(); }
  absl::Status Barrier() override { return comm_.Barrier(); }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override {
    return comm_.Split(color, key);
  }
  void Abort(absl::Status reason) override { comm_.Abort(std::move(reason)); }

 private:
  static absl::Status Unused() { return absl::UnimplementedError("not called"); }
  absl::Status DoAllReduce(void*, int64_t, DType, ReduceOp, Stream&) override { return Unused(); }
  absl::Status DoReduceScatter(const void*, void*, int64_t, DType, ReduceOp, Stream&) override {
    return Unused();
  }
  absl::Status DoAllGather(const void*, void*, int64_t, Stream&) override { return Unused(); }
  absl::Status DoAllToAllV(const void*, absl::Span<const int64_t>, void*, absl::Span<const int64_t>,
                           Stream&) override {
    return Unused();
  }
  absl::Status DoBroadcast(void*, int64_t, int, Stream&) override { return Unused(); }
  absl::Status DoSendRecv(SendRecvOps, Stream&) override { return Unused(); }
  absl::Status DoFence(Stream&) override { return Unused(); }

  Communicator& comm_;
};

std::string* logged = nullptr;

TEST(DispatcherCreateTest, DirectWithoutPeerMemoryRunsStagedAndSaysSoOnce) {
  std::string log;
  logged = &log;
  SetLogCallback(
      [](LogLevel, absl::string_view message) { logged->append(message.data(), message.size()); });
  Env().Run(1, kTimeout, EnvStream::kInline, [&](Communicator& comm, Stream&) {
    WithoutPeerMemory plain(comm);
    const auto dispatcher =
        Dispatcher<float>::Create({.algorithm = DispatchAlgorithm::kDirect}, plain);
    ASSERT_TRUE(dispatcher.ok()) << dispatcher.status();
    EXPECT_EQ((*dispatcher)->algorithm(), DispatchAlgorithm::kStaged);
    if (comm.rank() != 0) return;
    EXPECT_THAT(log, HasSubstr("running staged"));
    const std::string once = log;
    ASSERT_TRUE(Dispatcher<float>::Create({.algorithm = DispatchAlgorithm::kDirect}, plain).ok());
    EXPECT_EQ(log, once);
  });
  SetLogCallback(nullptr);
}

}  // namespace
}  // namespace moe::testing
