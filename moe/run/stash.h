// Memory of the micro-batches in flight: what forwards keep for their backwards.
#ifndef MOE_MOE_RUN_STASH_H_
#define MOE_MOE_RUN_STASH_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/base/workspace.h"

namespace moe {

struct Context;

// What a stash keeps: all of a micro-batch, or what one module makes again. Their sizes differ, so
// that each use has stashes of its own.
enum class StashUse : uint8_t { kMicroBatch, kModule };

// The memory of one micro-batch: forwards take from it what their backwards read, and it is all
// given back at once.
class Stash {
 public:
  Workspace& device() { return device_; }  // memory of the compute stream's device
  Workspace& host() { return apart_ ? host_ : device_; }
  // A number for each StashPool::Take, different from that of any other stash of the process.
  uint64_t generation() const { return generation_; }

 private:
  friend class StashPool;
  Stash(MemoryResource& memory, bool apart, StashUse use)
      : device_(memory), apart_(apart), use_(use) {}
  void Clear();

  Workspace device_, host_;  // the second for CUDA devices
  const bool apart_;
  const StashUse use_;
  uint64_t generation_ = 0;
};

// Keeps the stashes that nobody holds, with their grown memory: steps like the first one allocate
// nothing. Lives as long as one of its stashes.
class StashPool : public std::enable_shared_from_this<StashPool> {
 public:
  static std::shared_ptr<StashPool> Create(const Context& context);

  struct GiveBack {
    std::shared_ptr<StashPool> pool;
    void operator()(Stash* stash) const;
  };
  // An empty stash; it may be destroyed on any thread, also after modules and session, once the
  // compute stream waits for every stream that works on it. Its memory is not initialised; debug
  // builds fill what is the host's with NaN.
  std::unique_ptr<Stash, GiveBack> Take(StashUse use = StashUse::kMicroBatch);

  // Peak bytes on the compute stream's device, summed over all stashes. While no other thread gives
  // one back.
  int64_t peak_bytes() const;

 private:
  StashPool(MemoryResource& memory, bool apart) : memory_(memory), apart_(apart) {}

  MemoryResource& memory_;
  const bool apart_;  // the host has memory of its own
  mutable std::mutex mu_;
  // Guarded by mu_.
  std::vector<std::unique_ptr<Stash>> all_;
  std::vector<Stash*> free_[2];  // by use; each has room for all
};

using StashHandle = std::unique_ptr<Stash, StashPool::GiveBack>;

// A module's state S of each micro-batch in flight. Grows when it first sees a stash. Move-only.
template <typename S>
class PerStash {
 public:
  // The state for what a forward keeps in `stash`: that of its last use, for the caller to
  // overwrite. nullptr: the one state of forwards that keep nothing.
  S& Begin(const Stash* stash) {
    Entry* entry = EntryOf(stash);
    if (entry == nullptr) {
      entries_.push_back(std::make_unique<Entry>());
      entry = entries_.back().get();
      entry->stash = stash;
    }
    entry->generation = GenerationOf(stash);
    return entry->state;
  }
  // The state that was begun in `stash` since it was taken; nullptr: none was.
  S* Find(const Stash* stash) const {
    Entry* const entry = EntryOf(stash);
    return entry != nullptr && entry->generation == GenerationOf(stash) ? &entry->state : nullptr;
  }

 private:
  struct Entry {
    const Stash* stash = nullptr;
    uint64_t generation = 0;
    S state;
  };
  static uint64_t GenerationOf(const Stash* stash) {
    return stash == nullptr ? 0 : stash->generation();
  }
  Entry* EntryOf(const Stash* stash) const {
    for (const auto& entry : entries_) {
      if (entry->stash == stash) return entry.get();
    }
    return nullptr;
  }
  std::vector<std::unique_ptr<Entry>> entries_;
};

}  // namespace moe

#endif  // MOE_MOE_RUN_STASH_H_
