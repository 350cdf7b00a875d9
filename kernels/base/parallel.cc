#include "kernels/base/parallel.h"

#include <algorithm>
#include <stdexcept>
#include <system_error>

#include <oneapi/tbb/info.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include "kernels/base/status_macros.h"

#if defined(MOE_ANNOTATE_THREADS)  // a ThreadSanitizer build: see kernels/CMakeLists.txt
#include <sanitizer/tsan_interface.h>
#define MOE_TSAN_RELEASE(address) __tsan_release(address)
#define MOE_TSAN_ACQUIRE(address) __tsan_acquire(address)
#else
#define MOE_TSAN_RELEASE(address) (void)(address)
#define MOE_TSAN_ACQUIRE(address) (void)(address)
#endif

namespace moe {
namespace {

thread_local bool inside_for = false;

// Marks the thread as inside a For while one body runs, including a body that throws.
struct InsideFor {
  InsideFor() { inside_for = true; }
  ~InsideFor() { inside_for = false; }
  InsideFor(const InsideFor&) = delete;
  InsideFor& operator=(const InsideFor&) = delete;
};

// The happens-before edge from bodies to the caller, also when an exception leaves them.
struct ReleaseAtEnd {
  explicit ReleaseAtEnd(char* edge) : edge_(edge) {}
  ~ReleaseAtEnd() { MOE_TSAN_RELEASE(edge_); }
  char* const edge_;
};
struct AcquireAtEnd {
  explicit AcquireAtEnd(char* edge) : edge_(edge) {}
  ~AcquireAtEnd() { MOE_TSAN_ACQUIRE(edge_); }
  char* const edge_;
};

}  // namespace

struct ThreadPool::Arena {
  // oneTBB has no more workers than CPUs, and warns about an arena that would hold more.
  explicit Arena(int threads)
      : arena(std::min(threads, oneapi::tbb::info::default_concurrency()),
              /*reserved_for_masters=*/1) {}
  oneapi::tbb::task_arena arena;
};

ThreadPool::ThreadPool(int threads) : threads_(threads) {
  MOE_CHECK(threads >= 1);
  if (threads > 1) arena_ = std::make_unique<Arena>(threads);
}

ThreadPool::~ThreadPool() = default;

ThreadPool& ThreadPool::Serial() {
  static ThreadPool* const serial = new ThreadPool(1);
  return *serial;
}

void ThreadPool::For(int64_t n, int64_t grain, absl::FunctionRef<void(int64_t, int64_t)> body) {
  grain = std::max<int64_t>(grain, 1);
  const int64_t ranges = (n + grain - 1) / grain;
  const auto run = [&](int64_t range) {
    body(range * grain, std::min(n, (range + 1) * grain));
  };
  if (arena_ == nullptr || inside_for || ranges <= 1) {
    for (int64_t range = 0; range < ranges; ++range) run(range);
    return;
  }
  char fork = 0, join = 0;  // their addresses identify the two edges
  MOE_TSAN_RELEASE(&fork);
  const AcquireAtEnd acquire(&join);
  const auto fork_and_join = [&] {
    oneapi::tbb::parallel_for(
        int64_t{0}, ranges,
        [&](int64_t range) {
          MOE_TSAN_ACQUIRE(&fork);
          const ReleaseAtEnd release(&join);
          const InsideFor inside;
          run(range);
        },
        oneapi::tbb::simple_partitioner());
  };
  try {
    arena_->arena.execute(fork_and_join);
  } catch (const std::runtime_error& e) {  // from oneTBB, for a thread that does not start
    throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again),
                            e.what());
  }
}

}  // namespace moe
