// Memory of saved states that live as long as their owner likes, whatever the order.
#ifndef MOE_MOE_RUN_SAVED_MEMORY_H_
#define MOE_MOE_RUN_SAVED_MEMORY_H_

#include <memory>
#include <mutex>
#include <vector>

#include "kernels/base/workspace.h"
#include "moe/run/context.h"

namespace moe {

// The workspaces of one saved state, used in place of its context's. They come from a pool and
// return to it with their grown size. Move-only; an empty object means the context's own
// workspaces. May be destroyed on any thread, and after the layer, the pool and the session.
class SavedMemory {
 public:
  class Pool;

  bool empty() const { return held_ == nullptr; }
  // `context` with these workspaces.
  Context In(Context context) const;
  // Nothing in them is in use any more, but by what is in the context's streams already.
  void Clear();

 private:
  struct Workspaces {
    explicit Workspaces(MemoryResource& memory) : device(memory) {}
    void Clear();
    Workspace device, host;  // the second for CUDA devices
  };
  struct GiveBack {
    std::shared_ptr<Pool> pool;  // shared: states may outlive the layer
    void operator()(Workspaces* workspaces) const;
  };
  std::unique_ptr<Workspaces, GiveBack> held_;
};

// Keeps the workspaces that nobody holds: steps like the first one allocate nothing.
class SavedMemory::Pool : public std::enable_shared_from_this<Pool> {
 public:
  explicit Pool(MemoryResource& memory) : memory_(memory) {}
  SavedMemory Take();

 private:
  friend struct GiveBack;
  MemoryResource& memory_;
  std::mutex mu_;
  // Guarded by mu_; free_ has room for all that were made.
  size_t made_ = 0;
  std::vector<std::unique_ptr<Workspaces>> free_;
};

}  // namespace moe

#endif  // MOE_MOE_RUN_SAVED_MEMORY_H_
