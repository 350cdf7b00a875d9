#include "kernels/base/buffer.h"

#include <cstring>
#include <new>

#include <absl/strings/str_cat.h>
#include <sys/mman.h>

namespace moe {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kHugePage = int64_t{2} << 20;

// Products read rows a page or more apart: with pages of 4 KiB most of their loads would miss the
// TLB.
std::align_val_t AlignmentOf(int64_t bytes) {
  return std::align_val_t(bytes >= kHugePage ? kHugePage : kCacheLine);
}

class CpuMemoryResource final : public MemoryResource {
 public:
  Device device() const override { return {}; }
  absl::StatusOr<std::byte*> Allocate(int64_t bytes) override {
    void* data = ::operator new(static_cast<size_t>(bytes), AlignmentOf(bytes), std::nothrow);
    if (data == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("CpuMemory: ", bytes, " bytes are not available"));
    }
#ifdef MADV_HUGEPAGE
    // A hint: a system without huge pages uses small ones.
    if (bytes >= kHugePage) {
      ::madvise(data, static_cast<size_t>(bytes / kHugePage * kHugePage), MADV_HUGEPAGE);
    }
#endif
    std::memset(data, 0, static_cast<size_t>(bytes));
    return static_cast<std::byte*>(data);
  }
  void Free(std::byte* data, int64_t bytes) override {
    ::operator delete(data, AlignmentOf(bytes));
  }
};

class ZeroPagesResource final : public MemoryResource {
 public:
  Device device() const override { return {}; }
  absl::StatusOr<std::byte*> Allocate(int64_t bytes) override {
    // Huge pages begin at multiples of their size, so the mapping is made larger and trimmed.
    const auto wanted = Whole(bytes), huge = static_cast<uintptr_t>(kHugePage);
    void* const all = ::mmap(nullptr, wanted + huge, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) {
      return absl::ResourceExhaustedError(
          absl::StrCat("ZeroPages: ", bytes, " bytes are not available"));
    }
    auto* const data = static_cast<std::byte*>(all);
    const uintptr_t before = (huge - reinterpret_cast<uintptr_t>(data) % huge) % huge;
    if (before > 0) ::munmap(data, before);
    if (before < huge) ::munmap(data + before + wanted, huge - before);
#ifdef MADV_HUGEPAGE
    if (bytes >= kHugePage) ::madvise(data + before, wanted, MADV_HUGEPAGE);
#endif
    return data + before;
  }
  void Free(std::byte* data, int64_t bytes) override {
    ::munmap(data, Whole(bytes));
  }

 private:
  static uintptr_t Whole(int64_t bytes) {
    return static_cast<uintptr_t>((bytes + kPage - 1) / kPage * kPage);
  }
  static constexpr int64_t kPage = int64_t{64} << 10;  // a multiple of any system's page
};

}  // namespace

MemoryResource& ZeroPages() {
  static ZeroPagesResource* const memory = new ZeroPagesResource;
  return *memory;
}

MemoryResource& CpuMemory() {
  static CpuMemoryResource* const memory = new CpuMemoryResource;
  return *memory;
}

absl::StatusOr<Buffer> Buffer::Allocate(int64_t bytes, MemoryResource& memory,
                                        absl::string_view name) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": ", bytes, " bytes, expected >= 0"));
  }
  Buffer buffer;
  if (bytes == 0) return buffer;
  absl::StatusOr<std::byte*> data = memory.Allocate(bytes);
  if (!data.ok()) {
    return absl::Status(data.status().code(), absl::StrCat(name, ": ", data.status().message()));
  }
  buffer.data_ = *data;
  buffer.bytes_ = bytes;
  buffer.memory_ = &memory;
  return buffer;
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this == &other) return *this;
  Reset();
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  memory_ = std::exchange(other.memory_, nullptr);
  return *this;
}

void Buffer::Reset() {
  if (data_ != nullptr) memory_->Free(data_, bytes_);
  data_ = nullptr;
}

}  // namespace moe
