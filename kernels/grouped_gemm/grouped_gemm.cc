#include "kernels/grouped_gemm/grouped_gemm.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <new>
#include <string>
#include <type_traits>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "kernels/grouped_gemm/gemm_blocks.h"
#include "kernels/grouped_gemm/gemm_problem.h"

namespace moe {
namespace gemm {

template <typename T, typename TOut>
void Reference(const Problem<T, TOut>& problem) {
  const auto& [a, b, c, a_layout, b_layout, write] = problem;
  for (int64_t i = 0; i < c.rows(); ++i) {
    for (int64_t j = 0; j < c.cols(); ++j) {
      float sum = write == Write::kAdd ? static_cast<float>(c(i, j)) : 0.0f;
      for (int64_t k = 0; k < problem.depth(); ++k) {
        const T x = a_layout == Layout::kPlain ? a(i, k) : a(k, i);
        const T y = b_layout == Layout::kPlain ? b(k, j) : b(j, k);
        sum = std::fma(static_cast<float>(x), static_cast<float>(y), sum);
      }
      c(i, j) = static_cast<TOut>(sum);
    }
  }
}

template void Reference(const Problem<float, float>&);
template void Reference(const Problem<BFloat16, BFloat16>&);
template void Reference(const Problem<BFloat16, float>&);

}  // namespace gemm

namespace {

using gemm::BlockGrid;
using gemm::Layout;
using gemm::Problem;
using gemm::Slot;

template <typename T>
std::string Shape(const MatrixView<T>& m) {
  return absl::StrCat("[", m.rows(), ", ", m.cols(), "]");
}

template <typename T>
absl::Status CheckShape(absl::string_view function, absl::string_view name, const MatrixView<T>& m,
                        int64_t rows, int64_t cols) {
  if (m.rows() == rows && m.cols() == cols && m.stride() >= cols) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(function, ": ", name, " is ", Shape(m),
                                                 " with stride ", m.stride(), ", expected [", rows,
                                                 ", ", cols, "]"));
}

absl::Status CheckOffsets(absl::string_view function, absl::Span<const int64_t> offsets,
                          size_t groups, int64_t rows) {
  if (offsets.size() != groups + 1) {
    return absl::InvalidArgumentError(absl::StrCat(function, ": ", offsets.size(), " offsets for ",
                                                   groups, " weights, expected ", groups + 1));
  }
  if (offsets.front() != 0 || offsets.back() != rows) {
    return absl::InvalidArgumentError(absl::StrCat(function, ": offsets run from ", offsets.front(),
                                                   " to ", offsets.back(), ", expected 0 to ", rows,
                                                   " rows"));
  }
  for (size_t g = 0; g < groups; ++g) {
    if (offsets[g] <= offsets[g + 1]) continue;
    return absl::InvalidArgumentError(absl::StrCat(function, ": offsets[", g, "] = ", offsets[g],
                                                   " is above offsets[", g + 1,
                                                   "] = ", offsets[g + 1], ", expected ascending"));
  }
  return absl::OkStatus();
}

// Rows [begin, end) of `m`.
template <typename T>
MatrixView<T> Rows(const MatrixView<T>& m, int64_t begin, int64_t end) {
  return {m.data() + begin * m.stride(), end - begin, m.cols(), m.stride()};
}

// Products of the CPU's work below which a fork costs more than it saves.
constexpr int64_t kProductsPerThread = int64_t{1} << 18;

// All that a task needs, in workspace memory: `blocks_before[p]` blocks of the problems before p.
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
  return {problem.c.rows(), problem.c.cols(), gemm::ShapeFor(problem.b_layout), block_cols};
}

// Every worker takes the next block until none is left. Which worker computes a block does not
// show in its bits.
template <typename T, typename TOut>
void RunTask(Task<T, TOut>& task, ThreadPool& threads) {
  const int64_t blocks = task.blocks_before.back();
  threads.For(task.workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      const Slot slot{task.slots + worker * task.slot_floats};
      while (true) {
        const int64_t i = task.next_block.fetch_add(1, std::memory_order_relaxed);
        if (i >= blocks) break;
        const auto after =
            std::upper_bound(task.blocks_before.begin(), task.blocks_before.end(), i);
        const size_t p = static_cast<size_t>(after - task.blocks_before.begin()) - 1;
        const Problem<T, TOut>& problem = task.problems[p];
        gemm::RunBlock(problem, GridOf(problem, task.block_cols).At(i - task.blocks_before[p]),
                       slot);
      }
    }
  });
}

// Workers and the size of blocks: four blocks for each thread if there is that much work.
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
    task.slot_floats = std::max(task.slot_floats, Slot::Size(problem.a_layout));
  }
  const double useful = std::ceil(products / static_cast<double>(kProductsPerThread));
  task.workers = std::clamp<int64_t>(most_blocks, 1, threads.threads());
  if (useful < static_cast<double>(task.workers)) {
    task.workers = std::max<int64_t>(1, static_cast<int64_t>(useful));
  }
  task.block_cols = std::min(gemm::kMaxBlockCols, cols / (4 * task.workers));
  blocks_before[0] = 0;
  for (size_t p = 0; p < task.problems.size(); ++p) {
    blocks_before[p + 1] = blocks_before[p] + GridOf(task.problems[p], task.block_cols).size();
  }
  task.blocks_before = blocks_before;
}

// Takes the memory of a task from `workspace`. `problems` live there already.
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

// Gives back what the task took since `mark` if it has run: a stream that queues may still need it.
template <typename T, typename TOut>
absl::Status Run(absl::Span<const Problem<T, TOut>> problems, Workspace::Mark mark,
                 Workspace& workspace, Stream& stream) {
  MOE_ASSIGN_OR_RETURN(auto* const task, MakeTask(problems, workspace, stream.threads()));
  ThreadPool& threads = stream.threads();
  const absl::Status status = stream.Enqueue([task, &threads] {
    RunTask(*task, threads);
    task->done.store(true, std::memory_order_release);
    return absl::OkStatus();
  });
  if (task->done.load(std::memory_order_acquire)) workspace.Release(mark);
  return status;
}

absl::Status CheckDevice(absl::string_view function, const Stream& stream) {
  if (stream.device().kind == DeviceKind::kCpu) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(function, ": this build has no CUDA kernels"));
}

// One problem per group: rows of `a` and `c`, cut by the offsets, times weight[g].
template <typename T, typename TOut>
absl::Status RunGroups(MatrixView<const T> a, absl::Span<const int64_t> offsets,
                       absl::Span<const MatrixView<const T>> weight, Layout weight_layout,
                       MatrixView<TOut> c, Workspace& workspace, Stream& stream) {
  const Workspace::Mark mark = workspace.mark();
  MOE_ASSIGN_OR_RETURN(const auto problems,
                       (workspace.Array<Problem<T, TOut>>(static_cast<int64_t>(weight.size()))));
  for (size_t g = 0; g < weight.size(); ++g) {
    problems[g] = {.a = Rows(a, offsets[g], offsets[g + 1]),
                   .b = weight[g],
                   .c = Rows(c, offsets[g], offsets[g + 1]),
                   .b_layout = weight_layout};
  }
  return Run<T, TOut>(problems, mark, workspace, stream);
}

template <typename T, typename TOut>
absl::Status Forward(absl::string_view function, MatrixView<const T> x,
                     absl::Span<const int64_t> offsets,
                     absl::Span<const MatrixView<const T>> weight, MatrixView<TOut> y,
                     Workspace& workspace, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckDevice(function, stream));
  MOE_RETURN_IF_ERROR(CheckShape(function, "x", x, y.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(function, "y", y, x.rows(), y.cols()));
  MOE_RETURN_IF_ERROR(CheckOffsets(function, offsets, weight.size(), x.rows()));
  for (const MatrixView<const T>& w : weight) {
    MOE_RETURN_IF_ERROR(CheckShape(function, "weight", w, y.cols(), x.cols()));
  }
  return RunGroups<T, TOut>(x, offsets, weight, Layout::kTransposed, y, workspace, stream);
}

template <typename T, typename TOut>
absl::Status InputGradient(absl::string_view function, MatrixView<const T> dy,
                           absl::Span<const int64_t> offsets,
                           absl::Span<const MatrixView<const T>> weight, MatrixView<TOut> dx,
                           Workspace& workspace, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckDevice(function, stream));
  MOE_RETURN_IF_ERROR(CheckShape(function, "dy", dy, dx.rows(), dy.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(function, "dx", dx, dy.rows(), dx.cols()));
  MOE_RETURN_IF_ERROR(CheckOffsets(function, offsets, weight.size(), dy.rows()));
  for (const MatrixView<const T>& w : weight) {
    MOE_RETURN_IF_ERROR(CheckShape(function, "weight", w, dy.cols(), dx.cols()));
  }
  return RunGroups<T, TOut>(dy, offsets, weight, Layout::kPlain, dx, workspace, stream);
}

}  // namespace

template <typename T>
absl::Status GroupedGemm(MatrixView<const T> x, absl::Span<const int64_t> offsets,
                         absl::Span<const MatrixView<const T>> weight, MatrixView<T> y,
                         Workspace& workspace, Stream& stream) {
  return Forward<T, T>("GroupedGemm", x, offsets, weight, y, workspace, stream);
}

template <typename T>
absl::Status GroupedGemmInputGradient(MatrixView<const T> dy, absl::Span<const int64_t> offsets,
                                      absl::Span<const MatrixView<const T>> weight,
                                      MatrixView<T> dx, Workspace& workspace, Stream& stream) {
  return InputGradient<T, T>("GroupedGemmInputGradient", dy, offsets, weight, dx, workspace,
                             stream);
}

template <typename T>
absl::Status GemmWeightGradient(MatrixView<const T> dy, MatrixView<const T> x, MatrixView<float> dw,
                                Write write, Workspace& workspace, Stream& stream) {
  constexpr char kFunction[] = "GemmWeightGradient";
  MOE_RETURN_IF_ERROR(CheckDevice(kFunction, stream));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "dy", dy, x.rows(), dw.rows()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "x", x, dy.rows(), dw.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "dw", dw, dy.cols(), x.cols()));
  const Workspace::Mark mark = workspace.mark();
  MOE_ASSIGN_OR_RETURN(const auto problems, (workspace.Array<Problem<T, float>>(1)));
  problems[0] = {.a = dy, .b = x, .c = dw, .a_layout = Layout::kTransposed, .write = write};
  return Run<T, float>(problems, mark, workspace, stream);
}

template <typename T, typename TOut>
absl::Status Gemm(MatrixView<const T> x, MatrixView<const T> weight, MatrixView<TOut> y,
                  Workspace& workspace, Stream& stream) {
  const int64_t offsets[] = {0, x.rows()};
  return Forward<T, TOut>("Gemm", x, offsets, {&weight, 1}, y, workspace, stream);
}

template <typename T, typename TOut>
absl::Status GemmInputGradient(MatrixView<const T> dy, MatrixView<const T> weight,
                               MatrixView<TOut> dx, Workspace& workspace, Stream& stream) {
  const int64_t offsets[] = {0, dy.rows()};
  return InputGradient<T, TOut>("GemmInputGradient", dy, offsets, {&weight, 1}, dx, workspace,
                                stream);
}

#define MOE_INSTANTIATE(T)                                                                       \
  template absl::Status GroupedGemm(MatrixView<const T>, absl::Span<const int64_t>,              \
                                    absl::Span<const MatrixView<const T>>, MatrixView<T>,        \
                                    Workspace&, Stream&);                                        \
  template absl::Status GroupedGemmInputGradient(MatrixView<const T>, absl::Span<const int64_t>, \
                                                 absl::Span<const MatrixView<const T>>,          \
                                                 MatrixView<T>, Workspace&, Stream&);            \
  template absl::Status GemmWeightGradient(MatrixView<const T>, MatrixView<const T>,             \
                                           MatrixView<float>, Write, Workspace&, Stream&)
#define MOE_INSTANTIATE_DENSE(T, TOut)                                                   \
  template absl::Status Gemm(MatrixView<const T>, MatrixView<const T>, MatrixView<TOut>, \
                             Workspace&, Stream&);                                       \
  template absl::Status GemmInputGradient(MatrixView<const T>, MatrixView<const T>,      \
                                          MatrixView<TOut>, Workspace&, Stream&)
MOE_INSTANTIATE(float);
MOE_INSTANTIATE(BFloat16);
MOE_INSTANTIATE_DENSE(float, float);
MOE_INSTANTIATE_DENSE(BFloat16, BFloat16);
MOE_INSTANTIATE_DENSE(BFloat16, float);
#undef MOE_INSTANTIATE
#undef MOE_INSTANTIATE_DENSE

}  // namespace moe
