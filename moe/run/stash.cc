#include "moe/run/stash.h"

#include <atomic>
#include <cstddef>
#include <utility>

#include "moe/run/context.h"

namespace moe {
namespace {

// Fills what `workspace`, which is empty, has grown to with bytes that are NaN as any real.
void FillWithNan([[maybe_unused]] Workspace& workspace) {
#ifndef NDEBUG
  workspace.FillUnused(std::byte{0xff});
#endif
}

}  // namespace

void Stash::Clear() {
  device_.Release({});
  host_.Release({});
}

std::shared_ptr<StashPool> StashPool::Create(const Context& context) {
  const bool apart = context.host_workspace != context.workspace;
  return std::shared_ptr<StashPool>(new StashPool(*context.memory, apart));
}

StashHandle StashPool::Take(StashUse use) {
  static std::atomic<uint64_t> generations = 0;
  Stash* stash = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    std::vector<Stash*>& free = free_[static_cast<size_t>(use)];
    if (free.empty()) {
      free.reserve(all_.size() + 1);
      all_.emplace_back(new Stash(memory_, apart_, use));
      stash = all_.back().get();
    } else {
      stash = free.back();
      free.pop_back();
    }
  }
  stash->generation_ = ++generations;
  FillWithNan(stash->device_);
  FillWithNan(stash->host_);
  return {stash, GiveBack{shared_from_this()}};
}

void StashPool::GiveBack::operator()(Stash* stash) const {
  stash->Clear();
  const std::lock_guard<std::mutex> lock(pool->mu_);
  pool->free_[static_cast<size_t>(stash->use_)].push_back(stash);
}

int64_t StashPool::peak_bytes() const {
  const std::lock_guard<std::mutex> lock(mu_);
  int64_t bytes = 0;
  for (const auto& stash : all_) bytes += stash->device_.peak_bytes();
  return bytes;
}

}  // namespace moe
