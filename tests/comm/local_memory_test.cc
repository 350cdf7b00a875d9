// Ranks that are threads, when one of them has no memory in the midst of a collective. A program of
// its own, since all of it takes its memory from counting_new.cc.
#include <atomic>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include <absl/time/clock.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/local/local_group.h"
#include "comm/local/local_world.h"
#include "comm/mesh/mesh.h"
#include "comm/ring_all_reduce.h"
#include "kernels/base/buffer.h"
#include "kernels/base/caught.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/stream.h"
#include "tests/counting_new.h"

namespace moe {
namespace {

constexpr int64_t kNever = int64_t{1} << 40;
constexpr absl::Duration kDeadline = absl::Seconds(20);  // far more than any test needs

// body(rank) on two threads; what they returned.
template <typename Body>
std::vector<absl::Status> OnTwo(const Body& body) {
  std::vector<absl::Status> results(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) threads.emplace_back([&, r] { results[r] = body(r); });
  for (std::thread& thread : threads) thread.join();
  return results;
}

class LocalMemoryTest : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_LT(absl::Now() - begin_, kDeadline / 2); }

  const std::shared_ptr<LocalFate> fate_ = std::make_shared<LocalFate>();
  LocalGroup group_{fate_, {0, 1}, kDeadline};
  const absl::Time begin_ = absl::Now();
};

// Rank 1 throws while rank 0 waits for it, or works on rank 1's memory: each ends with its own
// reason, and rank 1 not before rank 0 has let go of what it was shown.
TEST_F(LocalMemoryTest, AnExceptionInsideACollectiveEndsTheWorld) {
  std::atomic<int> inside = 0;
  const auto results = OnTwo([&](int rank) {
    const absl::Status status =
        group_.Collective({.rank = rank, .operation = "Test"}, {.operation = "Test"},
                          [&](absl::Span<const LocalPost>) -> absl::Status {
                            ++inside;
                            while (inside < 2) std::this_thread::yield();
                            if (rank == 1) throw std::bad_alloc();
                            absl::SleepFor(absl::Milliseconds(20));  // reads what rank 1 has shown
                            inside = 3;
                            return absl::OkStatus();
                          });
    EXPECT_EQ(inside, 3) << "rank 0 still reads rank 1's memory";
    return status;
  });
  EXPECT_EQ(results[1].code(), absl::StatusCode::kResourceExhausted) << results[1];
  EXPECT_EQ(results[0].code(), absl::StatusCode::kAborted) << results[0];
  EXPECT_THAT(std::string(results[0].message()),
              ::testing::HasSubstr("stopped by rank 1: out of memory"));
}

// On one core rank 1, which comes last, does the work of rank 0, which sleeps, and fails in its
// name.
TEST_F(LocalMemoryTest, WhoIsAwakeWorksForWhoSleeps) {
  LocalGroup group(fate_, {0, 1}, kDeadline, /*cores=*/1);
  std::atomic<int> works = 0, for_others = 0;
  const auto results = OnTwo([&](int rank) -> absl::Status {
    const auto thread = std::this_thread::get_id();
    for (int round = 0; round <= 20; ++round) {
      if (rank == 1) absl::SleepFor(absl::Milliseconds(1));
      MOE_RETURN_IF_ERROR(
          group.Collective({.rank = rank, .operation = "Test"}, {.operation = "Test"},
                           [&](absl::Span<const LocalPost>) -> absl::Status {
                             ++works;
                             for_others += thread != std::this_thread::get_id() ? 1 : 0;
                             if (rank == 0 && round == 20) throw std::bad_alloc();
                             return absl::OkStatus();
                           }));
      EXPECT_GE(works, 2 * (round + 1));
    }
    return absl::OkStatus();
  });
  EXPECT_GT(for_others, 0);
  EXPECT_GE(works, 2 * 20 + 1);  // the last round may end before rank 1's
  EXPECT_EQ(results[0].code(), absl::StatusCode::kResourceExhausted) << results[0];
  EXPECT_EQ(results[1].code(), absl::StatusCode::kAborted) << results[1];
}

// What rank 1 does once a collective is over is not that collective's failure on rank 0.
TEST_F(LocalMemoryTest, ACollectiveThatIsOverStaysSoThoughTheWorldEnds) {
  LocalGroup group(fate_, {0, 1}, kDeadline, /*cores=*/1);
  const auto results = OnTwo([&](int rank) {
    if (rank == 1) absl::SleepFor(absl::Milliseconds(20));
    absl::Status status =
        group.Collective({.rank = rank, .operation = "Test"}, {.operation = "Test"},
                         [](absl::Span<const LocalPost>) { return absl::OkStatus(); });
    if (rank == 1) fate_->Kill(1, absl::AbortedError("later"));
    return status;
  });
  EXPECT_TRUE(results[0].ok()) << results[0];
  EXPECT_TRUE(results[1].ok()) << results[1];
}

TEST_F(LocalMemoryTest, AnExceptionInsideAHostExchangeEndsTheWorld) {
  const auto results = OnTwo([&](int rank) {
    int mine = 0;
    return group_.HostExchange({.rank = rank, .operation = "Test"}, &mine,
                               [&](absl::Span<void* const> all) {
                                 ++*static_cast<int*>(all[rank]);
                                 if (rank == 0) throw std::bad_alloc();
                               });
  });
  EXPECT_EQ(results[0].code(), absl::StatusCode::kResourceExhausted) << results[0];
  EXPECT_EQ(results[1].code(), absl::StatusCode::kAborted) << results[1];
}

// An exception of a task is the stream's error, for whoever waits for it.
TEST(StreamMemoryTest, ATaskThatThrowsFailsItsStream) {
  for (const bool queued : {false, true}) {
    const auto stream = queued ? *MakeStream({}) : MakeInlineStream();
    const auto other = MakeInlineStream();
    stream->Enqueue([]() -> absl::Status { throw std::bad_alloc(); }).IgnoreError();
    bool ran = false;
    stream
        ->Enqueue([&] {
          ran = true;
          return absl::OkStatus();
        })
        .IgnoreError();
    const auto event = stream->Record().value();
    EXPECT_EQ(other->WaitFor(event).code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(stream->Synchronize().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_FALSE(ran);
  }
}

// Each way in which ranks meet; two layouts of groups, streams with queues.
absl::Status AllOf(std::unique_ptr<Communicator> world) {
  const int rank = world->rank();
  MOE_ASSIGN_OR_RETURN(const auto mesh, Mesh::Create(std::move(world), {.expert = 2}));
  Communicator& comm = mesh->world();
  std::vector<float> values(64, 1.0f), other(64);
  RingAllReduce ring(comm);
  MOE_ASSIGN_OR_RETURN(const auto stream, MakeStream({}));
  const auto work = [&]() -> absl::Status {
    MOE_RETURN_IF_ERROR(comm.AllReduce<float>(absl::MakeSpan(values), ReduceOp::kSum, *stream));
    MOE_RETURN_IF_ERROR(comm.AllToAll<float>(values, absl::MakeSpan(other), *stream));
    const std::vector<int64_t> counts = {32, 32};
    MOE_RETURN_IF_ERROR(
        comm.AllToAllV<float>(values, counts, absl::MakeSpan(other), counts, *stream));
    MOE_RETURN_IF_ERROR(ring.Sum(absl::MakeSpan(values), *stream));
    const SendRecvOp ops[] = {{.peer = 1 - rank, .send = values.data(), .bytes = 64},
                              {.peer = 1 - rank, .recv = other.data(), .bytes = 64}};
    MOE_RETURN_IF_ERROR(comm.SendRecv(ops, *stream));
    MOE_RETURN_IF_ERROR(comm.Fence(*stream));
    MOE_ASSIGN_OR_RETURN(const auto buffer, comm.AllocatePeerBuffer(64, CpuMemory()));
    MOE_RETURN_IF_ERROR(comm.Barrier());
    return stream->Synchronize();
  };
  absl::Status status = Caught(work);
  if (!status.ok()) mesh->Abort(status);
  stream->Synchronize().IgnoreError();  // it uses the vectors
  return status;
}

// The n-th allocation fails, for n = 1, 2, ... until a run completes.
TEST(LocalWorldMemoryTest, EveryAllocationOfEveryCollectiveMayFail) {
  int64_t failures = 0;
  for (const int64_t count : {int64_t{1}, kNever}) {
    for (int64_t n = 1;; ++n) {
      const absl::Time begin = absl::Now();
      const auto fate = std::make_shared<LocalFate>();
      auto world = MakeLocalWorld({.ranks = 2, .timeout = kDeadline, .fate = fate});
      std::vector<absl::Status> results(2);
      std::atomic<int> ready = 0;
      std::vector<std::thread> threads;
      for (int r = 0; r < 2; ++r) {
        threads.emplace_back([&, r] {
          ++ready;
          while (ready < 3) std::this_thread::yield();
          results[r] = Caught([&] { return AllOf(std::move(world[r])); });
          if (!results[r].ok()) fate->Kill(r, results[r]);
        });
      }
      while (ready < 2) std::this_thread::yield();
      const int64_t before = Allocations();
      FailAllocations(n, count);
      ready = 3;
      for (std::thread& thread : threads) thread.join();
      const bool reached = Allocations() - before >= n;
      FailAllocations(kNever, 1);
      ASSERT_LT(absl::Now() - begin, kDeadline / 2) << "allocation " << n;
      for (const absl::Status& result : results) {
        const bool known =
            result.ok() || absl::IsResourceExhausted(result) || absl::IsAborted(result);
        ASSERT_TRUE(known) << "allocation " << n << ": " << result;
      }
      const bool failed = !results[0].ok() || !results[1].ok();
      failures += failed ? 1 : 0;
      if (reached) continue;
      EXPECT_FALSE(failed) << results[0] << "; " << results[1];
      break;
    }
  }
  EXPECT_GT(failures, 20);
}

}  // namespace
}  // namespace moe
