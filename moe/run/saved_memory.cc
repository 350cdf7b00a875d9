#include "moe/run/saved_memory.h"

#include <utility>

namespace moe {

Context SavedMemory::In(Context context) const {
  if (empty()) return context;
  const bool apart = context.host_workspace != context.workspace;
  context.workspace = &held_->device;
  context.host_workspace = apart ? &held_->host : &held_->device;
  return context;
}

void SavedMemory::Clear() {
  if (!empty()) held_->Clear();
}

void SavedMemory::Workspaces::Clear() {
  device.Release({});
  host.Release({});
}

void SavedMemory::GiveBack::operator()(Workspaces* workspaces) const {
  workspaces->Clear();
  const std::lock_guard<std::mutex> lock(pool->mu_);
  pool->free_.emplace_back(workspaces);
}

SavedMemory SavedMemory::Pool::Take() {
  SavedMemory memory;
  std::unique_ptr<Workspaces> workspaces;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (free_.empty()) {
      free_.reserve(++made_);
      workspaces = std::make_unique<Workspaces>(memory_);
    } else {
      workspaces = std::move(free_.back());
      free_.pop_back();
    }
  }
  memory.held_ = {workspaces.release(), GiveBack{shared_from_this()}};
  return memory;
}

}  // namespace moe
