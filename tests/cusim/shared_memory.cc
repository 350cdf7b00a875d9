#include "tests/cusim/shared_memory.h"

#include <cstdlib>
#include <cstring>

#include "tests/cusim/fiber.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) (static_cast<void>(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) (static_cast<void>(address), (void)(size))
#endif

namespace cusim {
namespace {

constexpr unsigned char kRedZoneByte = 0xdb;
constexpr unsigned char kUnwrittenByte = 0xff;

size_t RoundUp(size_t n, size_t unit) {
  return (n + unit - 1) / unit * unit;
}

}  // namespace

void* SharedMemory::Get(const void* site, size_t bytes) {
  for (const Array& array : arrays_) {
    if (array.site == site) return array.memory + kRedZoneBytes;
  }
  const TsanIgnore ignore;
  const size_t total = RoundUp(bytes + 2 * kRedZoneBytes, kAlignment);
  auto* const memory = static_cast<unsigned char*>(std::aligned_alloc(kAlignment, total));
  if (memory == nullptr) std::abort();
  std::memset(memory, kRedZoneByte, total);
  std::memset(memory + kRedZoneBytes, kUnwrittenByte, bytes);
  ASAN_POISON_MEMORY_REGION(memory, kRedZoneBytes);
  ASAN_POISON_MEMORY_REGION(memory + kRedZoneBytes + bytes, kRedZoneBytes);
  arrays_.push_back({site, bytes, memory});
  return memory + kRedZoneBytes;
}

int SharedMemory::FindOverrun() const {
  for (size_t i = 0; i < arrays_.size(); ++i) {
    const Array& array = arrays_[i];
    unsigned char* const after = array.memory + kRedZoneBytes + array.bytes;
    ASAN_UNPOISON_MEMORY_REGION(array.memory, kRedZoneBytes);
    ASAN_UNPOISON_MEMORY_REGION(after, kRedZoneBytes);
    for (size_t b = 0; b < kRedZoneBytes; ++b) {
      if (array.memory[b] != kRedZoneByte || after[b] != kRedZoneByte) return static_cast<int>(i);
    }
  }
  return -1;
}

SharedMemory::~SharedMemory() {
  const TsanIgnore ignore;
  for (const Array& array : arrays_) {
    ASAN_UNPOISON_MEMORY_REGION(array.memory, array.bytes + 2 * kRedZoneBytes);
    std::free(array.memory);
  }
}

}  // namespace cusim
