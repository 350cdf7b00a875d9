#include "kernels/base/buffer.h"

#include <cstring>
#include <new>

#include <absl/strings/str_cat.h>

namespace moe {
namespace {

constexpr std::align_val_t kAlignment{64};

class CpuMemoryResource final : public MemoryResource {
 public:
  Device device() const override { return {}; }
  absl::StatusOr<std::byte*> Allocate(int64_t bytes) override {
    void* data = ::operator new(static_cast<size_t>(bytes), kAlignment, std::nothrow);
    if (data == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("CpuMemory: ", bytes, " bytes are not available"));
    }
    std::memset(data, 0, static_cast<size_t>(bytes));
    return static_cast<std::byte*>(data);
  }
  void Free(std::byte* data, int64_t) override { ::operator delete(data, kAlignment); }
};

}  // namespace

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
