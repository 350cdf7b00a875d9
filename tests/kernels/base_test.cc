// kernels/base: streams, threads, workspace, 16-bit floats, random numbers, cuts of an index.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <future>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "kernels/base/buffer.h"
#include "kernels/base/cuda_devices.h"
#include "kernels/base/dtype.h"
#include "kernels/base/host_task.h"
#include "kernels/base/parallel.h"
#include "kernels/base/rng.h"
#include "kernels/base/stream.h"
#include "kernels/base/tree_cut.h"
#include "kernels/base/workspace.h"
#include "kernels/base/xxh3.h"
#include "tests/kernels/op_test.h"

namespace moe::testing {
namespace {

using ::testing::HasSubstr;

// Sizes: small, whole huge pages, and huge pages with a rest.
TEST(BufferTest, IsAlignedAndZeroed) {
  constexpr int64_t kHuge = int64_t{2} << 20;
  for (const int64_t bytes : {int64_t{1}, kHuge - 1, kHuge, 2 * kHuge + 5}) {
    for (int again = 0; again < 2; ++again) {  // the second time on used memory
      const Buffer buffer = Buffer::Allocate(bytes).value();
      const auto data = buffer.span<uint8_t>();
      EXPECT_EQ(reinterpret_cast<uintptr_t>(data.data()) % (bytes < kHuge ? 64 : kHuge), 0);
      EXPECT_EQ(std::count(data.begin(), data.end(), 0), bytes);
      std::fill(data.begin(), data.end(), uint8_t{1});
    }
  }
}

// A callable of about `kBytes` that counts its runs; every living object shares the counter.
template <size_t kBytes>
struct Counted {
  explicit Counted(std::shared_ptr<int> runs) : runs_(std::move(runs)) { bytes_.fill(7); }
  absl::Status operator()() {
    for (const uint8_t b : bytes_) EXPECT_EQ(b, 7);
    ++*runs_;
    return absl::OkStatus();
  }
  std::shared_ptr<int> runs_;
  std::array<uint8_t, kBytes> bytes_;
};

template <size_t kBytes>
void ExpectMovesRunsAndEndsOnce() {
  const auto runs = std::make_shared<int>(0);
  {
    HostTask task(Counted<kBytes>{runs});
    HostTask moved(std::move(task));
    EXPECT_FALSE(task);  // NOLINT(bugprone-use-after-move): what is left is empty
    ASSERT_TRUE(moved);
    HostTask other([] { return absl::InternalError("replaced"); });
    other = std::move(moved);
    ASSERT_OK(other());
    EXPECT_EQ(runs.use_count(), 2);
  }
  EXPECT_EQ(*runs, 1);
  EXPECT_EQ(runs.use_count(), 1);
}

TEST(MatrixViewTest, OverlapIsOfElements) {
  std::array<float, 64> memory;
  const auto at = [&](int64_t first, int64_t rows, int64_t cols, int64_t stride) {
    return MatrixView<float>(memory.data() + first, rows, cols, stride);
  };
  const MatrixView<float> m = at(16, 4, 4, 8);  // elements 16 to 19, 24 to 27, 32 .., 40 to 43
  const struct {
    MatrixView<float> other;
    bool overlaps;
  } cases[] = {
      {m, true},
      {at(43, 1, 1, 1), true},   // its last element
      {at(44, 2, 4, 4), false},  // after it
      {at(0, 4, 4, 4), false},   // before it
      {at(0, 4, 4, 5), true},    // 15 to 18
      {at(20, 4, 4, 8), false},  // columns between its rows
      {at(20, 4, 5, 8), true},   // 20 to 24
      {at(12, 4, 4, 8), false},
      {at(12, 4, 5, 8), true},   // 12 to 16
      {at(24, 4, 4, 8), true},   // one row further
      {at(4, 3, 4, 16), false},  // 4, 20, 36: between rows, at another stride
      {at(8, 3, 4, 16), true},   // 24 to 27
      {at(20, 1, 4, 4), false},  // between two rows
      {at(16, 0, 4, 8), false},  // no rows
      {MatrixView<float>(), false},
      {at(40, 3, 1, 0), true},  // one row, repeated
  };
  for (const auto& [other, overlaps] : cases) {
    const auto where = other.data() - memory.data();
    EXPECT_EQ(Overlap(m, other), overlaps) << where;
    EXPECT_EQ(Overlap(other, m), overlaps) << where;
  }
  // Bytes, not elements of one type.
  EXPECT_TRUE(Overlap(m, MatrixView<char>(reinterpret_cast<char*>(memory.data()) + 65, 1, 1)));
  EXPECT_FALSE(Overlap(m, MatrixView<char>(reinterpret_cast<char*>(memory.data()) + 63, 1, 1)));
}

TEST(HostTaskTest, MovesRunsAndEndsOnce) {
  EXPECT_FALSE(HostTask());
  ExpectMovesRunsAndEndsOnce<1>();
  ExpectMovesRunsAndEndsOnce<HostTask::kInPlaceBytes - sizeof(std::shared_ptr<int>)>();
  ExpectMovesRunsAndEndsOnce<HostTask::kInPlaceBytes>();  // on the heap
}

TEST(StreamTest, QueuesMoreThanItHasRoomForInOrder) {
  auto stream = MakeStream({}).value();
  auto gate = MakeStream({}).value();
  std::promise<void> opened;
  EnqueueWork(*gate, [wait = opened.get_future()]() mutable { wait.get(); });
  std::vector<int> seen;
  std::atomic<size_t> count = 0;
  std::vector<Event> held;  // events in use are not given out again
  for (int i = 0; i < 1500; ++i) {
    if (i == 100) {
      ASSERT_OK(stream->WaitFor(gate->Record().value()));
    }
    EnqueueWork(*stream, [&seen, &count, i] {
      seen.push_back(i);
      ++count;
    });
    if (i % 100 == 0) held.push_back(stream->Record().value());
  }
  auto other = MakeStream({}).value();
  ASSERT_OK(other->WaitFor(held[5]));
  EnqueueWork(*other, [&count] { EXPECT_GT(count, 500u); });
  opened.set_value();
  ASSERT_OK(other->Synchronize());
  ASSERT_OK(stream->Synchronize());
  ASSERT_EQ(seen.size(), 1500u);
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
}

// CPU streams in all pairs; cuda_stream_test has those of devices.
TEST(StreamTest, FirstErrorSticksStopsTheQueueAndTravelsWithAnEvent) {
  for (const bool first_queues : {false, true}) {
    for (const bool second_queues : {false, true}) {
      const auto make = [](bool queues) {
        return queues ? MakeStream({}).value() : MakeInlineStream();
      };
      const auto first = make(first_queues), second = make(second_queues);
      const Event before = first->Record().value();
      ASSERT_OK(second->WaitFor(before));
      ASSERT_OK(second->Synchronize());
      const absl::Status lost = absl::UnavailableError("peer lost");
      (void)first->Enqueue([lost] { return lost; });
      (void)second->WaitFor(first->Record().value());
      std::atomic<bool> ran = false;
      for (const auto& stream : {first.get(), second.get()}) {
        (void)stream->Enqueue([&ran] {
          ran = true;
          return absl::OkStatus();
        });
        EXPECT_EQ(stream->Synchronize(), lost) << first_queues << second_queues;
      }
      EXPECT_FALSE(ran);
    }
  }
}

TEST(StreamTest, AnEventThatWasNeverRecordedIsRefused) {
  for (const bool queues : {false, true}) {
    const auto stream = queues ? MakeStream({}).value() : MakeInlineStream();
    EXPECT_EQ(stream->WaitFor(Event()).code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_OK(stream->Synchronize());
  }
}

TEST(StreamTest, CopiesBytesInOrder) {
  auto stream = MakeStream({}).value();
  const int from = 7;
  int to = 0;
  ASSERT_OK(stream->CopyBytes(&from, &to, sizeof(to)));
  EnqueueWork(*stream, [&to] { to *= 2; });
  ASSERT_OK(stream->Synchronize());
  EXPECT_EQ(to, 14);
}

// In every build, on every machine.
TEST(StreamTest, ACudaStreamIsThereOrSaysWhatIsMissing) {
  const auto stream = MakeStream({DeviceKind::kCuda, 0});
  EXPECT_EQ(stream.ok(), CudaDevices().ok());
  EXPECT_EQ(stream.ok(), CudaMemory(0).ok());
  if (stream.ok()) return;
  EXPECT_EQ(stream.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(Message(stream.status()),
              ::testing::AnyOf(HasSubstr("MOE_ENABLE_CUDA=ON"), HasSubstr("driver")));
}

TEST(ThreadPoolTest, RangesCoverEveryElementOnceForAnyThreadCount) {
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    for (const int64_t n : {0, 1, 7, 64, 1000}) {
      std::vector<int> hits(static_cast<size_t>(n), 0);
      pool.For(n, 9, [&](int64_t begin, int64_t end) {
        EXPECT_EQ(begin % 9, 0);
        for (int64_t i = begin; i < end; ++i) ++hits[i];
      });
      EXPECT_EQ(hits, std::vector<int>(static_cast<size_t>(n), 1)) << threads << " " << n;
    }
  }
}

TEST(ThreadPoolTest, NestedForRunsInline) {
  ThreadPool pool(2);
  std::atomic<int> total = 0;
  pool.For(8, 1, [&](int64_t, int64_t) {
    const auto self = std::this_thread::get_id();
    pool.For(4, 1, [&](int64_t, int64_t) {
      EXPECT_EQ(std::this_thread::get_id(), self);
      ++total;
    });
  });
  EXPECT_EQ(total, 32);
}

TEST(ThreadPoolTest, AFailedBodyDoesNotMakeLaterCallsSerial) {
  ThreadPool pool(2);
  std::atomic<int> inside = 0;
  // Whether two threads run bodies at the same time: each waits until the other has arrived.
  const auto meet = [&](int both) {
    ++inside;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (inside < both && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    return inside >= both;
  };
  EXPECT_THROW(pool.For(2, 1,
                        [&](int64_t, int64_t) {
                          meet(2);
                          throw std::bad_alloc();
                        }),
               std::bad_alloc);
  std::array<bool, 2> met = {};
  const int before = inside;
  pool.For(2, 1, [&](int64_t begin, int64_t) { met[begin] = meet(before + 2); });
  EXPECT_TRUE(met[0] && met[1]);
}

TEST(WorkspaceTest, ReleasedMemoryIsUsedAgainAndTheSecondStepAllocatesNothing) {
  Workspace workspace;
  const auto step = [&] {
    WorkspaceScope scope(workspace);
    const auto a = workspace.Array<float>(1 << 18).value();
    {
      WorkspaceScope inner(workspace);
      const auto b = workspace.Matrix<double>(1000, 1000).value();
      a[(1 << 18) - 1] = 7;
      std::fill_n(b.data(), 1000 * 1000, 1.0);
      EXPECT_EQ(a[(1 << 18) - 1], 7);  // they do not overlap
    }
    const auto c = workspace.Array<uint8_t>(3).value();
    const auto d = workspace.Array<double>(1).value();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(d.data()) % 64, 0u);
    EXPECT_NE(static_cast<void*>(c.data()), static_cast<void*>(d.data()));
  };
  step();
  const int64_t after_first = workspace.allocations();
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(workspace.allocations(), after_first);
  EXPECT_EQ(workspace.used_bytes(), 0);
  EXPECT_EQ(workspace.Array<float>(-1).status().code(), absl::StatusCode::kInvalidArgument);
}

// An array that does not fit the end of a chunk leaves it, which is no memory that anything uses.
TEST(WorkspaceTest, BytesInUseAreThoseOfArraysAlone) {
  Workspace workspace;
  for (int step = 0; step < 2; ++step) {  // in several chunks, then in one
    const Workspace::Mark start = workspace.mark();
    ASSERT_TRUE(workspace.Array<std::byte>(1 << 19).ok());
    const Workspace::Mark inner = workspace.mark();
    ASSERT_TRUE(workspace.Array<std::byte>(1 << 20).ok());
    ASSERT_TRUE(workspace.Array<std::byte>(1).ok());
    EXPECT_EQ(workspace.used_bytes(), (1 << 19) + (1 << 20) + 64);
    workspace.Release(inner);
    EXPECT_EQ(workspace.used_bytes(), 1 << 19);
    workspace.Release(start);
    EXPECT_EQ(workspace.used_bytes(), 0);
    EXPECT_EQ(workspace.peak_bytes(), (1 << 19) + (1 << 20) + 64);
  }
}

// A half's magnitude by the standard's definition.
double HalfValue(uint16_t magnitude) {
  const int exponent = magnitude >> 10, mantissa = magnitude & 0x3ff;
  return exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
}

TEST(Float16Test, WidensEveryHalf) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    Float16 half;
    half.bits = static_cast<uint16_t>(bits);
    const auto value = static_cast<float>(half);
    const auto magnitude = static_cast<uint16_t>(bits & 0x7fff);
    EXPECT_EQ(std::signbit(value), bits >= 0x8000) << bits;
    if (magnitude > 0x7c00) {
      EXPECT_TRUE(std::isnan(value)) << bits;
    } else if (magnitude == 0x7c00) {
      EXPECT_TRUE(std::isinf(value)) << bits;
    } else {
      EXPECT_EQ(std::abs(value), HalfValue(magnitude)) << bits;
      EXPECT_EQ(Float16(value), half) << bits;
    }
  }
}

// Between every pair of neighbours: the midpoint rounds to the even one, all else to the nearer.
TEST(Float16Test, RoundsToNearestEvenAndKeepsNaN) {
  for (uint16_t low = 0; low < 0x7c00; ++low) {
    const auto high = static_cast<uint16_t>(low + 1);
    const double next = high == 0x7c00 ? 65536 : HalfValue(high);
    const auto middle = static_cast<float>((HalfValue(low) + next) / 2);
    const uint16_t even = low % 2 == 0 ? low : high;
    EXPECT_EQ(Float16(middle).bits, even) << low;
    EXPECT_EQ(Float16(-middle).bits, even | 0x8000) << low;
    EXPECT_EQ(Float16(std::nextafterf(middle, 0.0f)).bits, low) << low;
    EXPECT_EQ(Float16(std::nextafterf(middle, 1e9f)).bits, high) << low;
  }
  EXPECT_EQ(Float16(std::numeric_limits<float>::max()).bits, 0x7c00);
  EXPECT_EQ(Float16(-std::numeric_limits<float>::infinity()).bits, 0xfc00);
  EXPECT_EQ(Float16(std::numeric_limits<float>::denorm_min()).bits, 0);
  EXPECT_TRUE(std::isnan(static_cast<float>(Float16(std::nanf("")))));
  EXPECT_TRUE(std::isnan(static_cast<float>(Float16(std::bit_cast<float>(0x7f800001u)))));
}

TEST(BFloat16Test, RoundsToNearestEvenAndKeepsNaN) {
  EXPECT_EQ(static_cast<float>(BFloat16(1.0f)), 1.0f);
  EXPECT_EQ(static_cast<float>(BFloat16(1.0f + 0x1p-8f)), 1.0f);            // tie to even
  EXPECT_EQ(static_cast<float>(BFloat16(1.0f + 0x3p-8f)), 1.0f + 0x1p-6f);  // tie to even, up
  EXPECT_EQ(static_cast<float>(BFloat16(1.0f + 0x1.01p-8f)), 1.0f + 0x1p-7f);
  EXPECT_TRUE(std::isinf(static_cast<float>(BFloat16(std::numeric_limits<float>::max()))));
  EXPECT_TRUE(std::isnan(static_cast<float>(BFloat16(std::nanf("")))));
  EXPECT_EQ(BFloat16(std::bit_cast<float>(0x7f800001u)).bits, 0x7fc0);  // a NaN of the low bits
  EXPECT_EQ(BFloat16(-std::numeric_limits<float>::infinity()).bits, 0xff80);
  EXPECT_EQ(BFloat16(std::numeric_limits<float>::denorm_min()).bits, 0);
  EXPECT_EQ(BFloat16(-0.0f).bits, 0x8000);
}

// Every branch for short texts, and stripes and blocks with a remainder.
TEST(Xxh3Test, IsWhatTheLibraryGivesWithoutWideInstructions) {
  std::vector<uint8_t> bytes(20'000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * i + i / 7);
  for (size_t size = 0; size < bytes.size() - 3; size += size < 600 ? 1 : 577) {
    for (const uint64_t seed : {uint64_t{0}, uint64_t{0x9E3779B97F4A7C15}}) {
      const uint8_t* const data = bytes.data() + size % 4;
      ASSERT_EQ(Xxh3(data, size, seed), XXH3_64bits_withSeed(data, size, seed)) << size;
    }
  }
}

// Known-answer vector of philox4x32-10 with an all-zero counter (Random123's kat_vectors): seed 0,
// purpose 0, layer 0 is the key that our mixing maps to zero.
TEST(RandomTest, MatchesTheKnownAnswerOfPhilox) {
  const auto r = Random4({.seed = 0, .purpose = static_cast<RandomPurpose>(0)});
  EXPECT_EQ(r, (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
}

TEST(RandomTest, NormalHasMeanZeroAndVarianceOneAndKeysDiffer) {
  constexpr int kSamples = 20000;
  double sum = 0, squares = 0;
  for (int i = 0; i < kSamples; ++i) {
    const double x = Normal({.seed = 7, .item = static_cast<uint64_t>(i)}, 3);
    sum += x;
    squares += x * x;
  }
  // Five standard errors: 1/sqrt(n) for the mean, sqrt(2/n) for the variance.
  EXPECT_NEAR(sum / kSamples, 0, 5 / std::sqrt(kSamples));
  EXPECT_NEAR(squares / kSamples, 1, 5 * std::sqrt(2.0 / kSamples));
  EXPECT_NE(Uniform({.seed = 1}), Uniform({.seed = 2}));
  EXPECT_NE(Uniform({.layer = 1}), Uniform({.layer = 2}));
  EXPECT_NE(Uniform({.step = 1}), Uniform({.step = 2}));
}

TEST(TreeCut, KeepsItemsWholeAndSpreadsThemOverLeaves) {
  const TreeCut cut = {.leaves = 8, .extent = 70, .item = 16};  // items 0..4, the last of 6
  const std::vector<int64_t> begins = {0, 0, 16, 16, 32, 48, 48, 64, 70};
  for (int s = 0; s <= 8; ++s) EXPECT_EQ(cut.Begin(s), begins[s]) << s;
  EXPECT_EQ((TreeCut{.leaves = 4, .extent = 0, .item = 3}.Begin(4)), 0);
}

// Sums whose bits depend on the order of folding, and empty leaves.
std::optional<float> Leaf(int s) {
  if (s % 5 == 3) return std::nullopt;
  return 1.0f / static_cast<float>(s + 1);
}

// The node over [first, last), from given values or from its halves.
std::optional<float> Fold(int first, int last,
                          const std::vector<std::pair<TreeNode, std::optional<float>>>& there) {
  for (const auto& [node, value] : there) {
    if (node.first == first && node.last == last) return value;
  }
  if (last - first == 1) {
    ADD_FAILURE() << "leaf " << first << " is in no node";
    return std::nullopt;
  }
  const auto left = Fold(first, (first + last) / 2, there);
  const auto right = Fold((first + last) / 2, last, there);
  return left && right ? *left + *right : left ? left : right;
}

TEST(LargestNodes, CoverAnyRangeWithAlignedSubtrees) {
  for (int first = 0; first <= kMaxTreeLeaves; ++first) {
    for (int last = first; last <= kMaxTreeLeaves; ++last) {
      int next = first, previous = 0;
      bool smaller = false;
      for (const TreeNode& node : LargestNodes(first, last)) {
        const int size = node.last - node.first;
        EXPECT_EQ(node.first, next);
        EXPECT_TRUE(IsTreeLeaves(size) && node.first % size == 0) << first << ' ' << last;
        // As few as possible: sizes grow, then fall.
        EXPECT_TRUE(size > previous ? !smaller : size < previous || !smaller);
        smaller = smaller || size <= previous;
        next = node.last, previous = size;
      }
      EXPECT_EQ(next, last);
    }
  }
}

TEST(LargestNodes, FoldToTheSameRootForAnyPartition) {
  std::vector<std::pair<TreeNode, std::optional<float>>> leaves;
  for (int s = 0; s < kMaxTreeLeaves; ++s) leaves.push_back({{s, s + 1}, Leaf(s)});
  const auto root = Fold(0, kMaxTreeLeaves, leaves);
  float chain = 0;
  for (int s = 0; s < kMaxTreeLeaves; ++s) chain += Leaf(s).value_or(0.0f);
  ASSERT_NE(*root, chain);
  for (int a = 0; a <= kMaxTreeLeaves; ++a) {
    for (int b = a; b <= kMaxTreeLeaves; ++b) {
      std::vector<std::pair<TreeNode, std::optional<float>>> there;
      const int cuts[] = {0, a, b, kMaxTreeLeaves};
      for (int rank = 0; rank < 3; ++rank) {
        for (const TreeNode& node : LargestNodes(cuts[rank], cuts[rank + 1])) {
          there.push_back({node, Fold(node.first, node.last, leaves)});
        }
      }
      EXPECT_EQ(Fold(0, kMaxTreeLeaves, there), root) << a << ' ' << b;
    }
  }
}

}  // namespace
}  // namespace moe::testing
