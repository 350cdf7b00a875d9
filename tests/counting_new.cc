// In a file of its own: inlined into its callers, GCC takes these for a mismatched pair.
#include "tests/counting_new.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <new>

#include <malloc.h>

namespace {

std::atomic<int64_t> live_bytes = 0;
std::atomic<int64_t> peak_bytes = 0;
std::atomic<int64_t> allocations = 0;
std::atomic<int64_t> first_failing = std::numeric_limits<int64_t>::max();
std::atomic<int64_t> after_failing = 0;

// Whether the call that is counted here has memory.
bool Counted() {
  const int64_t n = ++allocations;
  return n < first_failing || n >= after_failing;
}

}  // namespace

void* operator new(size_t size) {
  void* const at = Counted() ? std::malloc(std::max<size_t>(size, 1)) : nullptr;
  if (at == nullptr) throw std::bad_alloc();
  const int64_t now = live_bytes += static_cast<int64_t>(malloc_usable_size(at));
  peak_bytes = std::max<int64_t>(peak_bytes, now);
  return at;
}

void operator delete(void* at) noexcept {
  if (at == nullptr) return;
  live_bytes -= static_cast<int64_t>(malloc_usable_size(at));
  std::free(at);
}

void operator delete(void* at, size_t) noexcept {
  operator delete(at);
}

// Each form by name: sanitizers have their own of those that are not here, whose memory is not
// free()'s.
void* operator new(size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  if (!Counted()) return nullptr;
  const auto whole = static_cast<size_t>(alignment);
  return std::aligned_alloc(whole, (std::max<size_t>(size, 1) + whole - 1) / whole * whole);
}

void* operator new(size_t size, std::align_val_t alignment) {
  void* const at = operator new(size, alignment, std::nothrow);
  if (at == nullptr) throw std::bad_alloc();
  return at;
}

void* operator new(size_t size, const std::nothrow_t&) noexcept {
  try {
    return operator new(size);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void operator delete(void* at, std::align_val_t) noexcept {
  std::free(at);
}

void operator delete(void* at, size_t, std::align_val_t) noexcept {
  std::free(at);
}

namespace moe {

int64_t Allocations() {
  return allocations;
}

void FailAllocations(int64_t first, int64_t count) {
  const int64_t now = allocations;
  after_failing = now + first + std::min(count, std::numeric_limits<int64_t>::max() - now - first);
  first_failing = now + first;
}

int64_t PeakBytesOf(const std::function<void()>& work) {
  const int64_t before = live_bytes;
  peak_bytes = before;
  work();
  return peak_bytes - before;
}

}  // namespace moe
