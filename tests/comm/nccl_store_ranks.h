// Ranks that meet over TCP, as threads of a test, and strangers that come to the same place.
#ifndef MOE_TESTS_COMM_NCCL_STORE_RANKS_H_
#define MOE_TESTS_COMM_NCCL_STORE_RANKS_H_

#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <gtest/gtest.h>

#include "comm/nccl/nccl_address.h"
#include "comm/nccl/nccl_auth.h"
#include "comm/nccl/nccl_store.h"
#include "kernels/base/log.h"
#include "kernels/base/stream.h"
#include "tests/cusim/fake_nccl.h"
#include "tests/cusim/fake_streams.h"

namespace moe::testing {

using Joined = absl::StatusOr<std::unique_ptr<Communicator>>;

inline std::string TextOf(const Joined& joined) {
  return std::string(joined.status().message());
}

// Warnings since the last Clear.
class Warnings {
 public:
  static void Clear() {
    const std::lock_guard<std::mutex> lock(mu_);
    lines_.clear();
  }
  static std::vector<std::string> All() {
    const std::lock_guard<std::mutex> lock(mu_);
    return lines_;
  }
  static void Add(LogLevel, absl::string_view line) {
    const std::lock_guard<std::mutex> lock(mu_);
    lines_.emplace_back(line);
  }

 private:
  static inline std::mutex mu_;
  static inline std::vector<std::string> lines_;  // guarded by mu_
};

class NcclStoreTest : public ::testing::Test {
 protected:
  static constexpr int kMostRanks = 5;

  void SetUp() override {
    Warnings::Clear();
    SetLogCallback(&Warnings::Add);
    // Let go again, so that rank 0 finds it free.
    const Descriptor listener = Listen("127.0.0.1", 0);
    const std::string text = ToString(NearEnd(listener));
    store_.port = std::stoi(text.substr(text.rfind(':') + 1));
  }
  void TearDown() override {
    SetLogCallback(nullptr);
    EXPECT_EQ(cusim::NcclCommunicators(), 0);
  }

  static Descriptor Listen(const std::string& host, int port) {
    return ListenOn(Resolve(host, port).value()).value();
  }
  Joined Join(int rank, int size, absl::Duration timeout = absl::Seconds(30)) const {
    return JoinNcclByTcp({.rank = rank, .size = size, .device = rank, .timeout = timeout}, store_);
  }
  // Joins, and sums over all ranks.
  void Meet(int rank, int size) const {
    const Joined joined = Join(rank, size);
    ASSERT_TRUE(joined.ok()) << joined.status();
    EXPECT_EQ((*joined)->rank(), rank);
    EXPECT_EQ((*joined)->size(), size);
    int64_t sum = rank + 1;
    const auto stream = MakeInlineStream();
    ASSERT_TRUE((*joined)->AllReduce<int64_t>({&sum, 1}, ReduceOp::kSum, *stream).ok());
    ASSERT_TRUE(stream->Synchronize().ok());
    EXPECT_EQ(sum, size * (size + 1) / 2);
  }
  std::thread Meeting(int rank, int size) const {
    return std::thread([this, rank, size] { Meet(rank, size); });
  }
  std::string address() const { return absl::StrCat(store_.host, ":", store_.port); }

  // A stranger's connection to rank 0, as soon as that listens.
  Descriptor Connect() const {
    const SocketAddress there = Resolve(store_.host, store_.port).value().front();
    while (true) {
      Patience patience(absl::Seconds(10));
      absl::StatusOr<Descriptor> socket = ConnectTo(there, patience);
      if (socket.ok()) return *std::move(socket);
      absl::SleepFor(absl::Milliseconds(1));
    }
  }
  template <typename Message>
  static Message Hear(const Descriptor& from) {
    Message message;
    Patience patience(absl::Seconds(20));
    const absl::Status heard = Receive(from, RoomOf(message), patience);
    EXPECT_TRUE(heard.ok()) << heard;
    return message;
  }
  // All that still comes until the peer closes the connection.
  static std::string HearAll(const Descriptor& from) {
    std::string all;
    char next = 0;
    Patience patience(absl::Seconds(20));
    while (Receive(from, {&next, 1}, patience).ok()) all.push_back(next);
    return all;
  }
  // As a rank has it after rank 0's greeting.
  StoreSession SessionOn(const Descriptor& socket) const {
    return {store_.secret, ToString(FarEnd(socket)), Hear<StoreGreeting>(socket)};
  }
  // What a stranger that knows the secret is told when it says that it is this rank.
  NcclAnnouncement Claim(int rank, int size) const {
    const Descriptor socket = Connect();
    const StoreSession session = SessionOn(socket);
    const StoreClaim claim = MakeClaim(session, rank, size).value();
    EXPECT_TRUE(Send(socket, BytesOf(claim)).ok());
    const auto answer = Hear<StoreAnswer>(socket);
    EXPECT_TRUE(IsProven(session, claim, answer));
    return answer.said;
  }

  const cusim::ScopedMachine machine_{{.devices = kMostRanks}};
  NcclStore store_ = {.host = "127.0.0.1", .secret = "0123456789 is a secret of a test"};
};

}  // namespace moe::testing

#endif  // MOE_TESTS_COMM_NCCL_STORE_RANKS_H_
