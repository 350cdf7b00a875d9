// Fork/join inside one rank. The only place that sees oneTBB.
#ifndef MOE_KERNELS_BASE_PARALLEL_H_
#define MOE_KERNELS_BASE_PARALLEL_H_

#include <algorithm>
#include <cstdint>
#include <memory>

#include <absl/functional/function_ref.h>

namespace moe {

// The threads of one rank: a oneTBB task_arena, so that several ranks of one process do not
// oversubscribe the machine. With one thread everything runs inline, without oneTBB.
class ThreadPool {
 public:
  // threads >= 1; the caller of For counts as one of them.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls body(begin, end) on disjoint ranges that cover [0, n), each `grain` long but the last.
  // Ranges do not depend on the number of threads; which thread runs a range does. Blocks until all
  // are done. A For inside a body runs inline. Everything the caller wrote before happens before
  // every body; every body happens before the return (annotated for ThreadSanitizer, because
  // Debian's oneTBB is not instrumented).
  void For(int64_t n, int64_t grain, absl::FunctionRef<void(int64_t, int64_t)> body);

  // A pool of one thread: For runs inline. Shared, stateless.
  static ThreadPool& Serial();

 private:
  struct Arena;
  const int threads_;
  std::unique_ptr<Arena> arena_;  // null with one thread
};

// A grain of rows that hold some 8000 elements: below that a fork costs more than it saves.
inline int64_t RowGrain(int64_t cols) {
  return std::max<int64_t>(1, 8192 / std::max<int64_t>(1, cols));
}

}  // namespace moe

#endif  // MOE_KERNELS_BASE_PARALLEL_H_
