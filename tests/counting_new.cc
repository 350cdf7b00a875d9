// In a file of its own: inlined into its callers, GCC takes these for a mismatched pair.
#include "tests/counting_new.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

#include <malloc.h>

namespace {

std::atomic<int64_t> live_bytes = 0;
std::atomic<int64_t> peak_bytes = 0;
std::atomic<int64_t> allocations = 0;

}  // namespace

void* operator new(size_t size) {
  ++allocations;
  void* const at = std::malloc(std::max<size_t>(size, 1));
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

void* operator new(size_t size, std::align_val_t alignment) {
  ++allocations;
  const auto whole = static_cast<size_t>(alignment);
  void* const at =
      std::aligned_alloc(whole, (std::max<size_t>(size, 1) + whole - 1) / whole * whole);
  if (at == nullptr) throw std::bad_alloc();
  return at;
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

int64_t PeakBytesOf(const std::function<void()>& work) {
  const int64_t before = live_bytes;
  peak_bytes = before;
  work();
  return peak_bytes - before;
}

}  // namespace moe
