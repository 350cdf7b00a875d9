// Weight gradients that a backward leaves for later, so that the gradients of its input come first.
#ifndef MOE_MOE_RUN_DEFERRED_GRADIENTS_H_
#define MOE_MOE_RUN_DEFERRED_GRADIENTS_H_

#include <cstdint>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/group_offsets.h"
#include "kernels/base/host_task.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/tensor_view.h"
#include "moe/run/context.h"
#include "moe/run/stash.h"

namespace moe {

// Those of one micro-batch. A Linear whose context has one (Context::later) adds its product here.
class DeferredGradients {
 public:
  // What follows is kept in `stash`, that of the micro-batch, until Run.
  void Begin(const Context& context, Stash& stash) {
    context_ = &context;
    stash_ = &stash;
  }

  // `rows` themselves where the stash has them, otherwise a copy there, enqueued on the compute
  // stream: a backward's scratch is gone, or overwritten, when Run reads it.
  template <typename T>
  absl::StatusOr<MatrixView<const T>> Keep(MatrixView<const T> rows) const {
    if (rows.rows() == 0 || stash_->device().Contains(rows.data())) return rows;
    MOE_ASSIGN_OR_RETURN(const auto copy,
                         stash_->device().template Matrix<T>(rows.rows(), rows.cols()));
    const bool dense = rows.stride() == rows.cols();
    const int64_t pieces = dense ? 1 : rows.rows();
    const int64_t bytes = rows.rows() / pieces * rows.cols() * int64_t{sizeof(T)};
    for (int64_t i = 0; i < pieces; ++i) {
      MOE_RETURN_IF_ERROR(context_->compute->CopyBytes(rows.row(i), copy.row(i), bytes));
    }
    return copy;
  }
  absl::StatusOr<GroupOffsets> Keep(const GroupOffsets& offsets) const;

  template <typename Task>
  void Add(Task&& task) {
    tasks_.emplace_back(std::forward<Task>(task));
  }
  // Runs what was added, in that order, and forgets it.
  absl::Status Run();

 private:
  const Context* context_ = nullptr;
  Stash* stash_ = nullptr;
  std::vector<HostTask> tasks_;
};

}  // namespace moe

#endif  // MOE_MOE_RUN_DEFERRED_GRADIENTS_H_
