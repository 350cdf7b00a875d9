// Scratch memory of one rank, handed out by moving a pointer.
#ifndef MOE_KERNELS_BASE_WORKSPACE_H_
#define MOE_KERNELS_BASE_WORKSPACE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/tensor_view.h"

namespace moe {

// Bump allocation with marks. A step marks, allocates and releases; after the first step the
// workspace has grown to what a step needs and allocates no more. Memory is not initialised.
// One thread at a time. Everything taken after a mark is invalid once that mark is released.
class Workspace {
 public:
  struct Mark {
    size_t chunk = 0;
    int64_t used = 0;
    int64_t taken = 0;
  };

  explicit Workspace(MemoryResource& memory = CpuMemory()) : memory_(&memory) {}
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // `count` elements, 64-byte aligned. kResourceExhausted when memory is out.
  template <typename T>
  absl::StatusOr<absl::Span<T>> Array(int64_t count) {
    MOE_ASSIGN_OR_RETURN(std::byte* const data, Take(count * static_cast<int64_t>(sizeof(T))));
    return absl::Span<T>(reinterpret_cast<T*>(data), static_cast<size_t>(count));
  }

  // [rows, cols], dense.
  template <typename T>
  absl::StatusOr<MatrixView<T>> Matrix(int64_t rows, int64_t cols) {
    MOE_ASSIGN_OR_RETURN(std::byte* const data,
                         Take(rows * cols * static_cast<int64_t>(sizeof(T))));
    return MatrixView<T>(reinterpret_cast<T*>(data), rows, cols);
  }

  Mark mark() const { return {chunk_, used_, taken_}; }
  // Gives back everything taken since `mark`. Releasing to the very start merges the chunks into
  // one.
  void Release(Mark mark);

  // Whether `data` lies in memory that was taken and not given back.
  bool Contains(const void* data) const;

  // Sets every byte that is allocated and not in use to `value`; nothing in a device's memory.
  void FillUnused(std::byte value);

  // Bytes in use now and the maximum so far, without ends of chunks that an array did not fit; the
  // number of allocations so far (a test asserts that it stays the same after the first step).
  int64_t used_bytes() const { return taken_; }
  int64_t peak_bytes() const { return peak_; }
  int64_t allocations() const { return allocations_; }

 private:
  absl::StatusOr<std::byte*> Take(int64_t bytes);

  MemoryResource* memory_;
  std::vector<Buffer> chunks_;
  size_t chunk_ = 0;   // the chunk in use
  int64_t used_ = 0;   // bytes of chunks_[chunk_] up to the end of the last array
  int64_t taken_ = 0;  // bytes of all arrays
  int64_t peak_ = 0;
  int64_t allocations_ = 0;
};

// Marks on construction, releases on destruction.
class WorkspaceScope {
 public:
  explicit WorkspaceScope(Workspace& workspace) : workspace_(workspace), mark_(workspace.mark()) {}
  ~WorkspaceScope() { workspace_.Release(mark_); }
  WorkspaceScope(const WorkspaceScope&) = delete;
  WorkspaceScope& operator=(const WorkspaceScope&) = delete;

 private:
  Workspace& workspace_;
  const Workspace::Mark mark_;
};

}  // namespace moe

#endif  // MOE_KERNELS_BASE_WORKSPACE_H_
