#include "tests/cusim/fake_memory.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "tests/cusim/fake_streams.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(data, bytes) ((void)(data), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(data, bytes) ((void)(data), (void)(bytes))
#endif

namespace cusim {
namespace {

constexpr size_t kAlignment = 256;
// Freed memory that is kept, so that its addresses are not reused at once.
constexpr size_t kQuarantineBytes = size_t{64} << 20;

struct Allocation {
  int device;
  size_t bytes;
  bool freed = false;
};

struct Memory {
  std::mutex mu;
  std::map<uintptr_t, Allocation> allocations;  // by first address; freed ones in quarantine too
  std::deque<uintptr_t> quarantine;             // oldest first
  size_t quarantine_bytes = 0;
  std::map<int, size_t> used;             // by device
  std::set<std::pair<int, int>> granted;  // (device with access, owner)
  std::map<uintptr_t, size_t> pinned;     // bytes by first address
  int64_t count = 0;
};

// Never destroyed, like Streams::Get().
Memory& TheMemory() {
  static Memory* const memory = new Memory;
  return *memory;
}

void* Pointer(uintptr_t address) {
  return reinterpret_cast<void*>(address);
}

// The allocation, freed or not, that contains `data`; end() for host memory.
auto Find(Memory& memory, const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const auto after = memory.allocations.upper_bound(address);
  if (after == memory.allocations.begin()) return memory.allocations.end();
  const auto found = std::prev(after);
  return address < found->first + found->second.bytes ? found : memory.allocations.end();
}

bool HasAccess(const Memory& memory, int device, int owner) {
  return device == owner || memory.granted.contains({device, owner});
}

void Forget(Memory& memory, uintptr_t address) {
  const auto found = memory.allocations.find(address);
  ASAN_UNPOISON_MEMORY_REGION(Pointer(address), found->second.bytes);
  memory.quarantine_bytes -= found->second.bytes;
  memory.allocations.erase(found);
  std::free(Pointer(address));
}

}  // namespace

void* AllocateDevice(int device, size_t bytes) {
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mu);
  void* data = nullptr;
  if (bytes > TheMachine().memory_bytes - memory.used[device]) return nullptr;
  if (posix_memalign(&data, kAlignment, bytes) != 0) return nullptr;
  std::memset(data, 0xff, bytes);
  ASAN_POISON_MEMORY_REGION(data, bytes);
  memory.allocations.emplace(reinterpret_cast<uintptr_t>(data),
                             Allocation{.device = device, .bytes = bytes});
  memory.used[device] += bytes;
  ++memory.count;
  return data;
}

void FreeDevice(const char* function, void* data) {
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mu);
  const auto found = memory.allocations.find(reinterpret_cast<uintptr_t>(data));
  if (found == memory.allocations.end()) Misuse(function, "no memory of a device");
  Allocation& allocation = found->second;
  if (allocation.freed) Misuse(function, "memory that was freed before");
  allocation.freed = true;
  memory.used[allocation.device] -= allocation.bytes;
  ASAN_UNPOISON_MEMORY_REGION(data, allocation.bytes);
  std::memset(data, 0xff, allocation.bytes);
  ASAN_POISON_MEMORY_REGION(data, allocation.bytes);
  memory.quarantine.push_back(found->first);
  memory.quarantine_bytes += allocation.bytes;
  while (memory.quarantine_bytes > kQuarantineBytes) {
    const uintptr_t oldest = memory.quarantine.front();
    memory.quarantine.pop_front();
    Forget(memory, oldest);
  }
}

int DeviceOfMemory(const void* data) {
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mu);
  const auto found = Find(memory, data);
  return found == memory.allocations.end() ? -1 : found->second.device;
}

void* AllocatePinned(size_t bytes) {
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mu);
  void* data = nullptr;
  if (posix_memalign(&data, kAlignment, bytes) != 0) return nullptr;
  memory.pinned.emplace(reinterpret_cast<uintptr_t>(data), bytes);
  return data;
}

void FreePinned(const char* function, void* data) {
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mu);
  if (memory.pinned.erase(reinterpret_cast<uintptr_t>(data)) == 0) {
    Misuse(function, "no pinned memory");
  }
  std::free(data);
}

bool IsPinned(const void* data) {
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mu);
  const auto address = reinterpret_cast<uintptr_t>(data);
  const auto after = memory.pinned.upper_bound(address);
  if (after == memory.pinned.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return address < begin + bytes;
}

size_t UsedDeviceBytes(int device) {
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mu);
  return memory.used[device];
}

int64_t DeviceAllocations() {
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mu);
  return memory.count;
}

void CheckDeviceRange(const char* function, const void* data, size_t bytes) {
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mu);
  const auto found = Find(memory, data);
  if (found == memory.allocations.end()) return;
  if (found->second.freed) Misuse(function, "memory that was freed");
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = found->first + found->second.bytes;
  if (address + bytes > end) {
    Misuse(function,
           std::to_string(address + bytes - end) + " bytes past the end of an allocation");
  }
}

void GrantAccess(int device, int owner) {
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mu);
  memory.granted.insert({device, owner});
}

void CheckAccess(const char* function, int device, const void* data) {
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mu);
  const auto found = Find(memory, data);
  if (found == memory.allocations.end()) return;
  const int owner = found->second.device;
  if (HasAccess(memory, device, owner)) return;
  Misuse(function, "memory of device " + std::to_string(owner) + " in a stream of device " +
                       std::to_string(device) + ", to which no cudaMemPoolSetAccess opened it");
}

DeviceAccess::DeviceAccess(int device) {
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mu);
  for (const auto& [address, allocation] : memory.allocations) {
    if (allocation.freed) continue;
    if (device != kEveryDevice && !HasAccess(memory, device, allocation.device)) continue;
    ASAN_UNPOISON_MEMORY_REGION(Pointer(address), allocation.bytes);
  }
}

DeviceAccess::~DeviceAccess() {
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mu);
  for (const auto& [address, allocation] : memory.allocations) {
    ASAN_POISON_MEMORY_REGION(Pointer(address), allocation.bytes);
  }
}

}  // namespace cusim
