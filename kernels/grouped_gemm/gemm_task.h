// Cuts products into blocks, gives each thread scratch, and enqueues them. Internal.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_TASK_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_TASK_H_

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/stream.h"
#include "kernels/base/workspace.h"
#include "kernels/grouped_gemm/gemm_blocks.h"
#include "kernels/grouped_gemm/gemm_problem.h"

namespace moe::gemm {

// Multiply-adds below which a fork costs more than it saves.
inline constexpr int64_t kProductsPerThread = int64_t{1} << 18;

// State of a task, in workspace memory: `blocks_before[p]` blocks belong to problems before p.
template <typename T, typename TOut>
struct Task {
  absl::Span<const Problem<T, TOut>> problems;
  absl::Span<const int64_t> blocks_before;  // one more than problems
  float* slots = nullptr;                   // one for each worker
  int64_t slot_floats = 0;
  int64_t workers = 0;
  int64_t block_cols = 0;
  std::atomic<int64_t> next_block = 0;
  std::atomic<bool> done = false;
};

template <typename T, typename TOut>
BlockGrid GridOf(const Problem<T, TOut>& problem, int64_t block_cols) {
  return {problem.c.rows(), problem.c.cols(), ShapeFor(problem), block_cols};
}

// Every worker takes the next block until none is left. Bits do not depend on which worker computes
// a block.
template <typename T, typename TOut>
void RunTask(Task<T, TOut>& task, ThreadPool& threads) {
  const int64_t blocks = task.blocks_before.back();
  threads.For(task.workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      float* const memory = task.slots + worker * task.slot_floats;
      while (true) {
        const int64_t i = task.next_block.fetch_add(1, std::memory_order_relaxed);
        if (i >= blocks) break;
        const auto after =
            std::upper_bound(task.blocks_before.begin(), task.blocks_before.end(), i);
        const size_t p = static_cast<size_t>(after - task.blocks_before.begin()) - 1;
        const Problem<T, TOut>& problem = task.problems[p];
        RunBlock(problem, GridOf(problem, task.block_cols).At(i - task.blocks_before[p]), memory);
      }
    }
  });
}

// Number of workers and size of blocks: four blocks for each thread if there is that much work.
template <typename T, typename TOut>
void Plan(Task<T, TOut>& task, absl::Span<int64_t> blocks_before, const ThreadPool& threads) {
  double products = 0;
  int64_t most_blocks = 0;
  int64_t cols = 0;
  for (const Problem<T, TOut>& problem : task.problems) {
    products += static_cast<double>(problem.c.rows()) * static_cast<double>(problem.c.cols()) *
                static_cast<double>(problem.depth());
    most_blocks += GridOf(problem, 0).size();
    cols += GridOf(problem, 0).rows.parts * problem.c.cols();
    task.slot_floats = std::max(task.slot_floats, Slot::Size(problem));
  }
  const double useful = std::ceil(products / static_cast<double>(kProductsPerThread));
  task.workers = std::clamp<int64_t>(most_blocks, 1, threads.threads());
  if (useful < static_cast<double>(task.workers)) {
    task.workers = std::max<int64_t>(1, static_cast<int64_t>(useful));
  }
  task.block_cols =
      task.workers == 1 ? kMaxBlockCols : std::min(kMaxBlockCols, cols / (4 * task.workers));
  blocks_before[0] = 0;
  for (size_t p = 0; p < task.problems.size(); ++p) {
    blocks_before[p + 1] = blocks_before[p] + GridOf(task.problems[p], task.block_cols).size();
  }
  task.blocks_before = blocks_before;
}

// Takes the memory of a task from `workspace`. `problems` are there already.
template <typename T, typename TOut>
absl::StatusOr<Task<T, TOut>*> MakeTask(absl::Span<const Problem<T, TOut>> problems,
                                        Workspace& workspace, const ThreadPool& threads) {
  using TaskType = Task<T, TOut>;
  MOE_ASSIGN_OR_RETURN(const auto memory, workspace.Array<std::byte>(sizeof(TaskType)));
  static_assert(alignof(TaskType) <= 64 && std::is_trivially_destructible_v<TaskType>);
  TaskType* const task = new (memory.data()) TaskType;
  task->problems = problems;
  MOE_ASSIGN_OR_RETURN(const auto blocks_before,
                       workspace.Array<int64_t>(static_cast<int64_t>(problems.size()) + 1));
  Plan(*task, blocks_before, threads);
  MOE_ASSIGN_OR_RETURN(const auto slots, workspace.Array<float>(task->workers * task->slot_floats));
  task->slots = slots.data();
  return task;
}

// kInvalidArgument, in the name of `function`, unless `tree` cuts a reduced index of `depth`
// values.
absl::Status CheckTree(absl::string_view function, const GemmTree& tree, int64_t depth);

// Enqueues the products of `problems`, an array in `workspace` that was taken after `mark`. If the
// task has run already, releases all that was taken since then; a queued task still needs it.
template <typename T, typename TOut>
absl::Status Run(absl::Span<const Problem<T, TOut>> problems, Workspace::Mark mark,
                 Workspace& workspace, Stream& stream) {
  absl::StatusOr<Task<T, TOut>*> made = MakeTask(problems, workspace, stream.threads());
  if (!made.ok()) {
    workspace.Release(mark);
    return std::move(made).status();
  }
  Task<T, TOut>* const task = *made;
  ThreadPool& threads = stream.threads();
  absl::Status status = stream.Enqueue([task, &threads] {
    RunTask(*task, threads);
    task->done.store(true, std::memory_order_release);
    return absl::OkStatus();
  });
  if (task->done.load(std::memory_order_acquire)) workspace.Release(mark);
  return status;
}

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_TASK_H_
