// Owned memory of one device: where life begins. Everything else takes views.
#ifndef MOE_KERNELS_BASE_BUFFER_H_
#define MOE_KERNELS_BASE_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace moe {

// Where buffers and workspaces get their memory.
class MemoryResource {
 public:
  virtual ~MemoryResource() = default;
  virtual Device device() const = 0;
  // At least `bytes` bytes, aligned to 64. kResourceExhausted names the size that was wanted.
  virtual absl::StatusOr<std::byte*> Allocate(int64_t bytes) = 0;
  virtual void Free(std::byte* data, int64_t bytes) = 0;
};

// Host memory, 64-byte aligned; never destroyed. `CpuMemory()` is thread-safe.
MemoryResource& CpuMemory();

// Move-only owner of `bytes` bytes. Contents start zeroed on the CPU.
class Buffer {
 public:
  Buffer() = default;
  static absl::StatusOr<Buffer> Allocate(int64_t bytes, MemoryResource& memory = CpuMemory());
  ~Buffer() { Reset(); }
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

  template <typename T>
  absl::Span<T> span() const {
    return {reinterpret_cast<T*>(data_), static_cast<size_t>(bytes_) / sizeof(T)};
  }

 private:
  void Reset();

  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  MemoryResource* memory_ = nullptr;
};

}  // namespace moe

#endif  // MOE_KERNELS_BASE_BUFFER_H_
